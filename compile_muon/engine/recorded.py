"""Whole steps as CUDA graphs.

Where the host decides nothing by what the device finds (``checks="next_step"``), a step asks the same of the device
each time, as long as its tensors are where they were. What differs, rates and what the host knows, is then one tensor
that a step copies there, so schedules need no new graph. The first step of its kind is launched as graphs will be, the
second is recorded, all later ones are replayed.

A graph knows addresses. Loading and edits in place keep them; a state, gradient or direction that is elsewhere, other
gradients, another phase of a method, and rates that are no tensor of the launches (``betas``, AdamW's decay) are
another kind of step, which is launched, and recorded when it comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.pinned import pinned_numbers
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.speculation import Speculation
from compile_muon.engine.step_checks import StepChecks
from compile_muon.engine.trained import Trained
from compile_muon.errors import warn_user
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.methods import MatrixMethod, Method
from compile_muon.passes.methods.method import DECAY, LR, MOMENTUM, STEP

__all__ = ["Given", "Launch", "Launched", "Recorded"]

#: graphs that are kept; the one that was replayed longest ago goes, unless that is fewer than ``_PATIENCE`` steps
_MOST = 8
#: kinds of steps that are remembered before they come again, and steps in a row of which none did that are enough
_PATIENCE = 16


@dataclass(frozen=True)
class Given:
    """What differs between steps that are alike, on the device.

    Args:
        numbers: fp64, facts that the host knows and rates behind them.
        count: of facts.
        places: of rates, by group and name.
    """

    numbers: Tensor
    count: int
    places: Mapping[str, Mapping[str, int]]

    @property
    def facts(self) -> Tensor:
        """In fp32."""
        return self.numbers[: self.count].float()

    def rates(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of a parameter group, tensors where they may differ."""
        own = {name: self.numbers[place] for name, place in self.places[group["name"]].items()}
        return {**group, **own}


@dataclass(frozen=True)
class Launched:
    """What launches of a step find.

    Args:
        checks: reduced.
        norm: of the gradients.
        traffic: what they send.
    """

    checks: StepChecks
    norm: Tensor
    traffic: Traffic


#: of a step, with what it is given
Launch = Callable[[Given | None], Launched]


@dataclass(eq=False)
class _Recording:
    """One graph.

    Args:
        replay: starts it.
        given: what it reads; ``values`` are what the host has put there.
        launched: what it writes.
        written: what of parameters, gradients and states.
        resident: parameters whose resident weights it gathers.
        reads: kept, so that no other tensor comes to their places.
        release: lets go of its memory.
        used: number of the step that it was last.
    """

    replay: Callable[[], None]
    given: Given
    values: list[float]
    launched: Launched
    written: list[Tensor]
    resident: list[ShardedParam]
    reads: list[Tensor]
    release: Callable[[], None]
    used: int = 0


