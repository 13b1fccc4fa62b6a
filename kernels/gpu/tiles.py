"""Tile shapes of the matrix-product kernels, from ``tiles.json``, and the choice among them by ``model.seconds``.

For each architecture the file has the model's numbers, their source, and for each kernel tiles from the largest to the
smallest. A large tile reads less memory per operation, but few tiles leave multiprocessors idle.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from .model import Device, Result, Tile, seconds

#: (matrices, k, l)
Shape = tuple[int, int, int]

_MANY = 64  # matrices of one shape that leave no multiprocessor idle
_FILE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True)
class Table:
    """The tiles and the model's numbers of one architecture."""

    source: str  # device, date and method of the measurements
    measured: bool  # tiles were timed on such a device; if not, "auto" leaves products to cuBLAS
    device: Device
    symmetric: tuple[Tile, ...]  # of the symmetric product's kernel, from the largest to the smallest
    product: tuple[Tile, ...]  # of the general product's kernel, likewise
    cublas: tuple[Tile, ...]  # of a product in cuBLAS, as far as the model needs them

    def taken(self, backend: str) -> bool:
        """Tell whether a backend, "auto" or "triton", may take Triton's products on this architecture."""
        return backend == "triton" or self.measured

    def tile(
        self, results: tuple[Result, ...], processors: int, *, triangle: bool, listed: bool, summand: bool = True
    ) -> Tile:
        """Return the fastest tile of the symmetric product's kernel (``triangle``) or the general product's, by the
        model; ``listed``: of the grouped kernel."""
        tiles = self.symmetric if triangle else self.product
        tiles = tuple(tile.in_list for tile in tiles) if listed else tiles
        return choose(tiles, self.device, results, processors, triangle=triangle, summand=summand)

    def pays(self, shapes: Sequence[Shape], processors: int) -> bool:
        """Tell whether a step of the standard form takes Triton at most as many seconds as cuBLAS, by the model."""
        # Triton has a launch for each product of all matrices; cuBLAS has three launches for each shape, and computes
        # both triangles of a symmetric product.
        triton_seconds = cublas_seconds = 0.0
        for results, triangle, summand in _products_of(shapes):
            tile = self.tile(results, processors, triangle=triangle, summand=summand, listed=len(results) > 1)
            triton_seconds += seconds(tile, self.device, results, processors, triangle=triangle, summand=summand)
        for shape in shapes:
            for results, _, summand in _products_of([shape]):
                tile = choose(self.cublas, self.device, results, processors, triangle=False, summand=summand)
                cublas_seconds += seconds(tile, self.device, results, processors, triangle=False, summand=summand)
        return triton_seconds <= cublas_seconds


@lru_cache(maxsize=1024)
def served(table: Table, shapes: tuple[Shape, ...], processors: int) -> tuple[bool, ...]:
    """Tell for each shape of a list whether Triton should be faster than cuBLAS; never on unmeasured architectures."""
    if not (table.measured and table.cublas):  # the interpreter's table has no times of cuBLAS
        return tuple(table.measured for _ in shapes)
    # Shapes that are faster in large batches are first compared as one list, which shares launches; if the list is not
    # faster, each shape by itself.
    pays_in_batches = tuple(table.pays([(_MANY, *shape[1:])], processors) for shape in shapes)
    candidates = [shape for shape, pays in zip(shapes, pays_in_batches, strict=True) if pays]
    if candidates and table.pays(candidates, processors):
        return pays_in_batches
    return tuple(table.pays([shape], processors) for shape in shapes)


def _products_of(shapes: Sequence[Shape]) -> Iterator[tuple[tuple[Result, ...], bool, bool]]:
    """List the three products of a standard step: (results, whether one triangle is enough, whether with a summand)."""
    yield tuple((b, rows, rows, cols) for b, rows, cols in shapes), True, False
    yield tuple((b, rows, rows, rows) for b, rows, _ in shapes), True, True
    yield tuple((b, rows, cols, rows) for b, rows, cols in shapes), False, True


_SMALL = Tile(rows=32, cols=32, depth=32, group=2, stages=1, warps=4, descriptors=True)
# For debugging: with TRITON_INTERPRET=1 matrices of any size on the CPU go through the kernels.
INTERPRETER = Table("Triton's interpreter", True, Device(), symmetric=(_SMALL,), product=(_SMALL,), cublas=())

_KERNELS = ("symmetric", "product", "cublas")


@cache
def load_tables(path: Path = _FILE) -> Mapping[str, Table]:
    """Load the tables by architecture, for example "sm_80"."""
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
    """Name the table for a CUDA device, or None if there is none."""
    # No table of 8.0 for 8.6 and 8.9: its code would run there, but they have 100 KiB of shared memory, not 164.
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
    """Return the tile with the least ``model.seconds``; the first of equals."""
    return min(tiles, key=lambda tile: seconds(tile, device, results, processors, triangle=triangle, summand=summand))
