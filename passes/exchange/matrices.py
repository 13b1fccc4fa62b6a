"""What every strategy does with whole matrices: see a parameter as them, put them through Newton-Schulz."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compile_muon.kernels.dispatch import symmetric_kernels

from ..language.spec import MuonSpec, decode_dtype
from ..language.views import View
from ..methods import Made, Seen, matrix_method
from ..methods.method import MOMENTUM

__all__ = ["MethodInputs", "as_matrices", "orthogonalized", "wire_dtype"]


def wire_dtype(muon: MuonSpec) -> torch.dtype:
    """Matrices travel in the compute dtype, those of float16 in bfloat16.

    A gradient may be anywhere in float32's range, which float16 only has room for after normalization, at the owner.
    Directions come back in the compute dtype: no entry of one is far from 1/√l.
    """
    dtype = decode_dtype(muon.dtype)
    return torch.bfloat16 if dtype is torch.float16 else dtype


def as_matrices(flat: Tensor, muon: MuonSpec) -> Tensor:
    """A whole parameter as one matrix, ``[rows, cols]``, or as a stack of them, ``[batch, rows, cols]``."""
    shape = (muon.rows, muon.cols) if muon.batch == 1 else (muon.batch, muon.rows, muon.cols)
    return flat if flat.shape == shape else flat.reshape(shape)


#: of a matrix, under which float32 may lose squares of entries that count
_LEAST_NORM = 1e-12


@dataclass(eq=False)
class MethodInputs:
    """What a method sees of one parameter beside its matrices, at whoever has these.

    Args:
        hyper: ``(1 - momentum, momentum)``, and the rates that its method is :attr:`~..methods.MatrixMethod.given`.
        settings: of the parameter.
        states: that this rank owns of it, ``[count, a, b]`` each, part by part.
        norms: of the rows of its update here, ``[..., rows]`` fp32, where they are known.
    Attributes:
        made: the new ones, in the same order, once directions are.
    """

    hyper: Tensor
    settings: MuonSpec
    states: Sequence[Tensor] = ()
    norms: Tensor | None = None

    def __post_init__(self) -> None:
        self._method = matrix_method(self.settings.method)
        self._left = iter(self.states)
        self.made: list[Tensor] = []

    def seen(self, part: Tensor) -> Seen:
        """Of its next part, ``[rows, cols]`` or ``[count, rows, cols]``."""
        method = self._method
        rates = {name: self.hyper[2 + place] for place, name in enumerate(method.given)}
        if method.keeps_momentum:
            rates[MOMENTUM.name] = self.hyper[1]
        own = {state.name: next(self._left) for state in method.owned}
        if part.ndim == 2:
            own = {name: state.squeeze(0) for name, state in own.items()}
        return Seen(rates, own, self.settings.phase)

    def row_norms(self, matrix: Tensor) -> Tensor:
        """``[..., rows, 1]`` fp32, of its whole update."""
        if self.norms is None or self.norms.numel() * matrix.shape[-1] != matrix.numel():
            return torch.linalg.vector_norm(matrix, dim=-1, keepdim=True, dtype=torch.float32)
        return self.norms.reshape(*matrix.shape[:-1], 1)

    def direction(self, found: Tensor | Made, seen: Seen) -> Tensor:
        """Of a part; its new states are noted."""
        made = found if isinstance(found, Made) else Made(found)
        for name, old in seen.states.items():
            new = made.states.get(name, old).to(old.dtype)
            self.made.append(new.unsqueeze(0) if old.ndim == 2 else new)
        return made.direction.to(decode_dtype(self.settings.dtype))


def orthogonalized(
    matrices: Sequence[Tensor],
    settings: MuonSpec,
    views: Sequence[View | None],
    inputs: Sequence[MethodInputs],
    *,
    fresh: bool = False,
) -> list[Tensor]:
    """Directions of ``[rows, cols]`` or ``[batch, rows, cols]`` tensors, in ``settings.dtype``: Newton-Schulz, an
    opaque op, and what a method has around it.

    Args:
        views: what of each is a matrix by itself.
        inputs: of the parameter of each.
        fresh: whether this graph makes the matrices where they are: what makes them then tells the norms of their rows,
            and Triton's kernels need not read them for it.
    """
    if not matrices:
        return []
    parts = _parts(matrices, views)
    whole = matrix_method(settings.method).whole
    flat = [part for several in parts for part in several]
    norms: list[Tensor] = []
    if fresh and whole is None and all(map(_in_rows, views)) and _norms_wanted(settings, flat[0].device):
        columns = [each.row_norms(x) for each, x in zip(inputs, matrices, strict=True)]
        norms = [part.squeeze(-1) for several in _parts(columns, views) for part in several]

    def run(matrices: list[Tensor]) -> list[Tensor]:
        return torch.ops.muon_zero.newton_schulz(matrices, *settings.kernel_settings, norms)

    if whole is None:
        made = iter(run(flat))
    else:
        whose = [each for each, several in zip(inputs, parts, strict=True) for _ in several]
        seen = [each.seen(part) for each, part in zip(whose, flat, strict=True)]
        results = zip(whose, whole(flat, run, seen), seen, strict=True)
        made = iter([each.direction(found, own) for each, found, own in results])
    found = [[next(made) for _ in several] for several in parts]
    return [own[0] if view is None else view.join(own) for own, view in zip(found, views, strict=True)]


def _parts(matrices: Sequence[Tensor], views: Sequence[View | None]) -> list[list[Tensor]]:
    return [[x] if view is None else view.cut(x) for x, view in zip(matrices, views, strict=True)]


def _in_rows(view: View | None) -> bool:
    """Whether matrices are whole rows, one behind the other: those that take turns are copied together."""
    return view is None or (view.dim == 0 and all(len(block.runs) == 1 for block in view.blocks))


def _norms_wanted(settings: MuonSpec, device: torch.device) -> bool:
    """Whether kernels that take them are to be expected."""
    on_triton = settings.backend != "quack" and symmetric_kernels(
        decode_dtype(settings.dtype), device, settings.backend
    )
    return on_triton and settings.eps >= _LEAST_NORM
