"""One trace serves every sharding, and says what a capture of each would; nothing is given memory for it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_gpt import one_layer
from torch._subclasses import FakeTensor

from compile_muon.config import Config, FrameOptions, config_from_kwargs
from compile_muon.engine.dtensors import local_tensor
from compile_muon.passes.costs import Link
from compile_muon.passes.lowering import buckets
from compile_muon.passes.methods import METHODS, MUON, MatrixMethod
from compile_muon.planning import capture_step
from compile_muon.planning.candidates import with_adamw
from compile_muon.planning.capture import shard, simulated_job
from compile_muon.planning.machine import load_machine
from compile_muon.planning.models import Batch, load_subject
from compile_muon.planning.simulate import Timeline
from compile_muon.planning.trace import Target, Trace, trace_step

TOKENS = torch.zeros(2, 8, dtype=torch.int64)
AXES = ({"shard": 4}, {"replicate": 2, "shard": 2})
#: where sending takes about as long as computing
SLOW = replace(load_machine("cpu"), cores=0, host_seconds={}, links=(Link(None, 1e9, 1e-6),))


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several collectives of each kind, of a model that would fit into one."""
    monkeypatch.setattr(buckets, "_SMALLEST", 2**12)


def configured(stage: int, **settings: Any) -> Config:
    given = {"gradient_accumulation_steps": 1, "ns_method": "standard", **settings}
    return config_from_kwargs(stage=stage, **given)


def options(**changes: Any) -> FrameOptions:
    return FrameOptions(**{"codegen": "eager", "bucket_bytes": 2**16, **changes})


@functools.cache
def traced(settings: tuple[tuple[str, Any], ...] = (), changes: tuple[tuple[str, Any], ...] = ()) -> Trace:
    subject = load_subject("tiny_gpt:one_layer", Batch(16, 8))
    return trace_step(subject.build, subject.batch, configured(1, **dict(settings)), options(**dict(changes)))


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


@pytest.mark.parametrize(("stage", "axes"), [pytest.param(0, 1, marks=pytest.mark.full), (3, 0)])
def test_every_stage_and_mesh_of_one_trace(stage: int, axes: int) -> None:
    compare(traced(), Target(4, configured(stage), AXES[axes], "nccl"), rank=1)


@pytest.mark.full
def test_micro_batches() -> None:
    """At stage 1 all but the last keep whole gradients; the trace is of that stage, and the others reduce each."""
    settings = (("gradient_accumulation_steps", 3),)
    compare(traced(settings), Target(4, configured(1, **dict(settings)), AXES[0], "nccl"), rank=0)


def test_adamw_of_a_trace_with_muon() -> None:
    found = compare(traced(), Target(4, with_adamw(configured(2)), AXES[1], "nccl"), rank=0)
    assert found.traffic.matrices == 0


SETTINGS: list[dict[str, Any]] = [{"method": m.name} for m in METHODS if isinstance(m, MatrixMethod) and m is not MUON]
SETTINGS += [{"auxiliary": "lion"}, {"momentum_dtype": "bfloat16"}, {"momentum_dtype": "8bit"}]
#: with states at owners; the others are in the full tier
_OFTEN = ("soap",)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(each, id=name, marks=() if name in _OFTEN else pytest.mark.full)
        for each in SETTINGS
        for name in each.values()
    ],
)
def test_every_method_and_dtype_is_in_a_plan(settings: dict[str, Any]) -> None:
    trace = traced(tuple(settings.items()))
    compare(trace, Target(4, configured(1, **settings), AXES[0], "nccl"), rank=1)


@pytest.mark.full
def test_methods_groups_and_views_are_in_a_plan() -> None:
    """Their states are memory, facts travel, and what lies whole on its rank does not; beside plain Muon."""
    own = {
        "method": "normuon",
        "muon_views": {"*qkv.weight": {"split": [48, 48, 48], "heads": 2}},
        "groups": {"*up.weight": {"method": "adamuon"}, "embedding*": {"lr": 0.1}},
    }
    config = configured(2, **own)
    trace = trace_step(load_subject("tiny_gpt:one_layer", Batch(16, 8)).build, (TOKENS,), config, options())
    plain = traced().captured(Target(4, configured(2), AXES[0], "nccl"), rank=1).simulated(SLOW)
    found = compare(trace, Target(4, config, AXES[0], "nccl"), rank=1)
    up, rows = 192 * 48, 144 + 48 + 48  # elements of one kind of state, rows of the others
    more = found.peak.by_category["optimizer"] - plain.peak.by_category["optimizer"]
    assert more == 4 * (up + rows) / 4
    assert found.traffic.bytes_sent < plain.traffic.bytes_sent
    adamw = trace.captured(Target(4, with_adamw(config), AXES[0], "nccl"), rank=1)
    assert adamw.simulated(SLOW).traffic.matrices == 0


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ((("update", "step"), ("momentum_dtype", "bfloat16")), ()),  # with random numbers
        pytest.param((("shard_state_over", "all"),), (), marks=pytest.mark.full),
    ],
)
def test_settings_that_change_the_graphs(settings: tuple, changes: tuple) -> None:
    target = Target(4, configured(3, **dict(settings)), AXES[1], "nccl")
    compare(traced(settings, changes), target, rank=2)


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
    trace = trace_step(subject.build, subject.batch, configured(1), options())
    step = trace.captured(Target(8, configured(3), {"shard": 8}, "nccl"))
    assert step.resident["parameters"] > 2**41 / 8