@dataclass(eq=False)
class Recorded:
    """The steps of one optimizer that are graphs.

    Args:
        gave_up: why none is recorded any more.
    """

    #: where a tensor is; asked of six tensors a parameter in every step
    address: ClassVar[staticmethod[[Tensor], int]] = staticmethod(Tensor.data_ptr)

    gave_up: str | None = None
    _recordings: dict[tuple[Any, ...], _Recording] = field(default_factory=dict)
    _seen: dict[tuple[Any, ...], None] = field(default_factory=dict)
    _missed: int = 0
    _steps: int = 0
    _pool: Any = None

    def __len__(self) -> int:
        return len(self._recordings)

    def left_out(self, step: Trained) -> str | None:
        """Why no step of an optimizer is recorded; None where they are."""
        config = step.config
        if step.ledger.hooks.unrecorded is not None:
            return step.ledger.hooks.unrecorded
        if not step.ledger.checks_later:
            return "checks='in_step' waits for what a step finds: set checks='next_step'"
        if config.zero.gradient_clipping is not None and step.ledger.speculating:
            return "gradient_clipping must know the norm before it uses directions of backward: set update='step'"
        for group in step.optimizer.param_groups:
            method, rates = step.method(group), [group[rate.name] for rate in step.method(group).rates]
            if isinstance(method, MatrixMethod) and None in method.launched:
                return f"method {method.name!r} asks libraries that wait for the host"
            if any(isinstance(rate, Tensor) for rate in rates):
                return f"rates of group {group['name']!r} are tensors"
        return self.gave_up

    @staticmethod
    def launched(step: Trained) -> str | None:
        """Which steps of an optimizer are never recorded, where others are; None if all may be."""
        methods = {method.name: method for group in step.optimizer.param_groups if (method := step.method(group))}
        phases = [(n, m.launched) for n, m in methods.items() if isinstance(m, MatrixMethod) and m.launched]
        return "; ".join(f"{', '.join(map(repr, own))} of method {name!r}" for name, own in phases) or None

    def run(
        self, step: Trained, launch: Launch, checks: StepChecks, used: Mapping[str, Speculation] | None
    ) -> Launched:
        """Launch a step, or replay one that is like it; what it finds is sent to the host.

        Args:
            checks: with what the host knows.
            used: directions of backward that it uses; None for a step like which there will be none.
        """
        for sharded in step.ledger.sharded_params:  # a graph waits for nothing that was started outside of it
            if sharded.refresh is not None:
                sharded.await_refresh()
        facts, groups = checks.facts, step.optimizer.param_groups
        places: dict[str, dict[str, int]] = {}
        values = list(facts)
        for group in groups:
            places[group["name"]] = own = {}
            for name in _moving(step.method(group)):
                if name in group:
                    own[name] = len(values)
                    values.append(float(group[name]))
        self._steps += 1
        kind = None if used is None or _must_be_launched(step) else self._kind(step, used)
        recording = None if kind is None else self._recordings.get(kind)
        if recording is None and kind is not None and kind in self._seen and self._has_room():
            recording = self._record(step, launch, self._given(step, values, len(facts), places), values)
            self._recordings[kind] = recording
        if recording is None:
            self._miss(kind)
            found = launch(self._given(step, values, len(facts), places))
        else:
            self._missed, recording.used = 0, self._steps
            found = self._replay(recording, values, checks)
        found.checks.send()
        return found

    def release(self) -> None:
        """Let go of all graphs and their memory."""
        for recording in self._recordings.values():
            recording.release()
        self._recordings.clear()
        self._seen.clear()
        self._pool = None

    def _given(self, step: Trained, values: list[float], facts: int, places: Mapping[str, Mapping[str, int]]) -> Given:
        numbers = pinned_numbers(values, torch.float64, step.device).to(step.device, non_blocking=True)
        return Given(numbers, facts, places)

    def _has_room(self) -> bool:
        """Whether one more graph may be kept: where more kinds of steps take turns, those that are stay."""
        if len(self._recordings) < _MOST:
            return True
        oldest = min(self._recordings, key=lambda kind: self._recordings[kind].used)
        if self._steps - self._recordings[oldest].used <= _PATIENCE:
            return False
        self._recordings.pop(oldest).release()
        return True

    def _miss(self, kind: tuple[Any, ...] | None) -> None:
        if kind is None:
            return
        self._seen[kind] = self._seen.pop(kind, None)
        if len(self._seen) > _PATIENCE:
            self._seen.pop(next(iter(self._seen)))
        self._missed += 1
        if self._missed > _PATIENCE:
            self.release()
            self.gave_up = "gradients, directions or states are at other places in each step, or other rates than lr"
            warn_user(
                f"step() stays outside of CUDA graphs from now on: {self.gave_up} change. Training is right, and takes "
                "the host longer"
            )

    def _record(self, step: Trained, launch: Launch, given: Given, values: list[float]) -> _Recording:
        graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        # NCCL's watchdog asks for events meanwhile, in a thread of its own.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            launched = launch(given)
        return self.recording(step, graph.replay, given, values, launched, graph.reset)

    @staticmethod
    def recording(
        step: Trained,
        replay: Callable[[], None],
        given: Given,
        values: list[float],
        launched: Launched,
        release: Callable[[], None],
    ) -> _Recording:
        """What was recorded, with what of it the host must know."""
        sharded_params = [sharded for sharded in (*step.muon, *step.rest) if sharded.grad is not None]
        resident = [sharded for sharded in (*step.muon, *step.rest) if sharded.resident is not None]
        states = [local_tensor(x) for sharded in sharded_params for x in step.optimizer.state[sharded.param].values()]
        written = [*(sharded.local.detach() for sharded in sharded_params), *states]
        written += [sharded.resident.detach() for sharded in resident if sharded.resident is not None]
        hypers = [sharded.hyper for sharded in step.muon]
        return _Recording(replay, given, values, launched, written, resident, [*written, *hypers], release)

    def _replay(self, recording: _Recording, values: list[float], checks: StepChecks) -> Launched:
        if values != recording.values:
            numbers = recording.given.numbers
            numbers.copy_(pinned_numbers(values, numbers.dtype, numbers.device), non_blocking=True)
            recording.values = values
        recording.replay()
        torch.autograd.graph.increment_version(recording.written)  # as every in-place operation does; a graph does not
        for sharded in recording.resident:
            sharded.note_refreshed()
        found = recording.launched
        # The next replay writes what this one found; users keep norms.
        return Launched(found.checks.again(checks.step, checks.refusal), found.norm.clone(), found.traffic)

    def _kind(self, step: Trained, used: Mapping[str, Speculation]) -> tuple[Any, ...]:
        """What a step has to have alike with another one for one graph to do both."""
        kind: list[Any] = [step.ledger.options, tuple(used)]
        for group in step.optimizer.param_groups:
            method, given = step.method(group), _given(step.method(group))
            kind += [(rate.name, group[rate.name]) for rate in method.rates if rate.name not in given]
        address, states = self.address, step.optimizer.state
        for sharded in (*step.muon, *step.rest):
            # A momentum is among the states: one that is elsewhere is in no graph.
            held = [sharded.param, *states[sharded.param].values()]
            if (grad := sharded.grad) is not None:
                own = local_tensor(grad)
                kind += (address(own), own.dtype, own.stride())
            kind += (sharded.text, sharded.entered, *[address(local_tensor(tensor)) for tensor in held])
            if (made := used.get(sharded.name)) is not None:
                kind += (address(made.direction), made.direction.stride(), address(made.fingerprint))
            if sharded.resident is not None:
                kind.append(address(sharded.resident))
        return tuple(kind)


def _must_be_launched(step: Trained) -> bool:
    """Whether a step is in a phase in which a method waits for the host."""
    for group in step.optimizer.param_groups:
        method = step.method(group)
        if isinstance(method, MatrixMethod) and method.launched and group["params"]:
            entered = step.sharded_params[group["params"][0]].entered
            if entered is not None and entered[0] in method.launched:
                return True
    return False


def _moving(method: Method) -> tuple[str, ...]:
    """Rates that launches read from the device, since schedules change them."""
    moving = (LR.name, DECAY[0].name, MOMENTUM.name)
    return tuple(name for name in moving if method.has(name) and name not in method.constants)


def _given(method: Method) -> tuple[str, ...]:
    """All rates of which a launch holds no number: these, and of those that graphs are given what no write reads."""
    if not isinstance(method, MatrixMethod):
        return _moving(method)
    writes = method.after or method.advance or method.finish
    return (*_moving(method), *(name for name in method.given if not writes or name == STEP.name))
