"""Which positions of a sequence that several ranks share are a rank's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Place", "Span"]


@dataclass(frozen=True)
class Span:
    """Some of the positions, as pieces of a sequence in order.

    Args:
        pieces: first unit and number of units of each.
        units: of the sequence in all.
    """

    pieces: tuple[tuple[int, int], ...]
    units: int

    def take(self, x: Tensor, dim: int) -> Tensor:
        """These of ``x``, whose dim of all positions is a multiple of the units."""
        unit = x.shape[dim] // self.units
        found = [x.narrow(dim, first * unit, count * unit) for first, count in self.pieces]
        return found[0] if len(found) == 1 else torch.cat(found, dim)


@dataclass(frozen=True)
class Place:
    """This rank's place among those that share a sequence.

    Ranks along ``sequence`` make ``ring`` groups of ranks beside each other. Those of a group exchange positions for
    heads; keys and values go around among the groups. With several groups each has a piece from the front of the
    sequence and one as far from its end, so that under a causal mask all have the same to do.

    Args:
        size: ranks along ``sequence``.
        index: this one's place.
        group: name of their process group.
        ring: groups that keys and values go around.
    """

    size: int
    index: int
    group: str
    ring: int = 1

    @property
    def fields(self) -> tuple[int, int, str, int]:
        """What it is made of, ``Place(*fields)``, for what takes numbers and names alone: graphs and autograd."""
        return self.size, self.index, self.group, self.ring

    @property
    def heads(self) -> int:
        """Ranks that exchange positions for heads."""
        return self.size // self.ring

    @property
    def ring_index(self) -> int:
        """Place in the ring."""
        return self.index // self.heads

    @property
    def neighbors(self) -> tuple[int, int]:
        """The ranks before and behind this one in its ring."""
        return (self.index - self.heads) % self.size, (self.index + self.heads) % self.size

    @property
    def _units(self) -> int:
        """Of a rank: two where the pieces of a group are no whole number of ranks."""
        return 2 if self.ring > 1 and self.heads % 2 else 1

    def local(self, whole: int) -> int:
        """Positions of a rank, with what pads those of the last ones."""
        return -(-whole // (self.size * self._units)) * self._units

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a dim of heads."""
        count = x.shape[dim] // self.heads
        return x.narrow(dim, self.index % self.heads * count, count)

    def positions(self, index: int) -> Span:
        """Those of a rank."""
        own = self._units
        units = [self._unit(index * own + number) for number in range(own)]
        if units[-1] - units[0] == own - 1:  # beside each other, or one
            return Span(((units[0], own),), self.size * own)
        return Span(tuple((unit, 1) for unit in units), self.size * own)

    def positions_of_group(self, ring_index: int) -> Span:
        """Those of all ranks of a group."""
        if self.ring == 1:
            return Span(((0, 1),), 1)
        return Span(((ring_index, 1), (2 * self.ring - 1 - ring_index, 1)), 2 * self.ring)

    def _unit(self, number: int) -> int:
        """Where the unit is in the sequence that has this number, counted rank by rank."""
        if self.ring == 1:
            return number
        in_group = self.heads * self._units
        half, (group, inside) = in_group // 2, divmod(number, in_group)
        return group * half + inside if inside < half else (2 * self.ring - 1 - group) * half + inside - half

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's positions of ``x``, which is whole; zeros past its end."""
        return self.positions(self.index).take(self.pad(x, dim), dim)

    def pad(self, x: Tensor, dim: int = 1) -> Tensor:
        """``x`` with zeros past its end, so that ranks have equal parts."""
        dim %= x.ndim
        missing = self.local(x.shape[dim]) * self.size - x.shape[dim]
        return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x

    def in_order(self, x: Tensor, dim: int = 1) -> Tensor:
        """All positions, which ``x`` has rank by rank."""
        if self.ring == 1:
            return x
        dim %= x.ndim
        front, back = x.unflatten(dim, (self.ring, 2, -1)).unbind(dim + 1)
        return torch.cat((front.flatten(dim, dim + 1), back.flip(dim).flatten(dim, dim + 1)), dim)
