"""Sequence parallelism as an extension, which compares a model's outputs with cut and with whole positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from compile_muon.engine import Extension
from compile_muon.errors import ConfigError, config_error
from compile_muon.model.readers import sharded_params_of
from compile_muon.passes.dynamo.attend import ATTEND, LOOK_UP_OWN
from compile_muon.sequence.batch import FIELD, check_shapes
from compile_muon.sequence.plan import SequencePlan, plan_of

#: positions per rank that the first step compares
_PIECE = 128
#: largest relative difference, in float32 and in half precision, whose rounding moves routers' choices
_OF_SINGLE, _OF_HALF = 1e-3, 5e-2
#: arguments that only the loss reads
_OF_THE_LOSS = ("labels", "num_items_in_batch", "shift_labels")


def _called(model: nn.Module, batch: Any) -> Tensor:
    if isinstance(batch, Mapping):
        return _numbers(model(**batch))
    return _numbers(model(*batch) if isinstance(batch, tuple) else model(batch))


def _numbers(output: Any) -> Tensor:
    """Return the logits or hidden states [B, S or s, ...] of a model's output, else its loss."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(tensor := getattr(output, name, None), Tensor):
            return tensor
    numbers = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    if not numbers:
        raise config_error(FIELD, type(output).__name__, "holds no tensor to compare", "return logits or a loss")
    return next((x for x in numbers if x.ndim > 1), numbers[0])


def check_sequence(model: nn.Module, batch: Any, *, tolerance: float = 1e-3) -> float:
    """Compare a model's outputs from cut positions with those from whole positions; collective over all ranks.

    Args:
        model: sharded by a MuonZero with ``sequence_parallel``.
        batch: keyword arguments of the model, a tuple of positional ones, or one argument; equal on all ranks of a
            group, and short enough for one rank.
        tolerance: largest norm of the difference, relative to the norm of the outputs.
    Returns:
        The largest relative difference, over all ranks.
    Raises:
        ConfigError: on every rank, if the difference is larger: blocks know positions otherwise than by their
            arguments, or mix them otherwise than by attention. Or if the model is not cut.
    """
    plan = plan_of(model)
    if plan is None:
        problem = "is not cut over ranks"
        raise config_error(FIELD, type(model).__name__, problem, "give MuonZero a config with sequence_parallel")
    return _compared(plan, model, lambda: _called(model, batch), tolerance)


def check_first(plan: SequencePlan) -> None:
    """Run :func:`check_sequence` once, eagerly, on a piece of the first step's batch, unless the batch has images."""
    latest = plan.batch.latest
    if not plan.unchecked or latest is None:
        return
    plan.unchecked = False
    model, args, kwargs = latest
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    shape = next((x.shape[:2] for x in tensors if x.ndim > 1 and not x.is_floating_point()), None)
    if shape is None or any(x.shape[:2] != shape for x in tensors):
        return

    def piece(value: Any) -> Any:
        return value[:1, : _PIECE * plan.size] if isinstance(value, Tensor) else value

    short = tuple(map(piece, args))
    named = {name: piece(value) for name, value in kwargs.items() if name not in _OF_THE_LOSS}

    def outputs() -> Tensor:
        plan.batch.joins = True
        with torch.compiler.set_stance("force_eager"):
            return _numbers(model.forward(*short, **named))

    sharded_params = [sharded for module in model.modules() for sharded in sharded_params_of(module).values()]
    half = any(sharded.spec.compute_dtype in ("bfloat16", "float16") for sharded in sharded_params)
    _compared(plan, model, outputs, _OF_HALF if half else _OF_SINGLE)


def _compared(plan: SequencePlan, model: nn.Module, outputs: Callable[[], Tensor], tolerance: float) -> float:
    place, training = plan.place, model.training
    assert place is not None
    model.eval()
    try:
        with torch.no_grad():
            with plan.wanting("cut"):
                parts = outputs()
            with plan.wanting("whole"):
                wholes = outputs()
    finally:
        model.train(training)
    if parts.shape != wholes.shape:  # `parts` has this rank's positions, and padding, which `valid` zeroes
        valid = place.cut(torch.ones_like(wholes))
        wholes, parts = place.cut(wholes), parts * valid
    norm = wholes.float().norm()
    error = torch.where(norm > 0, (parts.float() - wholes.float()).norm() / norm, norm)
    error = torch.nan_to_num(error, nan=torch.inf).reshape(1)
    if plan.everyone is not None:
        dist.all_reduce(error, dist.ReduceOp.MAX, group=plan.everyone)
    largest = float(error)
    if not largest <= tolerance:
        raise _differs(plan, type(model).__name__, largest)
    return largest


def _differs(plan: SequencePlan, kind: str, relative_error: float) -> ConfigError:
    if differing := plan.differing_batches():
        return config_error(FIELD, kind, differing, "give the ranks of a group the same batch (optimizer.data_place)")
    problem = (
        f"changes what {kind} computes, by {relative_error:.1e} of it: its blocks count positions from their own first "
        "one, or mix them otherwise than by attention"
    )
    remedy = f"hand positions to the blocks (position_embeddings), or leave {FIELD} out"
    return config_error(f"{FIELD}.size", plan.size, problem, remedy)


class SharedSequences(Extension):
    """Passes for attention in graphs of ranks that share sequences, and checks that these ranks have equal batches.
    `compares`: whether the other ranks exist and can compare batches (not in a plan)."""

    dynamo_passes = (ATTEND, LOOK_UP_OWN)

    def __init__(self, plan: SequencePlan, *, compares: bool) -> None:
        self.plan, self._compares = plan, compares

    def before_forward(self, groups: frozenset[str], integers: Sequence[Tensor]) -> None:
        """Check that a graph with collectives of the group gets batches of one shape on all its ranks."""
        place = self.plan.place
        if self._compares and integers and place is not None and place.group in groups:
            check_shapes(self.plan.batch, place, integers)

    def before_step(self) -> None:
        """In the first step, check that the model computes the same from cut positions."""
        if self._compares:
            check_first(self.plan)

    def why_not_finite(self) -> tuple[str, str] | None:
        """Return problem and remedy if ranks of a group have different batches, which makes all values NaN."""
        differing = self.plan.differing_batches() if self._compares else ""
        remedy = "optimizer.data_place says which data a rank is to load"
        return (f"{differing}, which makes them NaN", remedy) if differing else None
