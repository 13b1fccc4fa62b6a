"""The graphs of a step without the other ranks, and what the simulator says of them: tests of the schedule."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from tiny_gpt import GPT, OPTIONS, SLOW, TOKENS, configured
from tiny_gpt import one_layer as ONE
from torch import Tensor, nn
from torch.fx import Interpreter, Node
from torch.utils._pytree import tree_leaves

from compile_muon import MuonZero
from compile_muon.config import FrameOptions
from compile_muon.engine import frame
from compile_muon.engine.step_checks import StepChecks
from compile_muon.errors import MuonZeroError
from compile_muon.passes import LOWERING_PASSES, GraphKind
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.lowering import buckets
from compile_muon.passes.lowering.schedule import SCHEDULE
from compile_muon.passes.torch_private import fake_group
from compile_muon.planning import Captured, capture_step
from compile_muon.planning.capture import shard, simulated_job
from compile_muon.planning.step import step_graphs
from compile_muon.simulate import simulate, simulate_together
from compile_muon.simulate.engine import COMPUTE
from compile_muon.simulate.newton_schulz import Call
from compile_muon.simulate.offload_transfers import Move

WORLD = 4


def step(
    stage: int,
    *,
    world: int = WORLD,
    rank: int = 0,
    options: FrameOptions = OPTIONS,
    backend: str | None = None,
    model: Callable[[], nn.Module] = GPT,
    **settings,
) -> Captured:
    config = configured(stage, **settings)
    return capture_step(model, (TOKENS,), world=world, rank=rank, config=config, options=options, backend=backend)


captured = functools.cache(step)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several collectives of each kind, of a model that would fit into one."""
    monkeypatch.setattr(buckets, "_SMALLEST", 2**12)


def test_a_step_is_forward_backward_and_the_update() -> None:
    found = captured(1)
    assert [g.kind for g in found.graphs[:2]] == [GraphKind.FORWARD, GraphKind.BACKWARD]
    assert [g.frame for g in found.graphs[2:]] == ["checks", "commit", "refresh"]
    timeline = found.simulated(SLOW)
    assert timeline.traffic.matrices > 0
    assert {event.category for event in timeline.events} >= {"reduce", "exchange", "checks", "refresh"}
    assert "gather" not in timeline.exposed
    assert timeline.seconds == pytest.approx(timeline.busy + sum(timeline.exposed.values()))


