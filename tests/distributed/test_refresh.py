"""Resident weights: step() starts to gather them, and whoever reads one waits for it."""

import contextlib
import copy
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from support.harness import RanksOf, on_ranks
from support.reference import full, train_step
from torch import Tensor, nn

import compile_muon
from compile_muon.engine import resident
from compile_muon.mesh import Mesh


class Net(nn.Module):
    """Rows that divide by two and rows that do not, matrices and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(self.layers[0].bias.dtype))


def made(stage: int, backend: str = "eager", **settings: Any) -> tuple[Net, compile_muon.MuonZero, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = compile_muon.MuonZero(model, stage=stage, lr=0.1, ns_dtype="float32", **settings)
    run: Any = model
    if backend in ("eager", "inductor"):
        run = torch.compile(model, backend="muon_zero", options={"codegen": backend})
    elif backend == "another":
        run = torch.compile(model, backend="aot_eager")
    return model, optimizer, run


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def advance(optimizer: compile_muon.MuonZero, run: Any, step: int) -> None:
    train_step(optimizer, run(batch(step, dist.get_rank())).square().mean())


def under_way(optimizer: compile_muon.MuonZero) -> list[bool]:
    return [sharded.refresh is not None for sharded in optimizer.engine.params if sharded.resident is not None]


def expected(model: nn.Module, x: Tensor) -> Tensor:
    """By the master shards; collective."""
    whole = {name: full(param) for name, param in model.named_parameters()}
    with torch.no_grad():
        return torch.func.functional_call(Net(), whole, x)


def started(stage: int) -> list[str]:
    """Names, in the order in which a step starts to gather them."""
    _, optimizer, run = made(stage)
    with (
        patch.object(resident, "_BUCKET_BYTES", 1),
        patch.object(resident.Refresh, "start", wraps=resident.Refresh.start) as start,
    ):
        advance(optimizer, run, 0)
    return [sharded.name for call in start.call_args_list for sharded in call.args[0].sharded_params]


def test_weights_come_in_the_order_of_the_model(ranks: RanksOf) -> None:
    """Matrices ahead of the rest, as the step writes them, would have the next forward wait for all of them first."""
    names = [name for name, _ in Net().named_parameters()]
    for found in ranks(2).run(started, stage=1):
        assert sorted(found, key=names.index) == found and len(found) == len(names)


@pytest.mark.parametrize(
    ("backend", "stage"), [("eager", 1), ("none", 2), pytest.param("another", 1, marks=pytest.mark.full)]
)
@on_ranks(2)
def test_a_rank_reads_alone(stage: int, backend: str) -> None:
    model, optimizer, run = made(stage, backend)
    for step in range(2):
        advance(optimizer, run, step)
        assert all(under_way(optimizer))
        # Between steps of training one rank evaluates, as it may where weights are whole on every rank.
        with torch.no_grad():
            found = run(batch(9)) if dist.get_rank() == 0 else None
        assert any(under_way(optimizer)) == (dist.get_rank() != 0)
        want = expected(model, batch(9))
        if found is not None:
            torch.testing.assert_close(found, want)


@pytest.mark.parametrize(("dtype", "stage"), [("bf16", 2), ("fp32", 1)])
@on_ranks(2)
def test_an_edit_while_it_is_under_way(stage: int, dtype: str) -> None:
    """In the one dtype shards are a part of the resident weights' memory, in the other they are not."""
    model, optimizer, run = made(stage, param_dtype=dtype)
    advance(optimizer, run, 0)
    assert all(under_way(optimizer))
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
    edited = expected(model, batch(9))
    found = run(batch(9))
    tolerance = {} if dtype == "fp32" else {"atol": 0.02, "rtol": 0.02}
    torch.testing.assert_close(found.float(), edited, **tolerance)
    torch.testing.assert_close(expected(model, batch(9)), edited)  # and nothing was put back


@on_ranks(2)
def test_steps_and_copies_without_a_forward() -> None:
    model, optimizer, run = made(1)
    run(batch(0, dist.get_rank())).square().mean().backward()
    optimizer.step()
    optimizer.step()  # the same gradients again
    torch.testing.assert_close(run(batch(9)).detach(), expected(model, batch(9)))
    # What is copied while it is under way is whole too.
    advance(optimizer, run, 1)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(batch(9)).detach(), expected(model, batch(9)))


@pytest.mark.parametrize(("backend", "stage"), [("eager", 2), pytest.param("inductor", 1, marks=pytest.mark.full)])
@on_ranks(2)
def test_two_forwards_ahead_of_their_backwards(stage: int, backend: str) -> None:
    """Autograd counts edits of what it saved: one by a step is an error, waits of a later forward are none."""
    model, optimizer, run = made(stage, backend, gradient_accumulation_steps=2)
    for step in range(2):
        first, second = (run(batch(step + k, dist.get_rank())).square().mean() for k in range(2))
        first.backward()
        train_step(optimizer, second)
    stale = run(batch(5)).square().mean()
    advance(optimizer, run, 6)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()


def gathered_in_place(stage: int, dtype: str, replicate: int) -> None:
    """As over NCCL: each weight that divides goes straight to where it is resident."""
    settings: dict[str, Any] = {"param_dtype": dtype}
    if replicate > 1:
        mesh = dist.device_mesh.init_device_mesh("cpu", (replicate, 2), mesh_dim_names=("replicate", "shard"))
        settings |= {"mesh": mesh, "shard_state_over": "all"}
    found = []
    as_nccl = {"pairwise": property(lambda mesh: False), "_ALONE_BYTES": 1, "_ALONE_STARTS": 0}
    for own in (True, False):
        with contextlib.ExitStack() as stack:
            for name, value in as_nccl.items() if own else ():
                stack.enter_context(patch.object(Mesh if name == "pairwise" else resident, name, value))
            model, optimizer, run = made(stage, **settings)
            for step in range(3):
                advance(optimizer, run, step)
            started = [sharded.refresh for sharded in optimizer.engine.params if sharded.resident is not None]
            kinds = {refresh.gather.alone for refresh in started if refresh is not None}
            assert kinds == ({True, False} if own and (stage == 3 or replicate == 1) else {False})
            found.append((run(batch(9)).detach(), expected(model, batch(9))))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    if dtype == "fp32":
        torch.testing.assert_close(*found[0])


@pytest.mark.parametrize(
    ("stage", "dtype", "replicate"),
    [(2, "bf16", 1), *(pytest.param(stage, "fp32", 2, marks=pytest.mark.full) for stage in (2, 3))],
)
def test_weights_gathered_in_place(ranks: RanksOf, stage: int, dtype: str, replicate: int) -> None:
    ranks(2 * replicate).run(gathered_in_place, stage=stage, dtype=dtype, replicate=replicate)


PROGRAM = """
    import sys
    import torch
    import torch.distributed as dist
    import compile_muon

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.Linear(1024, 512))
    optimizer = compile_muon.MuonZero(model, stage=1)
    model(torch.ones(2, 512)).square().mean().backward()
    optimizer.step()
    assert all(sharded.refresh is not None for sharded in optimizer.engine.params)
"""


@pytest.mark.full
def test_a_training_may_end_with_a_step(tmp_path: Path) -> None:
    """Nobody waits for what the last step has started."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    running = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    assert not any("Traceback" in error or "unwaited" in error for error in errors), errors
