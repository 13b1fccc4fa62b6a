"""Profiler ranges around the launches, waits and Newton–Schulz calls that passes insert (opt-in: ``nvtx``).

Code generation reorders ops without data dependencies. So every range op declares writes: of one empty tensor, the
graph's *token*, which keeps the ranges in order, and of the tensors that its first node reads or its last one makes,
which keeps it at its place. Graph inputs, from which a bucket may be packed, must not be among them, since Inductor
would copy a declared write back: there ``pack`` reads the token, as a tensor of width 0.
"""

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ..collectives import bytes_sent, collectives, is_wait, matrices
from ..edit import inline
from ..language.work import Work, work_of
from ..pipeline import LOWERED, GraphPass, PassContext
from ..ranges import NEWTON_SCHULZ, RANGE_POP, RANGE_PUSH


@dataclass(frozen=True)
class _Range:
    """Consecutive nodes, and the text and numbers of the range around them."""

    first: Node
    last: Node
    results: Sequence[Node]  # nodes in it that nodes outside read
    # Arguments of ``ranges.ranged``.
    name: str
    category: str
    payload: int


def _packs(node: Node) -> bool:
    return node.target is torch.ops.muon_zero.pack.default


def _exchanges(gm: GraphModule, title: str) -> Iterator[_Range]:
    """Yield a range for each launch, with its ``pack`` where that is the node before, and for each wait."""
    works = [(node, kind, work) for node, kind in collectives(gm) if (work := work_of(node)) is not None]
    total_by_work = Counter(work for _, _, work in works)
    count_by_work: Counter[Work] = Counter()
    for node, kind, work in works:
        count_by_work[work] += 1
        name = f"{title} {work.category.value} {work.bucket}"
        if total_by_work[work] > 1:
            name += f" ({count_by_work[work]} of {total_by_work[work]})"
        packed = node.args[0]
        first = packed if _packs(packed) and packed.next is node else node
        sent = bytes_sent(node, kind)
        yield _Range(first, node, [node], f"{name} launch", work.category.value, sent)
        for wait in filter(is_wait, node.users):
            yield _Range(wait, wait, [wait], f"{name} wait", work.category.value, sent)


def _newton_schulz(gm: GraphModule, title: str) -> Iterator[_Range]:
    newton_schulz = gm.graph.find_nodes(op="call_function", target=torch.ops.muon_zero.newton_schulz.default)
    for number, node in enumerate(newton_schulz):
        results = [user for user in node.users if user.target is operator.getitem]
        # The end of the range has to follow all results of the call, so these move up right behind it.
        for result in reversed(results):
            node.append(result)
        last = results[-1] if results else node
        yield _Range(node, last, results, f"{title} {NEWTON_SCHULZ} {number}", NEWTON_SCHULZ, matrices(node))


def _surround(gm: GraphModule, span: _Range, token: Node) -> None:
    first, touched = span.first, [token]
    if _packs(first):
        xs, widths, *rest = first.args
        first.args = ([*xs, token], [*widths, 0], *rest)
    else:
        touched += [node for node in first.all_input_nodes if node.op != "placeholder"]
    with gm.graph.inserting_before(first):
        gm.graph.call_function(RANGE_PUSH, (touched, span.name, span.category, span.payload))
    with gm.graph.inserting_after(span.last):
        gm.graph.call_function(RANGE_POP, ([token, *span.results],))


def _annotate(gm: GraphModule, ctx: PassContext) -> GraphModule:
    if not ctx.options.nvtx:
        return gm
    ranges = [*_exchanges(gm, ctx.title), *_newton_schulz(gm, ctx.title)]
    if not ranges:
        return gm
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    first = min((span.first for span in ranges), key=order.__getitem__)
    token = inline(gm, first, lambda x: [x.new_empty(0)], first.all_input_nodes[:1])[0]
    for span in ranges:
        _surround(gm, span, token)
    return gm


ANNOTATE = GraphPass("annotate", _annotate, requires=("verify",), kinds=LOWERED)
