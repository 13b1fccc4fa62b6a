"""The writes of a step: momentum, matrices, AdamW. Everything here has been checked before it is called."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw

from compile_muon.kernels import Averages, muon_apply
from compile_muon.runtime.account import Account
from compile_muon.runtime.shards import local_tensor

__all__ = ["commit_adamw", "commit_muon"]


def commit_muon(
    accounts: Sequence[Account],
    directions: Sequence[Tensor],
    scales: Sequence[float],
    group: Mapping[str, Any],
    withheld: Tensor | None,
) -> None:
    """Move momenta toward the gradients, decay the matrices and move them along their directions.

    Args:
        accounts: Muon matrices with a gradient.
        directions: of their shards, in any floating dtype.
        scales: factor on the learning rate of each.
        group: ``lr``, ``momentum`` and ``weight_decay``.
        withheld: as for :func:`muon_apply`.
    """
    if not accounts:
        return
    muon_apply(
        [account.local.detach() for account in accounts],
        list(directions),
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        scale=list(scales),
        # torch.optim.Muon's `buf.lerp_(grad, 1 - momentum)`, which is also what the direction was made with.
        averages=Averages([a.momentum for a in accounts], [a.local_grad for a in accounts], 1 - group["momentum"]),
        withheld=withheld,
    )


def commit_adamw(
    accounts: Sequence[Account],
    slots: Sequence[MutableMapping[str, Tensor]],
    group: Mapping[str, Any],
    withheld: Tensor | None,
) -> None:
    """One step of torch's AdamW on the shards: on CUDA its fused kernel, which rounds once where ``foreach`` rounds
    after every operation.

    Args:
        accounts: parameters with a gradient.
        slots: ``step``, ``exp_avg`` and ``exp_avg_sq`` of each.
        group: ``lr``, ``betas``, ``eps`` and ``weight_decay``.
        withheld: on CUDA, as for :func:`muon_apply`.
    """
    if not accounts:
        return
    fused = True if accounts[0].local.is_cuda else None
    if fused:  # the kernel counts steps itself; a checkpoint may have brought them to the host
        for account, row in zip(accounts, slots, strict=True):
            if row["step"].device != account.local.device:
                row["step"] = row["step"].to(account.local.device, non_blocking=True)
    adamw(
        [account.local.detach() for account in accounts],
        [account.local_grad for account in accounts],
        [local_tensor(row["exp_avg"]) for row in slots],
        [local_tensor(row["exp_avg_sq"]) for row in slots],
        [],
        [row["step"] for row in slots],
        fused=fused,
        found_inf=withheld,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
