"""The pass that checks every lowered graph: a graph that breaks a rule would hang, or train on wrong numbers."""

import torch
from torch.fx import GraphModule, Node

from ..collectives import collectives, is_collective, is_wait
from ..errors import VerificationError
from ..joint.move import verify_moves
from ..joint.recompute import is_view_or_cast
from ..language.work import Category, work_of
from ..markers import MARKERS
from ..pipeline import LOWERED, GraphKind, GraphPass, PassContext

#: Reads no element. The model's own collectives may have sizes that depend on data.
_SIZE = torch.ops.aten.sym_size.int


def _no_marker_left(gm: GraphModule) -> None:
    unlowered = [node.name for node in gm.graph.nodes if node.target in MARKERS]
    if unlowered:
        raise VerificationError(f"markers {unlowered} were not lowered; the lower pass must run over every graph")


def _one_wait_each(gm: GraphModule) -> None:
    for node, kind in collectives(gm):
        waits = [user for user in node.users if is_wait(user)]
        others = [user.name for user in node.users if not is_wait(user) and user.target is not _SIZE]
        if len(waits) != 1 or others:
            raise VerificationError(
                f"{kind} {node.name} has {len(waits)} waits and is read unwaited by {others}; "
                "every collective needs exactly one wait, and every reader must read the wait"
            )


def _no_gathered_weight_saved(gm: GraphModule, user_outputs: int) -> None:
    """Refuse a forward graph that saves an unsharded weight. It returns user outputs first, then saved values."""
    output = gm.graph.output_node()
    saved, unpack = set(output.args[0][user_outputs:]), torch.ops.muon_zero.unpack.default
    for node, _ in collectives(gm):
        for wait in node.users:
            # A model's own collectives may be saved; only weights come out of a bucket.
            if not any(user.target is unpack for user in wait.users):
                continue
            stack = [wait]
            while stack:
                current = stack.pop()
                if current in saved:
                    raise VerificationError(
                        f"gathered weight {current.name} is saved for backward; the recompute pass must see its unshard"
                    )
                stack.extend(user for user in current.users if user.target is unpack or is_view_or_cast(user))


def _exchanges_under_way(gm: GraphModule) -> int:
    """Return the most bytes that two or more exchanges hold at once, averaged over ranks; 0 where none overlap."""
    bytes_of: dict[Node, int] = {}
    most = 0
    for node in gm.graph.nodes:
        work = work_of(node)
        if work is None or work.category is not Category.EXCHANGE:
            continue
        if is_wait(node):
            bytes_of.pop(node.args[0])
        elif is_collective(node):
            bytes_of[node] = work.nbytes
            most = max(most, sum(bytes_of.values()) if len(bytes_of) > 1 else 0)
    return most


def _verify(gm: GraphModule, ctx: PassContext) -> GraphModule:
    _no_marker_left(gm)
    _one_wait_each(gm)
    if ctx.kind is GraphKind.FORWARD and not ctx.kept.weights:
        _no_gathered_weight_saved(gm, ctx.user_outputs)
    verify_moves(gm)
    ctx.exchange_bytes = _exchanges_under_way(gm)
    if ctx.exchange_bytes > ctx.options.exchange_bytes:
        raise VerificationError(
            f"exchanges under way hold {ctx.exchange_bytes} bytes, more than exchange_bytes = "
            f"{ctx.options.exchange_bytes}; the schedule pass must finish one before it starts the next"
        )
    return gm


VERIFY = GraphPass("verify", _verify, requires=("lower",), kinds=LOWERED)
