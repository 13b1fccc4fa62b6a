"""Contenders that take turns, each in a process of its own: what breaks one leaves the others' times alone.

A contender prepares a case, which includes the proof that its result is right, and is then timed whenever its turn
comes. What fails is named and left out of that case; what fails in two cases is left out of the rest.
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
    """A contender raised, ended or fell silent; the message says what happened."""


# --- in the contender's process ---------------------------------------------------------------------------------------


class Subject(Protocol):
    """What can be timed: a `Contender` or a `Yardstick`."""

    def on(self, device: torch.device) -> Prepare: ...


class Timings:
    """One contender: checked and timed, a case at a time.

    Args:
        subject: to time.
        device: where.
        graph: capture its calls into a CUDA graph and replay that.
    """

    def __init__(self, subject: Subject, device: torch.device, *, graph: bool):
        self._device = device
        self._graph = graph
        self._prepare = subject.on(device)
        self._run: Callable[[], object] | None = None

    def prepare(self, case: Case) -> str | None:
        """Make the case's matrices, warm up, capture, and check what the timed call computes.

        Returns:
            What is wrong with the result, or None. A contender with a wrong result cannot be timed.
        """
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
        """Seconds of a call, the mean over as many as `at_least` seconds take."""
        if self._run is None:
            raise RuntimeError("not prepared, or its result is wrong")
        return seconds(self._run, self._device, at_least)

    def drop(self) -> None:
        """Free what a case took."""
        self._run = None
        release(self._device)


def capture(run: Callable[[], object]) -> tuple[Callable[[], object], object]:
    """`run` as the replay of a CUDA graph, and its result, which every replay writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    graph.replay()
    torch.cuda.synchronize()

    def replay() -> None:
        assert run is not None  # the graph reads its inputs where they were: `run` keeps them alive
        graph.replay()

    return replay, result


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def seconds(run: Callable[[], object], device: torch.device, at_least: float) -> float:
    """Mean over as many calls as `at_least` seconds take, by the device's own clock on CUDA."""
    if device.type != "cuda":
        run()
        started, calls = time.perf_counter(), 0
        while not calls or time.perf_counter() - started < at_least:
            run()
            calls += 1
        return (time.perf_counter() - started) / calls
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
    """A contender's process: `(method, arguments)` in, `(kind, value)` out, until the channel is closed."""
    torch._dynamo.config.recompile_limit = 256  # compiled for each shape, none left eager
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
            except Exception as error:  # whatever it is, it is this contender's alone
                return channel.send(("error", f"{type(error).__name__}: {error}".splitlines()[0][:300]))


# --- in the benchmark's process ---------------------------------------------------------------------------------------


class Turn(Protocol):
    """What `take_turns` needs of a contender: `Process`, or `Timings` itself. Every method may raise Failed."""

    def prepare(self, case: Case) -> str | None: ...

    def time(self, at_least: float) -> float: ...

    def drop(self) -> None: ...

    def close(self) -> None: ...


class Process:
    """A contender in a process of its own.

    Args:
        name: of a contender.
        device, graph: for `Timings`.
        patience_s: how long an answer may take, compilation included.
    Raises:
        Missing, Failed: it is not there, or did not start.
    """

    def __init__(self, name: str, device: str, graph: bool, patience_s: float):
        # Not forked from here: this process may have used the device. The server forks from one that has only imported.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "compile_muon.kernels"])
        self._patience_s = patience_s
        self._channel, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, device, graph))
        self._process.start()
        theirs.close()
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
    """Cases, contenders and turns. Afterwards `samples`, `wrong`, `failed` and `missing` say what came of each.

    Args:
        start: makes a contender ready; may raise Missing or Failed.
        repeats, at_least: how often each is timed, and for how many seconds.
        order: of the turns.
        say: takes a line for the reader.
    """

    def __init__(
        self,
        start: Callable[[str], Turn],
        *,
        repeats: int,
        at_least: float,
        order: random.Random,
        say: Callable[[str], None],
    ):
        self._start = start
        self._repeats = repeats
        self._at_least = at_least
        self._order = order
        self._say = say
        self._ready: dict[str, Turn] = {}
        self._failures: dict[str, int] = {}
        self.samples: dict[tuple[str, str], list[float]] = {}  # by case and contender
        self.wrong: dict[tuple[str, str], str] = {}
        self.failed: dict[tuple[str, str], str] = {}
        self.missing: dict[str, str] = {}

    def run(self, case: Case, names: Sequence[str]) -> None:
        """Time the contenders on a case, in turns; one after another if it is that large."""
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
            turn = self._ready.pop(name, None)  # a new process for the next case: this one's state is unknown
            if turn is not None:
                turn.close()
        return None
