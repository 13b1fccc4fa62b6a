"""Waits for resident weights at run time; where they stand in graphs, the golden gate stores."""

import torch

from compile_muon.passes.language.holder import hold, holder_of
from compile_muon.passes.lowering.refresh import AWAIT_REFRESH_OP
from compile_muon.passes.ranges import RANGE_POP, RANGE_PUSH


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
