"""The pass that inserts waits for the refresh of resident weights, each ahead of the weight's first reader in forward.

``step()`` starts the gathers, and the next forward overlaps with them. Equal blocks share a graph and it may run again
without a refresh, so the op asks the parameter's holder at run time whether there is a gather to wait for: one host
call a weight.

Inductor may pass the op a copy of the input (a layout for convolutions, an aligned address) that it made at the start
of the graph and that later nodes read in place of the input. The op therefore declares a write of ``resident``: where
it got a copy, it copies the refreshed weight into it.
"""

from torch import Tensor
from torch.fx import GraphModule, Node

from ..language.holder import holder_of
from ..operators import operator
from ..pipeline import GraphKind, GraphPass, PassContext

#: key of node.meta on a resident weight's placeholder: the placeholder of its parameter's state
_KEY = "muon_zero_resident"


def _await_refresh(resident: Tensor, state: Tensor) -> None:
    holder = holder_of(state)
    if holder is not None:
        holder.await_refresh(resident)


# A custom_op would bump the weight's version counter in each forward: of two forwards before a backward, the second
# would make autograd refuse the backward of the first.
AWAIT_REFRESH_OP = operator(
    "await_refresh(Tensor(a!) resident, Tensor state) -> ()",
    _await_refresh,
    lambda resident, state: None,
    calls_python=True,
)


def note_resident(resident: Node, state: Node) -> None:
    """Label the placeholder ``resident`` as the resident weight of the parameter with this state."""
    resident.meta[_KEY] = state


def _insert(gm: GraphModule, ctx: PassContext) -> GraphModule:
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    for resident in gm.graph.find_nodes(op="placeholder"):
        state = resident.meta.get(_KEY)
        if state is not None and resident.users:
            with gm.graph.inserting_before(min(resident.users, key=order.__getitem__)):
                gm.graph.call_function(AWAIT_REFRESH_OP, (resident, state))
    return gm


# After the schedule pass, which sees no dependency between the wait and the readers of the weight.
AWAIT_REFRESH = GraphPass(
    "await_refresh",
    _insert,
    requires=("lower",),
    conflicts=("verify",),
    kinds=(GraphKind.FORWARD, GraphKind.INFERENCE),
)
