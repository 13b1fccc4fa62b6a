"""The three marker ops: the whole intermediate language between the model and the passes.

``unshard`` reads a weight, ``reduce_grad`` is its backward, ``orthogonalize`` makes a Muon direction of a gradient.
Each has an eager implementation with real collectives, so a graph break or plain eager training gives the same
numbers. State travels as tensor arguments (never as a handle), static facts as one string (:class:`ParamSpec`).

``state`` is the momentum of a Muon parameter and an empty tensor otherwise; it identifies the parameter at run time.
``hyper`` is the fp32 tensor ``(1 - momentum, momentum)``, so changing the momentum never recompiles.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .exchange import transfers
from .exchange.orthogonalize import orthogonalize_group
from .pipeline import tensor_value
from .spec import ParamSpec, decode_dtype

__all__ = ["MARKERS", "ORTHOGONALIZE", "REDUCE_GRAD", "UNSHARD", "Orthogonalize", "ReduceGrad", "Unshard"]


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
    (direction,) = orthogonalize_group([grad], [state], [hyper], [ParamSpec.decode(spec)])
    return _no_alias(direction, grad, state)


@orthogonalize.register_fake
def _(grad: Tensor, state: Tensor, hyper: Tensor, spec: str) -> Tensor:
    return grad.new_empty(grad.shape, dtype=decode_dtype(ParamSpec.decode(spec).muon_settings.dtype))


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


# --- typed views of the markers in a graph: the only code that knows the order of their arguments ---------------------


def _arguments(node: Node, target: torch._ops.OpOverload) -> tuple[Any, ...]:
    if node.target is not target:
        raise TypeError(f"node {node} is {node.target}, not {target}")
    return node.args


def _find(gm: GraphModule, target: torch._ops.OpOverload) -> Iterable[Node]:
    return gm.graph.find_nodes(op="call_function", target=target)


@dataclass(frozen=True)
class Unshard:
    """An ``unshard`` marker in a graph.

    Args:
        node: the marker; ``spec.shape``, ``spec.compute_dtype``.
        shard, state, hyper: nodes of its tensor arguments.
        replica: node of the resident copy, or None.
        spec: static facts of the parameter.
    """

    node: Node
    shard: Node
    state: Node
    hyper: Node
    replica: Node | None
    spec: ParamSpec

    @staticmethod
    def of(node: Node) -> Unshard:
        """View ``node``; TypeError if it is something else."""
        shard, state, hyper, replica, text = _arguments(node, UNSHARD)
        return Unshard(node, shard, state, hyper, replica, ParamSpec.decode(text))

    @staticmethod
    def all(gm: GraphModule) -> list[Unshard]:
        """Every one of ``gm``, in graph order."""
        return [Unshard.of(node) for node in _find(gm, UNSHARD)]


@dataclass(frozen=True)
class ReduceGrad:
    """A ``reduce_grad`` marker in a graph.

    Args:
        node: the marker; ``spec.local_shape``, ``spec.dtype``.
        grad: node of the gradient of the whole weight, ``spec.shape``.
        state, hyper: nodes of the parameter's state and of ``(1 - momentum, momentum)``.
        spec: static facts of the parameter.
    """

    node: Node
    grad: Node
    state: Node
    hyper: Node
    spec: ParamSpec

    @staticmethod
    def of(node: Node) -> ReduceGrad:
        """View ``node``; TypeError if it is something else."""
        grad, state, hyper, text = _arguments(node, REDUCE_GRAD)
        return ReduceGrad(node, grad, state, hyper, ParamSpec.decode(text))

    @staticmethod
    def all(gm: GraphModule) -> list[ReduceGrad]:
        """Every one of ``gm``, in graph order."""
        return [ReduceGrad.of(node) for node in _find(gm, REDUCE_GRAD)]

    @staticmethod
    def insert(graph: Graph, grad: Node, state: Node, hyper: Node, spec: ParamSpec) -> ReduceGrad:
        """Put a marker at the graph's insertion point."""
        node = graph.call_function(REDUCE_GRAD, (grad, state, hyper, spec.encode()))
        node.meta["val"] = tensor_value(grad).new_empty(spec.local_shape, dtype=decode_dtype(spec.dtype))
        return ReduceGrad.of(node)


@dataclass(frozen=True)
class Orthogonalize:
    """An ``orthogonalize`` marker in a graph.

    Args:
        node: the marker; the direction, ``spec.local_shape``, ``spec.muon.dtype``.
        grad: node of the averaged gradient of the shard, ``spec.local_shape``, master dtype.
        state, hyper: nodes of the momentum and of ``(1 - momentum, momentum)``.
        spec: static facts of the parameter, with ``muon``.
    """

    node: Node
    grad: Node
    state: Node
    hyper: Node
    spec: ParamSpec

    @staticmethod
    def of(node: Node) -> Orthogonalize:
        """View ``node``; TypeError if it is something else."""
        grad, state, hyper, text = _arguments(node, ORTHOGONALIZE)
        return Orthogonalize(node, grad, state, hyper, ParamSpec.decode(text))

    @staticmethod
    def all(gm: GraphModule) -> list[Orthogonalize]:
        """Every one of ``gm``, in graph order."""
        return [Orthogonalize.of(node) for node in _find(gm, ORTHOGONALIZE)]

    @staticmethod
    def insert(graph: Graph, grad: Node, state: Node, hyper: Node, spec: ParamSpec) -> Orthogonalize:
        """Put a marker at the graph's insertion point."""
        node = graph.call_function(ORTHOGONALIZE, (grad, state, hyper, spec.encode()))
        dtype = decode_dtype(spec.muon_settings.dtype)
        node.meta["val"] = tensor_value(grad).new_empty(spec.local_shape, dtype=dtype)
        return Orthogonalize.of(node)
