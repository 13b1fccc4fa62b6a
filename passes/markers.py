"""The three marker ops: the whole intermediate language between the model and the passes.

``unshard`` reads a weight, ``reduce_grad`` is its backward, ``orthogonalize`` makes a Muon direction of a gradient.
Each has an eager implementation with real collectives, so a graph break or plain eager training gives the same
numbers. ``orthogonalize_with`` is the second form of the last, for what a method keeps at the owners of matrices. State
travels as tensor arguments (never as a handle), static facts as one string (:class:`ParamSpec`).

``state`` is the momentum of a Muon parameter and an empty tensor otherwise; it identifies the parameter at run time.
``hyper`` is the fp32 tensor ``(1 - momentum, momentum)``, behind it the rates that a method is given, so changing these
never recompiles.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import ClassVar, TypeVar, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .exchange import transfers
from .exchange.orthogonalize import orthogonalize_group
from .exchange.shares import shares
from .language.holder import holder_of
from .language.spec import ParamSpec, decode_dtype, encode_dtype
from .pipeline import tensor_value
from .torch_private import another_fake

__all__ = [
    "MARKERS",
    "ORTHOGONALIZE",
    "ORTHOGONALIZE_WITH",
    "REDUCE_GRAD",
    "UNSHARD",
    "Orthogonalize",
    "OrthogonalizeWith",
    "ReduceGrad",
    "Unshard",
]


def _no_alias(result: Tensor, *inputs: Tensor | None) -> Tensor:
    """Operators may not return their inputs; only the eager path pays for this copy."""
    storages = {t.untyped_storage()._cdata for t in inputs if t is not None}
    return result.clone() if result.untyped_storage()._cdata in storages else result.contiguous()


@torch.library.custom_op("muon_zero::unshard", mutates_args=())
def unshard(shard: Tensor, state: Tensor, hyper: Tensor, resident: Tensor | None, spec: str) -> Tensor:
    holder = holder_of(state)
    if holder is not None:
        holder.await_refresh()
    return _no_alias(transfers.unshard(shard, resident, ParamSpec.decode(spec)), shard, resident)


@unshard.register_fake
def _(shard: Tensor, state: Tensor, hyper: Tensor, resident: Tensor | None, spec: str) -> Tensor:
    facts = ParamSpec.decode(spec)
    return shard.new_empty(facts.layout.shape, dtype=decode_dtype(facts.compute_dtype))


@torch.library.custom_op("muon_zero::reduce_grad", mutates_args=())
def reduce_grad(grad: Tensor, state: Tensor, hyper: Tensor, spec: str) -> Tensor:
    holder = holder_of(state)
    with nullcontext() if holder is None else holder.reducing():
        return _no_alias(transfers.reduce_grad(grad, ParamSpec.decode(spec)), grad)


@reduce_grad.register_fake
def _(grad: Tensor, state: Tensor, hyper: Tensor, spec: str) -> Tensor:
    facts = ParamSpec.decode(spec)
    return grad.new_empty(facts.layout.local_shape, dtype=decode_dtype(facts.dtype))


@torch.library.custom_op("muon_zero::orthogonalize", mutates_args=())
def orthogonalize(grad: Tensor, state: Tensor, hyper: Tensor, spec: str) -> Tensor:
    facts = ParamSpec.decode(spec)
    (direction,) = orthogonalize_group([grad], [state], [hyper], [facts], [0] * len(shares(facts)))
    return _no_alias(direction, grad, state)


@orthogonalize.register_fake
def _(grad: Tensor, state: Tensor, hyper: Tensor, spec: str) -> Tensor:
    return grad.new_empty(grad.shape, dtype=decode_dtype(ParamSpec.decode(spec).muon_settings.dtype))


@torch.library.custom_op("muon_zero::orthogonalize_with", mutates_args=())
def orthogonalize_with(grad: Tensor, state: Tensor, hyper: Tensor, states: list[Tensor], spec: str) -> list[Tensor]:
    facts = ParamSpec.decode(spec)
    owners = facts.muon_settings.owners
    found = orthogonalize_group([grad], [state], [hyper], [facts], owners, [states])
    return [_no_alias(each, grad, state, *states) for each in found]


@orthogonalize_with.register_fake
def _(grad: Tensor, state: Tensor, hyper: Tensor, states: list[Tensor], spec: str) -> list[Tensor]:
    dtype = decode_dtype(ParamSpec.decode(spec).muon_settings.dtype)
    return [grad.new_empty(grad.shape, dtype=dtype), *map(torch.empty_like, states)]


def _save_for_reduce(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    _, state, hyper, _, spec = inputs
    ctx.save_for_backward(state, hyper)
    ctx.spec = spec  # type: ignore[attr-defined]


def _unshard_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    state, hyper = ctx.saved_tensors  # type: ignore[attr-defined]
    text: str = ctx.spec  # type: ignore[attr-defined]
    holder = holder_of(state)
    whole = grad if holder is None else holder.to_reduce(grad)
    if whole is None:  # it stays here
        spec = ParamSpec.decode(text)
        return grad.new_zeros(spec.layout.local_shape, dtype=decode_dtype(spec.dtype)), None, None, None, None
    return REDUCE_GRAD(whole, state, hyper, text), None, None, None, None


unshard.register_autograd(_unshard_backward, setup_context=_save_for_reduce)


def _save_for_gather(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    grad, _, hyper, spec = inputs
    ctx.save_for_backward(hyper)
    ctx.spec, ctx.dtype = spec, grad.dtype  # type: ignore[attr-defined]


def _reduce_grad_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of losses that are made of gradients: a gather, whose backward is ``reduce_grad`` again.

    Nothing is divided. What arrives on a rank counts once for each rank that the loss is the mean of, as the gradient
    of a weight does, and will be divided where that is reduced.
    """
    (hyper,) = ctx.saved_tensors  # type: ignore[attr-defined]
    facts, dtype = ParamSpec.decode(ctx.spec), encode_dtype(ctx.dtype)  # type: ignore[attr-defined]
    gathered = replace(facts.layout, stage=min(facts.layout.stage, 1) * 3)
    spec = ParamSpec(gathered, encode_dtype(grad.dtype), dtype, facts.reduce_dtype)
    nobodys = hyper.new_empty(0)  # no sharded parameter is asked: this is neither its weight nor its gradient
    return UNSHARD(grad, nobodys, hyper, None, spec.encode()), None, None, None


