"""A step counted: Newton-Schulz once per matrix, reductions when they are due, bytes by the formulas.

What single collectives send is counted by hand in tests/passes/test_collectives.py; here is how many there are.
"""

import contextlib
import itertools
import re
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.harness import RanksOf
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


def count(micro: int, reshard_after_forward: bool = True, eager: bool = False, **settings: Any) -> tuple[int, int]:
    """Train two steps, then count one: bytes that this rank sends, and matrices that it orthogonalizes. ``eager``:
    without a compiler, and with micro-batches that only the loop knows of."""
    torch.manual_seed(0)
    model = Small()
    optimizer = compile_muon.MuonZero(model, gradient_accumulation_steps=None if eager else micro, **settings)
    options = {"codegen": "eager", "reshard_after_forward": reshard_after_forward}
    run: Any = model if eager else torch.compile(model, backend="muon_zero", options=options)
    tokens = torch.randint(0, 16, (2, 4), generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(3):
        before = optimizer.traffic
        for number in range(micro):
            with optimizer.accumulate() if eager and number < micro - 1 else contextlib.nullcontext():
                (torch.nn.functional.cross_entropy(run(tokens).flatten(0, 1), tokens.flatten()) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
    now = optimizer.traffic
    return now.bytes_sent - before.bytes_sent, now.matrices - before.matrices


#: collectives and their waits in generated code
_CODE = re.compile(
    r"(\w+) = torch.ops._c10d_functional.all_gather_into_tensor(?:_out)?\."
    r"|_c10d_functional.wait_tensor.default\((\w+)\)"
)


@pytest.mark.full
def test_generated_code_keeps_the_schedule() -> None:
    """Not only our graph: Inductor's memory pass once moved every start to its wait."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh()) for _ in range(12))
        model = nn.Sequential(nn.Embedding(64, 64), *layers, nn.Linear(64, 64, bias=False))
        optimizer = compile_muon.MuonZero(model, ns_method="standard", stage=3, update="step")
        compiled = torch.compile(model, backend="muon_zero", options={"bucket_mb": 0.03})
        tokens = torch.zeros(2, 4, dtype=torch.int64)
        with patch("compile_muon.passes.lowering.buckets._SMALLEST", 2**12):
            _, sources = run_and_get_code(lambda: compiled(tokens).sum().backward())
        optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    assert len(sources) == 2  # forward and backward
    for source in sources:
        graph = [f"start {start}" if start else f"wait {wait}" for start, wait in _CODE.findall(source)]
        buffers = [event.split()[1] for event in graph if event.startswith("start")]
        assert len(buffers) > 3
        for ahead, prefetched in itertools.pairwise(buffers):
            assert graph.index(f"start {prefetched}") < graph.index(f"wait {ahead}"), graph


def bytes_of(by_kind: str, tensors: list[tuple[int, ...]], world: int) -> float:
    """The formula: what a rank sends on average."""
    return sum(sum(bytes_by_axis(by_kind, *shape, shards=world, itemsize=FLOAT).values()) for shape in tensors)


@pytest.mark.parametrize(
    ("stage", "settings"),
    [
        (1, {"update": "backward", "micro": 3}),
        (3, {"update": "backward", "micro": 1}),
        *((stage, {"update": "step", "micro": 2, "eager": True}) for stage in (0, 2)),
        pytest.param(0, {"update": "step", "micro": 3}, marks=pytest.mark.full),
        pytest.param(3, {"update": "backward", "micro": 3}, marks=pytest.mark.full),
        pytest.param(3, {"update": "backward", "micro": 3, "reshard_after_forward": False}, marks=pytest.mark.full),
    ],
)
def test_what_two_ranks_send_and_compute(ranks: RanksOf, stage: int, settings: dict[str, Any]) -> None:
    found = ranks(2).run(count, stage=stage, **settings)
    assert sum(matrices for _, matrices in found) == len(MATRICES) + EXPERTS
    if stage == 0:
        return
    # Rows are filled up to a multiple of the ranks.
    shapes = [tuple(param.shape) for param in Small().parameters()]
    rows = [(shape[0] + shape[0] % 2, torch.Size(shape[1:]).numel()) for shape in shapes]
    micro, sent = settings["micro"], sum(sent for sent, _ in found) / 2
    due = 1 if stage == 1 else micro
    left = sent - due * bytes_of("reduce_scatter", rows, 2) - bytes_of("owner", MATRICES, 2)
    gathered = left / bytes_of("all_gather", rows, 2)
    if stage < 3:  # the refresh, once a step
        assert gathered == pytest.approx(1, rel=0.1)
    elif settings.get("reshard_after_forward", True):  # forward gathers everything, backward what it needs of it
        assert 1.05 * micro < gathered < 2.05 * micro
    else:
        assert gathered == pytest.approx(micro, rel=0.1)
