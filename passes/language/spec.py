"""The static facts a marker op carries: one immutable record per parameter, encoded as a string.

A marker's tensor arguments say *which* parameter it reads; its ``spec`` string says *how*: its layout over the mesh,
its dtypes, and the method, Muon or not. Everything here is known when the model is sharded and equal on identical
layers, so N equal blocks share one compiled graph. Values that change during training (lr, momentum) are never part of
it.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property

import torch

from compile_muon.kernels.call_plan import MEMORY_LIMIT
from compile_muon.kernels.coefficients import CoefficientSet

from ..methods import matrix_method
from .layout import Axis, Layout
from .views import Part, View

__all__ = ["MuonSpec", "ParamSpec", "decode_dtype", "encode_dtype", "exchange_of"]


def encode_dtype(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def decode_dtype(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``."""
    return getattr(torch, name)


def exchange_of(layout: Layout, batch: int, view: View | None) -> str:
    """How the matrices of a parameter come together: "local" where each rank has whole ones, else "owner".

    Args:
        batch: matrices that it is a stack of.
        view: what of it is one by itself.
    """
    apart = layout.sharded or not layout.expert.alone
    # Whole matrices already: one process, or experts where they live.
    local = layout.owner_group.size * layout.replica_group.size == 1 or (batch > 1 and apart and not layout.joined)
    if view is not None and apart and not layout.joined and layout.replica_group.alone:
        bounds = [layout.region(rank)[0] for rank in layout.holders]
        local = local or all(view.within(part.start, part.stop) for part in bounds)
    return "local" if local else "owner"


@dataclass(frozen=True)
class MuonSpec:
    """How one parameter is orthogonalized.

    Args:
        batch, rows, cols: the parameter seen as ``batch`` matrices of ``rows x cols``.
        nesterov: look ahead along the momentum.
        form: of Newton-Schulz, ``"standard"`` or ``"gram"`` (already resolved, never ``"auto"``).
        coefficients: flattened ``(a, b, c)`` triples, one per Newton-Schulz step.
        safety: factor on the Frobenius norm before the first step.
        restarts: gram-form restart points (steps after which R is recomputed).
        dtype: compute dtype of Newton-Schulz, and of directions on the wire.
        eps: lower bound of the norm.
        memory_limit: bytes that Newton-Schulz may hold on a GPU beside its inputs and results, or ``AUTO_LIMIT``.
        backend: what Newton-Schulz runs on, ``"auto"`` for whichever is expected to be fastest.
        exchange: ``"local"`` (whole matrices already here) or ``"owner"``.
        method: its name (:mod:`compile_muon.passes.methods`).
        view: the matrices in each ``rows x cols``, where these are not one by themselves.
        fetched: whether the momentum is elsewhere, and graphs fetch it where they use it.
        phase: which graph of the method's a step takes, see :attr:`~.methods.MatrixMethod.phase`.
        owners: of each share, where states are at the owners; empty for any.
    """

    batch: int
    rows: int
    cols: int
    nesterov: bool
    form: str
    coefficients: tuple[float, ...]
    safety: float
    restarts: tuple[int, ...]
    dtype: str
    eps: float
    exchange: str
    backend: str = "auto"
    memory_limit: int = MEMORY_LIMIT
    method: str = "muon"
    view: View | None = None
    fetched: bool = False
    phase: str | float | None = None
    owners: tuple[int, ...] = ()

    @cached_property
    def speculates(self) -> bool:
        """Whether a backward may make its directions."""
        return not matrix_method(self.method).in_step

    @cached_property
    def resident_momentum(self) -> bool:
        """Whether there is a momentum, and it is resident."""
        return not self.fetched and matrix_method(self.method).keeps_momentum

    @property
    def steps(self) -> int:
        """Number of Newton-Schulz steps."""
        return len(self.coefficients) // 3

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """``(count, rows, cols)`` of what is orthogonalized by itself."""
        if self.view is None:
            return ((self.batch, self.rows, self.cols),)
        return self.view.shapes(self.rows, self.cols)

    @cached_property
    def all_or_nothing(self) -> bool:
        """Whether a direction that Newton-Schulz makes of a matrix is finite in all entries or in none."""
        flat = self.coefficients
        triples = tuple(zip(flat[0::3], flat[1::3], flat[2::3], strict=True))
        return CoefficientSet("", triples, self.safety).is_all_or_nothing(decode_dtype(self.dtype))

    @property
    def kernel_settings(self) -> tuple[object, ...]:
        """What two matrices must agree on to go through one call of ``muon_zero::newton_schulz``: its arguments."""
        how = (self.coefficients, self.form, self.dtype, self.eps, self.safety, self.restarts)
        return (*how, self.backend, self.memory_limit)


