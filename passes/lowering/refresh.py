"""Waits for resident weights that are being gathered: where a forward graph first reads them.

``step()`` starts the gathers, and the forward that follows computes while they are under way. Which of them bring a
weight is known at run time alone: graphs are shared by equal blocks, and run again when everything is there. So a wait
asks the parameter, by its state, and costs a forward without a refresh a call a weight.

Inductor may give the op a copy of the input, in the layout that a convolution reads or at an aligned address, made when
the graph begins: it stands for the input from there on, so the op writes it anew.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..language.holder import holder_of
from ..pipeline import GraphKind, GraphPass, PassContext

__all__ = ["AWAIT_REFRESH", "AWAIT_REFRESH_OP", "note_resident"]

#: key of node.meta: the state of the parameter that an input is resident for
_KEY = "muon_zero_resident"

_LIBRARY = torch.library.Library("muon_zero", "FRAGMENT")
# Not a custom_op: that would count an edit of the weight in each forward, and a forward that runs between another one
# and its backward would make autograd refuse the backward.
# A CUDA graph that is replayed would neither ask the parameter nor wait: Inductor runs the op between the graphs.
_LIBRARY.define("await_refresh(Tensor(a!) resident, Tensor state) -> ()", tags=(torch.Tag.cudagraph_unsafe,))


@torch.library.impl(_LIBRARY, "await_refresh", "CompositeExplicitAutograd")
def _await_refresh(resident: Tensor, state: Tensor) -> None:
    holder = holder_of(state)
    if holder is not None:
        holder.await_refresh(resident)


torch.library.register_fake("muon_zero::await_refresh", lambda resident, state: None, lib=_LIBRARY)

AWAIT_REFRESH_OP = torch.ops.muon_zero.await_refresh.default


def note_resident(resident: Node, state: Node) -> None:
    """Say that the input ``resident`` is resident for the parameter with this state."""
    resident.meta[_KEY] = state


def _insert(gm: GraphModule, ctx: PassContext) -> GraphModule:
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    for resident in gm.graph.find_nodes(op="placeholder"):
        state = resident.meta.get(_KEY)
        if state is not None and resident.users:
            with gm.graph.inserting_before(min(resident.users, key=order.__getitem__)):
                gm.graph.call_function(AWAIT_REFRESH_OP, (resident, state))
    return gm


# Never ahead of the schedule, which does not know that readers must stay behind the wait.
AWAIT_REFRESH = GraphPass(
    "await_refresh",
    _insert,
    requires=("lower",),
    conflicts=("verify",),
    kinds=(GraphKind.FORWARD, GraphKind.INFERENCE),
)
