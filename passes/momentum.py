"""``muon_zero::momentum``: Muon's updates of many gradients, with norms and fingerprints from the same read.

    momentum(Tensor[] grads, Tensor[] momenta, Tensor[] hypers, Tensor[] carried, bool nesterov, str dtype, str wide)
        -> Tensor[]

For each gradient the operator returns the update in ``dtype``, the gradient in the dtype ``wide`` if it has another,
the norms of the update's rows, and the sums of the wide gradient's rows, of which a fingerprint is made
(:func:`~.fingerprint.row_sums`): updates first, then the rest list by list, all in new memory. ``carried``, if not
empty, is added to each gradient, but not to the gradient that is returned.

On CUDA Triton's kernel (``compile_muon.kernels.gpu.momentum``) makes them, several gradients a launch. Written in aten,
as elsewhere, Inductor would fuse each with what makes the gradient: as many bytes, but 20 nodes a matrix, which were
half of the time that a first step took beyond that of AdamW.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compile_muon.kernels.apply import may_launch
from compile_muon.kernels.dispatch import triton_kernels
from compile_muon.kernels.momentum import muon_momentum

from .fingerprint import FORMULA, LEAST_ROW, row_sums
from .language.spec import ParamSpec, decode_dtype, encode_dtype
from .methods import matrix_method
from .operators import operator

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Updated:
    """The operator's results for one gradient."""

    update: Tensor  # to be orthogonalized
    wide: Tensor  # the gradient in the parameter's dtype
    norms: Tensor  # of the update's rows, ``[..., rows]`` fp32
    sums: Tensor  # of the rows of gradient plus carried, 1-D int64


def supports(grad: Tensor, momentum: Tensor, spec: ParamSpec) -> bool:
    """Tell whether the operator takes this gradient: on CUDA with Triton, of a method that averages gradients."""
    method = matrix_method(spec.muon_settings.method)
    if method.before is not None or method.project is not None or not (method.keeps_momentum and method.nesterov):
        return False
    if spec.muon_settings.fetched:
        return False
    if spec.muon_settings.backend == "aten" or not kernel_on(grad.device):
        return False
    sizes = all(isinstance(size, int) for size in grad.shape)
    if not sizes or grad.ndim < 2 or not grad.numel() or grad.shape[-1] < LEAST_ROW or not grad.is_contiguous():
        return False
    alike = momentum.shape == grad.shape and momentum.is_contiguous()
    return alike and all(dtype in _DTYPES for dtype in (grad.dtype, momentum.dtype, decode_dtype(spec.dtype)))


def kernel_on(device: torch.device) -> bool:
    """Tell whether Triton's kernel runs there. Without a GPU plans are made of graphs for one with Triton."""
    return device.type == "cuda" and (not torch.cuda.is_available() or triton_kernels() is not None)


def updates_of(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    hypers: Sequence[Tensor],
    carried: Sequence[Tensor],
    nesterov: bool,
    dtype: torch.dtype,
    wide: torch.dtype,
) -> list[Updated]:
    """Make the updates of gradients that :func:`supports` accepts, of one dtype, with momenta of one dtype.

    ``hypers``: fp32, each beginning with ``(1 - beta, beta)``. ``carried``: addends of the gradients in dtype ``wide``,
    or none. ``dtype`` is that of the updates.
    """
    results = list(MOMENTUM_UPDATES(grads, momenta, hypers, carried, nesterov, encode_dtype(dtype), encode_dtype(wide)))
    lists = [results[start : start + len(grads)] for start in range(0, len(results), len(grads))]
    if grads[0].dtype is wide:
        lists.insert(1, list(grads))
    return [
        Updated(update, grad, norms.view(update.shape[:-1]), sums)
        for update, grad, norms, sums in zip(*lists, strict=True)
    ]


def make_updates(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    hypers: Sequence[Tensor],
    carried: Sequence[Tensor],
    nesterov: bool,
    dtype: str,
    wide: str,
    *,
    by_kernel: bool = False,
) -> list[Tensor]:
    """Run the operator; ``by_kernel``: by Triton's kernel on any device, as on "meta" to note its launches."""
    out, full = decode_dtype(dtype), decode_dtype(wide)
    if by_kernel or may_launch([*grads, *momenta]):
        from compile_muon.kernels.gpu import momentum as gpu

        # A compiler may have padded the rows of what a product wrote.
        dense_grads, dense_momenta, carry = ([x.contiguous() for x in xs] for xs in (grads, momenta, carried))
        updates, wide_grads, norms, sums = gpu.momentum_updates(
            dense_grads, dense_momenta, hypers, carry, nesterov=nesterov, dtype=out, wide=full, **FORMULA
        )
    else:
        wide_grads = [grad.to(full) for grad in grads]
        totals = [carry + grad for carry, grad in zip(carried, wide_grads, strict=True)] if carried else wide_grads
        updates = [
            muon_momentum(grad, momentum, beta=(hyper[0], hyper[1]), nesterov=nesterov, out_dtype=out)[0]
            for grad, momentum, hyper in zip(totals, momenta, hypers, strict=True)
        ]
        norms = [torch.linalg.vector_norm(update, dim=-1, dtype=torch.float32).view(-1) for update in updates]
        sums = list(map(row_sums, totals))
    widened = wide_grads if grads[0].dtype is not full else []
    return [*updates, *widened, *norms, *sums]


def _fake(grads, momenta, hypers, carried, nesterov, dtype, wide):  # type: ignore[no-untyped-def]
    def like(dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(grad.shape, dtype=dtype, device=grad.device) for grad in grads]

    widened = [] if grads[0].dtype is decode_dtype(wide) else like(decode_dtype(wide))
    rows = [grad.numel() // grad.shape[-1] for grad in grads]
    row_results = [grads[0].new_empty(n, dtype=kind) for kind in (torch.float32, torch.int64) for n in rows]
    return [*like(decode_dtype(dtype)), *widened, *row_results]


MOMENTUM_UPDATES = operator(
    "momentum(Tensor[] grads, Tensor[] momenta, Tensor[] hypers, Tensor[] carried, bool nesterov, str dtype, str wide)"
    " -> Tensor[]",
    make_updates,
    _fake,
)
