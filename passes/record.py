"""Recording of functions that passes insert into graphs.

``make_fx`` takes 60 ms for each function, to prepare a tracer, a module and modes, and 2 ms an operator; passes record
a short function for each matrix of a model. Here inputs are fake and shapes constant, so that operators need only be
noted, decomposed by Inductor's table.

Equal values share one node. The parameters of a bucket read the same rates and weigh the rows of a fingerprint by the
same numbers; recorded for each, these were half of the nodes that Muon adds to a backward graph.
"""

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .torch_private import another_fake, decomposition_table, fake_mode_of, without_modes

#: ``(kind, function, tensors) -> function(*tensors)``, a tensor. Calls of one kind record the same nodes for tensors
#: that differ in content only.
Alike = Callable[[Hashable, Callable[..., Tensor], Sequence[Tensor]], Tensor]

#: operators that return their input if sizes stay the same
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.alias.default)


def call(kind: Hashable, function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
    """:data:`Alike` for eager code: call the function each time."""
    return function(*tensors)


@dataclass(frozen=True)
class _Template:
    """The nodes of the first call of a kind."""

    inputs: Sequence[Node]  # nodes of its tensors
    nodes: Sequence[Node]  # in order
    result: Node  # one of both


class _WritesError(Exception):
    """A recorded operator writes to a tensor, so equal reads before and after it differ and must not share a node."""


class _Recorder(TorchDispatchMode):
    """Dispatch mode that appends each operator to a graph, with its result under ``meta["val"]``.

    ``inputs`` become placeholders. With ``share``, an operator equal to an earlier one returns that one's result. Only
    results of at most one dimension are shared: AOTAutograd has merged the model's larger ones, and a merged value
    stays in memory for longer.
    """

    def __init__(self, inputs: Sequence[Tensor], fake: Any, *, share: bool) -> None:
        super().__init__()
        self.graph = Graph()
        self._fake = fake
        self._share = share
        self._decompositions = decomposition_table()
        #: tensor and node by the tensor's id; the reference keeps the id from being reused
        self._nodes: dict[int, tuple[Tensor, Node]] = {}
        self._order: list[Node] = []
        self._shared: dict[Any, Node] = {}
        self._templates: dict[Any, _Template] = {}
        for place, value in enumerate(inputs):
            self._note(value, self.graph.placeholder(f"input_{place}"))

    def alike(self, kind: Hashable, function: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Tensor:
        """:data:`Alike`: record the first call of a kind, and copy its nodes for the others."""
        inputs = [self.node_of(tensor) for tensor in tensors]
        key = kind, *(_kind(tensor, node) for tensor, node in zip(tensors, inputs, strict=True))
        if (template := self._templates.get(key)) is not None:
            return self._copy(template, inputs)
        before = len(self._order)
        result = function(*tensors)
        nodes = self._order[before:]
        if all(isinstance(node.meta["val"], Tensor) for node in nodes):  # ``_copy`` knows no list results
            self._templates[key] = _Template(inputs, nodes, self.node_of(result))
        return result

    def _copy(self, template: _Template, inputs: Sequence[Node]) -> Tensor:
        copies = {old: new for old, new in zip(template.inputs, inputs, strict=True) if old is not new}
        shared = set(self._shared.values())
        with without_modes(), self._fake:
            for node in template.nodes:
                if node in shared and copies.keys().isdisjoint(node.all_input_nodes):
                    continue
                copy = self.graph.node_copy(node, lambda source: copies.get(source, source))
                target: Any = node.target
                if target.is_view:
                    args, kwargs = torch.fx.map_arg((copy.args, copy.kwargs), lambda source: source.meta["val"])
                    copy.meta["val"] = target(*args, **kwargs)
                else:
                    copy.meta["val"] = another_fake(node.meta["val"])
                copies[node] = copy
                self._note(copy.meta["val"], copy)
            if (result := copies.get(template.result)) is not None:
                return result.meta["val"]
            return self._note(template.result.meta["val"].detach(), template.result)

    def _note(self, value: Tensor, node: Node) -> Tensor:
        node.meta.setdefault("val", value)
        self._nodes[id(value)] = value, node
        return value

    def node_of(self, value: Tensor) -> Node:
        """Return the node that made ``value``; RuntimeError for a constant of the function, which no node made."""
        if id(value) not in self._nodes:
            raise RuntimeError(f"recording captured a constant of shape {tuple(value.shape)}; pass it as an input")
        return self._nodes[id(value)][1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # queries such as ``prim::device``, which return no tensor
            return func(*args, **kwargs)
        decompose = self._decompositions.get(func, func.decompose)
        with self:
            result = decompose(*args, **kwargs)
        return self._record(func, args, kwargs) if result is NotImplemented else result

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        node_args, node_kwargs = tree_map_only(Tensor, self.node_of, (args, kwargs))
        key = None
        if self._share:
            if func._schema.is_mutable:
                raise _WritesError
            if func.namespace in ("aten", "prims") and torch.Tag.nondeterministic_seeded not in func.tags:
                key = func, _typed(node_args), _typed(sorted(node_kwargs.items()))
                if (node := self._shared.get(key)) is not None:
                    value = node.meta["val"]
                    # Autograd marks a view operator's result as a view, and refuses a tensor that is marked already.
                    return self._note(value.detach(), node) if func.is_view else value
        result = func(*args, **kwargs)
        if key is not None and isinstance(result, Tensor):
            if func in _VIEWS and node_args[0].op != "placeholder" and _alike(result, args[0]):
                return self._note(result, node_args[0])
        node = self.graph.create_node("call_function", func, node_args, node_kwargs, func.overloadpacket.__name__)
        self._order.append(node)
        if isinstance(result, Tensor):
            if key is not None and result.ndim <= 1:
                self._shared[key] = node
            return self._note(result, node)
        node.meta["val"] = result
        for place, value in enumerate(result):
            self._note(value, self.graph.call_function(operator.getitem, (node, place)))
        return result


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()


def _typed(value: Any) -> Any:
    """Return ``value`` as a key that includes types, since in Python 1 == 1.0 == True."""
    if isinstance(value, list | tuple):
        return tuple(map(_typed, value))
    return value if isinstance(value, Node) else (type(value), str(value))


def _kind(value: Tensor, node: Node) -> Any:
    """Return a key, equal for tensors with which a function records the same nodes; small tensors are shared nodes."""
    return node if value.ndim <= 1 else (value.shape, value.stride(), value.dtype, value.device)


def record(function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> Graph:
    """Return the graph of ``function(alike, *inputs)``, decomposed by Inductor's table, without dead code.

    ``inputs`` are fake tensors of constant shapes, all distinct objects. The operators of ``function`` must not depend
    on values, and it may run twice. RuntimeError if it reads a tensor that is not made of ``inputs``.
    """
    fake = fake_mode_of(inputs)
    recorder = _Recorder(inputs, fake, share=True)
    with torch.no_grad(), fake:
        try:
            with recorder:
                results = function(recorder.alike, *inputs)
        except _WritesError:
            with (recorder := _Recorder(inputs, fake, share=False)):
                results = function(recorder.alike, *inputs)
    recorder.graph.output(tuple(map(recorder.node_of, results)))
    recorder.graph.eliminate_dead_code()
    return recorder.graph
