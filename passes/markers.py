"""The three marker ops: the whole intermediate language between the model and the passes.

``unshard`` reads a weight, ``reduce_grad`` is its backward, ``orthogonalize`` stands where a Muon direction replaces a
gradient. Each has an eager implementation with real collectives, so a graph break or plain eager training gives the
same numbers. State travels as tensor arguments (never as a handle), static facts as one string (:class:`ParamSpec`).

``state`` is the momentum of a Muon parameter and an empty tensor otherwise; it identifies the parameter at run time.
``hyper`` is the fp32 tensor ``(1 - momentum, momentum)``, so changing the momentum never recompiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .exchange import transfers
from .exchange.orthogonalize import orthogonalize_group
from .spec import ParamSpec, decode_dtype

__all__ = ["MARKERS", "ORTHOGONALIZE", "REDUCE_GRAD", "UNSHARD"]


def _no_alias(result: Tensor, *inputs: Tensor | None) -> Tensor:
    """Operators may not return their inputs; only the eager path pays for this copy."""
    storages = {t.untyped_storage()._cdata for t in inputs if t is not None}
    return result.clone() if result.untyped_storage()._cdata in storages else result.contiguous()


@torch.library.custom_op("muon_zero::unshard", mutates_args=())
def unshard(shard: Tensor, state: Tensor, hyper: Tensor, replica: Tensor | None, spec: str) -> Tensor:
    return _no_alias(transfers.unshard(shard, replica, ParamSpec.decode(spec)), shard, replica)


@unshard.register_fake
def _(shard: Tensor, state: Tensor, hyper: Tensor, replica: Tensor | None, spec: str) -> Tensor:
    facts = ParamSpec.decode(spec)
    return shard.new_empty(facts.shape, dtype=decode_dtype(facts.compute_dtype))


@torch.library.custom_op("muon_zero::reduce_grad", mutates_args=())
def reduce_grad(grad: Tensor, state: Tensor, hyper: Tensor, spec: str) -> Tensor:
    return _no_alias(transfers.reduce_grad(grad, ParamSpec.decode(spec)), grad)


@reduce_grad.register_fake
def _(grad: Tensor, state: Tensor, hyper: Tensor, spec: str) -> Tensor:
    facts = ParamSpec.decode(spec)
    return grad.new_empty(facts.local_shape, dtype=decode_dtype(facts.dtype))


@torch.library.custom_op("muon_zero::orthogonalize", mutates_args=())
def orthogonalize(grad: Tensor, state: Tensor, hyper: Tensor, spec: str) -> Tensor:
    directions, _ = orthogonalize_group([grad], [state], [hyper], [ParamSpec.decode(spec)])
    return _no_alias(directions[0], grad, state)


@orthogonalize.register_fake
def _(grad: Tensor, state: Tensor, hyper: Tensor, spec: str) -> Tensor:
    return torch.empty_like(grad, memory_format=torch.contiguous_format)


def _save_for_reduce(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    _, state, hyper, _, spec = inputs
    ctx.save_for_backward(state, hyper)
    ctx.spec = spec  # type: ignore[attr-defined]


def _unshard_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    state, hyper = ctx.saved_tensors  # type: ignore[attr-defined]
    return REDUCE_GRAD(grad, state, hyper, ctx.spec), None, None, None, None  # type: ignore[attr-defined]


unshard.register_autograd(_unshard_backward, setup_context=_save_for_reduce)

UNSHARD = torch.ops.muon_zero.unshard.default
REDUCE_GRAD = torch.ops.muon_zero.reduce_grad.default
ORTHOGONALIZE = torch.ops.muon_zero.orthogonalize.default
MARKERS = (UNSHARD, REDUCE_GRAD, ORTHOGONALIZE)
