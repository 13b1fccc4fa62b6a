"""Ranks that live as long as the test session, over Gloo, or where models train on a GPU over NCCL.

Starting a rank costs seconds, a tiny training run much less: so one set of processes per world size is started when it
is first asked for, and every test hands its function to it. A function runs on all ranks at once, in a process group
of its own world; what it returns (or raises) on each comes back. An exception is reported with its traceback at once,
whether or not the other ranks are stuck in a collective with the one that raised.

COMPILE_MUON_TEST_BACKEND=nccl, beside COMPILE_MUON_TEST_DEVICE=cuda, sends what is on the GPU over NCCL; what is on the
host goes over Gloo still. All ranks share the first GPU, which NCCL allows from 2.30 on: benchmarks/shared_nccl.py.
"""

import atexit
import functools
import gc
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import compilation_time_metrics
from torch.distributed.distributed_c10d import _resolve_process_group, _world
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

#: of what ranks have where models train
BACKEND = os.environ.get("COMPILE_MUON_TEST_BACKEND", "gloo")
_BACKENDS = {"gloo": "gloo", "nccl": "cpu:gloo,cuda:nccl"}
# Kernels of ranks that share a GPU wait for each other in turns: they hold little of it meanwhile. And PyTorch's
# watchdog would write what it knows for a minute before it ends a process that has waited in vain.
_SHARED = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000",
}

# what the other ranks get after one has failed, before they are stopped
_GRACE_SECONDS = 5.0

# Ranks with more process groups than this are started anew: each polls a hundred times a second on threads of its own,
# and those named by their ranks cannot be destroyed and made again over one store.
_MOST_GROUPS = 40


#: what every rank imports
_PRELOADED = ("compile_muon.backend", "torch._inductor.compile_fx", "torch.testing")

#: what the ranks of this process' tests have taken of a core; tests/conftest.py asks
_taken = 0.0


#: what they have compiled and lowered, and how many were started; the same
_done: Counter[str] = Counter()


def cpu_seconds() -> float:
    """Of all ranks so far."""
    return _taken


def compiled() -> dict[str, int]:
    """What this process has compiled: Dynamo's frames, and graphs that came to Inductor, cached or not."""
    return {
        "frames compiled": len(compilation_time_metrics.get("_compile.compile_inner", ())),
        "graphs lowered": len(compilation_time_metrics.get("compile_fx_inner", ())),
    }


def work() -> Counter[str]:
    """What all ranks have done so far."""
    return _done


def _of_children() -> float:
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


class RankError(AssertionError):
    """A function raised on some rank, or a rank died; the message holds every rank's traceback."""


@dataclass(frozen=True)
class Outcome:
    """What one rank made of a function: its value, or the text of its failure."""

    value: Any = None
    failure: str | None = None
    groups: int = 0  # process groups that the rank holds afterwards
    seconds: float = 0.0  # of a core
    compiled: dict[str, int] = field(default_factory=dict)


def _module(path: str) -> ModuleType:
    """A test module by its file: under --import-mode=importlib its name means nothing to another process."""
    name = f"_cases_{Path(path).stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def _run(path: str, name: str, kwargs: dict[str, Any]) -> Outcome:
    began, before = time.process_time(), compiled()
    try:
        function = getattr(_module(path), name)
        value = getattr(function, "on_rank", function)(**kwargs)
        pickle.dumps(value)
        found = Outcome(value, groups=len(_world.pg_map))
    except BaseException:
        found = Outcome(failure=traceback.format_exc())
    torch._dynamo.reset()
    gc.collect()
    gc.freeze()
    made = {name: number - before[name] for name, number in compiled().items()}
    return replace(found, seconds=time.process_time() - began, compiled=made)


def _serve(rank: int, world: int, store: str, timeout: float, connection: Connection) -> None:
    os.environ.update(OMP_NUM_THREADS="1", TORCHINDUCTOR_COMPILE_THREADS="1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()  # a collection of what imports leave takes a fifth of a second, and each test ends with one
    limit = timedelta(seconds=timeout)
    if BACKEND == "nccl":
        os.environ.update(_SHARED)
    shared = dist.FileStore(store, world)
    dist.init_process_group(_BACKENDS[BACKEND], store=shared, rank=rank, world_size=world, timeout=limit)
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _gather, "CPU")
    while True:
        try:
            task = connection.recv()
        except EOFError:  # the session is over
            os._exit(0)
        _forget_groups()  # no rank uses them any more: all have answered
        connection.send(_run(*task))


def _gather(tensor: torch.Tensor, size: int, name: str) -> torch.Tensor:
    """PyTorch's functional all-gather on the host, ``DTensor.full_tensor()``'s, with the name of another collective. Of
    its own Gloo keeps a name that is longer than 15 characters, from two threads without a lock: ranks that live long
    abort with a corrupted heap (benchmarks/NOTES.md, torch 2.11 to 2.13)."""
    gathered = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
    dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=_resolve_process_group(name))
    return gathered


def _forget_groups() -> None:
    """Destroy what the last task made: each group polls a hundred times a second, and tests make hundreds of them.
    Those of NCCL stay: autograd's thread of a GPU has a cache of DTensor's own, which nothing here can clear."""
    if BACKEND == "nccl":
        return
    _clear_sharding_prop_cache()  # DTensor takes a mesh it has seen for an equal one, and so its groups
    for group in list(_world.pg_map):
        # Those named by a count: the next group of a name made from its ranks would find this one's addresses.
        if group is not dist.group.WORLD and group.group_name.isdigit():
            dist.destroy_process_group(group)
    gc.collect()


