"""Counting: bytes of collectives by hand; test_layout.py and test_counts.py compare them with the formulas."""

import pytest
import torch
from torch.fx import Graph, GraphModule

from compile_muon.passes.collectives import Traffic, collectives, measure_traffic
from compile_muon.passes.language.layout import Axis

_c10d = torch.ops._c10d_functional


def graph_of(*calls):
    """A graph of collectives, each on its own fresh `[12]` float32 input, each waited for."""
    graph = Graph()
    waits = []
    for number, (target, args) in enumerate(calls):
        x = graph.placeholder(f"x{number}")
        x.meta["val"] = torch.zeros(12)
        waits.append(graph.call_function(_c10d.wait_tensor.default, (graph.call_function(target, (x, *args)),)))
    graph.output(tuple(waits))
    return GraphModule(torch.nn.Module(), graph)


GATHER = _c10d.all_gather_into_tensor.default, (4, "g")
REDUCE = _c10d.all_reduce.default, ("sum", "g")


@pytest.mark.parametrize(
    ("call", "sent", "kind"),
    [
        (GATHER, 48 * 3, "all_gather"),
        ((_c10d.reduce_scatter_tensor.default, ("sum", 4, "g")), 48 * 3 / 4, "reduce_scatter"),
        (REDUCE, 2 * 48 * 3 / 4, "all_reduce"),
        ((_c10d.all_to_all_single.default, ([2, 1, 0, 0], [5, 4, 2, 1], "g")), (5 + 2 + 1) * 4, "all_to_all"),
    ],
)
def test_bytes_by_hand(call, sent, kind):
    """Rank 1 of 4, 48 bytes in; what stays on the rank is not sent."""
    gm = graph_of(call)
    assert measure_traffic(gm, [Axis("shard", 4, 1, "g")]) == Traffic(sent, ((kind, 1),), 0, (("shard", sent),))
    assert [k for _, k in collectives(gm)] == [kind]


def test_sums():
    once = measure_traffic(graph_of(REDUCE, REDUCE, GATHER), [Axis("shard", 4, 0, "g")])
    assert once == Traffic(2 * 72 + 144, (("all_gather", 1), ("all_reduce", 2)), 0, (("shard", 288),))
    assert once + once == Traffic(576, (("all_gather", 2), ("all_reduce", 4)), 0, (("shard", 576),))
    assert once + Traffic() == once
