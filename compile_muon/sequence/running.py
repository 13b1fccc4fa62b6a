"""What the parts of a model know of the batch that is being computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compile_muon.passes.sequence.place import Place

__all__ = ["FIELD", "Batch", "Running"]

#: of the configuration, for errors
FIELD = "sequence_parallel"


@dataclass(eq=False)
class Batch:
    """What all stacks of blocks know of it.

    Args:
        sharded: whether each rank is given its own part of the positions.
        wanted: "whole" for all positions on every rank, "cut" for parts of them though a cache is read, "joined" for
            logits of all positions though the loss could do with parts; "" for as the model is called.
        joins: whether positions are joined behind the last block, and not only behind the loss.
        latest: module, arguments and keyword arguments that the ranks were given.
        shapes: of batches that were found the same on all ranks of the group.
        digest: of what they were given, int64; and ``doubt``, 0 or NaN where it is not the same.
    """

    sharded: bool = False
    wanted: str = ""
    joins: bool = True
    latest: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = field(default=None, repr=False)
    shapes: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)
    digest: Tensor | None = field(default=None, repr=False)
    doubt: Tensor | None = field(default=None, repr=False)


@dataclass(eq=False)
class Running:
    """Of one stack of blocks.

    Args:
        place: of this rank.
        batch: that is computed.
        whole: positions of it, as the first block has found them.
        reads: whether the blocks read a cache of keys and values.
        tail: whether what stands behind the last block gets all positions, though head and loss stay cut.
        shape: rows and positions that it got, where positions stay cut behind it.
    """

    place: Place
    batch: Batch
    whole: int = 0
    reads: bool = False
    tail: bool = False
    shape: tuple[int, ...] = ()

    @property
    def alone(self) -> bool:
        """Whether every rank computes all positions: a cache holds all, so who reads one does."""
        return self.reads or self.batch.wanted == "whole"

    @property
    def deals(self) -> bool:
        """Whether ranks have a share of the images each; all of them without gradients, as a rank may be alone then."""
        return torch.is_grad_enabled() and self.batch.wanted != "whole"

    def look_for_cache(self, kwargs: dict[str, Any]) -> None:
        """Note whether a block that is called with these reads one."""
        there = not torch.is_grad_enabled() and kwargs.get("past_key_values") is not None
        self.reads = there and self.batch.wanted != "cut"
