"""The ledger by itself: which lowering each backward visit gets, and what it refuses."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from compile_muon import LedgerError, MuonZero
from compile_muon.kernels import resolve_coefficients
from compile_muon.passes import Lowering
from compile_muon.passes.spec import MuonSpec, ParamSpec
from compile_muon.runtime import ledger
from compile_muon.runtime.ledger import Arrival, Decision, Ledger, ParamState, Pending, state_of

ACCUMULATE, REDUCE, UPDATE = Lowering.ACCUMULATE, Lowering.REDUCE, Lowering.UPDATE


def make_state(book, name="w", stage=2, muon=True, world=1):
    steps = tuple(value for triple in resolve_coefficients("jordan", 5).steps for value in triple)
    facts = MuonSpec(1, 4, 3, True, "standard", steps, 1.0, (), "float32", 1e-7, "local") if muon else None
    spec = ParamSpec((4, 3), world, 0, "", stage, "float32", "float32", "float32", facts)
    param = nn.Parameter(torch.zeros(4, 3))
    state = ParamState(name, param, spec, torch.zeros(4, 3), torch.tensor([0.05, 0.95]), None, book)
    book.states.append(state)
    return state


@pytest.fixture(autouse=True)
def delivering(monkeypatch):
    """Outside a real backward autograd cannot say what it will deliver; here everything, or what a test removes."""
    silent = set()
    monkeypatch.setattr(ParamState, "receives", lambda state: state.name not in silent)
    monkeypatch.setattr(ledger, "current_backward", itertools.count().__next__)  # each visit is of its own
    return silent


def book(steps=1, in_backward=True):
    return Ledger(accumulation_steps=steps, update_in_backward=in_backward)


def forward(*states):
    for state in states:
        state.ledger.visit_forward(state)


def backward(*states, updates=None):
    """One backward visit; afterwards `.grad` and the pending update are what the real frame would leave."""
    decision = states[0].ledger.visit_backward(states, updates or [s.spec.muon is not None for s in states])
    for state, receives in zip(states, decision.receives, strict=True):
        if not receives:
            continue
        if decision.lowering is UPDATE and state.spec.muon is not None:
            state.pending = Pending(torch.ones(4, 3), torch.tensor(1.0))
            state.param.grad = torch.ones(4, 3)
            state.ledger.delivered(state)
        elif state.param.grad is None:
            state.param.grad = torch.ones(4, 3)
        else:
            state.param.grad.add_(1.0)
    return decision


# --- decisions --------------------------------------------------------------------------------------------------------


def test_one_forward_one_backward_updates():
    w = make_state(book())
    forward(w)
    assert w.ledger.balance() == 1
    assert backward(w) == Decision(UPDATE, False, (True,))
    assert w.ledger.balance() == 0


@pytest.mark.parametrize(
    ("ledger", "muon", "lowering"),
    [
        (book(in_backward=False), True, REDUCE),
        (book(steps=None), True, REDUCE),
        (book(), False, REDUCE),  # nothing to orthogonalize in this frame
        (book(steps=2), True, ACCUMULATE),
    ],
)
def test_when_not_to_update(ledger, muon, lowering):
    w = make_state(ledger, muon=muon)
    forward(w)
    assert backward(w).lowering is lowering


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_the_last_micro_batch_updates_and_takes_the_others_in(steps):
    w = make_state(book(steps))
    for number in range(steps):
        forward(w)
        decision = backward(w)
        last = number == steps - 1
        assert decision.lowering is (UPDATE if last else ACCUMULATE)
        assert decision.with_prior is last


def test_unknown_boundary_always_reduces():
    w = make_state(book(steps=None))
    for _ in range(4):
        forward(w)
        assert backward(w).lowering is REDUCE


def test_accumulate_holds_back():
    w = make_state(book())
    with w.ledger.accumulate():
        for _ in range(3):
            forward(w)
            assert backward(w).lowering is ACCUMULATE
    forward(w)
    assert backward(w) == Decision(UPDATE, True, (True,))


def test_accumulate_nests_and_survives_exceptions():
    b = book()
    with pytest.raises(ValueError), b.accumulate():
        with b.accumulate():
            pass
        assert b.accumulating
        raise ValueError
    assert not b.accumulating


def test_two_forwards_two_backwards_reduce():
    """Autograd sums both contributions before anyone sees them apart, or the second comes after the first's update."""
    w = make_state(book())
    forward(w)
    forward(w)
    assert backward(w).lowering is ACCUMULATE
    assert backward(w).lowering is REDUCE
    assert w.ledger.balance() == 0


