"""NVTX ranges around what the passes added: Newton-Schulz calls and waits for collectives (opt-in).

Inductor drops ``record_function`` nodes and any side effect without tensors. A range is therefore an op that claims to
mutate the tensors at its place, which keeps it there and costs nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..collectives import collectives, is_wait
from ..pipeline import GraphPass, Half, PassContext

__all__ = ["ANNOTATE", "RANGE_POP", "RANGE_PUSH"]


@torch.library.custom_op("muon_zero::range_push", mutates_args=("xs",))
def range_push(xs: Sequence[Tensor], name: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_push(name)


@torch.library.custom_op("muon_zero::range_pop", mutates_args=("xs",))
def range_pop(xs: Sequence[Tensor], name: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.nvtx.range_pop()


RANGE_PUSH = torch.ops.muon_zero.range_push.default
RANGE_POP = torch.ops.muon_zero.range_pop.default


def _surround(
    gm: GraphModule, first: Node, last: Node, inputs: Sequence[Node], outputs: Sequence[Node], name: str
) -> None:
    # Graph inputs are left out: a claimed mutation of one would be copied back.
    with gm.graph.inserting_before(first):
        gm.graph.call_function(RANGE_PUSH, ([node for node in inputs if node.op != "placeholder"], name))
    with gm.graph.inserting_after(last):
        gm.graph.call_function(RANGE_POP, (list(outputs), name))


def _annotate(gm: GraphModule, ctx: PassContext) -> GraphModule:
    if not ctx.options.nvtx:
        return gm
    newton_schulz = gm.graph.find_nodes(op="call_function", target=torch.ops.muon_zero.newton_schulz.default)
    for number, node in enumerate(newton_schulz):
        results = [user for user in node.users if user.target is operator.getitem]
        for result in reversed(results):
            node.append(result)
        if results and any(x.op != "placeholder" for x in node.args[0]):
            name = f"muon_zero {ctx.title} newton_schulz {number} ({len(node.args[0])} matrices)"
            _surround(gm, node, results[-1], node.args[0], results, name)
    for number, (node, kind) in enumerate(list(collectives(gm))):
        for wait in [user for user in node.users if is_wait(user)]:
            _surround(gm, wait, wait, [node], [wait], f"muon_zero {ctx.title} wait {kind} {number}")
    return gm


ANNOTATE = GraphPass(
    "annotate", _annotate, requires=("verify",), halves=(Half.FORWARD, Half.BACKWARD, Half.INFERENCE, Half.STEP)
)
