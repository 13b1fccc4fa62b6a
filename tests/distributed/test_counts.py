"""Counted at run time: Newton-Schulz once per matrix and step, reductions when they are due, bytes by the formulas.

The counts are those of PyTorch's profiler (``traced.py``), which sees what compiled graphs execute.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
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
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)
        self.blocks = nn.Sequential(*(Block(64) for _ in range(layers)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))


def count(micro: int, reshard_after_forward: bool = True, eager: bool = False, **settings: Any) -> dict[str, Any]:
    """Train two steps, then trace one.

    Args:
        eager: without a compiler, and with micro-batches that only the loop knows of.
    """
    torch.manual_seed(0)
    rank, model = dist.get_rank(), Small()
    everything = [tuple(param.shape) for param in model.parameters()]
    optimizer = compile_muon.MuonZero(model, gradient_accumulation_steps=None if eager else micro, **settings)
    options = {"codegen": "eager", "reshard_after_forward": reshard_after_forward}
    compiled: Any = model if eager else torch.compile(model, backend="muon_zero", options=options)
    tokens = torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        for number in range(micro):
            with optimizer.accumulate() if eager and number < micro - 1 else contextlib.nullcontext():
                (torch.nn.functional.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten()) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    before = optimizer.traffic
    traced = trace(step, world=dist.get_world_size(), rank=rank)
    claimed = optimizer.traffic.bytes_sent - before.bytes_sent
    matrices = optimizer.traffic.matrices - before.matrices
    return {"trace": traced.__dict__, "claimed": claimed, "matrices": matrices, "shapes": everything}


@contextlib.contextmanager
def fake_ranks(rank: int, world: int) -> Iterator[None]:
    """One rank of a world that is not there: its collectives do nothing, but they are called as they would be."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


#: collectives, their waits, and what runs between them, in generated code
_CODE = re.compile(
    r"(\w+) = torch.ops._c10d_functional.(all_to_all_single|reduce_scatter_tensor|all_gather_into_tensor)(?:_out)?\."
    r"|_c10d_functional.wait_tensor.default\((\w+)\)"
    r"|(await_refresh|extern_kernels\.\w*mm|(?<== torch.ops.muon_zero.)newton_schulz)"
)


def generated(rank: int, world: int, layers: int, bucket_mb: float, backward: bool, **settings: Any) -> list[list[str]]:
    """In order, in the code of each graph: "start KIND BUFFER", "wait KIND BUFFER" and "run NAME"."""
    with fake_ranks(rank, world), patch("compile_muon.passes.lowering.buckets._SMALLEST", 2**12):
        torch.manual_seed(0)
        model = GPT(layers)
        optimizer = compile_muon.MuonZero(model, ns_method="standard", **settings)
        compiled = torch.compile(model, backend="muon_zero", options={"bucket_mb": bucket_mb})
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        run = (lambda: compiled(tokens).sum().backward()) if backward else (lambda: compiled(tokens))
        _, sources = run_and_get_code(run)
        optimizer.zero_grad()
    graphs = []
    for source in sources:
        kinds: dict[str, str] = {}
        graphs.append([])
        for buffer, kind, waited, name in _CODE.findall(source):
            kinds |= {buffer: kind} if buffer else {}
            what = (
                f"run {name}" if name else f"wait {kinds.get(waited)} {waited}" if waited else f"start {kind} {buffer}"
            )
            graphs[-1].append(what)
    return graphs


