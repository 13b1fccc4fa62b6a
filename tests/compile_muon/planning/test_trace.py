"""One trace serves every sharding, and says what a capture of each would; nothing is given memory for it."""

import functools
from typing import Any

import pytest
from tiny_gpt import OPTIONS, SLOW, TOKENS, configured, one_layer
from torch._subclasses import FakeTensor

from compile_muon.config import config_from_kwargs
from compile_muon.engine.dtensors import local_tensor
from compile_muon.passes.lowering import buckets
from compile_muon.passes.methods import METHODS, MUON, MatrixMethod
from compile_muon.planning import capture_step
from compile_muon.planning.candidates import with_adamw
from compile_muon.planning.capture import shard, simulated_job
from compile_muon.planning.models import Batch, load_subject
from compile_muon.planning.trace import Target, Trace, trace_step
from compile_muon.simulate import Timeline

AXES = ({"shard": 4}, {"replicate": 2, "shard": 2})


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several collectives of each kind, of a model that would fit into one."""
    monkeypatch.setattr(buckets, "_SMALLEST", 2**12)


@functools.cache
def traced(*settings: tuple[str, Any]) -> Trace:
    subject = load_subject("tiny_gpt:one_layer", Batch(16, 8))
    return trace_step(subject.build, subject.batch, configured(1, **dict(settings)), OPTIONS)


def compare(trace: Trace, target: Target, rank: int) -> Timeline:
    """What is made of the trace is what a model with values is captured as, while it is trained."""
    real = capture_step(
        one_layer, (TOKENS,), world=target.world, rank=rank, config=target.config, options=trace.options,
        axes=target.axes, backend=target.backend,
    )  # fmt: skip
    found, expected = trace.captured(target, rank=rank).simulated(SLOW), real.simulated(SLOW)
    assert found.traffic == expected.traffic
    assert found.traffic.bytes_sent > 0
    assert found.peak == expected.peak
    assert (found.seconds, found.exposed) == (expected.seconds, expected.exposed)
    return found


@pytest.mark.full
def test_adamw_of_a_trace_with_muon() -> None:
    found = compare(traced(), Target(4, with_adamw(configured(2)), AXES[1], "nccl"), rank=0)
    assert found.traffic.matrices == 0


SETTINGS: list[dict[str, Any]] = [{"method": m.name} for m in METHODS if isinstance(m, MatrixMethod) and m is not MUON]
SETTINGS += [{"auxiliary": "lion"}, {"momentum_dtype": "bfloat16"}, {"momentum_dtype": "8bit"}]


@pytest.mark.parametrize(
    ("settings", "stage", "axes", "rank"),
    [
        pytest.param({}, 0, 1, 1, marks=pytest.mark.full),
        ({}, 3, 0, 1),
        ({"update": "step", "momentum_dtype": "bfloat16"}, 3, 1, 2),  # with random numbers
        pytest.param({"shard_state_over": "all"}, 3, 1, 2, marks=pytest.mark.full),
        # At stage 1 all but the last keep whole gradients; the trace is of that stage, and the others reduce each.
        pytest.param({"gradient_accumulation_steps": 3}, 1, 0, 0, marks=pytest.mark.full),
        # "soap" has states at owners; the others are in the full tier
        *(
            pytest.param(each, 1, 0, 1, id=name, marks=() if name == "soap" else pytest.mark.full)
            for each in SETTINGS
            for name in each.values()
        ),
    ],
)
def test_every_stage_mesh_method_and_dtype_is_in_a_plan(
    settings: dict[str, Any], stage: int, axes: int, rank: int
) -> None:
    target = Target(4, configured(stage, **settings), AXES[axes], "nccl")
    compare(traced(*settings.items()), target, rank)


@pytest.mark.full
def test_methods_groups_and_views_are_in_a_plan() -> None:
    """Their states are memory, facts travel, and what lies whole on its rank does not; beside plain Muon."""
    own = {
        "method": "normuon",
        "muon_views": {"*qkv.weight": {"split": [48, 48, 48], "heads": 2}},
        "groups": {"*up.weight": {"method": "adamuon"}, "embedding*": {"lr": 0.1}},
    }
    config = configured(2, **own)
    trace = trace_step(load_subject("tiny_gpt:one_layer", Batch(16, 8)).build, (TOKENS,), config, OPTIONS)
    plain = traced().captured(Target(4, configured(2), AXES[0], "nccl"), rank=1).simulated(SLOW)
    found = compare(trace, Target(4, config, AXES[0], "nccl"), rank=1)
    up, rows = 192 * 48, 144 + 48 + 48  # elements of one kind of state, rows of the others
    more = found.peak.by_category["optimizer"] - plain.peak.by_category["optimizer"]
    assert more == 4 * (up + rows) / 4
    assert found.traffic.bytes_sent < plain.traffic.bytes_sent
    adamw = trace.captured(Target(4, with_adamw(config), AXES[0], "nccl"), rank=1)
    assert adamw.simulated(SLOW).traffic.matrices == 0


def test_owners_by_formula_are_those_of_the_graphs() -> None:
    """Of four matrices for five ranks, so that one has none, and that one is the same."""
    target = Target(5, configured(1), {"shard": 5}, "nccl")
    work = traced().owner_work(target)
    assert sum(map(bool, work)) == 4
    idle = work.index(0)
    graphs = [traced().captured(target, rank=rank).simulated(SLOW).traffic.matrices for rank in (idle, (idle + 1) % 5)]
    assert graphs == [0, 1]
    more = traced().owner_work(Target(11, configured(1), {"shard": 11}, "nccl"))
    assert sum(not done for done in more) == 11 - 4


@pytest.mark.parametrize("name", ["GPT", "on_meta"])
def test_nothing_is_given_memory(name: str) -> None:
    model = load_subject(f"tiny_gpt:{name}", Batch(16, 8)).build()
    assert all(isinstance(p, FakeTensor) and p.device.type == "cpu" for p in model.parameters())


@pytest.mark.parametrize("given", [{}, {"momentum_dtype": "8bit"}, {"offload": "cpu", "method": "normuon"}])
def test_nor_is_optimizer_state(given: dict[str, Any]) -> None:
    with simulated_job(2, 0):
        model = load_subject("tiny_gpt:one_layer", Batch(16, 8)).build()
        optimizer = shard(model, config_from_kwargs(**given), axes=None, backend=None)
        states = [local_tensor(x) for slots in optimizer.state.values() for x in slots.values() if x.ndim]
        assert states and all(isinstance(state, FakeTensor) for state in states)


def test_a_model_larger_than_this_machine() -> None:
    subject = load_subject("tiny_gpt:huge", Batch(16, 8))
    trace = trace_step(subject.build, subject.batch, configured(1), OPTIONS)
    step = trace.captured(Target(8, configured(3), {"shard": 8}, "nccl"))
    assert step.resident["parameters"] > 2**41 / 8
