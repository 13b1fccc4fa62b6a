"""Gathered weights that stay between the micro-batches of a step (:attr:`~..pipeline.Kept.persistent`).

A step's first forward gathers them and saves them for backward, as without this. Later forwards take them as inputs,
behind all others, and save them again. A weight that backward does not read is gathered by each forward.
"""

from collections.abc import Collection

from torch.fx import GraphModule

from ..edit import append_inputs, outputs, replace
from ..markers import Unshard
from ..pipeline import PassContext, tensor_value
from ..torch_private import keep_undonated
from .recompute import is_made


def persistent_weights(forward: GraphModule, ctx: PassContext) -> dict[int, Unshard]:
    """Return the weights of ``forward`` that stay for later micro-batches, by their places among its outputs."""
    if not ctx.kept.persistent:
        return {}
    reads = {read.node: read for read in Unshard.all(forward) if is_made(read)}
    saved = enumerate(outputs(forward)[ctx.user_outputs :], ctx.user_outputs)
    return {place: reads[node] for place, node in saved if node in reads}


def take_weights(forward: GraphModule, ctx: PassContext) -> None:
    """Turn the persistent weights of ``forward`` into inputs, in the order of :func:`persistent_weights`; in place."""
    reads = list(persistent_weights(forward, ctx).values())
    inputs = append_inputs(forward, [(f"{read.node.name}_persistent", tensor_value(read.node)) for read in reads])
    for read, weight in zip(reads, inputs, strict=True):
        replace(forward, read.node, weight)
    forward.recompile()


def keep_weights(backward: GraphModule, names: Collection[str]) -> None:
    """Forbid code generation to write to the memory of the inputs ``names``, which outlive ``backward``."""
    inputs = backward.graph.find_nodes(op="placeholder")
    keep_undonated([place for place, node in enumerate(inputs) if node.name in names])
    for node in inputs:
        if node.name in names:
            # Donated inputs are no part of the key under which Inductor caches generated code; names are.
            node.target = f"{node.name}_persistent"
            node._rename(node.target)
    backward.recompile()
