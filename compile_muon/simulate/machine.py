"""A machine as the planner sees it: the costs that the core reads, and compute rates and memory on top.

``compile_muon.config.machine`` reads it from a file; ``compile_muon.planning.machines`` measures new ones.
docs/reference/machines.md explains it to users.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from compile_muon.config.machine import load_as
from compile_muon.kernels.gpu.tiles import Table as Tiles
from compile_muon.kernels.gpu.tiles import load_tables
from compile_muon.passes.costs import Costs, Table, divided, interpolated

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, kw_only=True)
class Machine(Costs):
    """The devices of a job and the links between them; every rank has the same device."""

    name: str  # as users call it
    device: str  # "cuda" or "cpu"
    memory_bytes: int  # of one rank's device
    attention_fraction: float | None = None  # of the rate of large products; None: as its smallest product
    # dtype -> ((sequence length, operations/s), ...), causal, of all pairs of positions; goes before the fraction
    attention_rates: Mapping[str, Table] = field(default_factory=dict)
    function_seconds: float = 0.0  # of an exponential or the like for one entry, beside its bytes
    # Of the thread that launches kernels, by kind: "graph", "parameter", "collective"; on CPUs, where kernels wait for
    # it, "byte" sent; on GPUs, which run behind it, each launch: "kernel", "product", "copy", "newton_schulz".
    host_seconds: Mapping[str, float] = field(default_factory=dict)
    late_seconds: float = 0.0  # delay of the last rank's issue of a collective, where ranks share cores; none is busy
    host_bandwidth: float = 0.0  # bytes/s between a device and pinned host memory, each way; 0 where they are the same
    host_memory_bandwidth: float = 0.0  # bytes/s of host memory that AdamW on a rank's cores moves; 0 for no time
    disk_bandwidth: float = 0.0  # bytes/s that a rank reads and writes on its disk, together; 0 without one
    architecture: str = ""  # of a GPU in kernels/gpu/tiles.json ("sm_90"); empty: no model of its launches
    processors: int = 0  # multiprocessors of a GPU
    collective_processors: int = 0  # multiprocessors that a collective under way takes from products
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)  # field -> origin of its numbers

    # A frozen dataclass would hash its fields, and mappings have no hash.
    __hash__ = Costs.__hash__

    @property
    def node(self) -> int | None:
        """The number of consecutive ranks that the innermost link joins; None where one link joins all."""
        return self.links[0].within

    def shared_by(self, ranks: int) -> Self:
        """Return the costs as :meth:`Costs.shared_by`, with an equal part of memory and disk for each rank."""
        if not self.cores:
            return self
        load = self.load(ranks)
        return replace(
            super().shared_by(ranks),
            memory_bytes=self.memory_bytes // ranks,
            attention_rates={dtype: divided(table, load) for dtype, table in self.attention_rates.items()},
            function_seconds=self.function_seconds * load,
            # Gloo's own threads copy bytes: free of charge while a core is idle.
            host_seconds={k: s * load for k, s in self.host_seconds.items() if k != "byte" or ranks >= self.cores},
            late_seconds=self.late_seconds * load,
            disk_bandwidth=self.disk_bandwidth / ranks,
        )

    @property
    def tiles(self) -> Tiles | None:
        """The tile tables of the machine's architecture; None where none is named."""
        return load_tables()[self.architecture] if self.architecture and self.processors else None

    def attention_rate(self, size: float, sequence: float, dtype: str, *, causal: bool = True) -> float:
        """Return operations/s of attention over all pairs of positions, of which causal attention computes half.

        `size` is the smallest dimension of its products, `sequence` the number of positions.
        """
        if dtype in self.attention_rates:
            return interpolated(self.attention_rates[dtype], sequence) / (1 if causal else 2)
        if self.attention_fraction is None or getattr(torch, dtype).itemsize != 2:
            return self.rate(size, dtype)
        return self.listed_rate(math.inf, dtype) * self.attention_fraction * (2 if causal else 1)

    def to_json(self) -> dict[str, Any]:
        """Return what :func:`compile_muon.config.machine.read_machine` reads, once JSON has made lists of tuples."""
        return asdict(self)


def load_machine(name_or_path: str | os.PathLike, field: str = "machine") -> Machine:
    """See :func:`compile_muon.config.machine.load_as`."""
    return load_as(Machine, name_or_path, field)
