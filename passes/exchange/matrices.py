"""Newton-Schulz on whole matrices, with the method around it: common to all exchange strategies."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compile_muon.kernels.dispatch import symmetric_kernels

from ..language.spec import MuonSpec, decode_dtype
from ..language.views import View
from ..methods import WholeInputs, WholeOutputs, matrix_method
from ..methods.method import MOMENTUM


def wire_dtype(muon: MuonSpec) -> torch.dtype:
    """Return the dtype in which updates travel to owners: the compute dtype, but bfloat16 for float16.

    Updates have the range of float32, and fit float16 only once the owner has normalized them. Directions travel back
    in the compute dtype: their entries are near 1/√l for matrices whose longer side is l.
    """
    dtype = decode_dtype(muon.dtype)
    return torch.bfloat16 if dtype is torch.float16 else dtype


def as_matrices(flat: Tensor, muon: MuonSpec) -> Tensor:
    """Return a whole parameter as a matrix ``[rows, cols]``, or a stack ``[batch, rows, cols]``."""
    shape = (muon.rows, muon.cols) if muon.batch == 1 else (muon.batch, muon.rows, muon.cols)
    return flat if flat.shape == shape else flat.reshape(shape)


#: Frobenius norm below which squares of entries may underflow in float32
_LEAST_NORM = 1e-12


@dataclass(eq=False)
class MethodInputs:
    """The inputs of a method for one parameter, beside its matrices, on the rank that orthogonalizes them."""

    # ``(1 - momentum, momentum)``, then the rates that :attr:`~..methods.MatrixMethod.graph_rates` names.
    graph_scalars: Tensor
    settings: MuonSpec
    states: Sequence[Tensor] = ()  # at this rank, their owner: ``[count, a, b]`` each, part by part
    norms: Tensor | None = None  # of the update's rows on this rank, ``[..., rows]`` fp32, if known

    def __post_init__(self) -> None:
        self._method = matrix_method(self.settings.method)
        self._unread_states = iter(self.states)  # of parts for which :meth:`whole_inputs` has yet to be called
        #: new states, in the order of ``states``, filled by :meth:`direction`
        self.new_states: list[Tensor] = []

    def whole_inputs(self, part: Tensor) -> WholeInputs:
        """Return the inputs for ``part``, ``[rows, cols]`` or ``[count, rows, cols]``; call once for each, in order."""
        method = self._method
        rates = {name: self.graph_scalars[2 + place] for place, name in enumerate(method.graph_rates)}
        if method.keeps_momentum:
            rates[MOMENTUM.name] = self.graph_scalars[1]
        owned_states = {state.name: next(self._unread_states) for state in method.owned}
        if part.ndim == 2:
            owned_states = {name: state.squeeze(0) for name, state in owned_states.items()}
        return WholeInputs(rates, owned_states, self.settings.phase)

    def row_norms(self, matrix: Tensor) -> Tensor:
        """Return the norms of the rows of the parameter's update ``matrix``, ``[..., rows, 1]`` fp32."""
        if self.norms is None or self.norms.numel() * matrix.shape[-1] != matrix.numel():
            return torch.linalg.vector_norm(matrix, dim=-1, keepdim=True, dtype=torch.float32)
        return self.norms.reshape(*matrix.shape[:-1], 1)

    def direction(self, result: Tensor | WholeOutputs, whole_inputs: WholeInputs) -> Tensor:
        """Return the direction of a part from the method's ``result``, and append its new states to ``new_states``."""
        outputs = result if isinstance(result, WholeOutputs) else WholeOutputs(result)
        for name, old in whole_inputs.states.items():
            new = outputs.states.get(name, old).to(old.dtype)
            self.new_states.append(new.unsqueeze(0) if old.ndim == 2 else new)
        return outputs.direction.to(decode_dtype(self.settings.dtype))


def orthogonalized(
    matrices: Sequence[Tensor],
    settings: MuonSpec,
    views: Sequence[View | None],
    inputs: Sequence[MethodInputs],
    *,
    fresh: bool = False,
) -> list[Tensor]:
    """Return directions of ``[rows, cols]`` or ``[batch, rows, cols]`` tensors, in ``settings.dtype``.

    One opaque op orthogonalizes all of them, called here or by the method's ``whole``. ``views`` and ``inputs`` have
    one entry for each tensor; a view cuts it into parts. ``fresh``: this graph computes the matrices on this rank, so
    the kernel that writes them can also compute the norms of their rows, which saves Triton's Newton-Schulz a read.
    """
    if not matrices:
        return []
    parts = _parts(matrices, views)
    whole = matrix_method(settings.method).whole
    all_parts = [part for of_matrix in parts for part in of_matrix]
    row_norms: list[Tensor] = []
    if fresh and whole is None and all(map(_in_rows, views)) and _norms_wanted(settings, all_parts[0].device):
        columns = [method_inputs.row_norms(x) for method_inputs, x in zip(inputs, matrices, strict=True)]
        row_norms = [part.squeeze(-1) for of_matrix in _parts(columns, views) for part in of_matrix]

    def newton_schulz(matrices: list[Tensor]) -> list[Tensor]:
        return torch.ops.muon_zero.newton_schulz(matrices, *settings.kernel_settings, row_norms)

    if whole is None:
        directions = iter(newton_schulz(all_parts))
    else:
        part_inputs = [method_inputs for method_inputs, of_matrix in zip(inputs, parts, strict=True) for _ in of_matrix]
        whole_inputs = [of_part.whole_inputs(part) for of_part, part in zip(part_inputs, all_parts, strict=True)]
        results = zip(part_inputs, whole(all_parts, newton_schulz, whole_inputs), whole_inputs, strict=True)
        directions = iter([of_part.direction(result, whole_input) for of_part, result, whole_input in results])
    output = [[next(directions) for _ in of_matrix] for of_matrix in parts]
    return [entry[0] if view is None else view.join(entry) for entry, view in zip(output, views, strict=True)]


def _parts(matrices: Sequence[Tensor], views: Sequence[View | None]) -> list[list[Tensor]]:
    """Return the parts of each matrix: the stacks ``[count, r, c]`` of its view, or without one the matrix itself."""
    return [[x] if view is None else view.cut(x) for x, view in zip(matrices, views, strict=True)]


def _in_rows(view: View | None) -> bool:
    """Whether the view's matrices are consecutive rows; interleaved rows would have to be copied together first."""
    return view is None or (view.dim == 0 and all(len(block.runs) == 1 for block in view.blocks))


def _norms_wanted(settings: MuonSpec, device: torch.device) -> bool:
    """Whether Newton-Schulz is expected to run on kernels that read norms of rows."""
    return symmetric_kernels(decode_dtype(settings.dtype), device, settings.backend) and settings.eps >= _LEAST_NORM
