"""What is measured of a machine, how long it took, and what a description of the machine says of it."""

from __future__ import annotations

from dataclasses import dataclass

from compile_muon.planning.machine import Machine

__all__ = [
    "AttentionSample",
    "CollectiveSample",
    "FunctionSample",
    "LateSample",
    "MoveSample",
    "ProductSample",
    "Sample",
    "StepSample",
    "TransferSample",
]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement.

    Args:
        seconds: median over the rounds.
        held_out: the fit may not see it.
    """

    seconds: float
    held_out: bool = False

    #: what the report puts together
    group = ""

    def predicted(self, machine: Machine) -> float:
        """Seconds that ``machine`` says it takes."""
        raise NotImplementedError

    def error(self, machine: Machine) -> float:
        """How far the prediction is off, as a part of what was measured; negative where it is too short."""
        return self.predicted(machine) / self.seconds - 1


@dataclass(frozen=True, kw_only=True)
class ProductSample(Sample):
    """``batch`` products (m, k) @ (k, n) by one rank, as many others as there are cores doing the same."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str

    group = "products"

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        return f"{batch}({self.m}, {self.k}) @ ({self.k}, {self.n}) {self.dtype}"

    def predicted(self, machine: Machine) -> float:
        return machine.product_seconds(self.m, self.n, self.k, batch=self.batch, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class MoveSample(Sample):
    """A compiled kernel that reads two tensors and writes one, ``nbytes`` in all."""

    nbytes: int

    group = "kernels"

    def __str__(self) -> str:
        return f"kernel that moves {self.nbytes:,} bytes"

    def predicted(self, machine: Machine) -> float:
        return machine.move_seconds(self.nbytes)


@dataclass(frozen=True, kw_only=True)
class AttentionSample(Sample):
    """Causal attention of ``heads`` sequences, forward and backward, by one rank beside others."""

    heads: int
    sequence: int
    width: int
    dtype: str

    group = "attention"

    def __str__(self) -> str:
        return f"{self.heads} x attention over {self.sequence} entries of {self.width}, {self.dtype}"

    @property
    def operations(self) -> float:
        """As ``torch.utils.flop_counter`` has them: two products forward and five backward, of all pairs."""
        return 7 * 2.0 * self.heads * self.sequence**2 * self.width

    def predicted(self, machine: Machine) -> float:
        rate = machine.attention_rate(min(self.sequence, self.width), self.sequence, self.dtype)
        return 2 * machine.product_start(self.dtype) + self.operations / rate


@dataclass(frozen=True, kw_only=True)
class FunctionSample(Sample):
    """A compiled kernel that reads and writes ``entries`` numbers of float32 and takes ``functions`` of each."""

    entries: int
    functions: int

    group = "functions"

    def __str__(self) -> str:
        return f"{self.functions} functions of {self.entries:,} entries"

    def predicted(self, machine: Machine) -> float:
        return machine.move_seconds(8 * self.entries) + self.functions * self.entries * machine.function_seconds


@dataclass(frozen=True, kw_only=True)
class StepSample(Sample):
    """A training step of so little that the host is what takes time: ``parameters`` of a few numbers each.

    Its seconds are CPU time of the rank: what it waits for are late ranks, a sample of their own.

    Args:
        ranks: that train together.
        collectives: of the step.
    """

    ranks: int
    parameters: int
    collectives: int

    group = "steps"
    #: graphs that the host enters: forward, backward, the optimizer's step; and all have all parameters
    graphs = 3

    def __str__(self) -> str:
        return f"step of {self.ranks} ranks, {self.parameters} parameters, {self.collectives} collectives"

    def predicted(self, machine: Machine) -> float:
        host = machine.shared_by(self.ranks).host_seconds
        alone = host.get("graph", 0.0) + self.parameters * host.get("parameter", 0.0)
        return self.graphs * alone + self.collectives * host.get("collective", 0.0)


@dataclass(frozen=True, kw_only=True)
class LateSample(Sample):
    """How much longer work takes with a small collective behind it: ``ranks`` ranks wait for the last of them."""

    ranks: int

    group = "late ranks"

    def __str__(self) -> str:
        return f"the last of {self.ranks} ranks"

    def predicted(self, machine: Machine) -> float:
        return machine.shared_by(self.ranks).late_seconds


@dataclass(frozen=True, kw_only=True)
class TransferSample(Sample):
    """``nbytes`` from host memory to a device, or from a disk to memory, and as many back beside them; or of host
    memory that AdamW reads and writes.

    Args:
        way: "host", "disk" or "adamw".
        ranks: that do so at a time.
    """

    way: str
    nbytes: int
    ranks: int

    group = "offload"

    def __str__(self) -> str:
        where = "of AdamW on the host" if self.way == "adamw" else f"to the {self.way} and back"
        return f"{self.nbytes:,} bytes {where}, {self.ranks} ranks"

    def predicted(self, machine: Machine) -> float:
        own = machine.shared_by(self.ranks)
        rates = {"host": own.host_bandwidth, "disk": own.disk_bandwidth, "adamw": own.host_memory_bandwidth}
        return self.served / rates[self.way]

    @property
    def served(self) -> int:
        """Bytes that the busier side serves: a disk those of both ways."""
        return 2 * self.nbytes if self.way == "disk" else self.nbytes


@dataclass(frozen=True, kw_only=True)
class CollectiveSample(Sample):
    """One collective of ranks 0 to ``ranks`` - 1, of which each sends ``nbytes`` bytes.

    Args:
        core_seconds: that all threads of a rank computed meanwhile; 0 where that was not measured.
    """

    kind: str
    nbytes: float
    ranks: int
    core_seconds: float = 0.0

    group = "collectives"

    def __str__(self) -> str:
        return f"{self.kind} of {self.ranks} ranks, {self.nbytes:,.0f} bytes sent"

    def predicted(self, machine: Machine) -> float:
        return machine.shared_by(self.ranks).collective_seconds(self.kind, self.nbytes, range(self.ranks))
