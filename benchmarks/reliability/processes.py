"""Ranks as forks of one process that has imported everything and started no thread: each costs milliseconds.

A rank ends as a program of its own would: it waits for threads that are no daemons. Its result or exception comes back
through a pipe; its progress is in shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import mmap
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Board", "Child", "join", "rendezvous", "start", "store_host", "warm", "watch"]

_TICK = 0.002
_TEXT = 4000  # characters of an error that are sent: an answer must fit into a pipe
_PR_SET_PDEATHSIG = 1


class Board:
    """The progress of each rank (step, phase and the time it began), in memory shared by later forks."""

    _SLOT = struct.Struct("ddd")

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, self._SLOT.size * ranks)

    def write(self, rank: int, step: int, phase: int) -> None:
        """Note that ``rank`` enters ``phase`` of ``step`` now."""
        self._SLOT.pack_into(self._memory, self._SLOT.size * rank, step, phase, time.monotonic())

    def read(self, rank: int) -> tuple[int, int, float]:
        """Return a rank's step, phase, and the monotonic time since when."""
        step, phase, since = self._SLOT.unpack_from(self._memory, self._SLOT.size * rank)
        return int(step), int(phase), since


@dataclass
class Child:
    """A fork of this process."""

    pid: int
    _pipe: int
    answer: Any = None  # result of its function
    error: tuple[list[str], str] | None = None  # names of the exception's classes, most special first, and its text
    code: int | None = None  # exit code, negative for a signal; None while it runs
    ended: float = 0.0  # monotonic time at which its end was seen
    killed: bool = field(default=False)

    def poll(self) -> bool:
        """Tell whether the child has ended."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code, self.ended = os.waitstatus_to_exitcode(status), time.monotonic()
                self._hear()
        return self.code is not None

    def cpu_seconds(self) -> float:
        """Return the CPU seconds of all its threads; 0 once it has ended."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return 0.0
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.code is None:
            self.killed |= number == signal.SIGKILL
            os.kill(self.pid, number)

    def _hear(self) -> None:
        with open(self._pipe, "rb") as pipe:
            # Without waiting for the end of the pipe, which a process started by the child may still hold open.
            data = pipe.read() if select.select([pipe], [], [], 0)[0] else b""
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            self.answer, self.error = pickle.loads(data)


def start(function: Callable[..., Any], *args: Any, log: Path | None = None) -> Child:
    """Run ``function(*args)`` in a fork of this process, which must have one thread only; output goes to ``log``."""
    _end_threads()
    deadline = time.monotonic() + 10  # the system lists a thread for a moment after it was joined
    while (threads := len(os.listdir("/proc/self/task"))) != 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{threads} threads: only a process of one can fork ranks")
        time.sleep(0.01)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    read_end, write_end = os.pipe()
    if pid := os.fork():
        os.close(write_end)
        return Child(pid, read_end)
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before prctl
            os._exit(1)
        os.close(read_end)
        output = os.open(os.devnull if log is None else log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for handle in (1, 2):
            os.dup2(output, handle)
        faulthandler.enable(2)
        faulthandler.register(signal.SIGUSR1, 2, all_threads=True)  # writes the stack of each thread
        warnings.simplefilter("ignore")
        try:
            answer: Any = (function(*args), None)
            code = 0
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            answer = (None, (names, str(error)[:_TEXT]))
        # Private: ends threads as the interpreter does at exit, which notifies pools and waits for all. The rest of an
        # exit frees nothing that matters, and may hang in destructors.
        threading._shutdown()  # type: ignore[attr-defined]
        os.write(write_end, pickle.dumps(answer))
    finally:
        os._exit(code)


def join(children: Sequence[Child], patience: float) -> list[Child]:
    """Wait until all children have ended; kill and return those that have not within ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while not all([child.poll() for child in children]) and time.monotonic() < deadline:
        time.sleep(_TICK)
    late = [child for child in children if not child.poll()]
    for child in late:
        child.kill(signal.SIGUSR1)  # writes its stacks to the log
    if late:
        time.sleep(0.2)
    for child in late:
        child.kill()
        while not child.poll():
            time.sleep(_TICK)
    return late


def watch(children: Sequence[Child], until: float) -> bool:
    """Wait until all children have ended or the monotonic clock reaches ``until``; tell whether all have ended."""
    while time.monotonic() < until:
        if all([child.poll() for child in children]):
            return True
        time.sleep(_TICK)
    return all([child.poll() for child in children])


def rendezvous(store: dist.Store, rank: int, world: int, timeout: float, interface: str = "lo") -> None:
    """Initialize the default process group over Gloo."""
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)


@contextmanager
def store_host(address: str = "127.0.0.1") -> Iterator[int]:
    """Host the ranks' store in a process that survives any rank, as torchrun's agent does; yield the port."""
    port_reader, port_writer = os.pipe()

    def serve() -> None:
        store = dist.TCPStore(address, 0, None, True, timedelta(seconds=60), wait_for_workers=False)
        os.write(port_writer, str(store.port).encode())
        signal.pause()

    host = start(serve)
    os.close(port_writer)
    try:
        yield int(os.read(port_reader, 16))
    finally:
        os.close(port_reader)
        host.kill()
        join([host], 5.0)


def warm() -> None:
    """Run a training step of each kind before forking, for imports that happen late."""
    import compile_muon

    torch.set_num_threads(1)
    for compiled in (False, True):
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
        optimizer = compile_muon.MuonZero(model, stage=0, ns_dtype="float32")
        run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
        run(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    torch._dynamo.reset()


def _end_threads() -> None:
    """End the threads that a compilation has left: a monitor of progress bars, and the one that logs its progress."""
    if (tqdm := sys.modules.get("tqdm")) is not None and tqdm.tqdm.monitor is not None:
        tqdm.tqdm.monitor.exit()
        tqdm.tqdm.monitor = None
    for thread in threading.enumerate():
        if thread.name == "muon_zero progress":  # ends some seconds after the last graph
            thread.join()
