"""``muon_zero::momentum``: Muon's updates of many gradients, and what is told by the same read, as one operator.

    momentum(Tensor[] grads, Tensor[] momenta, Tensor[] hypers, Tensor[] carried, bool nesterov, str dtype, str wide)
        -> Tensor[]

Results are, of each gradient, the update in ``dtype``, the gradient in the dtype ``wide`` where it has another, the
norms of the update's rows, and the sums of the wide gradient's rows that its fingerprint is made of
(:func:`~.fingerprint.row_sums`): updates first, then the rest list by list. Each is new memory. ``carried`` is what
each gradient is added to, for all but the gradient that is returned, or empty.

On CUDA Triton's kernel (``compile_muon.kernels.gpu.momentum``) makes them, several gradients a launch. Written in aten,
as elsewhere, Inductor would fuse each with what makes the gradient: as many bytes, but 20 nodes a matrix, which were
half of the time that a first step took beyond that of AdamW.
"""

from __future__ import annotations

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

__all__ = ["MOMENTUM_UPDATES", "Updated", "make_updates", "supports", "updates_of"]

_LIBRARY = torch.library.Library("muon_zero", "FRAGMENT")
_LIBRARY.define(
    "momentum(Tensor[] grads, Tensor[] momenta, Tensor[] hypers, Tensor[] carried, bool nesterov, str dtype, str wide)"
    " -> Tensor[]"
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Updated:
    """What the operator makes of one gradient.

    Args:
        update: to be orthogonalized.
        wide: the gradient in the parameter's dtype.
        norms: of the update's rows, ``[..., rows]`` fp32.
        sums: of the rows of the gradient and what it is added to, 1-D int64.
    """

    update: Tensor
    wide: Tensor
    norms: Tensor
    sums: Tensor


def supports(grad: Tensor, momentum: Tensor, spec: ParamSpec) -> bool:
    """Whether the operator is for this gradient: on CUDA with Triton, of a method that averages gradients."""
    method = matrix_method(spec.muon_settings.method)
    if method.before is not None or method.project is not None or not method.keeps_momentum:
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
    """Whether Triton's kernel runs there. Plans are made without a GPU, of graphs for one that has Triton."""
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
    """Of gradients that :func:`supports` takes, of one dtype, with momenta of one dtype.

    Args:
        hypers: fp32, each beginning with ``(1 - beta, beta)``.
        carried: what each is added to, in dtype ``wide``, or none.
        nesterov: whether updates look ahead.
        dtype: of the updates.
        wide: of the gradients that belong to them.
    """
    found = list(MOMENTUM_UPDATES(grads, momenta, hypers, carried, nesterov, encode_dtype(dtype), encode_dtype(wide)))
    count = len(grads)
    updates, found = found[:count], found[count:]
    given = list(grads)
    if grads[0].dtype is not wide:
        given, found = found[:count], found[count:]
    norms, sums = found[:count], found[count:]
    return [
        Updated(update, own, rows.view(update.shape[:-1]), told)
        for update, own, rows, told in zip(updates, given, norms, sums, strict=True)
    ]


@torch.library.impl(_LIBRARY, "momentum", "CompositeExplicitAutograd")
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
    """The operator; ``by_kernel``: in Triton's kernel wherever the tensors are, as on "meta" to note its launches."""
    out, full = decode_dtype(dtype), decode_dtype(wide)
    if by_kernel or may_launch([*grads, *momenta]):
        from compile_muon.kernels.gpu import momentum as gpu

        # A compiler may have padded the rows of what a product wrote.
        own, kept, held = ([x.contiguous() for x in xs] for xs in (grads, momenta, carried))
        made = gpu.momentum_updates(own, kept, hypers, held, nesterov=nesterov, dtype=out, wide=full, **FORMULA)
        updates, given, norms, sums = made.updates, made.wide, made.norms, made.sums
    else:
        given = [grad.to(full) for grad in grads]
        totals = [held + grad for held, grad in zip(carried, given, strict=True)] if carried else given
        updates = [
            muon_momentum(grad, momentum, beta=(hyper[0], hyper[1]), nesterov=nesterov, out_dtype=out)[0]
            for grad, momentum, hyper in zip(totals, momenta, hypers, strict=True)
        ]
        norms = [torch.linalg.vector_norm(update, dim=-1, dtype=torch.float32).view(-1) for update in updates]
        sums = list(map(row_sums, totals))
    widened = given if grads[0].dtype is not full else []
    return [*updates, *widened, *norms, *sums]


@torch.library.register_fake("muon_zero::momentum", lib=_LIBRARY)
def _(grads, momenta, hypers, carried, nesterov, dtype, wide):  # type: ignore[no-untyped-def]
    def like(dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(grad.shape, dtype=dtype, device=grad.device) for grad in grads]

    widened = [] if grads[0].dtype is decode_dtype(wide) else like(decode_dtype(wide))
    rows = [grad.numel() // grad.shape[-1] for grad in grads]
    told = [grads[0].new_empty(n, dtype=kind) for kind in (torch.float32, torch.int64) for n in rows]
    return [*like(decode_dtype(dtype)), *widened, *told]


MOMENTUM_UPDATES = torch.ops.muon_zero.momentum.default
