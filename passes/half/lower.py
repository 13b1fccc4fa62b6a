"""Markers to functional collectives, Newton-Schulz and plain tensor code: one file per marker, put together here."""

from __future__ import annotations

from torch.fx import GraphModule

from ..errors import PassContractError, RequestError
from ..markers import Orthogonalize
from ..pipeline import LOWERED, GraphPass, Half, PassContext
from .directions import lower_directions
from .gradients import lower_gradients
from .weights import lower_weights

__all__ = ["LOWER"]


def _lower(gm: GraphModule, ctx: PassContext) -> GraphModule:
    lower_weights(gm, ctx)
    if ctx.half is Half.BACKWARD:
        if ctx.request is None:
            raise RequestError("a backward graph without a request; give PassContext(request=BackwardRequest(...))")
        inserted, asked = len(Orthogonalize.all(gm)), len(ctx.request.speculated)
        if inserted != asked:
            raise PassContractError(
                f"{asked} directions asked for, {inserted} inserted; run insert_orthogonalize ahead of lower"
            )
        lower_gradients(gm, ctx.request, ctx)
    lower_directions(gm, ctx)
    gm.graph.eliminate_dead_code()
    return gm


LOWER = GraphPass("lower", _lower, halves=LOWERED)
