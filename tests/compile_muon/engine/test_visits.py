"""Visits, sums and policy by themselves: which purpose each backward visit gets."""

import gc
import itertools
import weakref

import pytest
import torch
from support.compiled import Net, X
from torch import nn

from compile_muon import LedgerError, MuonZero
from compile_muon.engine.gradient import PATIENCE, UnreducedSums
from compile_muon.engine.ledger import Ledger
from compile_muon.engine.sharded_param import ShardedParam, sharded_param_of
from compile_muon.kernels import resolve_coefficients
from compile_muon.passes import Purpose
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec
from compile_muon.passes.torch_private import current_backward

ACCUMULATE, REDUCE, SPECULATE = Purpose.ACCUMULATE, Purpose.REDUCE, Purpose.SPECULATE


def make_sharded_param(ledger, name="w", stage=2, muon=True, world=1):
    steps = tuple(value for triple in resolve_coefficients("jordan", 5).steps for value in triple)
    facts = MuonSpec(1, 4, 3, True, "standard", steps, 1.0, (), "float32", 1e-7, "local") if muon else None
    spec = ParamSpec(Layout((4, 3), stage, Axis("shard", world)), "float32", "float32", "float32", facts)
    param = nn.Parameter(torch.zeros(4, 3))
    sharded = ShardedParam(name, param, spec, torch.zeros(4, 3), torch.tensor([0.05, 0.95]), None, ledger)
    ledger.sharded_params.append(sharded)
    return sharded


class Calls:
    """Backward calls by number."""

    def __init__(self):
        self.numbers = itertools.count()

    def visit(self, *sharded_params, receives=True, speculates=True, call=None):
        """One visit of a frame; afterwards `.grad` is there."""
        call = next(self.numbers) if call is None else call
        found = []
        for sharded in sharded_params:
            sharded.begin_backward(call)
            found.append(sharded.ledger.purpose(sharded, call, receives=receives, speculates=speculates))
        for sharded in sharded_params if receives else ():
            sharded.param.grad = torch.ones(4, 3)
        return found[0] if len(found) == 1 else found


@pytest.fixture
def calls():
    return Calls()


def book(steps=1, update="auto"):
    return Ledger(steps, update)


def purposes(w, calls, events, **visit):
    """What each backward is for; events: a forward, a backward, ``close``, or ``.grad`` that ledger or user dropped."""
    found = ""
    for event in events:
        if event == "f":
            w.visits.forward()
        elif event == "b":
            found += {ACCUMULATE: "A", REDUCE: "R", SPECULATE: "S"}[calls.visit(w, **visit)]
        elif event == "c":
            w.ledger.close([w])
        elif event == "d":
            w.drop_gradient()
        else:
            w.param.grad = None
    return found


NEVER = {"speculates": False}


@pytest.mark.parametrize(
    ("ledger", "where", "visit", "events", "expected"),
    [
        (book(), {}, {}, "fb", "S"),
        (book(update="step"), {}, {}, "fb", "R"),
        (book(steps=None), {}, {}, "fb", "R"),
        (book(), {}, NEVER, "fb", "R"),
        (book(2), {}, {}, "fb", "R"),
        # the last micro-batch; one more than was declared may be the last as well
        (book(3), {"stage": 1, "world": 2}, {}, "fbfbfbfb", "AASS"),
        (book(3), {"stage": 1, "world": 1}, {}, "fbfbfbfb", "RRSS"),
        (book(3), {"stage": 2, "world": 2}, {}, "fbfbfbfb", "RRSS"),
        # at stage 1, too, `.grad` must be whole when a loop looks at it, whatever is still owed
        (book(), {"stage": 1, "world": 2}, NEVER, "ffb", "R"),
        # a forward whose backward never comes: validation without no_grad(), one rank alone that counts operations
        (book(), {}, {}, "ffbcffbcffbc", "SSS"),
        (book(), {}, {}, "ffbb", "SS"),
        (book(), {}, {}, "fdb", "S"),  # zero_grad() between forward and backward
        (book(2), {}, {}, "fb0fbfb", "RRS"),  # model.zero_grad(): dropped gradients start the count anew
    ],
)
def test_purposes(calls, ledger, where, visit, events, expected):
    w = make_sharded_param(ledger, **where)
    assert purposes(w, calls, events, **visit) == expected
    assert ledger.balance() == events.count("f") - events.count("b") or "c" in events


