"""Edits of graphs that several passes need."""

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node

from .language.work import Work, note_work
from .pipeline import tensor_value
from .record import Alike, record
from .torch_private import fake_mode_of


def replace(gm: GraphModule, node: Node, new: Node) -> None:
    """Replace all uses of ``node`` by ``new``, and erase ``node``."""
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def outputs(gm: GraphModule) -> list[Node | None]:
    """Return the outputs of a graph, in order."""
    return list(gm.graph.output_node().args[0])


def append_inputs(gm: GraphModule, named: Sequence[tuple[str, torch.Tensor]], *, ahead_of_last: int = 0) -> list[Node]:
    """Add a placeholder for each ``(name, fake tensor)``, behind all others but the last ``ahead_of_last``."""
    placeholders = list(gm.graph.find_nodes(op="placeholder"))
    last = placeholders[len(placeholders) - ahead_of_last - 1]
    new_inputs = []
    for name, like in named:
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(name)
        last.meta["val"] = like
        new_inputs.append(last)
    return new_inputs


def insert_outputs(gm: GraphModule, extra: Sequence[Node], *, ahead_of_last: int = 0) -> None:
    """Return ``extra`` as well, behind all other outputs but the last ``ahead_of_last``."""
    output = gm.graph.output_node()
    returned = outputs(gm)
    at = len(returned) - ahead_of_last
    output.args = ((*returned[:at], *extra, *returned[at:]),)
    # AOTAutograd notes these for each output, and Inductor reads them by position.
    for key in ("desc", "output_stack_traces"):
        if key in output.meta:
            notes = list(output.meta[key])
            output.meta[key] = [*notes[:at], *(None for _ in extra), *notes[at:]]


def _distinct(nodes: Sequence[Node]) -> dict[Node, torch.Tensor]:
    """Return a separate fake tensor for each node: recording identifies inputs by them, and nodes may share one."""
    values: dict[Node, torch.Tensor] = {}
    used_ids: set[int] = set()
    with fake_mode_of([tensor_value(node) for node in nodes]):
        for node in nodes:
            value = tensor_value(node)
            if node not in values and id(value) in used_ids:
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            used_ids.add(id(values.setdefault(node, value)))
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
    """Insert ``function(*inputs)`` ahead of ``before``, label its nodes ``work`` and return the nodes of its results.
    With ``by_kind``, ``function`` gets the keyword ``alike`` (:data:`~.record.Alike`)."""
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
