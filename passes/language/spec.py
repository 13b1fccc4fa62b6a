"""Specs: the static facts of one parameter, carried by its markers as a string.

A marker's tensor arguments identify the parameter; its ``spec`` string gives layout, dtypes and update method, all of
them fixed when the model is sharded. Equal layers have equal specs, so that N blocks share one compiled graph; values
that change in training (lr, momentum) are no part of a spec.
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


def encode_dtype(dtype: torch.dtype) -> str:
    """Return a dtype's name: ``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def decode_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name: ``"bfloat16"`` -> ``torch.bfloat16``."""
    return getattr(torch, name)


def exchange_of(layout: Layout, batch: int, view: View | None) -> str:
    """Name the exchange strategy of ``batch`` stacked matrices: "local" if ranks hold whole ones, else "owner"."""
    cut = layout.sharded or not layout.expert.alone
    # Ranks hold whole matrices if there is one rank, or if dim 0, which is cut, counts the matrices of a stack.
    local = layout.owner_group.size * layout.replica_group.size == 1 or (
        batch > 1 and cut and not layout.tensor_parallel
    )
    # The matrices of a view are whole if every cut is between two of them.
    if view is not None and cut and not layout.tensor_parallel and layout.replica_group.alone:
        bounds = [layout.region(rank)[0] for rank in layout.holders]
        local = local or all(view.within(part.start, part.stop) for part in bounds)
    return "local" if local else "owner"


@dataclass(frozen=True)
class MuonSpec:
    """The update method of one parameter, and the settings of Newton-Schulz."""

    # The parameter in this rank's model, as ``batch`` matrices of ``rows x cols``.
    batch: int
    rows: int
    cols: int
    nesterov: bool
    form: str  # of Newton-Schulz, ``"standard"`` or ``"gram"``; ``"auto"`` is resolved
    coefficients: tuple[float, ...]  # flattened ``(a, b, c)`` triples, one per Newton-Schulz step
    safety: float  # factor on the Frobenius norm before the first step
    restarts: tuple[int, ...]  # steps after which the gram form recomputes R
    dtype: str  # compute dtype of Newton-Schulz, and dtype of directions in collectives
    eps: float  # lower bound of the norm
    exchange: str  # ``"local"`` or ``"owner"``, see :func:`exchange_of`
    backend: str = "auto"  # of Newton-Schulz; ``"auto"`` for the one expected to be fastest
    memory_limit: int = MEMORY_LIMIT  # bytes of temporaries of Newton-Schulz on a GPU, or ``AUTO_LIMIT``
    method: str = "muon"  # name in :mod:`compile_muon.passes.methods`
    view: View | None = None  # smaller matrices within each ``rows x cols``
    fetched: bool = False  # whether the momentum is offloaded, so that graphs fetch it at its use
    phase: str | float | None = None  # of the step that a graph is for, see :attr:`~.methods.MatrixMethod.phase`
    owners: tuple[int, ...] = ()  # of each share, where the method keeps states at owners; else empty

    @cached_property
    def speculates(self) -> bool:
        """Whether a backward may make the parameter's directions."""
        return not matrix_method(self.method).in_step

    @cached_property
    def resident_momentum(self) -> bool:
        """Whether the method has a momentum, and it is not offloaded."""
        return not self.fetched and matrix_method(self.method).keeps_momentum

    @property
    def steps(self) -> int:
        """Number of Newton-Schulz steps."""
        return len(self.coefficients) // 3

    @property
    def matrices(self) -> tuple[tuple[int, int, int], ...]:
        """``(count, rows, cols)`` of the matrices to orthogonalize."""
        if self.view is None:
            return ((self.batch, self.rows, self.cols),)
        return self.view.shapes(self.rows, self.cols)

    @cached_property
    def all_or_nothing(self) -> bool:
        """Whether either all entries of a direction of Newton-Schulz are finite, or none is."""
        flat = self.coefficients
        triples = tuple(zip(flat[0::3], flat[1::3], flat[2::3], strict=True))
        return CoefficientSet("", triples, self.safety).is_all_or_nothing(decode_dtype(self.dtype))

    @property
    def kernel_settings(self) -> tuple[object, ...]:
        """Arguments of ``muon_zero::newton_schulz``, the same for all matrices of one call."""
        how = (self.coefficients, self.form, self.dtype, self.eps, self.safety, self.restarts)
        return (*how, self.backend, self.memory_limit)


@dataclass(frozen=True)
class ParamSpec:
    """All static facts of one parameter."""

    layout: Layout
    dtype: str  # of the shard and its gradient
    compute_dtype: str  # of the weight in the model
    reduce_dtype: str  # of gradients in collectives
    muon: MuonSpec | None = None  # None for a parameter that AdamW updates, or that is frozen
    master: str = ""  # dtype of master weights that are optimizer state beside a rounded shard; else ""
    on_host: bool = False  # whether the shard is in host memory, and copied to the device ahead of a gather

    @property
    def state_dtype(self) -> str:
        """Dtype of master weight and elementwise optimizer state."""
        return self.master or self.dtype

    @property
    def muon_settings(self) -> MuonSpec:
        """:attr:`muon`; ValueError where it is None."""
        if self.muon is None:
            raise ValueError(f"parameter of shape {self.layout.shape} is not a Muon matrix")
        return self.muon

    @cached_property
    def stacked(self) -> bool:
        """Whether dim 0 of the whole Muon parameter counts matrices."""
        whole, muon = self.layout.unsharded_shape, self.muon_settings
        return len(whole) == 3 and (muon.rows, muon.cols) == whole[1:]

    @property
    def cut_in_columns(self) -> bool:
        """Whether tensor parallelism cuts each row of a matrix, so that a rank has some columns of it."""
        layout = self.layout
        return layout.tensor_parallel and layout.tensor_dim is not None and layout.tensor_dim > self.stacked

    @property
    def matrix_count(self) -> int:
        """Number of matrices in the whole parameter."""
        if (view := self.muon_settings.view) is not None:
            return view.count
        return self.layout.unsharded_shape[0] if self.stacked else 1

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The matrices, or parts of matrices, in this rank's piece."""
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
        """Return a Muon matrix's spec in the step graph of ``phase``; ``joined``: as one matrix, without its view."""
        muon = replace(self.muon_settings, phase=phase, owners=owners)
        if joined and muon.view is not None:
            muon = replace(muon, view=None, exchange=exchange_of(self.layout, muon.batch, None))
        return replace(self, muon=muon)

    def encode(self) -> str:
        """Encode the spec for a marker."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    @functools.cache
    def decode(text: str) -> ParamSpec:
        """Return the spec that :meth:`encode` encoded as ``text``."""
        fields = json.loads(text)
        layout, muon = fields.pop("layout"), fields.pop("muon")
        layout["unsharded_shape"] = tuple(layout["unsharded_shape"])
        for axis in ("shard", "replicate", "both", "expert", "tensor", "owner_group_over", "replica_group_over"):
            layout[axis] = None if layout[axis] is None else Axis(**layout[axis])
        if muon is not None:
            muon["coefficients"] = tuple(muon["coefficients"])
            muon["restarts"] = tuple(muon["restarts"])
            muon["owners"] = tuple(muon["owners"])
            muon["view"] = None if muon["view"] is None else View.from_json(muon["view"])
            muon = MuonSpec(**muon)
        return ParamSpec(Layout(**layout), **fields, muon=muon)
