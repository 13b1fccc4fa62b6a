"""What is measured of a machine, how long it took, and what a description of the machine says of it."""

from __future__ import annotations

from dataclasses import dataclass

from compile_muon.passes.machine import Machine

__all__ = ["CollectiveSample", "MoveSample", "ProductSample", "Sample"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One measurement.

    Args:
        seconds: median over the rounds.
        held_out: the fit may not see it.
    """

    seconds: float
    held_out: bool

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
class CollectiveSample(Sample):
    """One collective of ranks 0 to ``ranks`` - 1, of which each sends ``nbytes`` bytes."""

    kind: str
    nbytes: float
    ranks: int

    group = "collectives"

    def __str__(self) -> str:
        return f"{self.kind} of {self.ranks} ranks, {self.nbytes:,.0f} bytes sent"

    def predicted(self, machine: Machine) -> float:
        return machine.shared_by(self.ranks).collective_seconds(self.kind, self.nbytes, range(self.ranks))
