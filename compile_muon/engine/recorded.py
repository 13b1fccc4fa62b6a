"""Whole steps as CUDA graphs.

With ``checks="next_step"`` the host decides nothing by results of the device, so a step launches the same work each
time, as long as its tensors keep their addresses. Numbers that differ, rates and facts of the host, are in one tensor
that each step copies to the device, so schedules need no new graph. The first step of a kind is launched outside a
graph, the second is captured, later ones are replayed.

Steps of one kind have the same gradients; states, gradients and directions at the same addresses; the same phases of
methods; and equal values of rates that launches take as numbers (``betas``, AdamW's decay). Loading and in-place edits
keep addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from compile_muon.engine.dtensors import edits_of, local_tensor, pinned_numbers
from compile_muon.engine.gradient import Speculation
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.step_checks import StepChecks
from compile_muon.engine.trained import OptimizerState
from compile_muon.errors import warn_user
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.methods import MatrixMethod, Method
from compile_muon.passes.methods.method import DECAY, LR, MOMENTUM, STEP

#: most graphs kept; a new one replaces the least recently replayed, if that was more than ``_PATIENCE`` steps ago
_MOST = 8
#: kinds of steps remembered until they recur; after more steps in a row of which none recurs, recording stops
_PATIENCE = 16


@dataclass(frozen=True)
class StepInputs:
    """The numbers in which steps of one kind differ, on the device."""

    numbers: Tensor  # fp64: facts of the host, then rates
    count: int  # number of facts
    places: Mapping[str, Mapping[str, int]]  # positions of rates, by group and rate

    @property
    def facts(self) -> Tensor:
        """The facts, in fp32."""
        return self.numbers[: self.count].float()

    def rates(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``group`` with 0-dim tensors for the rates that may differ."""
        device_rates = {name: self.numbers[place] for name, place in self.places[group["name"]].items()}
        return {**group, **device_rates}


@dataclass(frozen=True)
class StepResult:
    """Results of a step's launches."""

    checks: StepChecks  # reduced
    norm: Tensor  # of all gradients, 0-dim fp32
    traffic: Traffic  # sent by one step


#: launches a step; with None in place of ``StepInputs`` where steps are never recorded
Launch = Callable[[StepInputs | None], StepResult]


@dataclass(eq=False)
class _Recording:
    """One CUDA graph."""

    replay: Callable[[], None]
    inputs: StepInputs  # read by the graph
    values: list[float]  # the numbers in ``inputs`` at present
    launched: StepResult  # written by the graph
    written: list[Tensor]  # parameters, states and resident weights it writes
    resident: list[ShardedParam]  # parameters whose resident weights it gathers
    reads: list[Tensor]  # kept alive, so that no other tensor gets their addresses
    release: Callable[[], None]  # frees the graph's memory
    used: int = 0  # number of the step that replayed it last