def test_a_forward_without_backward_defers_to_step():
    w = make_state(book())
    forward(w)
    forward(w)
    assert backward(w).lowering is ACCUMULATE
    assert w.ledger.balance() == 1
    w.ledger.close()
    assert w.ledger.balance() == 0
    w.param.grad = None
    forward(w)
    assert backward(w).lowering is UPDATE


def test_one_unclean_matrix_holds_back_its_frame():
    b = book()
    w, v = make_state(b, "w"), make_state(b, "v")
    forward(w, v)
    b.read_eagerly(v)
    assert backward(w, v).lowering is REDUCE


def test_an_unclean_vector_does_not():
    """Only what would be orthogonalized must be clean: a bias that two frames read is summed by autograd as ever."""
    b = book()
    w, bias = make_state(b, "w"), make_state(b, "bias", muon=False)
    forward(w, bias)
    b.read_eagerly(bias)
    assert backward(w, bias).lowering is UPDATE


@pytest.mark.parametrize("grad", [True, False])
def test_eager_reads_count_only_with_grad(grad):
    w = make_state(book())
    with torch.set_grad_enabled(grad):
        w.ledger.read_eagerly(w)
    forward(w)
    assert backward(w).lowering is (REDUCE if grad else UPDATE)


def test_frozen_parameters_are_read_freely():
    w = make_state(book())
    w.param.requires_grad_(False)
    w.ledger.read_eagerly(w)
    assert not w.eager_read


def test_a_users_hook_on_the_parameter_holds_back():
    w = make_state(book())
    w.param.register_hook(lambda grad: w.ledger.arriving(w, grad))  # the optimizer's own
    forward(w)
    assert backward(w).lowering is UPDATE
    w.close()
    w.param.grad = None
    w.param.register_hook(lambda grad: grad)
    forward(w)
    assert backward(w).lowering is REDUCE


def test_a_second_backward_of_one_forward_accumulates():
    w = make_state(book(steps=2))
    forward(w)
    assert backward(w).lowering is ACCUMULATE
    assert backward(w).lowering is ACCUMULATE  # retain_graph: nothing was owed
    assert w.ledger.balance() == 0
    forward(w)
    assert backward(w) == Decision(UPDATE, True, (True,))


# --- gradients that are not delivered ---------------------------------------------------------------------------------


def test_autograd_grad_for_something_else_settles_nothing(delivering):
    w = make_state(book(steps=2))
    forward(w)
    backward(w)
    delivering.add("w")
    forward(w)
    decision = backward(w)
    assert decision.receives == (False,)
    assert decision.lowering is not UPDATE
    delivering.clear()
    forward(w)
    assert backward(w) == Decision(UPDATE, True, (True,))


def test_after_an_update_autograd_grad_is_no_late_gradient(delivering):
    w = make_state(book())
    forward(w)
    backward(w)
    delivering.add("w")
    forward(w)
    assert backward(w).lowering is not UPDATE
    assert w.pending is not None


def test_dropped_gradients_drop_their_update():
    w = make_state(book())
    forward(w)
    backward(w)
    w.param.grad = None  # model.zero_grad()
    forward(w)
    assert backward(w).lowering is UPDATE


def test_autograd_grad_of_parameters_gets_whole_gradients(delivering):
    """It delivers to none of them, but may hand out what the graph returns for each."""
    w = make_state(book(steps=2), stage=1, world=2)
    delivering.add("w")
    forward(w)
    assert backward(w).lowering is REDUCE


