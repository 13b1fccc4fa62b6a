"""A machine as the planner sees it: what the core knows of its costs, and how fast it computes and what it holds.

``compile_muon.config.machine`` reads it from a file, of which there are several; ``.machines`` measures others.
docs/reference/machines.md is the same for users.
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

__all__ = ["Machine", "load_machine"]


@dataclass(frozen=True, kw_only=True)
class Machine(Costs):
    """The devices of a job and what joins them; every rank has the same.

    Args:
        name: as users call it.
        device: "cuda" or "cpu".
        memory_bytes: of one rank's device.
        attention_fraction: of the ``rates`` of large products that fused attention in half precision reaches; None for
            what products of its smallest dimension reach.
        attention_rates: dtype -> ``((length of a sequence, operations/s), ...)`` of fused causal attention, all
            pairs of entries counted; interpolated. Of a dtype that is there, in place of ``attention_fraction``.
        function_seconds: what an exponential, error function or the like takes of an entry, beside its bytes.
        host_seconds: what the thread that launches kernels does itself: to enter a ``"graph"``, for each
            ``"parameter"`` of it, for each ``"collective"``. On CPUs kernels wait for it, and it also takes time for
            each ``"byte"`` that a rank sends, which cores copy. A GPU runs behind it, and waits where it is late; there
            each launch counts too, by kind: ``"kernel"``, ``"product"``, ``"copy"`` (of buckets), ``"newton_schulz"``.
            0 where it is not there.
        late_seconds: how much later than this rank the last one issues a collective, where ranks that compute share
            cores: it has just lost its own. Who waits does so until then; meanwhile no core and no link is taken.
        host_bandwidth: bytes/s between a rank's device and pinned host memory, each way; 0 where they are the same.
        host_memory_bandwidth: bytes/s of host memory that AdamW on a rank's cores reads and writes; 0 for no time.
        disk_bandwidth: bytes/s that a rank reads from its disk and writes to it, both together; 0 where it has none.
        architecture: of GPUs, as ``kernels/gpu/tiles.json`` names it ("sm_90"): Newton-Schulz by the model of its
            launches there; empty for products as all others.
        processors: multiprocessors of a GPU.
        collective_processors: of these, that a collective under way holds: so many fewer are left to products.
        sources: field -> where its numbers come from.
    """

    name: str
    device: str
    memory_bytes: int
    attention_fraction: float | None = None
    attention_rates: Mapping[str, Table] = field(default_factory=dict)
    function_seconds: float = 0.0
    host_seconds: Mapping[str, float] = field(default_factory=dict)
    late_seconds: float = 0.0
    host_bandwidth: float = 0.0
    host_memory_bandwidth: float = 0.0
    disk_bandwidth: float = 0.0
    architecture: str = ""
    processors: int = 0
    collective_processors: int = 0
    sources: Mapping[str, str] = field(default_factory=dict, compare=False)

    __hash__ = Costs.__hash__

    @property
    def node(self) -> int | None:
        """Consecutive ranks that the innermost link joins; None where one link joins all."""
        return self.links[0].within

    def shared_by(self, ranks: int) -> Self:
        """As :meth:`Costs.shared_by`; each rank has its part of the memory."""
        if not self.cores:
            return self
        load = self.load(ranks)
        return replace(
            super().shared_by(ranks),
            memory_bytes=self.memory_bytes // ranks,
            attention_rates={dtype: divided(table, load) for dtype, table in self.attention_rates.items()},
            function_seconds=self.function_seconds * load,
            # What copies bytes is no thread of ours: a core that nobody computes on has it for nothing.
            host_seconds={k: s * load for k, s in self.host_seconds.items() if k != "byte" or ranks >= self.cores},
            late_seconds=self.late_seconds * load,
            disk_bandwidth=self.disk_bandwidth / ranks,
        )

    @property
    def tiles(self) -> Tiles | None:
        """The tiles of its architecture; None where none is named."""
        return load_tables()[self.architecture] if self.architecture and self.processors else None

    def attention_rate(self, size: float, sequence: float, dtype: str, *, causal: bool = True) -> float:
        """Operations/s of attention, of all pairs of entries, of which causal attention computes half.

        Args:
            size: smallest dimension of its products.
            sequence: how many entries it is over.
        """
        if dtype in self.attention_rates:
            return interpolated(self.attention_rates[dtype], sequence) / (1 if causal else 2)
        if self.attention_fraction is None or getattr(torch, dtype).itemsize != 2:
            return self.rate(size, dtype)
        return self.listed_rate(math.inf, dtype) * self.attention_fraction * (2 if causal else 1)

    def to_json(self) -> dict[str, Any]:
        """What :func:`compile_muon.config.machine.read_machine` takes, once JSON has made lists of its tuples."""
        return asdict(self)


def load_machine(name_or_path: str | os.PathLike, field: str = "machine") -> Machine:
    """See :func:`compile_muon.config.machine.load_as`."""
    return load_as(Machine, name_or_path, field)