def _orthogonalize_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    raise RuntimeError("muon_zero::orthogonalize: a direction has no gradient; take losses of .grad, not of directions")


reduce_grad.register_autograd(_reduce_grad_backward, setup_context=_save_for_gather)
orthogonalize.register_autograd(_orthogonalize_backward)
orthogonalize_with.register_autograd(_orthogonalize_backward)

UNSHARD = torch.ops.muon_zero.unshard.default
REDUCE_GRAD = torch.ops.muon_zero.reduce_grad.default
ORTHOGONALIZE = torch.ops.muon_zero.orthogonalize.default
ORTHOGONALIZE_WITH = torch.ops.muon_zero.orthogonalize_with.default
MARKERS = (UNSHARD, REDUCE_GRAD, ORTHOGONALIZE, ORTHOGONALIZE_WITH)


# --- typed views of the markers in a graph: the only code that knows the order of their arguments ---------------------

_View = TypeVar("_View", bound="_Marker")
_Made = TypeVar("_Made", bound="_GradientMarker")


@dataclass(frozen=True)
class _Marker:
    node: Node
    spec: ParamSpec
    target: ClassVar[torch._ops.OpOverload]

    @classmethod
    def of(cls: type[_View], node: Node) -> _View:
        """View ``node``; TypeError if it is something else."""
        if node.target is not cls.target:
            raise TypeError(f"node {node} is {node.target}, not {cls.target}")
        *inputs, text = node.args
        return cls(node, ParamSpec.decode(cast("str", text)), *inputs)

    @classmethod
    def all(cls: type[_View], gm: GraphModule) -> list[_View]:
        """Every one of ``gm``, in graph order."""
        return [cls.of(node) for node in gm.graph.find_nodes(op="call_function", target=cls.target)]