# --- stage 1 ----------------------------------------------------------------------------------------------------------


def test_stage_one_trusts_only_its_own_zeros():
    alone = make_state(book(), stage=1)
    alone.param.grad = torch.zeros(4, 3)
    assert alone.gradient_is_ours  # one process keeps nothing unreduced: `.grad` is the sum itself
    w = make_state(book(), stage=1, world=2)
    assert w.gradient_is_ours
    w.param.grad = torch.zeros(4, 3)
    assert not w.gradient_is_ours  # came from elsewhere
    w.unreduced = torch.zeros(4, 3)
    assert w.gradient_is_ours
    w.reduced = True
    assert not w.gradient_is_ours  # some of it is already in .grad, reduced


# --- refusals ---------------------------------------------------------------------------------------------------------


def keep(state, value, *, delivers=True):
    """A backward visit at stage 1 that accumulates, and what it leaves; without ``delivers`` it raises later on."""
    assert backward(state).lowering is ACCUMULATE
    state.keep_unreduced(torch.full((4, 3), value))
    if delivers:
        state.ledger.delivered(state)


def test_what_was_kept_goes_with_the_gradient_though_a_forward_is_still_owed():
    w = make_state(book(steps=2), stage=1, world=2)
    forward(w)
    forward(w)  # one of the two never runs backward
    keep(w, 1.0)
    w.param.grad = None  # model.zero_grad()
    forward(w)
    backward(w)
    assert w.take_unreduced() is None


def test_what_was_kept_goes_with_the_gradient_when_the_next_one_comes_from_outside():
    w = make_state(book(steps=2), stage=1, world=2)
    forward(w)
    keep(w, 1.0)
    w.param.grad = None
    w.ledger.arriving(w, torch.ones(4, 3))
    assert w.take_unreduced() is None


def test_what_a_backward_kept_before_it_raised_does_not_count():
    w = make_state(book(steps=3), stage=1, world=2)
    forward(w)
    keep(w, 1.0)
    forward(w)
    forward(w)
    keep(w, 10.0, delivers=False)
    forward(w)
    keep(w, 100.0)
    assert torch.equal(w.unreduced, torch.full((4, 3), 101.0))


def test_late_gradients_are_refused_before_anything_changes():
    b = book()
    w, v = make_state(b, "w"), make_state(b, "v")
    forward(w)
    backward(w)
    forward(v, w)
    before = [(s.owed, s.reads, s.settled) for s in (v, w)]
    with pytest.raises(LedgerError, match=r"'w' arrived after its Muon update.*gradient_accumulation_steps=N"):
        b.visit_backward([v, w], [True, True])
    assert [(s.owed, s.reads, s.settled) for s in (v, w)] == before


def test_old_directions_are_refused_until_they_are_gone():
    w = make_state(book())
    forward(w)
    backward(w)
    w.note_direction()
    w.ledger.close()
    forward(w)
    with pytest.raises(LedgerError, match=r"'w' still holds the Muon direction.*zero_grad"):
        w.ledger.visit_backward([w], [True])
    with pytest.raises(LedgerError, match="still holds"):
        w.ledger.check_fresh(w)
    w.param.grad.zero_()  # zero_grad(set_to_none=False)
    w.ledger.check_fresh(w)
    assert backward(w).lowering is UPDATE


def test_a_new_gradient_with_an_old_address_is_not_the_old_direction():
    """Ids and addresses are reused as soon as a tensor is gone."""
    w = make_state(book())
    for _ in range(20):
        w.param.grad = torch.ones(4, 3)
        w.note_direction()
        w.param.grad = None
        w.param.grad = torch.ones(4, 3)
        w.ledger.check_fresh(w)


@pytest.mark.parametrize(
    "edit",
    [
        lambda w: w.param.grad.mul_(2),
        lambda w: setattr(w.param, "grad", w.param.grad.clone()),
        lambda w: w.param.grad.zero_(),
    ],
)
def test_edited_directions_are_refused(edit):
    w = make_state(book())
    forward(w)
    backward(w)
    w.ledger.check_untouched(w)
    edit(w)
    with pytest.raises(LedgerError, match=r"'w' was edited between backward and step\(\).*update='step'"):
        w.ledger.check_untouched(w)


