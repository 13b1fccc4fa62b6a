"""Requests: the treatment of each gradient in one compiled backward, with its extra inputs and outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from ..errors import RequestError
from .spec import ParamSpec

T = TypeVar("T")


class Purpose(str, Enum):
    """The treatment of one gradient in one backward."""

    #: stage 1, several ranks, not the last micro-batch: zeros for the shard, the unreduced gradient as an extra output
    ACCUMULATE = "accumulate"
    #: the averaged gradient of the shard
    REDUCE = "reduce"
    #: the averaged gradient of the shard, and beside it the Muon direction as an extra output
    SPECULATE = "speculate"


@dataclass(frozen=True)
class ReducedGrad:
    """One parameter whose gradient a backward graph produces."""

    spec: ParamSpec
    state_index: int  # position of its state tensor among the graph's inputs
    # Position of the averaged gradient among the graph's outputs, for a Muon matrix whose gradient the graph returns
    # and reads nowhere else; else None.
    output: int | None

    @property
    def speculates(self) -> bool:
        """Whether SPECULATE is allowed."""
        return self.output is not None


@dataclass(frozen=True)
class Extras(Generic[T]):
    """The extra outputs of one backward, by index of their gradient."""

    unreduced: dict[int, T]  # of ACCUMULATE: gradient of the full weight, ``spec.layout.shape``, master dtype
    directions: dict[int, T]  # of SPECULATE: ``spec.layout.local_shape``, in the dtype of Newton-Schulz
    # ``[SPECULATEs]`` int64, of the gradient (``carried`` included) behind each direction; None without SPECULATE.
    fingerprints: T | None


@dataclass(frozen=True)
class BackwardRequest:
    """The treatment of all gradients of a graph: one entry each, in the order of
    :func:`~compile_muon.passes.reduced_grads`.

    Extra inputs follow the graph's own: one per True of ``unreduced``, by index, then one per True of ``carried``, by
    index. Extra outputs follow the graph's own: one unreduced gradient per ACCUMULATE, by index; one direction per
    SPECULATE, by index; then, with any SPECULATE, their fingerprints (:class:`Extras`).
    """

    purposes: tuple[Purpose, ...]
    # With REDUCE or SPECULATE at stage 1: whether the sum of earlier micro-batches (``layout.shape``, master dtype,
    # contiguous) is an extra input, added before the reduction.
    unreduced: tuple[bool, ...]
    # With SPECULATE: whether the present ``.grad`` (``layout.local_shape``, master dtype, contiguous) is an extra
    # input. Direction and fingerprint include it; the gradient returned does not.
    carried: tuple[bool, ...]

    @classmethod
    def of(
        cls, grads: Sequence[ReducedGrad], purpose: Purpose, *, unreduced: bool = False, carried: bool = False
    ) -> BackwardRequest:
        """Return a request of ``purpose``, ``unreduced``, ``carried`` for gradients that allow them, else of REDUCE."""
        allowed = {
            Purpose.ACCUMULATE: [grad.spec.layout.accumulates for grad in grads],
            Purpose.REDUCE: [True for _ in grads],
            Purpose.SPECULATE: [grad.speculates for grad in grads],
        }[purpose]
        purposes = tuple(purpose if ok else Purpose.REDUCE for ok in allowed)
        return cls(
            purposes,
            tuple(
                unreduced and grad.spec.layout.accumulates and chosen is not Purpose.ACCUMULATE
                for grad, chosen in zip(grads, purposes, strict=True)
            ),
            tuple(carried and chosen is Purpose.SPECULATE for chosen in purposes),
        )

    def _indices(self, purpose: Purpose) -> tuple[int, ...]:
        return tuple([i for i, chosen in enumerate(self.purposes) if chosen is purpose])

    @property
    def accumulated(self) -> tuple[int, ...]:
        """Indices with ACCUMULATE: the first extra outputs."""
        return self._indices(Purpose.ACCUMULATE)

    @property
    def speculated(self) -> tuple[int, ...]:
        """Indices with SPECULATE: the next extra outputs, and the rows of the fingerprints behind them."""
        return self._indices(Purpose.SPECULATE)

    @property
    def unreduced_inputs(self) -> tuple[int, ...]:
        """Indices whose unreduced sum of earlier micro-batches is an input: the first extra inputs."""
        return tuple([i for i, present in enumerate(self.unreduced) if present])

    @property
    def carried_inputs(self) -> tuple[int, ...]:
        """Indices whose present ``.grad`` is an input: the next extra inputs."""
        return tuple([i for i, present in enumerate(self.carried) if present])

    @property
    def extra_outputs(self) -> int:
        """Number of outputs that follow the graph's own."""
        return len(self.accumulated) + self.speculation_outputs

    @property
    def speculation_outputs(self) -> int:
        """Number of the last extra outputs that belong to SPECULATE."""
        return len(self.speculated) + bool(self.speculated)

    def split(self, extra: Sequence[T]) -> Extras[T]:
        """Sort the extra outputs of a run by kind and gradient; ValueError unless there are :attr:`extra_outputs`."""
        accumulated, speculated = self.accumulated, self.speculated
        if len(extra) != self.extra_outputs:
            raise ValueError(f"{len(extra)} extra outputs where the request has {self.extra_outputs}")
        return Extras(
            dict(zip(accumulated, extra, strict=False)),
            dict(zip(speculated, extra[len(accumulated) :], strict=False)),
            extra[-1] if speculated else None,
        )

    @property
    def title(self) -> str:
        """The request in a file name: its purpose, and a digest where gradients differ in theirs."""
        words = next((p.value for p in (Purpose.SPECULATE, Purpose.ACCUMULATE) if p in self.purposes), "reduce")
        words += ("_unreduced" if any(self.unreduced) else "") + ("_carried" if any(self.carried) else "")
        if all(len(set(column)) <= 1 for column in (self.purposes, self.unreduced, self.carried)):
            return words
        rows = zip(self.purposes, self.unreduced, self.carried, strict=True)
        text = ";".join(f"{purpose.value},{int(unreduced)},{int(carried)}" for purpose, unreduced, carried in rows)
        return f"{words}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"

    def check(self, grads: Sequence[ReducedGrad]) -> None:
        """Raise :class:`RequestError` with index, shape and remedy where ``grads`` do not allow the request."""
        lengths = {len(self.purposes), len(self.unreduced), len(self.carried)}
        if lengths != {len(grads)}:
            raise RequestError(
                f"a request of {sorted(lengths)} entries for {len(grads)} gradients; give one per reduced_grads(gm)"
            )
        for i, grad in enumerate(grads):
            problem = self._problem(i, grad)
            if problem:
                raise RequestError(f"gradient {i} of shape {grad.spec.layout.shape}: {problem}")

    def _problem(self, i: int, grad: ReducedGrad) -> str:
        purpose, layout = self.purposes[i], grad.spec.layout
        accumulates = layout.accumulates
        if purpose is Purpose.ACCUMULATE and not accumulates:
            return (
                f"ACCUMULATE at stage {layout.stage} with world {layout.everyone.size}: nothing accumulates; use REDUCE"
            )
        if purpose is Purpose.SPECULATE and grad.spec.muon is None:
            return "SPECULATE for a parameter that is not a Muon matrix; use REDUCE"
        if purpose is Purpose.SPECULATE and not grad.speculates:
            return "SPECULATE for a gradient that the graph does not return untouched; use REDUCE"
        if self.unreduced[i] and not accumulates:
            return f"unreduced at stage {layout.stage} with world {layout.everyone.size}: nothing is kept; use False"
        if self.unreduced[i] and purpose is Purpose.ACCUMULATE:
            return "unreduced with ACCUMULATE, which reduces nothing; add to the sum outside of the graph"
        if self.carried[i] and purpose is not Purpose.SPECULATE:
            return f"carried with {purpose.name}; it only counts for a direction, use SPECULATE"
        return ""
