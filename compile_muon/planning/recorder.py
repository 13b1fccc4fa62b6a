"""Record the graphs in place of generated code, and the operations of all other code."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from compile_muon.engine.frame import Lowered, lower
from compile_muon.engine.sharded_param import sharded_param_of
from compile_muon.passes import GraphKind, PassContext
from compile_muon.passes.language.work import Work, note_work
from compile_muon.simulate import SimulatedGraph
from compile_muon.simulate.offload_transfers import Moves

_c10d = torch.ops.c10d
_functional = torch.ops._c10d_functional


@dataclass(frozen=True)
class Visit:
    """A run of a graph."""

    played: SimulatedGraph  # the lowered graph
    source: GraphModule  # the graph ahead of lowering
    ctx: PassContext  # that it was lowered with
    states: Mapping[int, str]  # position of a state tensor among the inputs -> name of its parameter


@dataclass
class Recorder:
    """A :data:`~compile_muon.engine.frame.Lowering` that records graphs and returns zeros."""

    tensors: AbstractContextManager[Any]  # context in which results are allocated: a fake mode makes fake ones
    visits: list[Visit] = field(default_factory=list)  # in the order they ran

    def __call__(self, gm: GraphModule, inputs: Sequence[Any], ctx: PassContext) -> Lowered:
        source = copy.deepcopy(gm)
        gm, traffic = lower(gm, ctx)
        graph = SimulatedGraph.of(gm, ctx)
        placeholders = graph.gm.graph.find_nodes(op="placeholder")
        (outputs,) = graph.gm.graph.output_node().args

        def run(args: list[Any]) -> list[Any]:
            states = {
                i: sharded.name for i, value in enumerate(args) if (sharded := sharded_param_of(value)) is not None
            }
            self.visits.append(Visit(graph, source, ctx, states))
            value_of = dict(zip(placeholders, args, strict=True))
            args.clear()
            with self.tensors:
                return [value_of[n] if n in value_of else _zeros(n) for n in outputs]

        run._boxed_call = True  # type: ignore[attr-defined]
        return run, traffic


def _zeros(output: Any) -> Any:
    if not isinstance(output, Node):
        return output
    value = output.meta["val"]
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).zero_()
    return value


class EagerGraph(TorchDispatchMode):
    """A dispatch mode that runs every operation and records it as a node; tensors from outside become inputs.

    Operations while :attr:`elsewhere` is set are not recorded: another device runs them. Collectives of
    :mod:`torch.distributed` become the functional ones that passes and simulator know: a synchronous one is followed by
    its wait, for an asynchronous one :meth:`wait` records where it is awaited.
    """

    def __init__(self) -> None:
        super().__init__()
        self._graph = Graph()
        #: id of a tensor -> node; the node's meta keeps the tensor alive, so that no other gets its id
        self._nodes: dict[int, Node] = {}
        self._work: Work | None = None
        #: moves of offloaded state ahead of each node
        self.moves: dict[Node, Moves] = {}
        self._pending: Moves = ()
        self.elsewhere = False

    def played(self, name: str, returned: Sequence[Tensor] = (), **part: Any) -> SimulatedGraph:
        """Return the graph as a part of a step; `part` are fields of :class:`SimulatedGraph`.

        `returned` are its tensors that other graphs read.
        """
        self.moves[self._graph.output(tuple(self._node(tensor) for tensor in returned))] = self._pending
        gm = GraphModule(nn.Module(), self._graph)
        return SimulatedGraph(gm, GraphKind.STEP, name, eager=True, moves=self.moves, **part)

    @contextmanager
    def noting(self, work: Work) -> Iterator[None]:
        """Mark nodes recorded in this block as part of `work`."""
        outer_work, self._work = self._work, work
        try:
            yield
        finally:
            self._work = outer_work

    def move(self, moves: Moves) -> None:
        """Record moves of offloaded state ahead of the next node."""
        self._pending = (*self._pending, *moves)

    def wait(self, tensor: Tensor) -> None:
        """Record a wait for the collective under way into `tensor`."""
        self._add(_functional.wait_tensor.default, (tensor,), {}, tensor)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor dispatches to its shard, which comes here again
        results = func(*args, **(kwargs or {}))
        if self.elsewhere:
            return results
        if func.namespace == "c10d":
            self._collective(func, {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)})
        elif func.namespace != "profiler":
            # A graph cannot hold a generator, and no value is drawn.
            self._add(func, args, tree_map_only(torch.Generator, lambda _: None, kwargs or {}), results)
        return results

    def _collective(self, func: Any, call_args: Mapping[str, Any]) -> None:
        group = dist.ProcessGroup.unbox(call_args["process_group"])
        size, kwargs = group.size(), dict[str, Tensor]()
        args: tuple[Any, ...]
        if func is _c10d.allreduce_.default:
            (tensor,) = call_args["tensors"]
            target, args = _functional.all_reduce_.default, (tensor, "sum")
        elif func is _c10d._allgather_base_.default:
            tensor = kwargs["out"] = call_args["output_tensor"]
            target, args = _functional.all_gather_into_tensor_out.default, (call_args["input_tensor"], size)
        elif func is _c10d.alltoall_base_.default:
            tensor, sent = call_args["output"], call_args["input"]
            splits = [sent.numel() // size] * size
            target, args = _functional.all_to_all_single.default, (sent, splits, splits)
        else:
            raise NotImplementedError(f"{func}: no functional collective is known for it")
        self._add(target, (*args, group.group_name), kwargs, tensor)
        if not call_args.get("async_op", True):
            self.wait(tensor)

    def _add(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Any) -> None:
        node = self._graph.call_function(target, *tree_map_only(Tensor, self._node, (args, dict(kwargs))))
        node.meta["val"] = results
        self.moves[node], self._pending = self._pending, ()
        if self._work is not None:
            note_work(node, self._work)
        if isinstance(results, Tensor):
            self._nodes[id(results)] = node
        for number, value in enumerate(results if isinstance(results, (list, tuple)) else ()):
            if isinstance(value, Tensor):
                item = self._nodes[id(value)] = self._graph.call_function(operator.getitem, (node, number))
                item.meta["val"] = value

    def _node(self, tensor: Tensor) -> Node:
        if id(tensor) not in self._nodes:
            with self._graph.inserting_after():  # at the beginning of the graph
                node = self._graph.placeholder(f"input_{len(self._nodes)}")
            node.meta["val"] = tensor
            self._nodes[id(tensor)] = node
        return self._nodes[id(tensor)]
