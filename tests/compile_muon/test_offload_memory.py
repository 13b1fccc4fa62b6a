"""What offload to a file takes of a process' own memory: under limits that the kernel enforces, each in a process."""

import gc
import os
import re
import resource
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_muon
from compile_muon.engine.dtensors import local_tensor

MB = 1 << 20
MATRICES, TABLES = 12, 8  # of 2 MB each, the momentum of one and the moments of the other
WEIGHTS, STATE = 2 * MB * (MATRICES + TABLES), 2 * MB * MATRICES + 4 * MB * TABLES
#: what the allocator, threads and the interpreter take beside tensors
SLACK = 6 * MB


class Net(nn.Module):
    def __init__(self, matrices: int, tables: int) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(nn.Parameter(torch.randn(64, 8192) / 90) for _ in range(matrices))
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(64, 8192) / 90) for _ in range(tables))

    def forward(self, x: Tensor) -> Tensor:
        for weight in (*self.matrices, *self.tables):
            x = x + torch.relu(x @ weight.T) @ weight
        return x.square().mean()


def made(folder: str | None, matrices: int = MATRICES, tables: int = TABLES) -> tuple[nn.Module, compile_muon.MuonZero]:
    """Its state in a file in ``folder``, or resident."""
    model = Net(matrices, tables)
    offload = {"device": "nvme", "nvme_path": folder, "buffer_count": 2, "buffer_bytes": MB} if folder else None
    muon = ["matrices.*"]
    return model, compile_muon.MuonZero(model, muon_params=muon, update="step", ns_dtype="float32", offload=offload)


def train(model: nn.Module, optimizer: compile_muon.MuonZero, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(1, 8192)).backward()
        optimizer.step()
        optimizer.zero_grad()


def of_the_process(what: str) -> int:
    found = re.search(rf"^{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) << 10


@contextmanager
def with_no_more_than(nbytes: int) -> Iterator[None]:
    """Private memory of this process beyond what it has now; files that are mapped, and what is shared, are not."""
    gc.collect()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (of_the_process("VmData") + nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def trained_within(folder: str | None, nbytes: int) -> compile_muon.MuonZero | None:
    try:
        with with_no_more_than(nbytes):
            model, optimizer = made(folder)
            train(model, optimizer, 2)
    except (MemoryError, RuntimeError):  # the latter is what torch's allocator says
        return None
    return optimizer


def training(folder: str) -> None:
    train(*made(folder, 1, 1), 1)
    directions, undo = 2 * MB * MATRICES, 2 * MB * TABLES  # a step keeps what it writes over until the disk has it all
    allowed = 2 * WEIGHTS + directions + undo + STATE // 4
    assert trained_within(None, allowed) is None
    assert trained_within(None, 2 * allowed) is not None  # it is the memory that it lacks
    before = of_the_process("RssShmem")  # where buffers are
    optimizer = trained_within(folder, allowed)
    assert optimizer is not None
    states: Any = optimizer.engine.state_provider
    assert states.bytes_off_device == STATE and states.bytes_in_buffers == 2 * MB  # no state of one parameter fits
    assert 0 < of_the_process("RssShmem") - before <= states.bytes_in_buffers


def checkpoints(folder: str) -> None:
    small = made(folder, 1, 1)
    train(*small, 1)
    for asynchronous in (False, True):
        checkpointer = compile_muon.Checkpointer(Path(folder) / "small", asynchronous=asynchronous)
        checkpointer.save(1, *small)
        checkpointer.wait()
        checkpointer.load(*small)
    model, optimizer = made(folder)
    train(model, optimizer, 1)
    checkpointer = compile_muon.Checkpointer(Path(folder) / "large")
    with with_no_more_than(SLACK):
        checkpointer.save(1, model, optimizer)
    states = [local_tensor(state) for slots in optimizer.state.values() for state in slots.values()]
    sums = [state.double().sum().item() for state in states]
    for state in states:
        state.zero_()
    mapped = WEIGHTS + STATE  # by safetensors: the file, which the limit takes for memory since it might be written to
    with with_no_more_than(mapped + WEIGHTS + SLACK):
        checkpointer.load(model, optimizer)
    assert sums == [state.double().sum().item() for state in states]
    checkpointer = compile_muon.Checkpointer(Path(folder) / "large", asynchronous=True)
    with with_no_more_than(WEIGHTS + SLACK):
        checkpointer.save(2, model, optimizer)
        for state in states:
            state.zero_()  # while it is written
        checkpointer.wait()
    checkpointer.load(model, optimizer)
    assert sums == [state.double().sum().item() for state in states]


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="limits of private memory are Linux's")
@pytest.mark.parametrize("function", [training, checkpoints])
def test_state_of_four_times_the_memory_trains_and_is_saved(function: Callable[[str], None], tmp_path: Path) -> None:
    """The allocator gives back what is freed, and takes no more than is asked for."""
    malloc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, __file__, function.__name__, str(tmp_path)]
    environment = {**os.environ, **malloc, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    threading.stack_size(MB)
    gc.freeze()  # what was imported, which each collection would look at
    globals()[sys.argv[1]](sys.argv[2])
