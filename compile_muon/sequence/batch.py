"""The batch that ranks of a group share: whether it is the same, and what of a call says how it is to be cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compile_muon.errors import config_error
from compile_muon.passes.exchange.sequence import Place
from compile_muon.sequence.running import FIELD, Batch

__all__ = ["note_batch"]

_PERIOD = 8191


def _digest(given: Sequence[Tensor]) -> Tensor:
    """A number that two batches hardly share: sums of the integers in them, weighed by their places."""
    total = torch.zeros((), dtype=torch.int64, device=given[0].device)
    for number, x in enumerate(given):
        flat = x.reshape(-1).to(torch.int64)
        total = total + (flat * (torch.arange(flat.shape[0], device=flat.device) % _PERIOD + 1 + number)).sum()
    return total


def note_batch(batch: Batch, place: Place, *, loss: bool) -> Callable[..., None]:
    """A hook ahead of the model: compare the batch within the group, and see whether the loss is computed inside.

    Nothing is waited for: a difference turns what blocks compute into NaN, which no step writes.

    Args:
        place: of this rank in the group.
        loss: whether the model computes a causal loss where it is given labels; head and loss stay cut then.
    """

    def note(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keeps = loss and kwargs.get("labels") is not None and batch.wanted != "joined"
        kept = kwargs.get("logits_to_keep", 0)
        if keeps and not (isinstance(kept, int) and kept == 0):
            problem = "counts positions from the end, and with labels each rank has its own"
            raise config_error("logits_to_keep", kept, problem, f"leave it out, or set {FIELD}.joined")
        batch.joins = not keeps
        batch.latest = model, args, kwargs
        caches = kwargs.get("use_cache", getattr(getattr(model, "config", None), "use_cache", False))
        if caches and not torch.is_grad_enabled():  # whole on every rank, and perhaps on one alone
            batch.doubt = None
            return
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.dtype.is_floating_point]
        if not given:
            return
        batch.digest = digest = _digest(given)
        most = torch.ops._c10d_functional.all_reduce(torch.stack((digest, -digest)), "max", place.group)
        most = torch.ops._c10d_functional.wait_tensor(most)
        batch.doubt = torch.where(most[0] == -most[1], 0.0, torch.nan)

    return note
