"""The pass that replaces markers by functional collectives, Newton-Schulz and tensor code; one file for each marker."""

from torch.fx import GraphModule, Node

from ..collectives import is_hop, is_wait
from ..errors import PassContractError, RequestError
from ..markers import Orthogonalize
from ..pipeline import LOWERED, GraphKind, GraphPass, PassContext
from .directions import lower_directions
from .gradients import lower_gradients
from .weights import lower_weights


def _has_effects(node: Node) -> bool:
    """Whether dead-code elimination has to keep ``node``: impure nodes, but for ring hops and their waits."""
    # Backward sends keys round the ring anew; AOTAutograd leaves unread copies of those hops in forward.
    source = node.args[0] if is_wait(node) else node
    return node.is_impure() and not (isinstance(source, Node) and is_hop(source))


def _lower(gm: GraphModule, ctx: PassContext) -> GraphModule:
    gm.graph.eliminate_dead_code(_has_effects)  # before lowering, while all collectives are the model's own
    lower_weights(gm, ctx)
    if ctx.kind is GraphKind.BACKWARD:
        if ctx.request is None:
            raise RequestError("a backward graph without a request; give PassContext(request=BackwardRequest(...))")
        inserted, requested = len(Orthogonalize.all(gm)), len(ctx.request.speculated)
        if inserted != requested:
            raise PassContractError(
                f"{requested} directions asked for, {inserted} inserted; run insert_orthogonalize ahead of lower"
            )
        lower_gradients(gm, ctx.request, ctx)
    lower_directions(gm, ctx)  # last: an exchange waits for reductions that ``lower_gradients`` has labelled
    gm.graph.eliminate_dead_code()
    return gm


LOWER = GraphPass("lower", _lower, kinds=LOWERED)
