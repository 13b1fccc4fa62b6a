"""From a sharded parameter to its shard and back, through as many derivatives as a loss takes; and gradients of copies.

``DTensor.to_local()`` makes a new DTensor of a gradient, outside of autograd: what is computed of that gradient, a
penalty on its norm or an inner loop's step, would have none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_muon.engine.dtensor_parameter import ShardedParameter
from compile_muon.engine.dtensors import like_parameter

__all__ = ["local_of", "locals_of", "of_trained"]


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


class _TrainedCopy(Tensor):
    """A plain tensor, but for ``torch.autograd.grad(loss, model.head.weight)``: forward has read another copy.

    What is asked for is the parameter's gradient, averaged over the ranks, and what is given all of it; collective.

    Attributes:
        source: the parameter.
        in_vain: told that a backward was asked for the copy's gradient, which has none.
    """

    source: nn.Parameter
    in_vain: Callable[[], None]

    def __del__(self) -> None:
        # What backward(inputs=[...]) is given is told to keep its gradient, and forward has read another copy.
        if self.retains_grad and self.grad is None:
            self.in_vain()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is not torch.autograd.grad:
                return func(*args, **kwargs)
            return _gradients(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in vars(self) and name not in ("source", "in_vain"):  # and not what every tensor has, as .grad
            setattr(self.source, name, value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._as_plain())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_plain().__reduce_ex__(protocol)

    def _as_plain(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.view_as(self)


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    sources = [value.source if isinstance(value, _TrainedCopy) else value for value in given]
    found = torch.autograd.grad(outputs, sources, *args, **kwargs)
    return tuple(
        _whole(grad).to(value.dtype) if isinstance(value, _TrainedCopy) and grad is not None else grad
        for value, grad in zip(given, found, strict=True)
    )


def _whole(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def of_trained(copy: Tensor, param: nn.Parameter, in_vain: Callable[[], None]) -> Tensor:
    """The gathered copy that eager code reads outside of forwards, itself, as a tensor to ask for gradients of.

    Args:
        in_vain: called when the copy is gone and a backward was asked for its gradient, which is never there.
    """
    if type(copy) is not Tensor or not copy.requires_grad:
        return copy
    tensor: Any = copy
    tensor.__class__ = _TrainedCopy
    tensor.source, tensor.in_vain = param, in_vain
    return copy