@dataclass(eq=False)
class StepGraphCache:
    """The CUDA graphs of one optimizer's steps."""

    #: address of a tensor; called for about six tensors per parameter in every step; tests replace it
    address: ClassVar[staticmethod[[Tensor], int]] = staticmethod(Tensor.data_ptr)

    gave_up: str | None = None  # why recording has stopped
    _recordings: dict[tuple[Any, ...], _Recording] = field(default_factory=dict)
    _seen: dict[tuple[Any, ...], None] = field(default_factory=dict)  # kinds of launched steps, the latest last
    _missed: int = 0  # steps in a row whose kind had no graph
    _steps: int = 0
    _pool: Any = None

    def __len__(self) -> int:
        return len(self._recordings)

    def left_out(self, step: OptimizerState) -> str | None:
        """Return why no step of this optimizer is recorded; None if steps are."""
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
    def launched(step: OptimizerState) -> str | None:
        """Return in words the phases of methods whose steps are never recorded; None if all steps may be."""
        methods = {method.name: method for group in step.optimizer.param_groups if (method := step.method(group))}
        phases = [(n, m.launched) for n, m in methods.items() if isinstance(m, MatrixMethod) and m.launched]
        return "; ".join(f"{', '.join(map(repr, names))} of method {name!r}" for name, names in phases) or None

    def run(
        self, step: OptimizerState, launch: Launch, checks: StepChecks, used: Mapping[str, Speculation] | None
    ) -> StepResult:
        """Launch or replay a step, and send its results to the host. ``checks`` holds the facts of the host, ``used``
        the directions of backward that it takes; None for a kind of step that does not recur, which is in no graph."""
        for sharded in step.ledger.sharded_params:  # a captured graph cannot wait for work launched outside it
            if sharded.refresh is not None:
                sharded.await_refresh()
        facts, groups = checks.facts, step.optimizer.param_groups
        places: dict[str, dict[str, int]] = {}
        values = list(facts)
        for group in groups:
            places[group["name"]] = group_places = {}
            for name in _moving(step.method(group)):
                if name in group:
                    group_places[name] = len(values)
                    values.append(float(group[name]))

        def inputs() -> StepInputs:
            numbers = pinned_numbers(values, torch.float64, step.device).to(step.device, non_blocking=True)
            return StepInputs(numbers, len(facts), places)

        self._steps += 1
        kind = None if used is None or _must_be_launched(step) else self._kind(step, used)
        recording = None if kind is None else self._recordings.get(kind)
        if recording is None and kind is not None and kind in self._seen and self._has_room():
            recording = self._record(step, launch, inputs(), values)
            self._recordings[kind] = recording
        if recording is None:
            self._miss(kind)
            results = launch(inputs())
        else:
            self._missed, recording.used = 0, self._steps
            results = self._replay(recording, values, checks)
        results.checks.send()
        return results

    def release(self) -> None:
        """Free all graphs and their memory."""
        for recording in self._recordings.values():
            recording.release()
        self._recordings.clear()
        self._seen.clear()
        self._pool = None

    def _has_room(self) -> bool:
        """Return whether one more graph may be kept, after dropping one that has not been replayed lately."""
        if len(self._recordings) < _MOST:
            return True
        oldest = min(self._recordings, key=lambda kind: self._recordings[kind].used)
        if self._steps - self._recordings[oldest].used <= _PATIENCE:
            return False
        self._recordings.pop(oldest).release()
        return True

    def _miss(self, kind: tuple[Any, ...] | None) -> None:
        """Remember a kind without a graph; stop recording when kinds never recur."""
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

    def _record(self, step: OptimizerState, launch: Launch, inputs: StepInputs, values: list[float]) -> _Recording:
        graph, self._pool = torch.cuda.CUDAGraph(), self._pool or torch.cuda.graph_pool_handle()
        # NCCL's watchdog thread queries events during capture, which the default mode, "global", forbids.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            results = launch(inputs)
        return self.recording(step, graph.replay, inputs, values, results, graph.reset)

    @staticmethod
    def recording(
        step: OptimizerState,
        replay: Callable[[], None],
        inputs: StepInputs,
        values: list[float],
        launched: StepResult,
        release: Callable[[], None],
    ) -> _Recording:
        """Return a recording with the tensors that the host must account for after a replay."""
        sharded_params = [sharded for sharded in (*step.muon, *step.rest) if sharded.grad is not None]
        resident = [sharded for sharded in (*step.muon, *step.rest) if sharded.resident is not None]
        states = [local_tensor(x) for sharded in sharded_params for x in step.optimizer.state[sharded.param].values()]
        written = [*(sharded.local.detach() for sharded in sharded_params), *states]
        written += [sharded.resident.detach() for sharded in resident if sharded.resident is not None]
        all_graph_scalars = [sharded.graph_scalars for sharded in step.muon]
        return _Recording(replay, inputs, values, launched, written, resident, [*written, *all_graph_scalars], release)

    def _replay(self, recording: _Recording, values: list[float], checks: StepChecks) -> StepResult:
        if values != recording.values:
            numbers = recording.inputs.numbers
            numbers.copy_(pinned_numbers(values, numbers.dtype, numbers.device), non_blocking=True)
            recording.values = values
        recording.replay()
        torch.autograd.graph.increment_version(recording.written)  # a replay does not count edits
        for sharded in recording.resident:
            sharded.refreshed_at = edits_of(sharded.param)
        results = recording.launched
        # The next replay overwrites the norm, which users keep.
        return StepResult(results.checks.again(checks), results.norm.clone(), results.traffic)

    def _kind(self, step: OptimizerState, used: Mapping[str, Speculation]) -> tuple[Any, ...]:
        """Return the key on which two steps must agree to share a graph."""
        kind: list[Any] = [step.ledger.options, tuple(used)]
        for group in step.optimizer.param_groups:
            method, device_rates = step.method(group), _device_rates(step.method(group))
            kind += [(rate.name, group[rate.name]) for rate in method.rates if rate.name not in device_rates]
        address, states = self.address, step.optimizer.state
        for sharded in (*step.muon, *step.rest):
            # A resident momentum is among the states; an offloaded one is in no graph.
            tensors = [sharded.param, *states[sharded.param].values()]
            if (grad := sharded.grad) is not None:
                local_grad = local_tensor(grad)
                kind += (address(local_grad), local_grad.dtype, local_grad.stride())
            kind += (sharded.text, sharded.entered, *[address(local_tensor(tensor)) for tensor in tensors])
            if (speculation := used.get(sharded.name)) is not None:
                direction = speculation.direction
                kind += (address(direction), direction.stride(), address(speculation.fingerprint))
            if sharded.resident is not None:
                kind.append(address(sharded.resident))
        return tuple(kind)


def _must_be_launched(step: OptimizerState) -> bool:
    """Return whether a method waits for the host in the phase of this step, which no graph can hold then."""
    for group in step.optimizer.param_groups:
        method = step.method(group)
        if isinstance(method, MatrixMethod) and method.launched and group["params"]:
            entered = step.sharded_params[group["params"][0]].entered
            if entered is not None and entered[0] in method.launched:
                return True
    return False


def _moving(method: Method) -> tuple[str, ...]:
    """Return the rates that launches read from the device, because schedules change them."""
    moving = (LR.name, DECAY[0].name, MOMENTUM.name)
    return tuple(name for name in moving if method.has(name) and name not in method.constants)


def _device_rates(method: Method) -> tuple[str, ...]:
    """Return the rates that may differ within a kind: :func:`_moving` and those in ``graph_scalars``, of these only
    ``step`` if the method has writes of its own, which read the others as numbers."""
    if not isinstance(method, MatrixMethod):
        return _moving(method)
    writes = method.after or method.advance or method.finish
    return (*_moving(method), *(name for name in method.graph_rates if not writes or name == STEP.name))
