"""Whether a model computes with cut positions what it computes with all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compile_muon.errors import ConfigError, config_error
from compile_muon.sequence.plan import SequencePlan, plan_of
from compile_muon.sequence.running import FIELD

__all__ = ["check_sequence"]


def _called(model: nn.Module, batch: Any) -> Tensor:
    """What the model returns: its logits or hidden states, ``[B, S or s, ...]``."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    for name in ("logits", "last_hidden_state"):
        if isinstance(found := getattr(output, name, None), Tensor):
            return found
    for found in tree_leaves(output):
        if isinstance(found, Tensor) and found.is_floating_point() and found.ndim > 1:
            return found
    raise config_error(FIELD, type(output).__name__, "holds no tensor with positions", "return logits as well")


def check_sequence(model: nn.Module, batch: Any, *, tolerance: float = 1e-3) -> float:
    """Compare what ranks compute of their positions with what each computes by itself; collective over all ranks.

    Args:
        model: which a MuonZero with ``sequence_parallel`` has sharded.
        batch: keyword arguments of it, or a tuple of positional ones, or one; the same on all ranks of a group, and
            short enough for one rank.
        tolerance: of the largest difference, as a part of the largest number.
    Returns:
        The largest relative difference, over all ranks.
    Raises:
        ConfigError: it is larger, on every rank: something in the blocks knows positions otherwise than by what it is
            given, or mixes them otherwise than by attention. Or the model is not cut.
    """
    plan = plan_of(model)
    if plan is None:
        problem = "is not cut over ranks"
        raise config_error(FIELD, type(model).__name__, problem, "give MuonZero a config with sequence_parallel")
    place, training = plan.running[0].place, model.training
    model.eval()
    try:
        with torch.no_grad():
            parts = _called(model, batch)
            with plan.whole():
                wholes = _called(model, batch)
    finally:
        model.train(training)
    if parts.shape[1] != wholes.shape[1]:  # this rank's positions, and what pads them
        local = place.local(wholes.shape[1])
        wholes = wholes[:, place.index * local : (place.index + 1) * local]
        parts = parts[:, : wholes.shape[1]]
    error = parts.new_zeros(1) if not wholes.numel() else (parts - wholes).abs().max() / wholes.abs().max()
    error = torch.nan_to_num(error.float(), nan=torch.inf).reshape(1)
    if plan.everyone is not None:
        dist.all_reduce(error, dist.ReduceOp.MAX, group=plan.everyone)
    found = float(error)
    if not found <= tolerance:
        raise _differs(plan, type(model).__name__, found)
    return found


def _differs(plan: SequencePlan, kind: str, found: float) -> ConfigError:
    if said := plan.differing_batches():
        return config_error(FIELD, kind, said, "give the ranks of a group the same batch (optimizer.data_place)")
    problem = (
        f"changes what {kind} computes, by {found:.1e} of it: its blocks count positions from their own first one, or "
        "mix them otherwise than by attention"
    )
    remedy = f"hand positions to the blocks (position_embeddings), or leave {FIELD} out"
    return config_error(f"{FIELD}.size", plan.size, problem, remedy)
