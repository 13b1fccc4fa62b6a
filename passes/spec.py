"""The static facts a marker op carries: one immutable record per parameter, encoded as a string.

A marker's tensor arguments say *which* parameter it reads; its ``spec`` string says *how* (shape, mesh, ZeRO stage,
dtypes, Muon settings). Everything here is known when the model is sharded and equal on identical layers, so N equal
blocks share one compiled graph. Values that change during training (lr, momentum) are never part of it.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass

import torch

from compile_muon.kernels.plan import MEMORY_LIMIT

__all__ = ["MuonSpec", "ParamSpec", "decode_dtype", "encode_dtype"]


def encode_dtype(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def decode_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``."""
    return getattr(torch, name)


@dataclass(frozen=True)
class MuonSpec:
    """How one parameter is orthogonalized.

    Args:
        batch, rows, cols: the parameter seen as ``batch`` matrices of ``rows x cols``.
        nesterov: look ahead along the momentum.
        method: ``"standard"`` or ``"gram"`` (already resolved, never ``"auto"``).
        coefficients: flattened ``(a, b, c)`` triples, one per Newton-Schulz step.
        safety: factor on the Frobenius norm before the first step.
        restarts: gram-form restart points (steps after which R is recomputed).
        dtype: compute dtype of Newton-Schulz, and of the matrices on the wire.
        eps: lower bound of the norm.
        memory_limit: bytes that Newton-Schulz may hold on a GPU beside its inputs and results.
        backend: what Newton-Schulz runs on, ``"auto"`` for whichever is expected to be fastest.
        exchange: ``"local"`` (whole matrices already here), ``"replicate"`` or ``"owner"``.
    """

    batch: int
    rows: int
    cols: int
    nesterov: bool
    method: str
    coefficients: tuple[float, ...]
    safety: float
    restarts: tuple[int, ...]
    dtype: str
    eps: float
    exchange: str
    backend: str = "auto"
    memory_limit: int = MEMORY_LIMIT

    @property
    def steps(self) -> int:
        """Number of Newton-Schulz steps."""
        return len(self.coefficients) // 3

    @property
    def kernel_settings(self) -> tuple[object, ...]:
        """What two matrices must agree on to go through one Newton-Schulz call."""
        how = (self.method, self.coefficients, self.safety, self.restarts, self.dtype, self.eps)
        return (*how, self.backend, self.memory_limit)


@dataclass(frozen=True)
class ParamSpec:
    """Everything static about one parameter.

    Args:
        shape: full (unsharded) shape.
        world, rank: size of the data-parallel group and this process's place in it.
        group: name of the process group, as functional collectives take it ("" when world is 1).
        stage: ZeRO stage, 0 to 3.
        dtype: dtype of the master shard and of its gradient.
        compute_dtype: dtype the model sees.
        reduce_dtype: dtype gradients travel in.
        muon: Muon settings, or None for a parameter that AdamW (or nobody) updates.
        gather: the collective that gathers, ``"all_gather"``, or ``"all_to_all"`` with a copy for every rank: the same
            bytes, for groups whose all-gather is not safe (Gloo, docs/decisions.md).
    """

    shape: tuple[int, ...]
    world: int
    rank: int
    group: str
    stage: int
    dtype: str
    compute_dtype: str
    reduce_dtype: str
    muon: MuonSpec | None = None
    gather: str = "all_gather"

    @property
    def muon_settings(self) -> MuonSpec:
        """``muon`` of a parameter that must have it.

        Raises:
            ValueError: it has not.
        """
        if self.muon is None:
            raise ValueError(f"parameter of shape {self.shape} is not a Muon matrix")
        return self.muon

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a slice (along dim 0) rather than the whole parameter."""
        return self.stage > 0 and self.world > 1 and len(self.shape) > 0

    @property
    def replicated_weight(self) -> bool:
        """Whether a full copy in compute dtype is resident between steps (stages 1 and 2)."""
        return self.sharded and self.stage < 3

    @property
    def gathered(self) -> bool:
        """Whether every use of the full weight starts with a collective (stage 3)."""
        return self.sharded and not self.replicated_weight

    @property
    def accumulates(self) -> bool:
        """Whether gradients stay on the rank, unreduced, between the boundaries of a step (stage 1)."""
        return self.stage == 1 and self.world > 1

    @property
    def chunk(self) -> int:
        """Rows of the largest shard: ``ceil(shape[0] / world)``, as in ``torch.chunk`` and ``Shard(0)``."""
        return -(-self.shape[0] // self.world)

    @property
    def row_numel(self) -> int:
        """Elements behind one index of dim 0."""
        numel = 1
        for size in self.shape[1:]:
            numel *= size
        return numel

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return self.row_numel * (self.shape[0] if self.shape else 1)

    def shard_rows(self, rank: int) -> tuple[int, int]:
        """``(start, stop)`` of the rows of ``rank``; empty for a rank past the end."""
        start = min(rank * self.chunk, self.shape[0])
        return start, min(start + self.chunk, self.shape[0])

    def shard_numel(self, rank: int) -> int:
        """Elements that ``rank`` holds."""
        if not self.sharded:
            return self.numel
        start, stop = self.shard_rows(rank)
        return (stop - start) * self.row_numel

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        if not self.sharded:
            return self.shape
        start, stop = self.shard_rows(self.rank)
        return (stop - start, *self.shape[1:])

    def encode(self) -> str:
        """The string that markers carry."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    @functools.cache
    def decode(text: str) -> ParamSpec:
        """Inverse of :meth:`encode`."""
        fields = json.loads(text)
        muon = fields.pop("muon")
        if muon is not None:
            muon["coefficients"] = tuple(muon["coefficients"])
            muon["restarts"] = tuple(muon["restarts"])
            muon = MuonSpec(**muon)
        return ParamSpec(**{**fields, "shape": tuple(fields["shape"])}, muon=muon)