def test_several_visits_of_one_backward_do_not_speculate(calls):
    """Autograd sums their contributions before it writes `.grad`."""
    w = make_sharded_param(book())
    w.visits.forward()
    w.visits.forward()
    assert calls.visit(w, call=7) is SPECULATE  # the first time nobody knows
    assert calls.visit(w, call=7) is REDUCE
    assert w.visits.backwards == 1
    for call in (8, 9):
        w.close()
        assert calls.visit(w, call=call) is REDUCE
        if call == 8:
            assert calls.visit(w, call=call) is REDUCE
    w.close()
    assert calls.visit(w, call=10) is SPECULATE


def test_accumulate_holds_back_and_nests_and_survives_exceptions(calls):
    w = make_sharded_param(book())
    with pytest.raises(ValueError), w.ledger.accumulate():
        with w.ledger.accumulate():
            pass
        w.visits.forward()
        assert calls.visit(w) is REDUCE
        raise ValueError
    w.visits.forward()
    assert calls.visit(w) is SPECULATE


def test_who_says_which_is_the_last_may_have_fewer_in_the_next_step(calls):
    """Backwards inside ``accumulate()`` are not among those that a step is expected to have."""
    w = make_sharded_param(book(None))
    for earlier in (3, 1, 0):
        for _ in range(earlier):
            with w.ledger.accumulate():
                w.visits.forward()
                assert calls.visit(w) is REDUCE
        w.visits.forward()
        assert (calls.visit(w) is SPECULATE) == (earlier < 3)  # of the first step nobody knows
        w.ledger.close([w])
        w.param.grad = None


def test_what_autograd_does_not_deliver_counts_for_nothing(calls):
    w = make_sharded_param(book(2), stage=1, world=2)
    w.visits.forward()
    assert calls.visit(w, receives=False) is ACCUMULATE  # stays here, and is dropped
    assert w.visits.backwards == 0


@pytest.mark.parametrize(("declared", "came", "then"), [(None, 3, 3), (1, 4, 4), (4, 2, 4), (2, 2, 2)])
def test_how_many_backwards_the_next_step_is_expected_to_have(calls, declared, came, then):
    w = make_sharded_param(book(declared))
    purposes(w, calls, "fb" * came + "c0")
    assert purposes(w, calls, "fb" * then) == "R" * (then - 1) + "S"


def test_auto_stops_after_several_steps_in_a_row_and_resumes_only_after_clipping():
    for reason in ("edited", "clipped"):
        ledger = book()
        w = make_sharded_param(ledger)
        for _ in range(PATIENCE - 1):
            ledger.discarded([w], reason)
        w.speculations.used()
        for _ in range(PATIENCE - 1):
            ledger.discarded([w], reason)
            assert w.speculations.stopped is None
        with pytest.warns(UserWarning, match="'?w'?.*made in step"):
            ledger.discarded([w], reason)
        assert w.speculations.stopped == reason
        for _ in range(PATIENCE):
            w.speculations.note_norm(under_limit=True)
        assert w.speculations.stopped == (None if reason == "clipped" else reason)


