"""Small edits of a graph that several passes need."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .language.work import Work, note_work
from .pipeline import tensor_value
from .share import share_values
from .torch_private import decomposition_table, fake_mode_of

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


def _distinct(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor per input: tracing takes two inputs that share a fake tensor for one, and reads the wrong one."""
    distinct: list[torch.Tensor] = []
    with fake_mode_of(values):
        for value in values:
            if any(value is other for other in distinct):
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            distinct.append(value)
    return distinct


def inline(
    gm: GraphModule,
    before: Node,
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[Node],
    work: Work | None = None,
) -> list[Node]:
    """Insert ``function(*inputs)`` ahead of ``before`` and return the nodes of its results.

    Args:
        function: takes one tensor per node of ``inputs``; returns tensors.
        work: noted at every new node.
    """
    values = _distinct([tensor_value(node) for node in inputs])
    with fake_mode_of(values):
        traced = make_fx(lambda *t: tuple(function(*t)), decomposition_table=decomposition_table())(*values)
    traced.graph.eliminate_dead_code()
    env: dict[Node, Node] = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    first: dict[Node, Node] = {}
    for placeholder, source in env.items():
        if (kept := first.setdefault(source, placeholder)) is not placeholder:
            placeholder.replace_all_uses_with(kept)
    share_values(traced.graph)
    with gm.graph.inserting_before(before):
        for node in traced.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.op == "get_attr":
                raise RuntimeError(f"tracing {function} captured the constant {node.target}; pass it as an input")
            env[node] = gm.graph.node_copy(node, env.__getitem__)
            if work is not None:
                note_work(env[node], work)
    return [env[result] for result in traced.graph.output_node().args[0]]
