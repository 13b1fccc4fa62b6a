"""From a sharded parameter to its shard and back, through as many derivatives as a loss takes.

``DTensor.to_local()`` makes a new DTensor of a gradient, outside of autograd: what is computed of that gradient, a
penalty on its norm or an inner loop's step, would have none.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compile_muon.runtime.parameter import ShardedParameter
from compile_muon.runtime.shards import like_parameter

__all__ = ["local_of"]


def local_of(param: DTensor) -> Tensor:
    """The shard behind a parameter; its gradient becomes one of the parameter."""
    return cast("Tensor", _Local.apply(param))


class _Local(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: DTensor) -> Tensor:
        ctx.param = param
        return param._local_tensor.view_as(param._local_tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Placed.apply(grad, ctx.param, torch.is_grad_enabled())


class _Placed(torch.autograd.Function):
    """The inverse.

    Args:
        continues: whether losses will be made of the result: those meet plain ones, as penalties on parameters do.
    """

    @staticmethod
    def forward(ctx: Any, shard: Tensor, param: DTensor, continues: bool) -> Tensor:
        ctx.param = param
        found: Any = like_parameter(param, shard)
        if continues:
            found.__class__ = ShardedParameter
        return cast("Tensor", found)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        return _Local.apply(grad.redistribute(placements=ctx.param.placements)), None, None
