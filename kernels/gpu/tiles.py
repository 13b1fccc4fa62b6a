"""Tile shapes of the matrix-product kernels, from ``tiles.json``, and the choice among them by ``model.seconds``.

The file holds, for each architecture, what is assumed of the device, where that comes from, and for each kernel tiles
from the largest to the smallest. A large tile reads less memory per operation but leaves multiprocessors idle when
there are few of them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from .model import Device, Result, Tile, seconds

__all__ = ["INTERPRETER", "Table", "architecture", "choose", "load_tables", "served"]

#: (matrices, k, l)
Shape = tuple[int, int, int]

_MANY = 64  # matrices of one shape leave no multiprocessor idle
_FILE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True)
class Table:
    """The tiles of one architecture, and what is known of it.

    Args:
        source: what the numbers were taken on, when and how.
        measured: whether tiles were timed on such a device; where they were not, "auto" leaves products to cuBLAS.
        device: what the model assumes.
        symmetric, product: tiles of either kernel, from the largest to the smallest.
        cublas: tiles of a product in cuBLAS, as far as the model needs them.
    """

    source: str
    measured: bool
    device: Device
    symmetric: tuple[Tile, ...]
    product: tuple[Tile, ...]
    cublas: tuple[Tile, ...]

    def taken(self, backend: str) -> bool:
        """Whether products of this backend, "auto" or "triton", are Triton's at all."""
        return backend == "triton" or self.measured

    def pays(self, shapes: Sequence[Shape], processors: int) -> bool:
        """Whether Triton is expected to take no longer than cuBLAS for a step of these matrices, of the standard form.

        Triton makes ``XXᵀ``, ``bA + cA²`` and ``aX + BX`` of all of them in a launch each; on cuBLAS each shape has
        three launches of its own, and squares are computed whole.
        """
        triton = sum(
            self._seconds(self.symmetric if triangle else self.product, results, processors, triangle, summand)
            for results, triangle, summand in _products_of(shapes)
        )
        return triton <= sum(
            self._seconds(self.cublas, results, processors, triangle=False, summand=summand)
            for shape in shapes
            for results, _, summand in _products_of([shape])
        )

    def _seconds(
        self, tiles: tuple[Tile, ...], results: tuple[Result, ...], processors: int, triangle: bool, summand: bool
    ) -> float:
        if len(results) > 1:
            tiles = tuple(tile.in_list for tile in tiles)
        tile = choose(tiles, self.device, results, processors, triangle=triangle, summand=summand)
        return seconds(tile, self.device, results, processors, triangle=triangle, summand=summand)


@lru_cache(maxsize=1024)
def served(table: Table, shapes: tuple[Shape, ...], processors: int) -> tuple[bool, ...]:
    """For each shape of a list, whether its matrices are expected to be done sooner by Triton than by cuBLAS; for none
    where that is an estimate.

    Shapes of which a large batch would be are taken together, for they share launches, and each by itself where that
    does not pay.
    """
    if not (table.measured and table.cublas):
        return tuple(table.measured for _ in shapes)
    worthwhile = tuple(table.pays([(_MANY, *shape[1:])], processors) for shape in shapes)
    together = [shape for shape, worth in zip(shapes, worthwhile, strict=True) if worth]
    if together and table.pays(together, processors):
        return worthwhile
    return tuple(table.pays([shape], processors) for shape in shapes)


def _products_of(shapes: Sequence[Shape]) -> Iterator[tuple[tuple[Result, ...], bool, bool]]:
    """The three products of a standard step, whether a triangle of each is enough, and whether it has a summand."""
    yield tuple((b, rows, rows, cols) for b, rows, cols in shapes), True, False
    yield tuple((b, rows, rows, rows) for b, rows, _ in shapes), True, True
    yield tuple((b, rows, cols, rows) for b, rows, cols in shapes), False, True


_SMALL = Tile(rows=32, cols=32, depth=32, group=2, stages=1, warps=4, descriptors=True)
# With TRITON_INTERPRET=1 matrices of any size on the CPU go through the kernels, for whoever debugs them.
INTERPRETER = Table("Triton's interpreter", True, Device(), symmetric=(_SMALL,), product=(_SMALL,), cublas=())

_KERNELS = ("symmetric", "product", "cublas")


@cache
def load_tables(path: Path = _FILE) -> Mapping[str, Table]:
    """Tables by architecture, "sm_80" for one."""
    entries: Mapping[str, dict[str, Any]] = json.loads(path.read_text())
    return {
        name: Table(
            source=entry["source"],
            measured=entry["measured"],
            device=Device(**entry["device"]),
            **{kernel: tuple(Tile(**tile) for tile in entry[kernel]) for kernel in _KERNELS},
        )
        for name, entry in entries.items()
    }


@cache
def architecture(device: torch.device) -> str | None:
    """The table for a CUDA device; None where there is none.

    Code for 8.0 would run on 8.6 and 8.9 too, but they have 100 KiB of shared memory where 8.0 has 164.
    """
    major, minor = torch.cuda.get_device_capability(device)
    name = f"sm_{major}{minor}"
    return name if name in load_tables() else None


@lru_cache(maxsize=1024)
def choose(
    tiles: tuple[Tile, ...],
    device: Device,
    results: tuple[Result, ...],
    processors: int,
    *,
    triangle: bool,
    summand: bool = True,
) -> Tile:
    """The tile that is expected to be done first; of equals the first in the table. Arguments: ``model.seconds``."""
    return min(tiles, key=lambda tile: seconds(tile, device, results, processors, triangle=triangle, summand=summand))
