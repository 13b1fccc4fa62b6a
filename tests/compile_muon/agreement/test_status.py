"""Places of ranks: what is published, who is told apart, and what is said."""

import copy
import gc
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from compile_muon.agreement.heartbeat import Entry, report
from compile_muon.agreement.status import RankStatus
from compile_muon.errors import PeerError

LOST = Entry(3, "backward of frame 2 (blocks.4)", True, 9)
WAITING = Entry(3, "forward of frame 5", True, 9)


@pytest.mark.parametrize(
    ("places", "alive", "said"),
    [
        (
            {0: WAITING, 1: LOST._replace(collectives=7), 2: WAITING},
            [0, 2],
            "rank 1 was last seen in step 3, backward of frame 2 (blocks.4); ranks 0, 2 wait in step 3, forward of "
            "frame 5\n(collectives before: 7 on rank 1, 9 on ranks 0, 2)",
        ),
        (
            {0: WAITING, 1: LOST._replace(inside=False), 2: LOST._replace(inside=False)},
            [0, 1, 2],
            "ranks 1, 2 run the loop's own code after step 3, backward of frame 2 (blocks.4); rank 0 waits in step 3, "
            "forward of frame 5",
        ),
        (
            {0: WAITING, 1: LOST._replace(raised="ValueError: no")},
            [0, 1],
            "rank 2 has not come so far; rank 1 raised ValueError: no in step 3, backward of frame 2 (blocks.4); "
            "rank 0 waits in step 3, forward of frame 5\n(collectives before: 0 on rank 2, 9 on ranks 0, 1)",
        ),
        (
            {0: WAITING, 1: LOST._replace(ended=True, inside=False), 2: WAITING._replace(raised="PeerError")},
            [0],
            "rank 1 ended after step 3, backward of frame 2 (blocks.4); ranks 0, 2 wait in step 3, forward of frame 5",
        ),
    ],
)
def test_who_is_where(places: dict[int, Entry], alive: list[int], said: str) -> None:
    assert report(3, places, alive) == said


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=timedelta(seconds=33))
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def status_in(group: Any) -> Any:
    status = RankStatus(group, torch.device("cpu"))
    assert status.heartbeat is not None
    return status


def soon(fact: Callable[[], bool]) -> None:
    for _ in range(400):
        if fact():
            return
        time.sleep(0.05)
    raise AssertionError("never came true")


def threads() -> int:
    return sum(thread.name == "muon_zero_place" for thread in threading.enumerate())


def test_a_thread_keeps_the_place_up_to_date(group: Any) -> None:
    status = status_in(group)
    with status.at("forward", "frame0003", ["blocks.1.up.weight"]):
        soon(lambda: status.heartbeat.read()[0][1:3] == ("forward of frame 3 (blocks.1.up)", True))
    soon(lambda: status.heartbeat.read()[0].inside is False)
    before = status.heartbeat.read()[0].beat
    soon(lambda: status.heartbeat.read()[0].beat > before)


def test_the_thread_ends_with_the_optimizer_and_says_so(group: Any) -> None:
    others = threads()
    status = status_in(group)
    heartbeat = status.heartbeat
    assert threads() == others + 1
    del status
    gc.collect()
    soon(lambda: threads() == others)
    assert heartbeat.read()[0].ended


