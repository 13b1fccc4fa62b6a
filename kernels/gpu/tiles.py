"""Tile shapes of the two matrix-product kernels, from ``tiles.json``: which runs is decided by how it fills the device.

The file holds, for each architecture, where its numbers come from and, for each kernel, tiles from the largest to the
smallest. A large tile reads less memory per operation but leaves multiprocessors idle when there are few of them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

__all__ = ["INTERPRETER", "Table", "Tile", "architecture", "ceildiv", "choose", "load_tables", "work"]

_FILE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True)
class Tile:
    """What one program makes of a result, and how.

    Args:
        rows, cols: of the result.
        depth: of the summed dimension at a time.
        group: rows of tiles that are walked together, so that their operands stay in the L2 cache.
        stages, warps: Triton's num_stages and num_warps.
        rate: what a multiprocessor does of such tiles in a second, relative to the table's fastest.
        descriptors: operands come through the tensor memory accelerator.
        specialize: loads and products run in warps of their own.
    """

    rows: int
    cols: int
    depth: int
    group: int
    stages: int
    warps: int
    rate: float = 1.0
    descriptors: bool = False
    specialize: bool = False


@dataclass(frozen=True)
class Table:
    """The tiles of one architecture, and the smallest problem worth them; cuBLAS runs smaller ones.

    Args:
        source: what the numbers were taken on, when and how.
        smallest: smaller dim from which Triton runs a matrix.
        smallest_batched, batch: the same in a batch of ``batch`` or more.
        symmetric, product: tiles of either kernel, from the largest to the smallest.
    """

    source: str
    smallest: int
    smallest_batched: int
    batch: int
    symmetric: tuple[Tile, ...]
    product: tuple[Tile, ...]

    def serves(self, matrices: int, smaller_dim: int) -> bool:
        """Whether Triton is expected to be at least as fast as cuBLAS."""
        return smaller_dim >= (self.smallest_batched if matrices >= self.batch else self.smallest)


_SMALL = Tile(rows=32, cols=32, depth=32, group=2, stages=1, warps=4, descriptors=True)
# With TRITON_INTERPRET=1 matrices of any size on the CPU go through the kernels, for whoever debugs them.
INTERPRETER = Table(
    source="Triton's interpreter", smallest=0, smallest_batched=0, batch=1, symmetric=(_SMALL,), product=(_SMALL,)
)


@cache
def load_tables(path: Path = _FILE) -> Mapping[str, Table]:
    """Tables by architecture, "sm_80" for one."""
    entries: Mapping[str, dict[str, Any]] = json.loads(path.read_text())
    return {
        name: Table(**entry | {kernel: tuple(Tile(**tile) for tile in entry[kernel]) for kernel in _KERNELS})
        for name, entry in entries.items()
    }


_KERNELS = ("symmetric", "product")


@cache
def architecture(device: torch.device) -> str | None:
    """The table for a CUDA device; None where there is none.

    Code for 8.0 would run on 8.6 and 8.9 too, but they have 100 KiB of shared memory where 8.0 has 164.
    """
    major, minor = torch.cuda.get_device_capability(device)
    name = f"sm_{major}{minor}"
    return name if name in load_tables() else None


def ceildiv(a: int, b: int) -> int:
    """⌈a / b⌉; ``triton.cdiv`` serves kernels too, and on the host costs more than what it divides for."""
    return -(-a // b)


@lru_cache(maxsize=1024)
def choose(tiles: tuple[Tile, ...], rows: int, cols: int, matrices: int, processors: int, *, triangle: bool) -> Tile:
    """The tile that is expected to be done first; of equals the first in the table."""
    return min(tiles, key=lambda tile: work(tile, rows, cols, matrices, processors, triangle=triangle) / tile.rate)


def work(tile: Tile, rows: int, cols: int, matrices: int, processors: int, *, triangle: bool) -> int:
    """Entries of the result that the busiest multiprocessor makes, whole tiles at a time.

    On 132 of them the 272 tiles of 128 × 256 in the triangle of a 4096 × 4096 result keep some busy for three tiles,
    where 128 × 128 are 528, four each: two thirds of the work.

    Args:
        tile: of the result.
        rows, cols, matrices: of the results.
        processors: that share the tiles.
        triangle: counts only the tiles that hold some of a square result's lower triangle.
    """
    down, across = ceildiv(rows, tile.rows), ceildiv(cols, tile.cols)
    programs = down * across
    if triangle:
        programs = sum(min(across, ceildiv((i + 1) * tile.rows, tile.cols)) for i in range(down))
    return ceildiv(programs * matrices, processors) * tile.rows * tile.cols