@dataclass(frozen=True)
class Unshard(_Marker):
    """An ``unshard`` marker in a graph.

    Args:
        node: the marker; ``spec.layout.shape``, ``spec.compute_dtype``.
        spec: static facts of the parameter.
        shard, state, hyper: nodes of its tensor arguments.
        resident: node of the resident copy, or None.
    """

    shard: Node
    state: Node
    hyper: Node
    resident: Node | None
    target = UNSHARD


@dataclass(frozen=True)
class _GradientMarker(_Marker):
    grad: Node
    state: Node
    hyper: Node
    dtype: ClassVar[attrgetter[str]]  # of the marker's result

    @classmethod
    def insert(cls: type[_Made], graph: Graph, grad: Node, state: Node, hyper: Node, spec: ParamSpec) -> _Made:
        """Put a marker at the graph's insertion point."""
        node = graph.call_function(cls.target, (grad, state, hyper, spec.encode()))
        like, shape, dtype = tensor_value(grad), spec.layout.local_shape, decode_dtype(cls.dtype(spec))
        node.meta["val"] = another_fake(like, shape=shape, dtype=dtype)
        return cls.of(node)


class ReduceGrad(_GradientMarker):
    """A ``reduce_grad`` marker in a graph.

    Args:
        node: the marker; ``spec.layout.local_shape``, ``spec.dtype``.
        spec: static facts of the parameter.
        grad: node of the gradient of the whole weight, ``spec.layout.shape``.
        state, hyper: nodes of the parameter's state and of ``(1 - momentum, momentum)``.
    """

    target = REDUCE_GRAD
    dtype = attrgetter("dtype")


class Orthogonalize(_GradientMarker):
    """An ``orthogonalize`` marker in a graph.

    Args:
        node: the marker; the direction, ``spec.layout.local_shape``, ``spec.muon.dtype``.
        spec: static facts of the parameter, with ``muon``.
        grad: node of the averaged gradient of the shard, ``spec.layout.local_shape``, master dtype.
        state, hyper: nodes of the momentum and of ``(1 - momentum, momentum)``.
    """

    target = ORTHOGONALIZE
    dtype = attrgetter("muon_settings.dtype")


@dataclass(frozen=True)
class OrthogonalizeWith(_Marker):
    """An ``orthogonalize`` marker in a step graph, of a method that keeps states at the owners of matrices.

    Args:
        node: the marker, a list: the direction as of :class:`Orthogonalize`, and the new states.
        spec: static facts of the parameter, with its owners.
        grad, state, hyper: as of :class:`Orthogonalize`.
        states: nodes of the states that this rank owns, ``[count, a, b]`` each.
    """

    grad: Node
    state: Node
    hyper: Node
    states: tuple[Node, ...]
    target = ORTHOGONALIZE_WITH

    @classmethod
    def insert(
        cls, graph: Graph, grad: Node, state: Node, hyper: Node, spec: ParamSpec, states: Sequence[Node]
    ) -> list[Node]:
        """Put a marker at the graph's insertion point; the nodes of what it makes."""
        node = graph.call_function(cls.target, (grad, state, hyper, list(states), spec.encode()))
        own = tensor_value(grad)
        like = own.new_empty(spec.layout.local_shape, dtype=decode_dtype(spec.muon_settings.dtype))
        node.meta["val"] = [like, *map(tensor_value, states)]
        found = [graph.call_function(operator.getitem, (node, place)) for place in range(1 + len(states))]
        for each, value in zip(found, node.meta["val"], strict=True):
            each.meta["val"] = value
        return found

    @property
    def found(self) -> list[Node]:
        """What reads the list: the direction, and the new states."""
        return sorted(self.node.users, key=lambda user: cast("int", user.args[1]))