@dataclass(frozen=True)
class ParamSpec:
    """Everything static about one parameter.

    Args:
        layout: where its parts are.
        dtype: dtype of the shard and of its gradient.
        compute_dtype: dtype the model sees.
        reduce_dtype: dtype gradients travel in.
        muon: Muon settings, or None for a parameter that AdamW (or nobody) updates.
        master: dtype of the master weight, where it is optimizer state and the shard is a rounded copy; else empty.
        on_host: whether the shard's memory is the host's, and a copy on the device is what weights are gathered from.
    """

    layout: Layout
    dtype: str
    compute_dtype: str
    reduce_dtype: str
    muon: MuonSpec | None = None
    master: str = ""
    on_host: bool = False

    @property
    def state_dtype(self) -> str:
        """Of the master weight, and of what methods keep for each of its elements."""
        return self.master or self.dtype

    @property
    def muon_settings(self) -> MuonSpec:
        """``muon`` of a parameter that must have it.

        Raises:
            ValueError: it has not.
        """
        if self.muon is None:
            raise ValueError(f"parameter of shape {self.layout.shape} is not a Muon matrix")
        return self.muon

    @cached_property
    def stacked(self) -> bool:
        """Whether dim 0 of a Muon parameter counts matrices."""
        whole, muon = self.layout.whole, self.muon_settings
        return len(whole) == 3 and (muon.rows, muon.cols) == whole[1:]

    @property
    def cut_in_columns(self) -> bool:
        """Whether ranks of a tensor-parallel group have parts of the same rows of a matrix."""
        layout = self.layout
        return layout.joined and layout.tensor_dim is not None and layout.tensor_dim > self.stacked

    @property
    def matrix_count(self) -> int:
        """How many matrices the whole parameter is."""
        if (view := self.muon_settings.view) is not None:
            return view.count
        return self.layout.whole[0] if self.stacked else 1

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What this rank has of the matrices of the parameter."""
        layout, muon = self.layout, self.muon_settings
        view = muon.view
        first = layout.part[0].start + (layout.local_rows.start if layout.sharded else 0)
        if view is None:
            return (Part(first if self.stacked else 0, muon.rows, muon.cols, None, self.stacked),)
        columns = layout.part[-1]
        bounds = (first, first + layout.local_shape[0]) if view.dim == 0 else (columns.start, columns.stop)
        return tuple(
            Part(segment.first, *view.shape_of(segment.first, muon.rows, muon.cols), segment, False)
            for segment in view.segments(*bounds)
        )

    def in_step(self, phase: str | float | None, *, joined: bool, owners: tuple[int, ...]) -> ParamSpec:
        """Of a matrix, for the graph of one step: see :class:`MuonSpec`.

        Args:
            joined: whether it is one matrix, whatever its view.
        """
        muon = replace(self.muon_settings, phase=phase, owners=owners)
        if joined and muon.view is not None:
            muon = replace(muon, view=None, exchange=exchange_of(self.layout, muon.batch, None))
        return replace(self, muon=muon)

    def encode(self) -> str:
        """The string that markers carry."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    @functools.cache
    def decode(text: str) -> ParamSpec:
        """Inverse of :meth:`encode`."""
        fields = json.loads(text)
        layout, muon = fields.pop("layout"), fields.pop("muon")
        layout["whole"] = tuple(layout["whole"])
        for axis in ("shard", "replicate", "both", "expert", "tensor", "owner_group_over", "replica_group_over"):
            layout[axis] = None if layout[axis] is None else Axis(**layout[axis])
        if muon is not None:
            muon["coefficients"] = tuple(muon["coefficients"])
            muon["restarts"] = tuple(muon["restarts"])
            muon["owners"] = tuple(muon["owners"])
            muon["view"] = None if muon["view"] is None else View.from_json(muon["view"])
            muon = MuonSpec(**muon)
        return ParamSpec(Layout(**layout), **fields, muon=muon)
