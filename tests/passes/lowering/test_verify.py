"""The verifier, shown deliberately broken graphs: every rule must be able to say no."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compile_muon import MuonZero
from compile_muon.passes import JOINT_PASSES, LOWERING_PASSES, GraphKind, GraphPass, Purpose
from compile_muon.passes.collectives import collectives, is_wait
from compile_muon.passes.errors import PassContractError, VerificationError

BY_NAME = {p.name: p for p in (*JOINT_PASSES, *LOWERING_PASSES)}
VERIFY = BY_NAME["verify"]


def breaking(rewrite):
    """The lowering pipeline with a pass in front of the verifier that spoils its work."""

    def spoil(gm, ctx):
        rewrite(gm)
        return gm

    at = LOWERING_PASSES.index(VERIFY)
    return (*LOWERING_PASSES[:at], GraphPass("spoil", spoil), *LOWERING_PASSES[at:])


@pytest.fixture(scope="module")
def graphs(uneven):
    return uneven(0, 3, stage=3)


def test_a_sound_graph_passes(graphs):
    graphs.lowered(GraphKind.FORWARD)
    for purpose in Purpose:
        graphs.lowered(GraphKind.BACKWARD, purpose)


@pytest.mark.parametrize("kind", [GraphKind.FORWARD, GraphKind.BACKWARD])
def test_markers_left(kind, graphs):
    fake_lower = GraphPass("lower", lambda gm, ctx: gm)
    with pytest.raises(VerificationError, match=r"markers \['unshard.* were not lowered; the lower pass"):
        graphs.lowered(kind, passes=(fake_lower, VERIFY))


def test_verification_needs_lowering_first(graphs):
    with pytest.raises(PassContractError, match=r"'verify' needs \['lower'\]"):
        graphs.lowered(GraphKind.FORWARD, passes=(VERIFY,))


def wait_twice(gm):
    node, _ = next(collectives(gm))
    (wait,) = node.users
    with gm.graph.inserting_after(wait):
        second = gm.graph.call_function(wait.target, (node,))
        second.meta = dict(wait.meta)
    list(wait.users)[0].replace_input_with(wait, second)


def read_unwaited(gm):
    node, _ = next(collectives(gm))
    (wait,) = node.users
    user = next(iter(wait.users))
    user.replace_input_with(wait, node)


def drop_wait(gm):
    node, _ = next(collectives(gm))
    (wait,) = node.users
    wait.replace_all_uses_with(node)
    gm.graph.erase_node(wait)


@pytest.mark.parametrize("kind", [GraphKind.FORWARD, GraphKind.BACKWARD])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wait_twice, r"has 2 waits and is read unwaited by \[\]"),
        (read_unwaited, r"is read unwaited by \['"),
        (drop_wait, r"has 0 waits and is read unwaited by \['"),
    ],
)
def test_waits(kind, spoil, message, graphs):
    with pytest.raises(VerificationError, match=message):
        graphs.lowered(kind, passes=breaking(spoil))


def save_weight(gm):
    """Return what a gather brought, as if backward needed it."""
    output = gm.graph.output_node()
    (wait,) = next(node for node, kind in collectives(gm) if kind == "all_gather").users
    output.args = ((*output.args[0], next(iter(wait.users))),)


def save_cast_of_weight(gm):
    output = gm.graph.output_node()
    (wait,) = next(node for node, kind in collectives(gm) if kind == "all_gather").users
    view = next(iter(wait.users))
    with gm.graph.inserting_before(output):
        cast = gm.graph.call_function(torch.ops.aten._to_copy.default, (view,), {"dtype": torch.bfloat16})
    output.args = ((*output.args[0], cast),)


@pytest.mark.parametrize("spoil", [save_weight, save_cast_of_weight])
def test_saved_weights(spoil, graphs):
    with pytest.raises(VerificationError, match="is saved for backward; the recompute pass must see its unshard"):
        graphs.lowered(GraphKind.FORWARD, passes=breaking(spoil))


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x))))).square().mean()


def test_without_the_recompute_pass_the_verifier_says_no(world, trace):
    """The reason for the pass, and for the rule."""
    x = torch.randn(64, 6)  # activations outweigh weights, so that saving weights is what the min cut prefers
    without = tuple(p for p in JOINT_PASSES if p.name != "recompute")
    with world(0, 2):
        model = Two()
        MuonZero(model, stage=3)
        broken, sound = trace(model, x, joint_passes=without), trace(model, x)
    with pytest.raises(VerificationError, match="saved for backward"):
        broken.lowered(GraphKind.FORWARD)
    sound.lowered(GraphKind.FORWARD)


def test_every_collective_of_a_sound_graph_is_waited_for_once(graphs):
    found = 0
    for kind, purpose in [(GraphKind.FORWARD, Purpose.REDUCE), *((GraphKind.BACKWARD, each) for each in Purpose)]:
        gm, _ = graphs.lowered(kind, purpose)
        for node, _kind in collectives(gm):
            found += 1
            assert [is_wait(user) for user in node.users] == [True]
    assert found > 8
