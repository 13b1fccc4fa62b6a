"""Norms of all parameters, or of all gradients, for a logger: one collective."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from compile_muon.model.readers import accounts_of
from compile_muon.passes.norms import norms
from compile_muon.runtime.account import Account

__all__ = ["parameter_norms"]


@torch.no_grad()
def parameter_norms(model: nn.Module, *, gradients: bool = False) -> dict[str, float]:
    """The 2-norm of each parameter of a sharded model, or of its gradient, whole at every stage.

    Every element counts once, however many ranks hold it. Collective over all ranks of the model's optimizer, in one
    all-reduce of one number a parameter (gradients that eager code left in another placement take one each, which the
    step then need not); waits for the device once.

    Args:
        gradients: of ``.grad`` in place of the weights; at stage 1 that is zero between micro-batches.
    Returns:
        By the names of ``model.named_parameters()``; without those that have no gradient on this rank.
    """
    accounts: dict[Account, str] = {}
    for path, module in model.named_modules():
        for name, account in accounts_of(module).items():
            accounts.setdefault(account, f"{path}.{name}" if path else name)
    if not accounts:
        return {}
    if gradients:
        for account in accounts:
            account.place_gradient()
    own = {a: a.local_grad if gradients else a.local.detach() for a in accounts if not gradients or a.grad is not None}
    device = next(iter(accounts)).local.device
    squares = torch.zeros(len(accounts), dtype=torch.float64, device=device)
    if own:
        places = [i for i, account in enumerate(accounts) if account in own]
        # What several ranks hold would be counted once for each.
        shares = squares.new_tensor([1 / account.spec.layout.copies for account in own])
        squares[places] = norms(list(own.values())).double().square() * shares
    for group in {id(account.group): account.group for account in accounts if account.group is not None}.values():
        part = torch.tensor([i for i, account in enumerate(accounts) if account.group is group], device=device)
        summed = squares[part]
        dist.all_reduce(summed, group=group)
        squares[part] = summed
    found = dict(zip(accounts, squares.sqrt().tolist(), strict=True))
    return {name: found[account] for account, name in accounts.items() if account in own}
