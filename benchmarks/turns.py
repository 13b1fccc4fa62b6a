"""Contenders that take turns, each in a process of its own: a failure of one leaves the others' times alone.

A contender prepares a case, which includes a check of its result, and is then timed whenever its turn comes. A
contender that fails is named and left out of that case; one that fails in two cases is left out of the rest.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
from orthogonalizers import CONTENDERS, Case, Missing, Prepare
from yardsticks import YARDSTICKS

MOST_FAILURES = 2


class Failed(Exception):
    """A contender raised, ended or fell silent; the message has the reason."""


# --- in the contender's process ---------------------------------------------------------------------------------------


class Subject(Protocol):
    """A subject of timing: a `Contender` or a `Yardstick`."""

    def on(self, device: torch.device) -> Prepare: ...


class Timings:
    """A contender in its own process, checked and timed case by case, with `graph` by replays of a CUDA graph."""

    def __init__(self, subject: Subject, device: torch.device, *, graph: bool):
        self._device = device
        self._graph = graph
        self._prepare = subject.on(device)
        self._run: Callable[[], object] | None = None

    def prepare(self, case: Case) -> str | None:
        """Make the case's matrices, warm up, capture, and check the timed call; return the complaint, or None."""
        self.drop()
        run, check = self._prepare(case)
        result = run()  # compiles
        if self._graph:
            del result
            release(self._device)
            run, result = capture(run)
        complaint = check(result)
        if complaint is None:
            self._run = run
        return complaint

    def time(self, at_least: float) -> float:
        """Return the mean seconds of a call, over at least `at_least` seconds of calls."""
        if self._run is None:
            raise RuntimeError("not prepared, or its result is wrong")
        return seconds(self._run, self._device, at_least)

    def drop(self) -> None:
        self._run = None
        release(self._device)


def capture(run: Callable[[], object]) -> tuple[Callable[[], object], object]:
    """Capture `run` into a CUDA graph; return its replay, and the result that every replay writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    graph.replay()
    torch.cuda.synchronize()

    def replay() -> None:
        assert run is not None  # keeps `run` alive, and so the inputs whose memory the graph reads
        graph.replay()

    return replay, result


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def seconds(run: Callable[[], object], device: torch.device, at_least: float) -> float:
    """Return the mean seconds of a call, over at least `at_least` seconds of calls, by the device's clock on CUDA."""
    if device.type != "cuda":
        run()
        begin, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - begin < at_least:
            run()
            calls += 1
        return (time.perf_counter() - begin) / calls
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    calls = max(1, int(at_least / (start.elapsed_time(end) / 1e3)))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def serve(channel: Connection, name: str, device: str, graph: bool) -> None:
    """Run a contender's process: `(method, arguments)` in, `(kind, value)` out, until the channel is closed."""
    torch._dynamo.config.recompile_limit = 256  # so that every shape is compiled, and none runs eagerly
    timings: Timings | None = None
    with contextlib.suppress(EOFError):
        while True:
            try:
                if timings is None:
                    timings, value = Timings((CONTENDERS | YARDSTICKS)[name], torch.device(device), graph=graph), None
                else:
                    method, arguments = channel.recv()
                    value = getattr(timings, method)(*arguments)
                channel.send(("value", value))
            except EOFError:
                raise
            except Missing as reason:
                return channel.send(("missing", str(reason)))
            except Exception as error:  # of any kind: it concerns this contender alone
                return channel.send(("error", f"{type(error).__name__}: {error}".splitlines()[0][:300]))


# --- in the benchmark's process ---------------------------------------------------------------------------------------


class Turn(Protocol):
    """A contender as `Rounds` needs it: a `Process`, or `Timings` itself. Every method may raise Failed."""

    def prepare(self, case: Case) -> str | None: ...

    def time(self, at_least: float) -> float: ...

    def drop(self) -> None: ...

    def close(self) -> None: ...


