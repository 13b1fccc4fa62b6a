"""Differentiable conversion of a sharded parameter to its shard, for derivatives of any order.

``DTensor.to_local()`` wraps the gradient in a new DTensor outside autograd, so a loss made of that gradient (a gradient
penalty, an inner loop's step) would get no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compile_muon.engine.dtensor_parameter import ShardedParameter
from compile_muon.engine.dtensors import like_parameter


def local_of(param: DTensor) -> Tensor:
    """Return the shard of a parameter; its gradient becomes a gradient of the parameter."""
    return locals_of([param])[0]


def locals_of(params: Sequence[DTensor]) -> tuple[Tensor, ...]:
    """Return the shards of several parameters from one autograd node."""
    return cast("tuple[Tensor, ...]", _Locals.apply(*params))


class _Locals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *params: DTensor) -> tuple[Tensor, ...]:
        ctx.params = params
        ctx.set_materialize_grads(False)
        shards = [param._local_tensor.detach() for param in params]
        # Autograd would mark every output as requiring grad if one input does.
        ctx.mark_non_differentiable(*[x for x, param in zip(shards, params, strict=True) if not param.requires_grad])
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        as_gradient = _Placed.apply if torch.is_grad_enabled() else _placed
        pairs = zip(grads, ctx.params, strict=True)
        return tuple([None if grad is None else as_gradient(grad, param) for grad, param in pairs])


def _placed(shard: Tensor, param: DTensor) -> Tensor:
    """Return ``shard`` as a gradient of the parameter, in the strides in which autograd keeps it."""
    local = param._local_tensor
    if shard.dtype is not local.dtype:
        return like_parameter(param, shard)
    if shard.stride() != local.stride():
        shard = torch.empty_like(local).copy_(shard)
    # The spec object of the parameter has a cached hash and sharding rules. __new__ skips DTensor.__init__, which does
    # nothing but leave and re-enter Dynamo.
    return DTensor.__new__(DTensor, shard, param._spec, requires_grad=False)


class _Placed(torch.autograd.Function):
    """The inverse of :class:`_Locals`, a :class:`ShardedParameter`: losses made of the gradient meet plain tensors."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, param: DTensor) -> Tensor:
        ctx.param = param
        gradient: Any = like_parameter(param, shard)
        gradient.__class__ = ShardedParameter
        return cast("Tensor", gradient)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        return local_of(grad.redistribute(placements=ctx.param.placements)), None