def test_directions_must_arrive_alone(monkeypatch):
    monkeypatch.setattr(ledger, "current_backward", lambda: 7)
    w = make_state(book())
    w.backward = 7  # what made the direction
    direction = torch.ones(4, 3)
    w.pending = Pending(torch.ones(4, 3), torch.tensor(1.0), Arrival.of(direction))
    w.ledger.arriving(w, direction)
    for mixed in (direction.add_(1.0), torch.ones(4, 3)):  # autograd sums in place or into a new tensor
        with pytest.raises(LedgerError, match=r"'w' got a gradient beside its Muon update.*update='step'"):
            w.ledger.arriving(w, mixed)


# --- identity ---------------------------------------------------------------------------------------------------------


def test_state_tensors_lead_to_their_parameter():
    w = make_state(book())
    assert state_of(w.state) is w
    assert state_of(w.state.detach()) is None
    assert state_of(torch.zeros(4, 3)) is None
    assert state_of(None) is None
    tensor = w.state
    w.ledger.states.clear()
    del w
    assert state_of(tensor) is None, "the tensor must not keep its parameter alive"


def test_copies_keep_their_own_account():
    b = book()
    w, v = make_state(b, "w"), make_state(b, "v")
    forward(w, v)
    twin, other = copy.deepcopy([w, v])
    assert state_of(twin.state) is twin
    assert twin.ledger is other.ledger is not b
    assert twin.ledger.states == [twin, other]
    assert twin.ledger.balance() == 0
    assert b.balance() == 2
    forward(twin)
    assert backward(twin).lowering is REDUCE, "no optimizer would step a copy"


def test_traffic_adds_up():
    from compile_muon.passes.collectives import Traffic

    b = book()
    b.count(Traffic(10, (("all_gather", 1),), 2))
    b.count(Traffic(5, (("all_gather", 1), ("all_reduce", 3)), 1))
    assert b.traffic == Traffic(15, (("all_gather", 2), ("all_reduce", 3)), 3)


def test_resident_weights_follow_edits():
    """A loaded checkpoint bumps the shard's version: the next read refreshes, and only the next."""
    b = book()
    w = make_state(b)
    w.replica = torch.zeros(4, 3)
    refreshed = []

    def refresh():
        refreshed.append(1)
        w.refreshed_at = ledger.edits_of(w.param)

    b.refresh = refresh
    b.keep_fresh(w)
    assert not refreshed
    with torch.no_grad():
        w.param.add_(1.0)
    b.keep_fresh(w)
    b.keep_fresh(w)
    assert refreshed == [1]


# --- a backward that fails in the middle ------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x))).square().mean()


def test_a_backward_graph_that_raises_gives_back_what_it_took(monkeypatch):
    """Out of memory in the updating backward: the sums of earlier micro-batches are still in `.grad`."""
    monkeypatch.undo()  # a real backward
    import compile_muon.runtime.frame as frame

    failing = []
    original = frame.lower_and_compile

    def fragile(gm, inputs, ctx, codegen):
        run, traffic = original(gm, inputs, ctx, codegen)

        def maybe(args):
            if failing and ctx.lowering is UPDATE:
                raise MemoryError
            return run(args)

        return maybe, traffic

    monkeypatch.setattr(frame, "lower_and_compile", fragile)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Small()
    optimizer = MuonZero(model, gradient_accumulation_steps=2, ns_dtype="float32")
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    x = torch.randn(3, 4)
    run(x).backward()
    sums = [p.grad.clone() for p in model.parameters()]
    failing.append(True)
    with pytest.raises(MemoryError):
        run(x).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), sums, strict=True))
    assert all(state.pending is None for state in optimizer._muon)
    optimizer.step()
    assert optimizer._ledger.balance() == 0
    assert ledger.state_of(optimizer._muon[0].state) is optimizer._muon[0]
    torch._dynamo.reset()