def test_a_rank_says_where_all_are_before_it_is_terminated(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun does so at once where Gloo has aborted another."""
    status, said = status_in(group), list[str]()

    def everyone() -> str:
        signal.raise_signal(signal.SIGTERM)
        return "rank 0 waits here"

    monkeypatch.setattr(status, "everyone", everyone)
    monkeypatch.setattr(logging.getLogger("compile_muon"), "error", lambda form, text: said.append(text))
    before = signal.signal(signal.SIGTERM, lambda number, frame: said.append("terminated"))
    try:
        with pytest.raises(PeerError), status.at("forward", "frame0001"):
            raise dist.DistBackendError("Connection closed by peer")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said == ["Connection closed by peer\nrank 0 waits here", "terminated"]


LAYER_DROP = """
import torch, torch.distributed as dist, compile_muon
model = torch.nn.ModuleList([torch.nn.Linear(16, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 64)])
model.forward = lambda x, dropped: model[2](x + model[0](x) + (0 if dropped else model[1](x))).sum()
model, optimizer = compile_muon.initialize(model, {"zero_optimization": {"stage": 3}})
for step in range(3):
    model(torch.ones(4, 16), step == 2 and dist.get_rank() == 1).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.full
def test_torchrun_shows_where_ranks_were_that_skipped_a_block(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(LAYER_DROP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "program.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    # torchrun may end the rank that is left before it has heard of the other one's end.
    for _ in range(4):
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
        assert ended.returncode
        if re.search(r"rank \d waits in step 3, an eager read", ended.stderr):
            return
    pytest.fail(ended.stderr)


def test_the_end_waits_for_a_thread_that_is_in_the_store(group: Any) -> None:
    """Coming back from there while the interpreter is taken down, it ended the process with exit code -6."""
    status = status_in(group)
    (thread,) = (thread for thread in threading.enumerate() if thread.name == "muon_zero_place")
    store, entered = status.heartbeat._store, threading.Event()

    def slowly(*entry: str) -> None:
        entered.set()
        time.sleep(0.5)
        store.set(*entry)

    status.heartbeat._store = SimpleNamespace(set=slowly, check=store.check, multi_get=store.multi_get)
    assert entered.wait(10)
    status.heartbeat.end(thread)
    assert not thread.is_alive()


def test_the_thread_ends_with_the_process_group(group: Any) -> None:
    others = threads()
    status = status_in(group)
    dist.destroy_process_group()
    soon(lambda: threads() == others)
    assert status.heartbeat.read() is None


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL communicator was aborted"),
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
        RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation"),
    ],
)
def test_a_failed_collective_tells_everyones_place(group: Any, error: Exception) -> None:
    status = status_in(group)
    with pytest.raises(PeerError) as caught, status.at("backward", "frame0002", ["a.weight"]):
        raise error
    assert str(caught.value) == f"{error}\nrank 0 waits in step 1, backward of frame 2 (a)"
    assert caught.value.__cause__ is error
    assert isinstance(caught.value, dist.DistError)


@pytest.mark.parametrize("error", [ValueError("no"), torch.OutOfMemoryError("CUDA"), RuntimeError("shapes differ")])
def test_other_errors_pass_and_are_published(group: Any, error: Exception) -> None:
    status = status_in(group)
    with pytest.raises(type(error)) as caught, status.at("forward"):
        raise error
    assert caught.value is error
    assert status.heartbeat.read()[0].raised == f"{type(error).__name__}: {error}"
    with status.at("forward"):  # a loop that goes on is forgiven
        soon(lambda: status.heartbeat.read()[0].raised == "")


def test_without_the_store_what_is_remembered_is_told(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status = status_in(group)
    soon(lambda: bool(status.heartbeat._seen))

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise dist.DistNetworkError("Connection reset by peer")

    monkeypatch.setattr(status.heartbeat, "_store", Gone())
    said = "store of the process group is gone.*rank 0, or torchrun's agent.*rank 0 waits in step 1, forward of frame 1"
    with pytest.raises(PeerError, match=said), status.at("forward", "frame0001"):
        raise RuntimeError("gloo/transport")


def test_where_the_backend_would_end_the_process_the_thread_speaks_up(group: Any) -> None:
    status = status_in(group)
    assert status.heartbeat.patience == float("inf")  # Gloo raises
    status.heartbeat.patience = 0.3
    said: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("compile_muon").addHandler(handler)
    try:
        with status.at("backward", "frame0002"):
            soon(lambda: bool(said))
            time.sleep(1.0)
    finally:
        logging.getLogger("compile_muon").removeHandler(handler)
    (message,) = said
    assert message.startswith("no collective has ended for ")
    assert message.endswith("rank 0 waits in step 1, backward of frame 2")


def test_one_process_has_no_thread_and_its_errors_are_its_own() -> None:
    others = threads()
    status = RankStatus()
    error = RuntimeError("gloo/transport")
    with pytest.raises(RuntimeError) as caught, status.at("forward"):
        raise error
    assert caught.value is error and threads() == others
    assert copy.deepcopy(status).heartbeat is None
