"""Small edits of a graph that several passes need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

__all__ = ["append_inputs", "insert_outputs", "outputs", "replace"]


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
