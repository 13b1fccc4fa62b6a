"""Requests: what fits which gradient, and what every position of the extra inputs and outputs is."""

import pytest

from compile_muon.passes import BackwardRequest, MuonZeroError, Purpose, ReducedGrad
from compile_muon.passes.errors import RequestError
from compile_muon.passes.language.layout import Axis, Layout
from compile_muon.passes.language.request import Extras
from compile_muon.passes.language.spec import MuonSpec, ParamSpec

ACCUMULATE, REDUCE, SPECULATE = Purpose
MUON = MuonSpec(1, 4, 4, True, "standard", (3.0, -4.0, 2.0), 1.0, (), "bfloat16", 1e-7, "owner")


def grad(stage=1, world=2, muon=MUON, speculates=True):
    spec = ParamSpec(Layout((4, 4), stage, Axis("shard", world, 0, "g")), "float32", "float32", "float32", muon)
    return ReducedGrad(spec, 0, 0 if speculates and muon is not None else None)


GRADS = (grad(), grad(muon=None), grad(), grad(speculates=False))


def request(*rows):
    return BackwardRequest(*zip(*rows, strict=True))


MIXED = request((SPECULATE, True, True), (ACCUMULATE, False, False), (SPECULATE, False, True), (REDUCE, True, False))


def test_positions_follow_from_the_request_alone():
    MIXED.check(GRADS)
    assert MIXED.unreduced_inputs == (0, 3)
    assert MIXED.carried_inputs == (0, 2)
    assert MIXED.accumulated == (1,)
    assert MIXED.speculated == (0, 2)
    assert (MIXED.extra_outputs, MIXED.speculation_outputs) == (4, 3)
    assert MIXED.split(["whole", "first", "second", "prints"]) == Extras(
        {1: "whole"}, {0: "first", 2: "second"}, "prints"
    )
    with pytest.raises(ValueError, match="3 extra outputs where the request has 4"):
        MIXED.split(["whole", "first", "second"])
    plain = request(*[(REDUCE, False, False)] * 4)
    assert (plain.unreduced_inputs, plain.carried_inputs, plain.extra_outputs) == ((), (), 0)
    assert plain.split([]) == Extras({}, {}, None)


@pytest.mark.parametrize(
    ("row", "of", "message"),
    [
        (
            (ACCUMULATE, False, False),
            grad(stage=2),
            "ACCUMULATE at stage 2 with world 2: nothing accumulates; use REDUCE",
        ),
        ((ACCUMULATE, False, False), grad(world=1), "ACCUMULATE at stage 1 with world 1"),
        ((SPECULATE, False, False), grad(muon=None), "SPECULATE for a parameter that is not a Muon matrix"),
        ((SPECULATE, False, False), grad(speculates=False), "does not return untouched; use REDUCE"),
        ((REDUCE, True, False), grad(stage=3), "unreduced at stage 3 with world 2: nothing is kept"),
        ((ACCUMULATE, True, False), grad(), "unreduced with ACCUMULATE, which reduces nothing"),
        ((REDUCE, False, True), grad(), "carried with REDUCE; it only counts for a direction, use SPECULATE"),
        ((ACCUMULATE, False, True), grad(), "carried with ACCUMULATE"),
    ],
)
def test_what_a_gradient_does_not_allow_is_refused(row, of, message):
    with pytest.raises(RequestError, match=rf"gradient 1 of shape \(4, 4\): .*{message}") as caught:
        request((REDUCE, False, False), row).check((grad(), of))
    assert isinstance(caught.value, MuonZeroError) and isinstance(caught.value, ValueError)


def test_lengths():
    with pytest.raises(RequestError, match=r"a request of \[4\] entries for 3 gradients"):
        MIXED.check(GRADS[:3])
    with pytest.raises(RequestError, match=r"a request of \[1, 2\] entries for 2 gradients"):
        BackwardRequest((REDUCE, REDUCE), (False,), (False, False)).check(GRADS[:2])


def test_one_purpose_for_every_gradient_that_allows_it():
    of = BackwardRequest.of
    assert of(GRADS, SPECULATE).purposes == (SPECULATE, REDUCE, SPECULATE, REDUCE)
    assert of(GRADS, SPECULATE, carried=True).carried == (True, False, True, False)
    assert of(GRADS, ACCUMULATE, unreduced=True) == request(*[(ACCUMULATE, False, False)] * 4)
    assert of(GRADS, REDUCE, unreduced=True, carried=True) == request(*[(REDUCE, True, False)] * 4)
    alone = (grad(world=1), grad(stage=0), grad(stage=3))
    for purpose in (ACCUMULATE, REDUCE):
        assert of(alone, purpose, unreduced=True, carried=True) == request(*[(REDUCE, False, False)] * 3)
    for grads in (GRADS, alone, ()):
        for purpose in Purpose:
            of(grads, purpose, unreduced=True, carried=True).check(grads)
