"""The batch that ranks of a group share, and the running forward: state that the hooks of a model share.

The batch is joined from parts or compared, and cut as the model is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compile_muon.agreement.compare import by_rank, compare
from compile_muon.errors import config_error
from compile_muon.passes.sequence.exchange_heads import join
from compile_muon.passes.sequence.place import Place
from compile_muon.passes.torch_private import group_named

#: section of the configuration, for errors
FIELD = "sequence_parallel"


@dataclass(eq=False)
class Batch:
    """The running batch, for all stacks of a model."""

    sharded: bool = False  # whether loaders give each rank its own part of the positions
    # "whole": all positions on every rank; "cut": parts although a cache is read; "joined": logits of all positions
    # although the loss needs only parts; "": as the model is called
    wanted: str = ""
    joins: bool = True  # whether positions are joined behind the last block; else head and loss stay cut
    # module, arguments and keyword arguments of the last call
    latest: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = field(default=None, repr=False)
    shapes: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)  # that were equal on all ranks of the group
    digest: Tensor | None = field(default=None, repr=False)  # int64 scalar of this rank's batch
    doubt: Tensor | None = field(default=None, repr=False)  # scalar: 0, or NaN where the group's digests differ


@dataclass(eq=False)
class Running:
    """The running forward of one stack of blocks."""

    place: Place
    batch: Batch
    whole: int = 0  # positions of the batch, set ahead of the first block
    reads: bool = False  # whether the blocks read a cache of keys and values
    tail: bool = False  # whether the modules behind the last block get all positions although head and loss stay cut
    shape: tuple[int, ...] = ()  # rows and positions behind the last block

    @property
    def alone(self) -> bool:
        """Whether every rank computes all positions, as with a cache, which holds all keys and values."""
        return self.reads or self.batch.wanted == "whole"

    @property
    def deals(self) -> bool:
        """Whether each rank computes a share of the images; without gradients a rank may be alone and computes all."""
        return torch.is_grad_enabled() and self.batch.wanted != "whole"


_PERIOD = 8191  # a prime: weights of positions repeat with it
#: arguments that losses read
_LABELS = ("labels", "shift_labels")

Call = tuple[tuple[Any, ...], dict[str, Any]]


def _digest(given: Sequence[Tensor]) -> Tensor:
    """Return an int64 digest of a batch: the sum of its integers, weighted by position modulo a prime."""
    total = torch.zeros((), dtype=torch.int64, device=given[0].device)
    for number, x in enumerate(given):
        flat = x.reshape(-1).to(torch.int64)
        total = total + (flat * (torch.arange(flat.shape[0], device=flat.device) % _PERIOD + 1 + number)).sum()
    return total


def check_shapes(batch: Batch, place: Place, given: Sequence[Tensor]) -> None:
    """Raise, on every rank, if a group has batches of different shapes: its exchanges would hang. Shapes that are new
    to this rank are compared by a collective that the host waits for."""
    shapes = tuple(tuple(x.shape) for x in given)
    if shapes in batch.shapes:
        return
    group = group_named(place.group)
    shape_lists = [list(x) for x in shapes]
    if differing := compare({"batch": shape_lists}, group):
        said = by_rank(differing["batch"], dist.get_process_group_ranks(group))
        problem = f"ranks share a sequence and were given {said}"
        raise config_error(
            "batch", shape_lists, problem, "give the ranks of a group the same batch (optimizer.data_place)"
        )
    batch.shapes.add(shapes)


def note_batch(batch: Batch, place: Place, *, loss: bool, compares: bool) -> Callable[..., Call]:
    """Return a pre-hook of the model that joins or compares the group's batch, and sets ``batch.joins``.

    The host does not wait: ``batch.doubt`` turns the blocks' values into NaN if batches differ, and no step writes NaN.

    `loss`: whether the model computes a causal loss from labels; head and loss then stay cut. `compares`: whether the
    group's other ranks exist (not in a plan).
    """

    def note(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        batch.doubt = None
        if batch.sharded and not torch.is_grad_enabled() and kwargs.get("past_key_values") is not None:
            return args, kwargs  # generation: every rank has all positions, and may be alone
        stays_cut = (batch.sharded or (loss and kwargs.get("labels") is not None)) and batch.wanted != "joined"
        logits_to_keep = kwargs.get("logits_to_keep", 0)
        if stays_cut and not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
            problem = "counts positions from the end, and with labels each rank has its own"
            raise config_error("logits_to_keep", logits_to_keep, problem, f"leave it out, or set {FIELD}.joined")
        batch.joins = not stays_cut
        config = getattr(model, "config", None)
        reads_cache = not torch.is_grad_enabled() and kwargs.get("use_cache", getattr(config, "use_cache", False))
        integers = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and not x.dtype.is_floating_point]
        if compares and integers and not torch.compiler.is_compiling() and (batch.sharded or not reads_cache):
            check_shapes(batch, place, integers)  # compiled graphs do so in SharedSequences.before_forward
        if batch.sharded:
            args, kwargs = _whole(args, kwargs, place, loss=loss)
            if not torch.is_grad_enabled() and hasattr(config, "use_cache"):
                kwargs["use_cache"] = False  # with a cache every rank would compute all positions
        batch.latest = model, args, kwargs
        if integers and not (reads_cache or batch.sharded):
            batch.digest = digest = _digest(integers)
            extremes = torch.ops._c10d_functional.all_reduce(torch.stack((digest, -digest)), "max", place.group)
            extremes = torch.ops._c10d_functional.wait_tensor(extremes)
            # Maximum and minimum are equal where all digests are.
            batch.doubt = torch.where(extremes[0] == -extremes[1], 0.0, torch.nan)
        return args, kwargs

    return note


def _whole(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: Place, *, loss: bool) -> Call:
    """Join the ranks' parts of a call's tensors [batch, positions, ...]; other arguments stay. Raises a ConfigError if
    the call has no such tensor, or has labels for a loss that is not cut."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    tensors = {name: x for name, x in named.items() if isinstance(x, Tensor) and x.ndim > 1}
    if not tensors:
        raise config_error(f"{FIELD}.inputs", "sharded", "finds no tensor [batch, positions] in the call", "give one")
    rows, columns = next(iter(tensors.values())).shape[:2]
    parts = {name: x for name, x in tensors.items() if x.shape[:2] == (rows, columns)}
    labels = next((name for name in _LABELS if name in parts), None)
    if labels is not None and not loss:
        problem = "is for a loss of all positions, which are on several ranks, and the model's is not cut"
        raise config_error(labels, list(parts[labels].shape), problem, "leave it out, and make the loss of the logits")
    numbers = {name: x for name, x in parts.items() if x.ndim == 2 and not x.dtype.is_floating_point}  # noqa: PLR2004
    whole = {name: join(x, place, columns * place.size) for name, x in parts.items() if name not in numbers}
    if numbers:  # ids, labels, positions and masks travel together
        together = join(torch.stack([x.to(torch.int64) for x in numbers.values()], -1), place, columns * place.size)
        whole |= {name: x.to(numbers[name].dtype) for name, x in zip(numbers, together.unbind(-1), strict=True)}
    joined = {name: whole.get(name, value) for name, value in named.items()}
    return tuple(joined[number] for number in range(len(args))), {name: joined[name] for name in kwargs}
