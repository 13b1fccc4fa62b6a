"""Small edits of a graph that several passes need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node

from .language.work import Work, note_work
from .pipeline import tensor_value
from .record import Alike, record
from .torch_private import fake_mode_of

__all__ = ["append_inputs", "inline", "insert_outputs", "outputs", "replace"]


def replace(gm: GraphModule, node: Node, new: Node) -> None:
    """Let every reader of ``node`` read ``new``, and erase ``node``."""
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def outputs(gm: GraphModule) -> list[Node | None]:
    """What a graph returns, in order."""
    return list(gm.graph.output_node().args[0])


def append_inputs(gm: GraphModule, named: Sequence[tuple[str, torch.Tensor]], *, ahead_of_last: int = 0) -> list[Node]:
    """Add placeholders behind a graph's own, but ahead of its last ``ahead_of_last``.

    Args:
        named: name and fake tensor of each.
    """
    existing = list(gm.graph.find_nodes(op="placeholder"))
    last = existing[len(existing) - ahead_of_last - 1]
    added = []
    for name, like in named:
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(name)
        last.meta["val"] = like
        added.append(last)
    return added


def insert_outputs(gm: GraphModule, extra: Sequence[Node], *, ahead_of_last: int = 0) -> None:
    """Return ``extra`` behind a graph's own outputs, but ahead of its last ``ahead_of_last``."""
    output = gm.graph.output_node()
    returned = outputs(gm)
    at = len(returned) - ahead_of_last
    output.args = ((*returned[:at], *extra, *returned[at:]),)
    # What AOTAutograd notes per output, Inductor reads.
    for key in ("desc", "output_stack_traces"):
        if key in output.meta:
            notes = list(output.meta[key])
            output.meta[key] = [*notes[:at], *(None for _ in extra), *notes[at:]]


def _distinct(nodes: Sequence[Node]) -> dict[Node, torch.Tensor]:
    """A fake tensor for each of ``nodes``: recording tells inputs apart by them, and two nodes may share one."""
    values: dict[Node, torch.Tensor] = {}
    seen: set[int] = set()
    with fake_mode_of([tensor_value(node) for node in nodes]):
        for node in nodes:
            value = tensor_value(node)
            if node not in values and id(value) in seen:
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            seen.add(id(values.setdefault(node, value)))
    return values


def inline(
    gm: GraphModule,
    before: Node,
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[Node],
    work: Work | None = None,
    *,
    by_kind: bool = False,
) -> list[Node]:
    """Insert ``function(*inputs)`` ahead of ``before`` and return the nodes of its results.

    Args:
        function: takes one tensor per node of ``inputs``; returns tensors.
        work: noted at every new node.
        by_kind: give ``function`` the keyword ``alike`` (:data:`~.record.Alike`), for what it does with many tensors.
    """
    values = _distinct(inputs)

    def call(alike: Alike, *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        tensor_of = dict(zip(values, tensors, strict=True))
        return function(*map(tensor_of.__getitem__, inputs), **({"alike": alike} if by_kind else {}))

    graph = record(call, list(values.values()))
    env: dict[Node, Node] = dict(zip(graph.find_nodes(op="placeholder"), values, strict=True))
    with gm.graph.inserting_before(before):
        for node in graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            env[node] = gm.graph.node_copy(node, env.__getitem__)
            if work is not None:
                note_work(env[node], work)
    return [env[result] for result in graph.output_node().args[0]]
