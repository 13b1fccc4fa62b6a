"""What the steps of one optimizer share: its settings, its parameters by group, and the states that methods keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from compile_muon.config import Config
from compile_muon.engine.dtensors import like_parameter, local_tensor
from compile_muon.engine.ledger import Ledger
from compile_muon.engine.pinned import pinned_numbers
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import StateProvider, StateRequest
from compile_muon.engine.states import new_state
from compile_muon.engine.step_graph import StepGraphs
from compile_muon.errors import config_error, listed
from compile_muon.passes.methods import MatrixMethod, Method, matrix_method
from compile_muon.passes.methods.method import STEP

__all__ = ["Trained"]


@dataclass(eq=False)
class Trained:
    """What one optimizer trains.

    Args:
        optimizer: whose ``param_groups`` and ``state`` are read anew each time: loading replaces them.
        config: of it.
        methods: of its groups, by name.
        ledger: with all sharded parameters.
        group: all its ranks, None for one process.
        device: of all tensors.
        compares: whether ranks answer.
        check_model: raises UnsupportedModelError where the model does not hold what was sharded any more.
        scale: of the rate, by ``adjust_lr``, rows and columns of a matrix.
        torn: whether a step has begun to write and has not come to its end.
    Attributes:
        state_provider: of the states that are not resident.
        sharded_params: that are trained; ``muon`` are the matrices, ``rest`` all else, each in the order of the model.
        summed: matrices of methods that need sums over whole ones.
    """

    optimizer: Optimizer
    config: Config
    methods: Mapping[str, Method]
    ledger: Ledger
    group: dist.ProcessGroup | None
    device: torch.device
    compares: bool
    check_model: Callable[[], None]
    scale: Callable[[str | float, int, int], float]
    step_graphs: StepGraphs = field(default_factory=StepGraphs)
    torn: bool = False
    state_provider: StateProvider = field(init=False)

    def __post_init__(self) -> None:
        self.state_provider = self.ledger.hooks.state_provider
        self.sharded_params: dict[Tensor, ShardedParam] = {}
        self._states: dict[Tensor, set[str]] = {}  # of each parameter, beside its momentum, by name
        self._further: dict[ShardedParam, dict[str, Tensor]] = {}  # of extensions
        self._know([sharded for sharded in self.ledger.sharded_params if sharded.param.requires_grad])

    def provide(
        self, sharded_params: Sequence[ShardedParam], what: StateRequest
    ) -> Iterator[tuple[Sequence[ShardedParam], Sequence[MutableMapping[str, Tensor]]]]:
        """Their states, to be read and written; all at once where they are resident."""
        if not self.state_provider.all_resident:
            yield from self.state_provider.provide(sharded_params, what, self.ledger.status.step)
        elif sharded_params:
            yield sharded_params, [self.optimizer.state[sharded.param] for sharded in sharded_params]

    def take_up(self, sharded_params: Sequence[ShardedParam], methods: Mapping[str, Method]) -> None:
        """Update these as well, which groups hold from now on.

        Args:
            methods: of their groups, by name.
        """
        self.methods = {**self.methods, **methods}
        self._know(sharded_params)
        self.create_state()

    def _know(self, sharded_params: Sequence[ShardedParam]) -> None:
        known = {*self.sharded_params.values(), *sharded_params}
        # in the same order on every rank
        trained = [sharded for sharded in self.ledger.sharded_params if sharded in known]
        self.sharded_params = {sharded.param: sharded for sharded in trained}
        self.muon = [sharded for sharded in trained if sharded.spec.muon is not None]
        self.rest = [sharded for sharded in trained if sharded.spec.muon is None]
        # with a gradient or without, the same on every rank
        methods = [matrix_method(sharded.spec.muon_settings.method) for sharded in self.muon]
        self.summed = [a for a, m in zip(self.muon, methods, strict=True) if m.facts]

    def method(self, group: Mapping[str, Any]) -> Method:
        """Of a parameter group."""
        return self.methods[group["name"]]

    def rates(self) -> dict[str, Any]:
        """Of all groups, by name of the group and of the rate."""
        groups = self.optimizer.param_groups
        return {
            f"{group['name']} {rate.name}": group[rate.name] for group in groups for rate in self.method(group).rates
        }

    def with_gradient(self, group: Mapping[str, Any]) -> list[ShardedParam]:
        """Those of a parameter group that have one."""
        return [self.sharded_params[param] for param in group["params"] if param.grad is not None]

    def create_state(self) -> None:
        """All state exists from the start, so checkpoints and sharding see it before the first step."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                sharded, slots = self.sharded_params[param], self.optimizer.state[param]
                kept = self.state_provider.places.get(sharded.name, {})
                if sharded.spec.muon is not None and sharded.spec.muon.resident_momentum:
                    slots["momentum_buffer"] = sharded.momentum_buffer
                own = [state for state in self.method(group).states if state.name not in kept]
                for state in own:
                    if state.name not in slots:
                        slots[state.name] = new_state(sharded, state)
                self._states[param] = {state.name for state in own}
                if self.ledger.hooks.state:
                    self._states[param] |= self._begin(sharded, {"momentum_buffer", *kept, *self._states[param]})

    def _begin(self, sharded: ShardedParam, taken: set[str]) -> set[str]:
        """What extensions keep of a parameter is there; returns its names.

        Raises:
            ConfigError: one is the name of another state.
        """
        slots, own, found = self.optimizer.state[sharded.param], self._further.setdefault(sharded, {}), set[str]()
        for state in self.ledger.hooks.state:
            for name, value in state(sharded).items():
                if name in taken | found:
                    raise config_error("extensions", name, f"is another state of {sharded.name}", "use another name")
                found.add(name)
                if name not in slots:
                    cut = value.shape == sharded.local.shape
                    slots[name] = own[name] = like_parameter(sharded.param, value) if cut else value
        return found

    def check_momentum(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[float, ...], list[ShardedParam]]]:
        """What graphs read of the rates of ``groups``, which stand for ``param_groups``, and those that share a
        tensor of each.

        Raises:
            ConfigError: groups that share one differ.
        """
        shared: dict[int, list[tuple[Mapping[str, Any], list[ShardedParam]]]] = {}
        methods: dict[int, MatrixMethod] = {}
        for own, group in zip(self.optimizer.param_groups, groups, strict=True):
            method = self.method(own)
            if isinstance(method, MatrixMethod) and own["params"] and method.keeps_momentum <= ("momentum" in group):
                sharded_params = [self.sharded_params[param] for param in own["params"]]
                shared.setdefault(id(sharded_params[0].hyper), []).append((group, sharded_params))
                methods[id(sharded_params[0].hyper)] = method
        found = []
        for hyper, sharing in shared.items():
            rates = []
            for name in ("momentum", *methods[hyper].given):
                values = {float(group.get(name, 0.0)) + (name == STEP.name) for group, _ in sharing}
                if len(values) > 1:
                    names = listed([group["name"] for group, _ in sharing])
                    raise config_error(name, values, f"differs between {names}", "give all of them the same")
                rates.append(values.pop())
            found.append((tuple(rates), [sharded for _, sharded_params in sharing for sharded in sharded_params]))
        return found

    def sync_momentum(self) -> None:
        """Bring the tensors that graphs read in line with ``param_groups`` (schedulers may change the momentum)."""
        for rates, sharded_params in self.check_momentum(self.optimizer.param_groups):
            if rates != sharded_params[0].rates:
                # .data: graphs saved this tensor for backward; a new value is no reason to refuse their backward.
                numbers = pinned_numbers([1 - rates[0], *rates], torch.float32, self.device)
                sharded_params[0].hyper.data.copy_(numbers, non_blocking=True)
                for sharded in sharded_params:
                    sharded.use_rates(rates)
        for group in self.optimizer.param_groups:
            method = self.method(group)
            if isinstance(method, MatrixMethod) and method.in_step:
                now = {rate.name: group[rate.name] for rate in method.rates}
                now |= {STEP.name: now[STEP.name] + 1} if method.has(STEP.name) else {}
                phase = None if method.phase is None else method.phase(now)
                joined = method.joined is not None and bool(method.joined(now))
                for param in group["params"]:
                    self.sharded_params[param].enter(phase, joined=joined)

    def count_step(self, steps: int = 1) -> None:
        """A step has been written, or was not after all (-1): groups whose methods ask for its number count it."""
        for group in self.optimizer.param_groups:
            if self.method(group).has(STEP.name):
                group[STEP.name] += steps

    @torch.no_grad()
    def own_momenta(self) -> None:
        """States that users put into the optimizer's, as they may, become those that graphs read; what they took out
        begins anew, as in torch.optim."""
        self.state_provider.own()
        for sharded in self.muon:
            if not sharded.spec.muon_settings.resident_momentum:
                continue
            slots = self.optimizer.state[sharded.param]
            held = slots.get("momentum_buffer")
            if held is sharded.momentum_buffer:
                continue
            if held is None:
                sharded.momentum.zero_()
            else:
                sharded.momentum.copy_(local_tensor(held))
            slots["momentum_buffer"] = sharded.momentum_buffer
        for sharded, own in self._further.items():
            slots = self.optimizer.state[sharded.param]
            for name, held in {**slots}.items():
                if name in own and held is not own[name]:
                    local_tensor(own[name]).copy_(local_tensor(held))
                    slots[name] = own[name]
        if any(not names <= self.optimizer.state[param].keys() for param, names in self._states.items()):
            self.create_state()
