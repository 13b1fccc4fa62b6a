"""Places: which positions of a shared sequence a rank has."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Positions of a sequence, as runs of equal units."""

    pieces: tuple[tuple[int, int], ...]  # first unit and number of units of each run
    units: int  # of the whole sequence

    def take(self, x: Tensor, dim: int) -> Tensor:
        """Return these positions of ``x``, whose ``dim`` has all positions, a multiple of the units."""
        unit = x.shape[dim] // self.units
        runs = [x.narrow(dim, first * unit, count * unit) for first, count in self.pieces]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim)


@dataclass(frozen=True)
class Place:
    """This rank's place among the ranks that share a sequence.

    Ranks along ``sequence`` form ``ring`` groups of neighbours. Ranks of a group exchange positions for heads; keys and
    values go round among groups. With several groups each has a piece from the front of the sequence and one equally
    far from its end, so that a causal mask leaves all the same work.
    """

    size: int  # ranks along ``sequence``
    index: int  # of this rank
    group: str  # name of their process group
    ring: int = 1  # number of groups

    @property
    def fields(self) -> tuple[int, int, str, int]:
        """The arguments of ``Place(*fields)``, for graphs and autograd functions, which hold numbers and strings."""
        return self.size, self.index, self.group, self.ring

    @property
    def heads(self) -> int:
        """Number of ranks that exchange positions for heads."""
        return self.size // self.ring

    @property
    def ring_index(self) -> int:
        """Index of this rank's group in the ring."""
        return self.index // self.heads

    @property
    def neighbors(self) -> tuple[int, int]:
        """Ranks before and after this one in its ring."""
        return (self.index - self.heads) % self.size, (self.index + self.heads) % self.size

    @property
    def _units(self) -> int:
        """Units per rank: two where a group's pieces are no whole number of ranks."""
        return 2 if self.ring > 1 and self.heads % 2 else 1

    def local(self, whole: int) -> int:
        """Positions per rank, with the padding of the last ranks."""
        return -(-whole // (self.size * self._units)) * self._units

    def own(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of a dim of heads."""
        count = x.shape[dim] // self.heads
        return x.narrow(dim, self.index % self.heads * count, count)

    def positions(self, index: int) -> Span:
        """Return the positions of rank ``index``."""
        count = self._units
        units = [self._unit(index * count + number) for number in range(count)]
        if units[-1] - units[0] == count - 1:  # one unit, or neighbours
            return Span(((units[0], count),), self.size * count)
        return Span(tuple((unit, 1) for unit in units), self.size * count)

    def positions_of_group(self, ring_index: int) -> Span:
        """Return the positions of all ranks of a group."""
        if self.ring == 1:
            return Span(((0, 1),), 1)
        return Span(((ring_index, 1), (2 * self.ring - 1 - ring_index, 1)), 2 * self.ring)

    def _unit(self, number: int) -> int:
        """Return the position, in units, of unit ``number``, counted rank by rank."""
        if self.ring == 1:
            return number
        in_group = self.heads * self._units
        half, (group, inside) = in_group // 2, divmod(number, in_group)
        return group * half + inside if inside < half else (2 * self.ring - 1 - group) * half + inside - half

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's positions of the whole ``x``; zeros past its end."""
        return self.positions(self.index).take(self.pad(x, dim), dim)

    def pad(self, x: Tensor, dim: int = 1) -> Tensor:
        """Pad ``x`` with zeros at its end, so that ranks have equal parts."""
        dim %= x.ndim
        missing = self.local(x.shape[dim]) * self.size - x.shape[dim]
        return F.pad(x, (0, 0) * (x.ndim - 1 - dim) + (0, missing)) if missing else x

    def in_order(self, x: Tensor, dim: int = 1) -> Tensor:
        """Reorder ``x``, concatenated rank by rank, by position."""
        if self.ring == 1:
            return x
        dim %= x.ndim
        front, back = x.unflatten(dim, (self.ring, 2, -1)).unbind(dim + 1)
        return torch.cat((front.flatten(dim, dim + 1), back.flip(dim).flatten(dim, dim + 1)), dim)
