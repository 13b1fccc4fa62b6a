"""Tile shapes of the two matrix-product kernels, from `tiles.json`: which runs is decided by how it fills the device.

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

__all__ = ["INTERPRETER", "Table", "Tile", "architecture", "choose", "load_tables"]

_FILE = Path(__file__).with_name("tiles.json")


@dataclass(frozen=True)
class Tile:
    """One program makes `rows` × `cols` of the result, `depth` of the summed dimension at a time.

    `group` rows of tiles are walked together, so that their operands stay in the L2 cache. `stages` and `warps` are
    Triton's num_stages and num_warps. `descriptors`: operands come through the tensor memory accelerator;
    `specialize`: loads and products run in warps of their own.
    """

    rows: int
    cols: int
    depth: int
    group: int
    stages: int
    warps: int
    descriptors: bool = False
    specialize: bool = False


@dataclass(frozen=True)
class Table:
    """The tiles of one architecture, and the smallest problem worth them.

    Triton runs matrices whose smaller dim is at least `smallest`, or `smallest_batched` in a batch of
    `batch` or more; cuBLAS all others. `source` says what the numbers were taken on, when and how.
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


_SMALL = Tile(rows=32, cols=16, depth=16, group=2, stages=1, warps=4, descriptors=True)
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


@lru_cache(maxsize=1024)
def choose(tiles: tuple[Tile, ...], rows: int, cols: int, matrices: int, processors: int, *, triangle: bool) -> Tile:
    """The largest tile with at least one program for every multiprocessor, else the smallest.

    `triangle` counts only the tiles that hold some of a square result's lower triangle.
    """
    for tile in tiles:
        down, across = -(-rows // tile.rows), -(-cols // tile.cols)
        if triangle:
            programs = sum(min(across, -(-((i + 1) * tile.rows) // tile.cols)) for i in range(down))
        else:
            programs = down * across
        if programs * matrices >= processors:
            return tile
    return tiles[-1]
