"""State of a running forward that the hooks of a model share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compile_muon.passes.sequence.place import Place

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

    def look_for_cache(self, kwargs: dict[str, Any]) -> None:
        """Set ``reads`` from the keyword arguments of the first block."""
        has_cache = not torch.is_grad_enabled() and kwargs.get("past_key_values") is not None
        self.reads = has_cache and self.batch.wanted != "cut"
