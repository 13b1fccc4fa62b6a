"""Counted at run time: Newton-Schulz once per matrix and step, reductions when they are due, bytes by the formulas.

The counts are those of PyTorch's profiler (``traced.py``), which sees what compiled graphs execute.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.harness import Ranks
from support.traced import Trace, trace
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.testing._internal.distributed.fake_pg import FakeStore

import compile_muon
from compile_muon.engine.step_checks import StepChecks
from compile_muon.passes.formulas import bytes_by_axis

EXPERTS = 4
FLOAT = 4  # bytes


class Small(nn.Module):
    """Six hidden matrices and a stack of experts; 10 rows or 6 do not divide by 4 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.up = nn.Linear(12, 10)
        self.down = nn.Linear(10, 12, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, 12, 12) / 4)
        self.head = nn.Linear(12, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + layer(h).tanh()
        h = h + self.down(self.up(h).relu()) + torch.einsum("btc,ecd->btd", h, self.experts)
        return self.head(h)


MATRICES = [(12, 12)] * 4 + [(10, 12), (12, 10)]


class Block(nn.Module):
    """The matrices of a transformer's block, with little between them: what is counted is theirs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.query(x) * self.key(x) + self.value(x))
        return x + self.down(self.up(x).relu())


class GPT(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def shapes(model: nn.Module) -> list[tuple[int, ...]]:
    return [tuple(param.shape) for param in model.parameters()]


def padded(shape: tuple[int, ...], world: int) -> tuple[int, int]:
    """``(rows, cols)`` of a parameter with its rows filled up to a multiple of ``world``."""
    return -(-shape[0] // world) * world, torch.Size(shape[1:]).numel()


def count(
    model: nn.Module,
    rank: int,
    world: int,
    warm: int,
    micro: int,
    reshard_after_forward: bool = True,
    eager: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train ``warm`` steps, then trace one.

    Args:
        eager: without a compiler, and with micro-batches that only the loop knows of.
    """
    everything = shapes(model)
    declared = None if eager else micro
    optimizer = compile_muon.MuonZero(model, gradient_accumulation_steps=declared, **settings)
    options = {"codegen": "eager", "reshard_after_forward": reshard_after_forward}
    compiled: Any = model if eager else torch.compile(model, backend="muon_zero", options=options)
    tokens = torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        for number in range(micro):
            with optimizer.accumulate() if eager and number < micro - 1 else contextlib.nullcontext():
                (torch.nn.functional.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten()) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(warm):
        step()
    before = optimizer.traffic
    traced = trace(step, world=world, rank=rank)
    claimed = optimizer.traffic.bytes_sent - before.bytes_sent
    matrices = optimizer.traffic.matrices - before.matrices
    return {"trace": traced.__dict__, "claimed": claimed, "matrices": matrices, "shapes": everything}


def count_small(**settings: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    return count(Small(), dist.get_rank(), dist.get_world_size(), 2, **settings)


def count_fake(rank: int, world: int, **settings: Any) -> dict[str, Any]:
    """One rank of a large world: its collectives do nothing, but they are called as they would be."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        torch.manual_seed(0)
        # What the fake collectives return is whatever the memory held, NaN included.
        unchecked = patch.object(compile_muon.MuonZero, "_refused", lambda *args: False)
        # ... and the other ranks say nothing about their directions.
        trusting = patch.object(StepChecks, "held", lambda checks, world: checks.names("ready"))
        # one set of Newton-Schulz settings, and every rank owns a matrix: the fake all-to-all cannot take empty inputs
        with unchecked, trusting:
            return count(GPT(12, 64), rank, world, 1, micro=1, ns_method="standard", **settings)
    finally:
        dist.destroy_process_group()


def generated_fake(stage: int) -> list[list[str]]:
    """Starts and waits of all-gathers in each graph's generated code, in order, by the buffer they gather into."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        torch.manual_seed(0)
        model = GPT(4, 64)
        optimizer = compile_muon.MuonZero(model, stage=stage, update="step")
        compiled = torch.compile(model, backend="muon_zero", options={"bucket_mb": 0.03})
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        _, sources = run_and_get_code(lambda: compiled(tokens).sum().backward())
        optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    pattern = r"(\w+) = torch.ops._c10d_functional.(all_gather)_into|_c10d_functional.(wait)_tensor.default\((\w+)\)"
    graphs = []
    for source in sources:
        found = [(start or wait, buffer or waited) for buffer, start, wait, waited in re.findall(pattern, source)]
        gathered = {buffer for kind, buffer in found if kind == "all_gather"}
        graphs.append([f"{kind} {buffer}" for kind, buffer in found if buffer in gathered])
    return [graph for graph in graphs if graph]


def generated_waits(stage: int) -> list[str]:
    """Matrix products, and waits for resident weights, in the code of a forward, in order."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        torch.manual_seed(0)
        model = GPT(4, 64)
        compile_muon.MuonZero(model, stage=stage)
        compiled = torch.compile(model, backend="muon_zero")
        _, (source, *_) = run_and_get_code(lambda: compiled(torch.zeros(2, 4, dtype=torch.int64)))
    finally:
        dist.destroy_process_group()
    return re.findall(r"await_refresh|extern_kernels\.\w*mm", source)


def generated_update(rank: int, world: int) -> list[tuple[str, str]]:
    """Collectives, their waits and Newton-Schulz in the code of a backward that speculates, in order.

    Waits have the kind of what they wait for.
    """
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        torch.manual_seed(0)
        model = GPT(6, 64)
        compile_muon.MuonZero(model, stage=3, update="backward", ns_method="standard")
        compiled = torch.compile(model, backend="muon_zero", options={"bucket_mb": 0.1})
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        with patch("compile_muon.passes.lowering.buckets._SMALLEST", 2**12):
            _, sources = run_and_get_code(lambda: compiled(tokens).sum().backward())
    finally:
        dist.destroy_process_group()
    (source,) = (source for source in sources if "newton_schulz" in source)
    kinds = "all_to_all_single|reduce_scatter_tensor|all_gather_into_tensor(?:_out)?"
    started = re.compile(rf"(\w+) = torch.ops._c10d_functional.({kinds})\.")
    waited, ran = r"_c10d_functional.wait_tensor.default\((\w+)\)", r"= torch.ops.muon_zero.(newton_schulz).default\("
    pattern = f"{started.pattern}|{waited}|{ran}"
    kind_of, found = {}, []
    for buffer, kind, waited, newton_schulz in re.findall(pattern, source):
        kind_of[buffer] = kind
        found.append(
            ("run", newton_schulz) if newton_schulz else ("wait", kind_of[waited]) if waited else ("start", kind)
        )
    return found


@pytest.mark.full
def test_exchanges_travel_under_backward_in_generated_code(ranks: Callable[[int], Ranks]) -> None:
    """Each but the last starts before the last two reductions do; what is waited for last is waited for last."""
    found = ranks(1).run(generated_update, rank=0, world=4)[0]
    kinds = [kind if what == "start" else "" for what, kind in found]
    exchanges = [i for i, kind in enumerate(kinds) if kind == "all_to_all_single"]
    reductions = [i for i, kind in enumerate(kinds) if kind == "reduce_scatter_tensor"]
    there, back = exchanges[: len(exchanges) // 2], exchanges[len(exchanges) // 2 :]
    assert len(there) == len(back) == 4
    assert len(reductions) > 6
    # All but the last, which reads the last gradients, start ahead of so many reductions.
    ahead = [sum(start < reduction for reduction in reductions) for start in there]
    assert ahead == sorted(ahead, reverse=True)
    assert min(ahead[:-1]) >= 2
    runs = [i for i, (what, _) in enumerate(found) if what == "run"]
    assert min(runs) > max(reductions)
    assert all(before < after for before, after in zip(runs, back, strict=True))
    # The way back of one bucket is under way during Newton-Schulz of the next, and nothing is left but waits behind it.
    assert [what for what, _ in found[max(back) + 1 :]] == ["wait"] * len(back)
    orders = [ranks(1).run(generated_update, rank=rank, world=4)[0] for rank in (3,)]
    meetings = [[event for event in order if event[0] != "run"] for order in (found, *orders)]
    assert meetings[0] == meetings[1]


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.campaign)])
def test_generated_code_waits_for_weights_layer_by_layer(ranks: Callable[[int], Ranks], stage: int) -> None:
    """Code generation neither drops the waits nor moves them together."""
    calls = ranks(1).run(generated_waits, stage=stage)[0]
    products = [place for place, call in enumerate(calls) if call != "await_refresh"]
    waits = calls.count("await_refresh")
    assert len(products) >= 4 * 4
    assert waits == sum(1 for _ in GPT(4, 64).parameters())
    # Ahead of each product no more than what its layer reads; of the products but the last some weight is left.
    ahead = [calls[:place].count("await_refresh") for place in products]
    steps = [after - before for before, after in itertools.pairwise([0, *ahead])]
    assert max(steps) <= 6, calls
    assert sum(step > 0 for step in steps) >= 4 * 3, calls


COMBINATIONS = [*itertools.product([0, 1, 2, 3], ["backward", "step"], [3]), (1, "backward", 1), (3, "backward", 1)]
#: Every value stays, and what tests below measure anyway; the others run in campaigns alone.
LEFT_OUT = ((0, "backward", 3), (1, "step", 3), (2, "step", 3), (1, "backward", 1), (2, "backward", 3), (3, "step", 3))
DEFAULT = ((1, "backward", 3), (3, "backward", 1))
CHOSEN = [
    pytest.param(*g, marks=pytest.mark.campaign if g in LEFT_OUT else () if g in DEFAULT else pytest.mark.full)
    for g in COMBINATIONS
]


@pytest.fixture(scope="module")
def counted(ranks: Callable[[int], Ranks]) -> Callable[..., list[dict[str, Any]]]:
    """Counts per rank, measured once per combination."""
    known: dict[tuple[Any, ...], list[dict[str, Any]]] = {}

    def of(world: int, **settings: Any) -> list[dict[str, Any]]:
        key = (world, *sorted(settings.items()))
        if key not in known:
            known[key] = ranks(world).run(count_small, **settings)
        return known[key]

    return of


def traces(results: list[dict[str, Any]]) -> list[Trace]:
    return [Trace(**result["trace"]) for result in results]


@pytest.mark.parametrize(("stage", "update", "micro"), CHOSEN)
def test_newton_schulz_runs_once_per_matrix_and_step(
    counted: Callable[..., Any], stage: int, update: str, micro: int
) -> None:
    results = counted(2, stage=stage, update=update, micro=micro)
    ran = sorted(shape for traced in traces(results) for shape in traced.shapes)
    split = 1 if stage == 0 else 2  # a stack is sharded by expert: each rank orthogonalizes its own
    stacks = [(EXPERTS // split, 12, 12)] * split
    assert ran == sorted([(1, *shape) for shape in MATRICES] + stacks)
    assert [r["matrices"] for r in results] == [traced.matrices for traced in traces(results)]


@pytest.mark.parametrize(("stage", "update", "micro"), CHOSEN)
def test_gradients_are_reduced_when_due(counted: Callable[..., Any], stage: int, update: str, micro: int) -> None:
    results = counted(2, stage=stage, update=update, micro=micro)
    total = sum(torch.Size(padded(shape, 2 if stage else 1)).numel() for shape in results[0]["shapes"])
    for traced in traces(results):
        # Stage 0 gathers what it has reduced: over Gloo in the order in which the others add.
        assert traced.elements["reduce_scatter"] == total * (1 if stage == 1 else micro)
        assert "all_reduce" not in traced.elements


@pytest.mark.parametrize(("stage", "update", "micro"), CHOSEN)
def test_the_optimizers_own_count_is_the_profilers(
    counted: Callable[..., Any], stage: int, update: str, micro: int
) -> None:
    for result in counted(2, stage=stage, update=update, micro=micro):
        assert result["claimed"] == round(sum(Trace(**result["trace"]).sent.values()))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_eager_code_reduces_when_due_and_is_counted(counted: Callable[..., Any], stage: int) -> None:
    """As compiled graphs do: at stage 1 sums stay on the rank until the last micro-batch."""
    results = counted(2, stage=stage, update="step", micro=3, eager=True)
    test_gradients_are_reduced_when_due(lambda *args, **settings: results, stage, "step", 3)
    for result in results:
        assert result["claimed"] == round(sum(Trace(**result["trace"]).sent.values()))


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.campaign) for stage in (0, 1)), 3])
def test_gloo_is_never_asked_to_all_gather(counted: Callable[..., Any], stage: int) -> None:
    """Several functional all-gathers in flight corrupt the heap there (docs/why/decisions.md)."""
    for traced in traces(counted(2, stage=stage, update="backward", micro=1)):
        assert "all_gather" not in traced.elements
        assert traced.elements["all_to_all"] > 0


def _sent(by_axis: Callable[..., dict[str, float]], name: str, shape: tuple[int, ...], world: int) -> float:
    return sum(by_axis(name, *shape, shards=world, itemsize=FLOAT).values())


def expected_bytes(everything: list[tuple[int, ...]], matrices: list[tuple[int, int]], world: int) -> dict:
    """The formulas: bytes a rank sends, on average, for one reduction, one unshard and one exchange of everything."""
    rows = [padded(shape, world) for shape in everything]
    return {
        "reduce_scatter": sum(_sent(bytes_by_axis, "reduce_scatter", shape, world) for shape in rows),
        "all_gather": sum(_sent(bytes_by_axis, "all_gather", shape, world) for shape in rows),
        "exchange": sum(_sent(bytes_by_axis, "owner", shape, world) for shape in matrices),
    }


def check_bytes(sent: dict[str, float], expected: dict[str, float], stage: int, micro: int) -> None:
    """Compare what ranks sent on average, by kind, with the formulas."""
    assert sent["reduce_scatter"] == pytest.approx(expected["reduce_scatter"] * (micro if stage > 1 else 1), rel=0.05)
    # Over Gloo, gathers are all-to-alls too (docs/why/decisions.md): the formula tells apart what the exchange sends.
    gathered = sent.get("all_gather", 0.0) + sent.get("all_to_all", 0.0) - expected["exchange"]
    if "all_gather" in sent:
        assert sent["all_to_all"] == pytest.approx(expected["exchange"], rel=0.05)
    if stage < 3:  # the refresh, once per step
        assert gathered == pytest.approx(expected["all_gather"], rel=0.05)
    else:  # forward gathers everything, backward what it needs of it
        assert 1.05 * expected["all_gather"] * micro < gathered < 2.05 * expected["all_gather"] * micro


def mean(parts: list[dict[str, float]], weights: list[int]) -> dict[str, float]:
    kinds = {kind for part in parts for kind in part}
    return {k: sum(w * p.get(k, 0.0) for p, w in zip(parts, weights, strict=True)) / sum(weights) for k in kinds}


@pytest.mark.parametrize(
    ("world", "stage"),
    [
        (2, 1),
        pytest.param(2, 3, marks=pytest.mark.full),
        *(pytest.param(*given, marks=pytest.mark.campaign) for given in ((2, 2), (4, 3))),
    ],
)
def test_bytes_follow_the_formulas(counted: Callable[..., Any], world: int, stage: int) -> None:
    results = counted(world, stage=stage, update="backward", micro=3 if world == 2 else 1)
    everything = results[0]["shapes"]
    sent = mean([traced.sent for traced in traces(results)], [1] * world)
    expected = expected_bytes(everything, MATRICES, world)
    check_bytes(sent, expected, stage, micro=3 if world == 2 else 1)


@pytest.mark.full
def test_weights_kept_for_backward_are_gathered_once_a_forward(counted: Callable[..., Any]) -> None:
    micro, settings = 3, {"stage": 3, "update": "backward"}
    results = counted(2, micro=micro, reshard_after_forward=False, **settings)
    expected = expected_bytes(results[0]["shapes"], MATRICES, 2)
    for traced in traces(results):
        gathered = traced.sent["all_to_all"] - expected["exchange"]
        assert gathered == pytest.approx(micro * expected["all_gather"], rel=0.05)


@pytest.mark.campaign
def test_bytes_of_a_world_of_64(ranks: Callable[[int], Ranks]) -> None:
    """24 large matrices and 48 small ones on 64 ranks: three kinds of owners, one of each is looked at."""
    owners = {0: [(1, 256, 64)], 24: [(1, 64, 64)] * 2, 40: [(1, 64, 64)]}
    weights = [24, 8, 32]  # 24 large, and 2 * 8 + 32 small ones, on 64 ranks
    results = [ranks(1).run(count_fake, rank=rank, world=64, stage=3)[0] for rank in owners]
    for result, owned in zip(results, owners.values(), strict=True):
        traced = Trace(**result["trace"])
        assert sorted(sorted(shape) for shape in traced.shapes) == sorted(sorted(shape) for shape in owned)
        assert result["claimed"] == round(sum(traced.sent.values()))
    sent = mean([traced.sent for traced in traces(results)], weights)
    matrices = ([(64, 64)] * 4 + [(256, 64), (64, 256)]) * 12
    check_bytes(sent, expected_bytes(results[0]["shapes"], matrices, 64), 3, micro=1)


@pytest.mark.full
def test_each_gather_starts_before_the_one_ahead_of_it_is_waited_for(ranks: Callable[[int], Ranks]) -> None:
    """In the code Inductor generates, not only in our graph: its memory pass once moved every start to its wait."""
    graphs = ranks(1).run(generated_fake, stage=3)[0]
    assert len(graphs) == 2  # forward and backward
    for events in graphs:
        buffers = [event.removeprefix("all_gather ") for event in events if event.startswith("all_gather")]
        assert len(buffers) > 3
        for ahead, prefetched in zip(buffers, buffers[1:], strict=False):
            assert events.index(f"all_gather {prefetched}") < events.index(f"wait {ahead}"), events
