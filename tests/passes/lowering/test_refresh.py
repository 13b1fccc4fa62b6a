"""Waits for resident weights in forward graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_muon import MuonZero
from compile_muon.passes import LOWERING_PASSES, GraphKind
from compile_muon.passes.language.holder import hold, holder_of
from compile_muon.passes.lowering.refresh import AWAIT_REFRESH_OP
from compile_muon.passes.ranges import RANGE_POP, RANGE_PUSH

LAYERS = 4


def lowered(world, trace, stage, kind=GraphKind.FORWARD, passes=LOWERING_PASSES):
    torch.manual_seed(0)
    with world(1, 2):
        layers = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(LAYERS))
        model = nn.Sequential(nn.Embedding(8, 16), *layers)
        MuonZero(model, stage=stage, ns_dtype="float32")
        return trace(model, torch.arange(4)).lowered(kind, passes=passes)[0]


@pytest.mark.parametrize("stage", [1, 2])
def test_a_weight_is_waited_for_where_it_is_first_read(world, trace, stage):
    nodes = list(lowered(world, trace, stage).graph.nodes)
    waits = [node for node in nodes if node.target is AWAIT_REFRESH_OP]
    assert len(waits) == 2 * LAYERS + 1
    for wait in waits:
        resident, state = wait.args
        readers = [node for node in resident.users if node is not wait]
        first = min(map(nodes.index, readers))
        assert nodes.index(wait) < first
        between = nodes[nodes.index(wait) + 1 : first]
        assert all(node.target is AWAIT_REFRESH_OP for node in between), "others run while this one is waited for"
    places = [nodes.index(wait) for wait in waits]
    products = [place for place, node in enumerate(nodes) if "mm" in str(node.target)]
    assert len(products) == LAYERS
    # All but the first layer's are waited for when a layer has been computed.
    assert sum(place > products[0] for place in places) >= 2 * (LAYERS - 1)


@pytest.mark.parametrize(("stage", "kind"), [(0, GraphKind.FORWARD), (3, GraphKind.FORWARD)])
def test_nothing_waits_where_nothing_is_resident(world, trace, stage, kind):
    assert not lowered(world, trace, stage, kind).graph.find_nodes(op="call_function", target=AWAIT_REFRESH_OP)


def test_the_op_asks_who_holds_the_state():
    class Asked:
        count = 0

        def await_refresh(self, read):
            assert read is resident
            self.count += 1

        def reducing(self):
            raise AssertionError

    asked, state, resident = Asked(), torch.zeros(2), torch.zeros(3)
    AWAIT_REFRESH_OP(resident, state)  # nobody's
    hold(state, asked)
    before = resident._version
    AWAIT_REFRESH_OP(resident, state)
    assert asked.count == 1
    assert resident._version == before, "an edit in each forward makes autograd refuse what earlier ones saved"
    assert holder_of(state) is asked
    del asked
    assert holder_of(state) is None, "a state must not keep its holder alive"
    AWAIT_REFRESH_OP(resident, state)


def test_cuda_graphs_leave_out_what_asks_at_run_time() -> None:
    """Replayed, a wait would ask nobody, and the graph read what the last step left; a range would not be opened."""
    for op in (AWAIT_REFRESH_OP, RANGE_PUSH, RANGE_POP):
        assert torch.Tag.cudagraph_unsafe in op.tags, op