def kept():
    """One accumulating backward call, 1, and its gradient."""
    sums, grad = UnreducedSums(), torch.zeros(2)
    sums.begin(1, None, "w")
    sums.keep(1, torch.ones(2))
    sums.deliver(1, grad)
    return sums, grad


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # (call, what it keeps, whether it delivers); then what the next call takes
        ([(1, 1.0, True)], 1.0),
        ([(1, 1.0, False), (1, 1.0, True)], 2.0),  # visits of one backward add up
        ([(1, 1.0, True), (2, 10.0, False), (3, 100.0, True)], 101.0),  # the second one raised
        ([(1, 1.0, False), (2, 10.0, False), (1, 100.0, True)], 101.0),  # the second one is nested
    ],
)
def test_what_backwards_keep_adds_up_once_they_deliver(events, expected):
    sums, grad = UnreducedSums(), torch.zeros(2)
    for call, value, delivers in events:
        sums.begin(call, None if sums.delivered is None else grad, "w")
        sums.keep(call, torch.full((2,), value))
        if delivers:
            sums.deliver(call, grad)
    assert sums.take(9).tolist() == [expected] * 2
    sums.begin(10, None, "w")  # model.zero_grad(): it goes with the gradient
    assert not sums.available(10)


def test_what_a_backward_took_is_gone_only_once_it_has_delivered():
    sums, grad = kept()
    sums.begin(2, grad, "w")
    assert sums.take(2).tolist() == [1.0, 1.0]
    assert not sums.available(2)  # another visit of the same call must not add it again
    sums.begin(3, grad, "w")  # call 2 raised
    assert sums.available(3)
    sums.take(3)
    sums.deliver(3, grad)
    assert not sums.available(4)


def test_an_edit_between_micro_batches_is_refused_by_name():
    """There are zeros in `.grad`: whoever clips or scales them means the sum."""
    sums, grad = kept()
    sums.begin(2, grad, "w")
    grad.mul_(0.5)
    with pytest.raises(LedgerError, match="gradient of 'w' was edited between the micro-batches.*use stage 2"):
        sums.begin(3, grad, "w")
    with pytest.raises(LedgerError, match="gradient of 'w'"):
        sums.check(torch.zeros(2), "w")
    sums.close()
    sums.check(grad, "w")


def test_hooks_hold_nothing():
    w = make_sharded_param(book(2), stage=1, world=2)
    w.watch()
    w.watch()
    assert len(w.param._backward_hooks) == len(w.param._post_accumulate_grad_hooks) == 1
    sums = w.sums
    handle = w.param.register_hook(lambda grad: sums.keep(current_backward(), torch.ones(4, 3)))
    w.param.square().sum().backward()
    assert sums.delivered is not None
    handle.remove()
    param, gone = w.param, weakref.ref(w)
    w.ledger.sharded_params.clear()
    del w
    gc.collect()
    assert gone() is None
    param.grad = None
    param.square().sum().backward()


def test_momenta_lead_to_their_account():
    w = make_sharded_param(book())
    assert sharded_param_of(w.momentum) is w
    assert (
        sharded_param_of(w.momentum.detach()) is sharded_param_of(torch.zeros(4, 3)) is sharded_param_of(None) is None
    )
    tensor = w.momentum
    w.ledger.sharded_params.clear()
    del w
    assert sharded_param_of(tensor) is None, "the tensor must not keep its sharded parameter alive"


def test_a_backward_graph_that_raises_gives_back_what_it_took(monkeypatch):
    """Out of memory in backward: the sums of earlier micro-batches are still in `.grad`."""
    from compile_muon import backend

    failing = []
    original = backend.lower_and_compile

    def fragile(gm, inputs, ctx, codegen):
        run, traffic = original(gm, inputs, ctx, codegen)

        def maybe(args):
            if failing and ctx.request is not None:
                raise MemoryError
            return run(args)

        return maybe, traffic

    monkeypatch.setattr(backend, "lower_and_compile", fragile)
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    optimizer = MuonZero(model, gradient_accumulation_steps=2, ns_dtype="float32")
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    run(X).square().mean().backward()
    sums = [p.grad.clone() for p in model.parameters()]
    failing.append(True)
    with pytest.raises(MemoryError):
        run(X).square().mean().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), sums, strict=True))
    assert all(sharded.speculations.current is None for sharded in optimizer.engine.step.muon)
    optimizer.step()
    assert optimizer.engine.ledger.balance() == 0
    torch._dynamo.reset()