def test_the_schedule_hides_exchanges(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it every collective is waited for where it starts."""
    scheduled = captured(1).simulated(SLOW)
    monkeypatch.setattr(frame, "LOWERING_PASSES", tuple(p for p in LOWERING_PASSES if p is not SCHEDULE))
    plain = step(1).simulated(SLOW)
    assert plain.traffic == scheduled.traffic
    assert plain.busy == pytest.approx(scheduled.busy)
    assert scheduled.exposed.get("exchange", 0.0) < 0.8 * plain.exposed["exchange"]
    assert scheduled.seconds < plain.seconds


def test_resident_weights_come_under_forward() -> None:
    """What the step before has started: a layer is computed while the weights of those behind it are under way."""
    found = captured(1)
    numbers = [number for played in found.graphs for number in played.awaits.values()]
    assert {*numbers} == {*range(max(numbers) + 1)} and max(numbers) >= 3
    timeline = found.simulated(SLOW)
    gathers = [event for event in timeline.events if event.category == "refresh" and event.stream != COMPUTE]
    assert len(gathers) == max(numbers) + 1
    computed = [e for e in timeline.events if e.stream == COMPUTE and gathers[0].end <= e.start < gathers[-1].end]
    assert any(event.category == "product" for event in computed)
    assert timeline.exposed["refresh"] < sum(event.end - event.start for event in gathers)


def test_bytes_are_those_that_the_optimizer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step that is run, refresh included; collectives of the fake group return anything, and nobody answers. Every
    rank owns something of the one exchange: the fake group cannot send nothing."""
    monkeypatch.setattr(buckets, "_SMALLEST", 2**20)
    expected = step(3, backend="nccl", options=FrameOptions(codegen="eager"), model=ONE).simulated(SLOW).traffic
    monkeypatch.setattr(StepChecks, "skips", lambda *args: False)
    monkeypatch.setattr(StepChecks, "speculated", lambda checks: frozenset(checks.names("ready")))
    torch.compiler.reset()
    with fake_group(0, WORLD):
        model = ONE()
        optimizer = MuonZero(model, stage=3, gradient_accumulation_steps=1, ns_method="standard")
        compiled = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
        before = optimizer.traffic
        compiled(TOKENS).backward()
        optimizer.step()
        counted = optimizer.traffic
    torch.compiler.reset()
    assert before == Traffic()
    assert counted == expected


def matrices_of(model: nn.Module) -> list[Tensor]:
    return [p for block in model.blocks for p in block.parameters() if p.ndim == 2]


@pytest.mark.parametrize(("stage", "model"), [(0, ONE), (1, GPT), (3, GPT)])
def test_residents_are_what_a_rank_holds(stage: int, model: Callable[[], nn.Module]) -> None:
    whole = 4 * sum(param.numel() for param in model().parameters())
    matrices = 4 * sum(p.numel() for p in matrices_of(model()))
    state = 2 * whole - matrices  # a momentum for each matrix, two moments for the rest
    expected = {
        0: {"parameters": whole, "optimizer": state},
        1: {"parameters": whole, "optimizer": state // WORLD},  # in float32 the shard is a part of what is resident
        3: {"parameters": whole // WORLD, "optimizer": state // WORLD},
    }
    found = captured(stage) if model is GPT else step(stage, model=model)
    assert found.resident == expected[stage]


def test_weights_in_host_memory_are_not_on_a_gpu_and_come_over_its_link() -> None:
    here, there = captured(3), step(3, offload_param="cpu")
    gpu = replace(SLOW, device="cuda", host_bandwidth=1e12)
    before, after = here.simulated(gpu), there.simulated(gpu)
    assert there.on_host == before.peak.by_category["parameters"] and not after.peak.by_category["parameters"]
    # Forward and backward read copies.
    copied = sum(event.end - event.start for event in after.events if event.stream == "offload in")
    assert copied == pytest.approx(2 * there.on_host / 1e12, rel=0.01)  # of embeddings backward reads nothing
    assert after.peak.total < before.peak.total
    slow = there.simulated(replace(gpu, host_bandwidth=1e6))
    assert slow.exposed["offload"] > 0.9 * 2 * there.on_host / 1e6
    assert there.simulated(SLOW).peak.by_category["parameters"] == there.on_host  # the same memory


def test_projected_gradients_are_live_until_the_commit_and_masters_come_for_them() -> None:
    offloaded = {"param_dtype": "bfloat16", "offload": {"device": "cpu", "masters": True}}
    found = step(1, method="muown", model=ONE, **offloaded)
    frames = [graph.frame for graph in found.graphs]
    projection, directions = (found.graphs[frames.index(frame)] for frame in ("projection", "step0"))
    matrices = sum(p.numel() for p in matrices_of(ONE())) // WORLD
    (projected,) = projection.gm.graph.output_node().args
    assert sum(node.meta["val"].nbytes for node in projected) == 4 * matrices
    read = [node for node in directions.gm.graph.find_nodes(op="placeholder") if node.name.startswith("grad_")]
    assert sum(node.meta["val"].nbytes for node in read) == 4 * matrices, "in the dtype of states"
    moves = [move for each in projection.moves.values() for move, _ in each]
    assert moves.count(Move.OPEN) == moves.count(Move.LEAVE) > 0 and set(moves) == {Move.OPEN, Move.LEAVE}


class Weighed(Interpreter):
    """Runs a graph on zeros, lets go of what is not read any more, and weighs what is there beside the inputs."""

    def run(self, *args: Tensor) -> object:
        self.inputs = {_memory(x) for x in args}
        self.peak = 0
        return super().run(*args)

    def run_node(self, n: Node) -> object:
        result = super().run_node(n)
        held = {_memory(x): x.untyped_storage().nbytes() for x in tree_leaves((dict(self.env), result)) if _memory(x)}
        self.peak = max(self.peak, sum(nbytes for key, nbytes in held.items() if key not in self.inputs))
        return result


def _memory(value: object) -> int:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else 0


@pytest.mark.parametrize("kind", [0, 1])
def test_peak_memory_is_what_a_run_holds(kind: int) -> None:
    """One rank, forward and backward each by itself; what Newton-Schulz holds inside is not weighed."""
    found = captured(0, world=1)
    played = found.graphs[kind]
    weighed = Weighed(played.gm)
    values = [node.meta["val"] for node in played.gm.graph.find_nodes(op="placeholder")]
    weighed.run(*(torch.zeros(value.shape, dtype=value.dtype) for value in values))
    alone = simulate([played], SLOW, groups={}, ranks=1, codegen="eager").peak
    inside = max(
        (Call(n, SLOW).workspace_bytes() for n in played.gm.graph.nodes if "newton_schulz" in str(n.target)), default=0
    )
    assert alone.total == weighed.peak + inside


def test_a_process_that_trains_already_is_refused() -> None:
    with fake_group(0, 2), pytest.raises(MuonZeroError, match="has one"):
        step(1)


def test_the_process_group_is_gone_behind_it_even_if_the_model_fails() -> None:
    def broken() -> nn.Module:
        raise RuntimeError("no model")

    with pytest.raises(RuntimeError, match="no model"):
        capture_step(broken, (TOKENS,), world=2)
    assert not dist.is_initialized()


def test_the_optimizer_keeps_its_state_provider_even_if_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object) -> None:
        raise RuntimeError("no write")

    monkeypatch.setattr("compile_muon.planning.step.commit", failing)
    with simulated_job(2, 0):
        optimizer = shard(ONE(), configured(1, offload="cpu"), axes=None, backend=None)
        provider = optimizer.engine.state_provider
        with pytest.raises(RuntimeError, match="no write"):
            step_graphs(optimizer, optimizer.engine.params, set(), OPTIONS)
        assert optimizer.engine.state_provider is provider


@pytest.mark.full
def test_ranks_of_a_step_are_played_together() -> None:
    """They meet in the same collectives, though frames and nodes are named otherwise in each, and end together."""
    steps = [captured(0, world=2, rank=rank) for rank in range(2)]
    alone = [each.simulated(SLOW) for each in steps]
    plays = {rank: lambda others, each=each: each.simulated(SLOW, others=others) for rank, each in enumerate(steps)}
    found = simulate_together(plays)
    for rank, timeline in found.items():
        assert timeline.busy == pytest.approx(alone[rank].busy)  # of the same kernels, summed in another order
        assert timeline.seconds >= max(each.seconds for each in alone) * (1 - 1e-9)
        (issued,) = timeline.issued.values()
        assert [name for name, _ in issued] == [name for name, _ in next(iter(found[0].issued.values()))]
    assert found[0].seconds == pytest.approx(found[1].seconds, rel=0.02)


@pytest.mark.full
def test_states_at_owners_are_planned() -> None:
    """All ranks together hold each once; where they are elsewhere, buffers on the device take turns."""
    settings = {"world": 2, "method": "soap", "update": "step", "model": ONE}
    ranks = [step(3, rank=rank, **settings) for rank in range(2)]
    matrices = matrices_of(ONE())
    whole = 4 * sum(2 * (p.numel() + p.shape[0] ** 2 + p.shape[1] ** 2) for p in matrices)
    others = 4 * sum(2 * p.numel() for p in ONE().parameters()) - 4 * sum(2 * p.numel() for p in matrices)
    assert sum(own.resident["optimizer"] for own in ranks) == whole + others
    away = step(3, rank=1, offload="cpu", **settings)
    assert away.states == ranks[1].states
    assert sum(own.states["moments"] for own in ranks) == whole + others
    assert away.simulated(SLOW).seconds > 0
