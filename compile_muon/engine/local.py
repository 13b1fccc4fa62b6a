"""From a sharded parameter to its shard and back, through as many derivatives as a loss takes.

``DTensor.to_local()`` makes a new DTensor of a gradient, outside of autograd: what is computed of that gradient, a
penalty on its norm or an inner loop's step, would have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compile_muon.engine.dtensor_parameter import ShardedParameter
from compile_muon.engine.dtensors import like_parameter

__all__ = ["local_of", "locals_of"]


def local_of(param: DTensor) -> Tensor:
    """The shard behind a parameter; its gradient becomes one of the parameter."""
    return locals_of([param])[0]


def locals_of(params: Sequence[DTensor]) -> tuple[Tensor, ...]:
    """The same of several, for one node of autograd."""
    return cast("tuple[Tensor, ...]", _Locals.apply(*params))


class _Locals(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *params: DTensor) -> tuple[Tensor, ...]:
        ctx.params = params
        ctx.set_materialize_grads(False)
        shards = [param._local_tensor.detach() for param in params]
        # Autograd takes all results of a function for trained where one input is.
        ctx.mark_non_differentiable(*[a for a, param in zip(shards, params, strict=True) if not param.requires_grad])
        return tuple(shards)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        place = _Placed.apply if torch.is_grad_enabled() else _placed
        pairs = zip(grads, ctx.params, strict=True)
        return tuple([None if grad is None else place(grad, param) for grad, param in pairs])


def _placed(shard: Tensor, param: DTensor) -> Tensor:
    """A gradient of the parameter, in whose strides autograd keeps it."""
    own = param._local_tensor
    if shard.dtype is not own.dtype:
        return like_parameter(param, shard)
    if shard.stride() != own.stride():
        shard = torch.empty_like(own).copy_(shard)
    # With the very spec of the parameter: PyTorch has its hash, and knows what operators make of it. Past an __init__
    # that does nothing, for which PyTorch would leave and enter Dynamo.
    return DTensor.__new__(DTensor, shard, param._spec, requires_grad=False)


class _Placed(torch.autograd.Function):
    """The inverse, of which losses will be made: those meet plain ones, as penalties on parameters do."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, param: DTensor) -> Tensor:
        ctx.param = param
        found: Any = like_parameter(param, shard)
        found.__class__ = ShardedParameter
        return cast("Tensor", found)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        return local_of(grad.redistribute(placements=ctx.param.placements)), None
