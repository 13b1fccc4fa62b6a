"""The three marker ops: the intermediate language between model and passes.

``unshard`` reads a weight, ``reduce_grad`` is its backward, ``orthogonalize`` turns a gradient into a Muon direction.
Each has an eager implementation with real collectives, so that graph breaks and eager training give the same numbers.
Optimizer state travels as tensor arguments, never as a handle, and static facts as one string (:class:`ParamSpec`).

``state`` is the momentum of a Muon parameter, else an empty tensor; at run time it identifies the parameter. ``hyper``
is the fp32 tensor ``(1 - momentum, momentum)``, followed by the rates that the method is given: a tensor, so that
changing them never recompiles. ``states`` are those that the method keeps at the owners of matrices, mostly none.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
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


def _no_alias(result: Tensor, *inputs: Tensor | None) -> Tensor:
    """Return ``result`` without aliasing inputs, as custom ops have to; only the eager path pays for the copy."""
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
def orthogonalize(grad: Tensor, state: Tensor, hyper: Tensor, states: list[Tensor], spec: str) -> list[Tensor]:
    facts = ParamSpec.decode(spec)
    owners = facts.muon_settings.owners or [0] * len(shares(facts))
    results = orthogonalize_group([grad], [state], [hyper], [facts], owners, [states])
    return [_no_alias(each, grad, state, *states) for each in results]


@orthogonalize.register_fake
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
    if whole is None:  # stage 1, not the last micro-batch: the gradient stays unreduced
        spec = ParamSpec.decode(text)
        return grad.new_zeros(spec.layout.local_shape, dtype=decode_dtype(spec.dtype)), None, None, None, None
    return REDUCE_GRAD(whole, state, hyper, text), None, None, None, None


unshard.register_autograd(_unshard_backward, setup_context=_save_for_reduce)


def _save_for_gather(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:
    grad, _, hyper, spec = inputs
    ctx.save_for_backward(hyper)
    ctx.spec, ctx.dtype = spec, grad.dtype  # type: ignore[attr-defined]


def _reduce_grad_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Gather the gradient of a loss that is made of gradients; its backward is ``reduce_grad`` again."""
    (hyper,) = ctx.saved_tensors  # type: ignore[attr-defined]
    facts, dtype = ParamSpec.decode(ctx.spec), encode_dtype(ctx.dtype)  # type: ignore[attr-defined]
    gathered = replace(facts.layout, stage=min(facts.layout.stage, 1) * 3)
    spec = ParamSpec(gathered, encode_dtype(grad.dtype), dtype, facts.reduce_dtype)
    # Nothing is divided: like a weight's gradient, this one counts once for each rank whose loss the mean covers, and
    # is divided where it is reduced.
    no_state = hyper.new_empty(0)  # a state without a holder: this tensor is no parameter's weight
    return UNSHARD(grad, no_state, hyper, None, spec.encode()), None, None, None


def _orthogonalize_backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
    raise RuntimeError("muon_zero::orthogonalize: a direction has no gradient; take losses of .grad, not of directions")


reduce_grad.register_autograd(_reduce_grad_backward, setup_context=_save_for_gather)
orthogonalize.register_autograd(_orthogonalize_backward)

UNSHARD = torch.ops.muon_zero.unshard.default
REDUCE_GRAD = torch.ops.muon_zero.reduce_grad.default
ORTHOGONALIZE = torch.ops.muon_zero.orthogonalize.default
MARKERS = (UNSHARD, REDUCE_GRAD, ORTHOGONALIZE)


# --- typed views of the markers in a graph: the only code that knows the order of their arguments ---------------------

_View = TypeVar("_View", bound="_Marker")


@dataclass(frozen=True)
class _Marker:
    node: Node
    spec: ParamSpec
    target: ClassVar[torch._ops.OpOverload]

    @classmethod
    def of(cls: type[_View], node: Node) -> _View:
        """View ``node``, a call of this marker."""
        *inputs, text = node.args
        return cls(node, ParamSpec.decode(cast("str", text)), *inputs)

    @classmethod
    def all(cls: type[_View], gm: GraphModule) -> list[_View]:
        """Return all markers of this kind in ``gm``, in graph order."""
        return [cls.of(node) for node in gm.graph.find_nodes(op="call_function", target=cls.target)]


@dataclass(frozen=True)
class Unshard(_Marker):
    """An ``unshard`` marker in a graph; ``node`` has ``spec.layout.shape`` and ``spec.compute_dtype``."""

    shard: Node
    state: Node
    graph_scalars: Node
    resident: Node | None  # the resident weight or slice
    target = UNSHARD


@dataclass(frozen=True)
class ReduceGrad(_Marker):
    """A ``reduce_grad`` marker: ``node`` is the piece's gradient, ``spec.layout.local_shape`` in ``spec.dtype``,
    averaged from ``grad``, the gradient of the full weight, ``spec.layout.shape``."""

    grad: Node
    state: Node
    graph_scalars: Node
    target = REDUCE_GRAD

    @classmethod
    def insert(cls, graph: Graph, grad: Node, state: Node, graph_scalars: Node, spec: ParamSpec) -> ReduceGrad:
        """Insert a marker at the graph's insertion point."""
        node = graph.call_function(cls.target, (grad, state, graph_scalars, spec.encode()))
        shape, dtype = spec.layout.local_shape, decode_dtype(spec.dtype)
        node.meta["val"] = another_fake(tensor_value(grad), shape=shape, dtype=dtype)
        return cls.of(node)


@dataclass(frozen=True)
class Orthogonalize(_Marker):
    """An ``orthogonalize`` marker: ``node`` is the list of the direction, ``spec.layout.local_shape`` in
    ``spec.muon.dtype``, and of the new states; ``grad`` is the shard's averaged gradient, ``state`` the momentum."""

    grad: Node
    state: Node
    graph_scalars: Node
    states: Sequence[Node]  # that this rank owns, ``[count, a, b]`` each
    target = ORTHOGONALIZE

    @classmethod
    def insert(
        cls, graph: Graph, grad: Node, state: Node, graph_scalars: Node, spec: ParamSpec, states: Sequence[Node] = ()
    ) -> list[Node]:
        """Insert a marker at the graph's insertion point and return the nodes of its results."""
        node = graph.call_function(cls.target, (grad, state, graph_scalars, list(states), spec.encode()))
        shape, dtype = spec.layout.local_shape, decode_dtype(spec.muon_settings.dtype)
        node.meta["val"] = [another_fake(tensor_value(grad), shape=shape, dtype=dtype), *map(tensor_value, states)]
        results = [graph.call_function(operator.getitem, (node, place)) for place in range(1 + len(states))]
        for result, value in zip(results, node.meta["val"], strict=True):
            result.meta["val"] = value
        return results

    @property
    def results(self) -> list[Node]:
        """The nodes of the marker's results: the direction, then the new states."""
        return sorted(self.node.users, key=lambda user: cast("int", user.args[1]))
