"""The verifier, shown deliberately broken graphs: every rule must be able to say no."""

import pytest
import torch
from torch import nn

from compile_muon import MuonZero
from compile_muon.passes import JOINT_PASSES, LOWERING_PASSES, GraphKind, GraphPass, PassContext, PassOptions, Purpose
from compile_muon.passes.collectives import collectives
from compile_muon.passes.errors import PassContractError, VerificationError
from compile_muon.passes.lowering import buckets
from compile_muon.passes.lowering.schedule import SCHEDULE
from compile_muon.passes.lowering.verify import VERIFY


@pytest.fixture
def deep(world, trace):
    """Graphs of seven layers on one of two ranks; activations outweigh weights, which the min cut would save."""

    def trace_with(joint_passes=JOINT_PASSES):
        with world(0, 2):
            model = nn.Sequential(*(layer for _ in range(7) for layer in (nn.Linear(6, 6, bias=False), nn.Tanh())))
            MuonZero(model, stage=3)
            return trace(model, torch.randn(64, 6), joint_passes=joint_passes)

    return trace_with


@pytest.fixture
def sound(deep):
    return deep()


def breaking(rewrite):
    """The lowering pipeline with a pass in front of the verifier that spoils its work."""

    def spoil(gm, ctx):
        rewrite(gm)
        return gm

    at = LOWERING_PASSES.index(VERIFY)
    return (*LOWERING_PASSES[:at], GraphPass("spoil", spoil), *LOWERING_PASSES[at:])


def first(gm):
    """The first gather, and its wait."""
    node, _ = next(collectives(gm))
    (wait,) = node.users
    return node, wait


def wait_twice(gm):
    node, wait = first(gm)
    with gm.graph.inserting_after(wait):
        second = gm.graph.call_function(wait.target, (node,))
        second.meta = dict(wait.meta)
    next(iter(wait.users)).replace_input_with(wait, second)


def read_unwaited(gm):
    node, wait = first(gm)
    next(iter(wait.users)).replace_input_with(wait, node)


def drop_wait(gm):
    node, wait = first(gm)
    wait.replace_all_uses_with(node)
    gm.graph.erase_node(wait)


def save_weight(gm, cast=False):
    """Return what a gather brought, as if backward needed it."""
    output, saved = gm.graph.output_node(), next(iter(first(gm)[1].users))
    if cast:
        with gm.graph.inserting_before(output):
            saved = gm.graph.call_function(torch.ops.aten._to_copy.default, (saved,), {"dtype": torch.bfloat16})
    output.args = ((*output.args[0], saved),)


SAVED = "is saved for backward; the recompute pass must see its unshard"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wait_twice, r"has 2 waits and is read unwaited by \[\]"),
        (read_unwaited, r"is read unwaited by \['"),
        (drop_wait, r"has 0 waits and is read unwaited by \['"),
        (save_weight, SAVED),
        (lambda gm: save_weight(gm, cast=True), SAVED),
    ],
)
def test_broken_graphs(spoil, message, sound):
    with pytest.raises(VerificationError, match=message):
        sound.lowered(GraphKind.FORWARD, passes=breaking(spoil))


def test_graphs_that_were_not_lowered(sound):
    with pytest.raises(VerificationError, match=r"markers \['unshard.* were not lowered; the lower pass"):
        sound.lowered(GraphKind.BACKWARD, passes=(GraphPass("lower", lambda gm, ctx: gm), VERIFY))
    with pytest.raises(PassContractError, match=r"'verify' needs \['lower'\]"):
        sound.lowered(GraphKind.FORWARD, passes=(VERIFY,))


def test_without_the_recompute_pass_the_verifier_says_no(deep):
    """The reason for the pass, and for the rule, which holds unless weights are to be saved."""
    broken = deep(tuple(p for p in JOINT_PASSES if p.name != "recompute"))
    with pytest.raises(VerificationError, match="saved for backward"):
        broken.lowered(GraphKind.FORWARD)
    broken.lowered(GraphKind.FORWARD, reshard_after_forward=False)


def test_a_schedule_that_goes_over_the_limit(deep, monkeypatch):
    def greedy(gm, ctx):
        return SCHEDULE.rewrite(gm, PassContext(ctx.kind, options=PassOptions(), request=ctx.request))

    monkeypatch.setattr(buckets, "_SMALLEST", 64)
    passes = [GraphPass("schedule", greedy) if p is SCHEDULE else p for p in LOWERING_PASSES]
    with pytest.raises(VerificationError, match="exchanges under way hold .* more than exchange_bytes = 10"):
        deep().lowered(GraphKind.BACKWARD, Purpose.SPECULATE, passes=passes, exchange_bytes=10)