class Process:
    """A contender in a process of its own; raises Missing if it cannot run here, Failed if it does not start."""

    def __init__(self, name: str, device: str, graph: bool, patience_s: float):
        # Forked from a server that has only imported, because this process may have used the device.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "compile_muon.kernels"])
        self._patience_s = patience_s  # for an answer, compilation included
        self._channel, worker_end = context.Pipe()
        self._process = context.Process(target=serve, args=(worker_end, name, device, graph))
        self._process.start()
        worker_end.close()
        self._answer()

    def prepare(self, case: Case) -> str | None:
        return self._ask("prepare", case)

    def time(self, at_least: float) -> float:
        return self._ask("time", at_least)

    def drop(self) -> None:
        self._ask("drop")

    def close(self) -> None:
        self._channel.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, method: str, *arguments: object) -> Any:
        try:
            self._channel.send((method, arguments))
        except OSError as error:
            raise Failed(f"its process is gone ({error})") from None
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self._channel.poll(self._patience_s):
                self._process.kill()
                self.close()
                raise Failed(f"no answer within {self._patience_s:.0f} s")
            kind, value = self._channel.recv()
        except (EOFError, ConnectionError):
            self.close()
            raise Failed(f"its process ended with status {self._process.exitcode}") from None
        if kind == "value":
            return value
        self.close()
        raise (Missing if kind == "missing" else Failed)(value)


class Rounds:
    """The rounds of all cases; `samples`, `wrong`, `failed` and `missing` have the outcomes."""

    def __init__(
        self,
        start: Callable[[str], Turn],
        *,
        repeats: int,
        at_least: float,
        order: random.Random,
        say: Callable[[str], None],
    ):
        self._start = start  # may raise Missing or Failed
        self._repeats = repeats
        self._at_least = at_least  # seconds of a timing
        self._order = order
        self._say = say
        self._ready: dict[str, Turn] = {}
        self._failures: dict[str, int] = {}
        self.samples: dict[tuple[str, str], list[float]] = {}  # by case and contender
        self.wrong: dict[tuple[str, str], str] = {}
        self.failed: dict[tuple[str, str], str] = {}
        self.missing: dict[str, str] = {}

    def run(self, case: Case, names: Sequence[str]) -> None:
        """Time the contenders on a case, in turns; or one after another, if the case is so large."""
        for group in [[name] for name in names] if case.alone else [list(names)]:
            right = [name for name in group if self._attempt(case, name, self._prepare) is True]
            for _ in range(self._repeats):
                for name in self._order.sample(right, len(right)):
                    if (case.name, name) not in self.failed:
                        self._attempt(case, name, self._time)
            for name in right:
                if (case.name, name) not in self.failed:
                    self._attempt(case, name, lambda case, name: self._ready[name].drop())

    def close(self) -> None:
        for turn in self._ready.values():
            turn.close()
        self._ready.clear()

    def _prepare(self, case: Case, name: str) -> bool:
        if name not in self._ready:
            self._ready[name] = self._start(name)
        complaint = self._ready[name].prepare(case)
        if complaint is not None:
            self.wrong[case.name, name] = complaint
            self._say(f"[red]{name} is wrong, and not timed, on {case.name}[/red]: {complaint}")
            self._ready[name].drop()
        return complaint is None

    def _time(self, case: Case, name: str) -> None:
        took = self._ready[name].time(self._at_least)
        self.samples.setdefault((case.name, name), []).append(took)

    def _attempt(self, case: Case, name: str, action: Callable[[Case, str], Any]) -> Any:
        if name in self.missing or self._failures.get(name, 0) >= MOST_FAILURES:
            return None
        try:
            return action(case, name)
        except Missing as reason:
            self.missing[name] = str(reason)
            self._say(f"[yellow]without {name}[/yellow]: {reason}")
        except Failed as failure:
            self._failures[name] = self._failures.get(name, 0) + 1
            self.failed[case.name, name] = str(failure)
            self.samples.pop((case.name, name), None)
            self._say(f"[red]{name} failed on {case.name}[/red]: {failure}")
            turn = self._ready.pop(name, None)  # its state is unknown: the next case gets a new process
            if turn is not None:
                turn.close()
        return None