class Ranks:
    """``world`` processes in one group on this machine, stopped while they have nothing to do: threads of a group poll,
    and ranks of several worlds that wait for tests have hundreds of them. The group's ``timeout`` is in seconds."""

    def __init__(self, world: int, timeout: float = 60.0) -> None:
        self.world = world
        self.timeout = timeout
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], /, *, patience: float = 300.0, **kwargs: Any) -> list[Any]:
        """Call a module-level ``function(**kwargs)`` on every rank; the values by rank. A failure on a rank raises
        RankError, and the next call starts fresh processes."""
        outcomes = self.outcomes(function, patience=patience, **kwargs)
        failures = [f"rank {rank}: {o.failure}" for rank, o in enumerate(outcomes) if o.failure is not None]
        if failures:
            raise RankError("\n".join(failures))
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, function: Callable[..., Any], /, *, patience: float = 300.0, grace: float = _GRACE_SECONDS, **kwargs: Any
    ) -> list[Outcome]:
        """Like :meth:`run`, but failures are values. Ranks that have not answered are stopped after ``patience``
        seconds, or ``grace`` seconds from the first failure on."""
        self._start()
        self._signal(signal.SIGCONT)
        task = (function.__code__.co_filename, function.__name__, kwargs)
        for connection in self._connections:
            connection.send(task)
        found: dict[int, Outcome] = {}
        deadline = time.monotonic() + patience
        while len(found) < self.world and (left := deadline - time.monotonic()) > 0:
            waiting = [self._connections[rank] for rank in range(self.world) if rank not in found]
            for ready in multiprocessing.connection.wait(waiting, timeout=left):
                rank = self._connections.index(ready)
                found[rank] = self._receive(rank)
                if found[rank].failure is not None:
                    deadline = min(deadline, time.monotonic() + grace)
        global _taken
        _taken += sum(outcome.seconds for outcome in found.values())
        made = [outcome.compiled for outcome in found.values() if outcome.compiled]
        _done.update(
            {name: max(each[name] for each in made) for name in compiled()} if made else {}
        )  # ranks do the same
        silent = Outcome(failure="no answer: stuck, or waiting for a rank that failed")
        outcomes = [found.get(rank, silent) for rank in range(self.world)]
        if any(outcome.failure is not None or outcome.groups > _MOST_GROUPS for outcome in outcomes):
            self.close()
        self._signal(signal.SIGSTOP)
        return outcomes

    def _signal(self, number: int) -> None:
        # NCCL's kernels may wait for threads of the host, and its watchdog counts the time that a process is stopped.
        for process in self._processes if BACKEND != "nccl" else ():
            if process.exitcode is None:
                os.kill(process.pid, number)

    def _receive(self, rank: int) -> Outcome:
        try:
            return self._connections[rank].recv()
        except EOFError:
            self._processes[rank].join()
            return Outcome(failure=f"the process ended with code {self._processes[rank].exitcode}")

    def _start(self) -> None:
        if self._processes:
            return
        # Forked from a process that has imported what all need, and started no thread: that takes seconds a rank. But
        # importing Inductor asks for GPUs, and where there are some a process that is forked then cannot use them.
        way = "spawn" if torch.cuda.is_available() else "forkserver"
        context = multiprocessing.get_context(way)
        if way == "forkserver":
            tested = [name for name in ("pytest", "transformers", "lightning") if name in sys.modules]
            context.set_forkserver_preload([*_PRELOADED, *tested])
        atexit.register(self.close)  # ahead of multiprocessing, which would wait for those that are stopped
        self._folder = tempfile.TemporaryDirectory(prefix="muon_zero_ranks_")
        store = os.path.join(self._folder.name, "store")  # a file: no port to be taken by someone else
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = (rank, self.world, store, self.timeout, theirs)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            _done["ranks started"] += 1
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def close(self) -> None:
        """End the processes."""
        atexit.unregister(self.close)
        for connection in self._connections:
            connection.close()
        global _taken
        counted = _of_children()
        for process in self._processes:
            process.kill()
            process.join()
        _taken -= _of_children() - counted  # what they took of each test is counted already
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None
        self._processes, self._connections = [], []


class _Single(Ranks):
    """World 1: this very process, with no process group."""

    def outcomes(self, function: Callable[..., Any], /, **kwargs: Any) -> list[Outcome]:
        for argument in ("patience", "grace"):
            kwargs.pop(argument, None)
        return [_run(function.__code__.co_filename, function.__name__, kwargs)]


def single_process() -> Ranks:
    """One rank, in the calling process."""
    return _Single(1)


#: The fixture `ranks`: so many of them, started once a session.
RanksOf = Callable[[int], Ranks]


def on_ranks(world: int | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for a test whose body runs on each of ``world`` ranks, or of as many as the test's parameter `world`
    says. Its other parameters and fixtures (`tmp_path`, say) travel to the ranks, and so have to be picklable."""

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(ranks: RanksOf, **given: Any) -> None:
            ranks(given.pop("world", world)).run(body, **given)

        own = inspect.signature(body)
        names = ["ranks"] if world is not None else ["ranks", "world"]
        more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.on_rank = body
        test.__signature__ = own.replace(parameters=[*own.parameters.values(), *more])
        return test

    return decorate
