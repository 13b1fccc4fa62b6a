"""What the parts of a model know of the batch that is being computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

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
        compared: whether what is computed now is compared, and no cache is read.
        joins: whether positions are joined behind the last block, and not only behind the loss.
        batch: latest module, arguments and keyword arguments that the ranks were given.
        digest: of the batch, int64; and ``doubt``, 0 or NaN where ranks were given different ones.
    """

    place: Place
    whole: int = 0
    alone: bool = False
    forced: bool = False
    compared: bool = False
    joins: bool = True
    batch: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = field(default=None, repr=False)
    digest: Tensor | None = field(default=None, repr=False)
    doubt: Tensor | None = field(default=None, repr=False)
