"""What the parts of a model know of the batch that is being computed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from compile_muon.passes.exchange.sequence import Place

__all__ = ["FIELD", "Running"]

#: of the configuration, for errors
FIELD = "sequence_parallel"


@dataclass(eq=False)
class Running:
    """Of one stack of blocks.

    Args:
        place: of this rank.
        whole: positions of the batch, as the first block has found them.
        alone: whether every rank computes all positions: with a cache of keys and values, or where ``forced``.
        joins: whether positions are joined behind the last block, and not only behind the loss.
        digest: of the batch, int64; and ``doubt``, 0 or NaN where ranks were given different ones.
    """

    place: Place
    whole: int = 0
    alone: bool = False
    forced: bool = False
    joins: bool = True
    digest: Tensor | None = field(default=None, repr=False)
    doubt: Tensor | None = field(default=None, repr=False)