@pytest.mark.full
def test_generated_code_keeps_the_schedule(ranks: Callable[[int], Ranks]) -> None:
    """Not only our graph: Inductor's memory pass once moved every start to its wait."""

    def code(**settings: Any) -> list[list[str]]:
        return ranks(1).run(generated, **settings)[0]

    def at(graph: list[str], what: str) -> list[int]:
        return [place for place, event in enumerate(graph) if event.startswith(what)]

    gathering = code(rank=0, world=2, layers=4, bucket_mb=0.03, backward=True, stage=3, update="step")
    for graph in gathering:  # forward and backward
        buffers = [event.split()[2] for event in graph if event.startswith("start all_gather")]
        assert len(buffers) > 3
        for ahead, prefetched in itertools.pairwise(buffers):
            start, wait = f"start all_gather_into_tensor {prefetched}", f"wait all_gather_into_tensor {ahead}"
            assert graph.index(start) < graph.index(wait), graph
    assert len(gathering) == 2

    # Exchanges start ahead of reductions, but for the last, and are waited for behind Newton-Schulz of others.
    settings = {"world": 4, "layers": 6, "bucket_mb": 0.1, "backward": True, "stage": 3, "update": "backward"}
    orders = [code(rank=rank, **settings)[-1] for rank in (0, 3)]
    meetings = [[event.split()[:2] for event in order if not event.startswith("run")] for order in orders]
    assert meetings[0] == meetings[1]
    graph, exchanges, reductions = orders[0], *(at(orders[0], f"start {kind}") for kind in ("all_to_all", "reduce"))
    there, back = exchanges[: len(exchanges) // 2], exchanges[len(exchanges) // 2 :]
    assert len(there) == len(back) == 4 and len(reductions) > 6
    ahead = [sum(start < reduction for reduction in reductions) for start in there]
    assert ahead == sorted(ahead, reverse=True) and min(ahead[:-1]) >= 2
    runs = at(graph, "run newton_schulz")
    assert min(runs) > max(reductions) and all(run < start for run, start in zip(runs, back, strict=True))
    assert [event.split()[0] for event in graph[max(back) + 1 :] if "mm" not in event] == ["wait"] * len(back)

    # Weights are waited for layer by layer.
    (calls,) = code(rank=0, world=2, layers=4, bucket_mb=1.0, backward=False, stage=1)
    waits, products = at(calls, "run await_refresh"), at(calls, "run extern_kernels")
    assert len(products) >= 16 and len(waits) == sum(1 for _ in GPT(4).parameters())
    seen = [sum(wait < place for wait in waits) for place in products]
    steps = [after - before for before, after in itertools.pairwise([0, *seen])]
    assert max(steps) <= 6 and sum(step > 0 for step in steps) >= 12, calls


def bytes_of(by_kind: str, tensors: list[tuple[int, ...]], world: int) -> float:
    """The formula: what a rank sends on average."""
    return sum(sum(bytes_by_axis(by_kind, *shape, shards=world, itemsize=FLOAT).values()) for shape in tensors)


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (1, {"update": "backward", "micro": 3}),
        (3, {"update": "backward", "micro": 1}),
        *((stage, {"update": "step", "micro": 3, "eager": True}) for stage in (0, 1, 2, 3)),
        *(
            pytest.param(stage, {"update": update, "micro": 3}, marks=pytest.mark.full)
            for stage, update in ((0, "step"), (2, "backward"), (3, "step"), (3, "backward"))
        ),
        pytest.param(3, {"update": "backward", "micro": 3, "reshard_after_forward": False}, marks=pytest.mark.full),
    ],
)
def test_what_two_ranks_send_and_compute(ranks: Callable[[int], Ranks], stage: int, settings: dict[str, Any]) -> None:
    """By the profiler: Newton-Schulz once per matrix and step, reductions when due, bytes as the formulas say."""
    results = ranks(2).run(count, stage=stage, **settings)
    micro, traced = settings["micro"], [Trace(**result["trace"]) for result in results]
    for result, own in zip(results, traced, strict=True):
        assert result["claimed"] == round(sum(own.sent.values())) and result["matrices"] == own.matrices
    split = 1 if stage == 0 else 2  # a stack is sharded by expert: each rank orthogonalizes its own
    stacks = [(EXPERTS // split, 12, 12)] * split
    assert sorted(shape for own in traced for shape in own.shapes) == sorted([(1, *s) for s in MATRICES] + stacks)
    # Rows are filled up to a multiple of the ranks.
    rows = [
        (shape[0] + shape[0] % (2 if stage else 1), torch.Size(shape[1:]).numel()) for shape in results[0]["shapes"]
    ]
    due = 1 if stage == 1 else micro
    for own in traced:
        # Stage 0 gathers what it has reduced: over Gloo in the order in which the others add. It is never asked to
        # gather: several functional all-gathers in flight corrupt its heap (docs/why/decisions.md).
        assert own.elements["reduce_scatter"] == due * sum(torch.Size(shape).numel() for shape in rows)
        assert not {"all_reduce", "all_gather"} & own.elements.keys()
    if stage == 0 or "eager" in settings:
        return
    sent = {kind: sum(own.sent.get(kind, 0.0) for own in traced) / 2 for kind in ("reduce_scatter", "all_to_all")}
    assert sent["reduce_scatter"] == pytest.approx(due * bytes_of("reduce_scatter", rows, 2), rel=0.05)
    gathered = (sent["all_to_all"] - bytes_of("owner", MATRICES, 2)) / bytes_of("all_gather", rows, 2)
    if stage < 3:  # the refresh, once a step
        assert gathered == pytest.approx(1, rel=0.05)
    elif settings.get("reshard_after_forward", True):  # forward gathers everything, backward what it needs of it
        assert 1.05 * micro < gathered < 2.05 * micro
    else:
        assert gathered == pytest.approx(micro, rel=0.05)
