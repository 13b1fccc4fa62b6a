"""The settings, parameters and method states that the steps of one optimizer share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from compile_muon.config import Config
from compile_muon.engine.dtensors import like_parameter, local_tensor, pinned_numbers
from compile_muon.engine.hooks import Provided, StateProvider, StateRequest
from compile_muon.engine.ledger import Ledger
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import new_state
from compile_muon.engine.step_graph import StepGraphs
from compile_muon.errors import config_error, listed
from compile_muon.passes.methods import MatrixMethod, Method, matrix_method
from compile_muon.passes.methods.method import STEP


@dataclass(eq=False)
class OptimizerState:
    """The trained parameters of one optimizer, by group, and their settings."""

    optimizer: Optimizer  # ``param_groups`` and ``state`` are read at each use, since loading replaces them
    config: Config
    methods: Mapping[str, Method]
    ledger: Ledger  # with all sharded parameters
    group: dist.ProcessGroup | None  # all ranks of the optimizer; None for one process
    device: torch.device  # of all tensors
    compares: bool  # whether other ranks answer
    check_model: Callable[[], None]  # raises UnsupportedModelError if the model no longer holds the sharded parameters
    step_graphs: StepGraphs = field(default_factory=StepGraphs)
    torn: bool = False  # a step has begun to write and has not come to its end
    state_provider: StateProvider = field(init=False)  # of states that are not resident

    def __post_init__(self) -> None:
        self.state_provider = self.ledger.hooks.state_provider
        self.sharded_params: dict[Tensor, ShardedParam] = {}
        self._states: dict[Tensor, set[str]] = {}  # names of each parameter's states, without the momentum
        self._further: dict[ShardedParam, dict[str, Tensor]] = {}  # states of extensions
        self._know([sharded for sharded in self.ledger.sharded_params if sharded.param.requires_grad])

    def provide(self, sharded_params: Sequence[ShardedParam], what: StateRequest) -> Provided:
        """Yield the states of these parameters, to be read and written; all at once where they are resident."""
        if not self.state_provider.all_resident:
            yield from self.state_provider.provide(sharded_params, what, self.ledger.status.step)
        elif sharded_params:
            yield sharded_params, [self.optimizer.state[sharded.param] for sharded in sharded_params]

    def take_up(self, sharded_params: Sequence[ShardedParam], methods: Mapping[str, Method]) -> None:
        """Train parameters as well that the optimizer's groups hold from now on; ``methods``: by name of the group."""
        self.methods = {**self.methods, **methods}
        self._know(sharded_params)
        self.create_state()

    def _know(self, sharded_params: Sequence[ShardedParam]) -> None:
        """Add parameters to ``sharded_params``, ``muon`` (matrices), ``rest`` (others) and ``summed`` (matrices whose
        methods sum facts)."""
        members = {*self.sharded_params.values(), *sharded_params}
        # In the order of the model, equal on all ranks, with a gradient or without: collectives run over these lists.
        trained = [sharded for sharded in self.ledger.sharded_params if sharded in members]
        self.sharded_params = {sharded.param: sharded for sharded in trained}
        self.muon = [sharded for sharded in trained if sharded.spec.muon is not None]
        self.rest = [sharded for sharded in trained if sharded.spec.muon is None]
        methods = [matrix_method(sharded.spec.muon_settings.method) for sharded in self.muon]
        self.summed = [a for a, m in zip(self.muon, methods, strict=True) if m.facts]

    def method(self, group: Mapping[str, Any]) -> Method:
        """Return the method of a parameter group."""
        return self.methods[group["name"]]

    def create_state(self) -> None:
        """Create all states that are missing: checkpoints and sharding need them before the first step."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                sharded, slots = self.sharded_params[param], self.optimizer.state[param]
                places = self.state_provider.places.get(sharded.name, {})
                if sharded.spec.muon is not None and sharded.spec.muon.resident_momentum:
                    slots["momentum_buffer"] = sharded.momentum_buffer
                resident_states = [state for state in self.method(group).states if state.name not in places]
                for state in resident_states:
                    if state.name not in slots:
                        slots[state.name] = new_state(sharded, state)
                self._states[param] = {state.name for state in resident_states}
                if self.ledger.hooks.state:
                    self._states[param] |= self._begin(sharded, {"momentum_buffer", *places, *self._states[param]})

    def _begin(self, sharded: ShardedParam, existing_names: set[str]) -> set[str]:
        """Create the states of extensions for a parameter; return their names. ConfigError for ``existing_names``."""
        slots, states, names = self.optimizer.state[sharded.param], self._further.setdefault(sharded, {}), set[str]()
        for state in self.ledger.hooks.state:
            for name, value in state(sharded).items():
                if name in existing_names | names:
                    raise config_error("extensions", name, f"is another state of {sharded.name}", "use another name")
                names.add(name)
                if name not in slots:
                    like_shard = value.shape == sharded.local.shape
                    slots[name] = states[name] = like_parameter(sharded.param, value) if like_shard else value
        return names

    def check_momentum(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[tuple[float, ...], list[ShardedParam]]]:
        """Return for each tensor of graph scalars its rates by ``groups``, which stand for ``param_groups``, and the
        parameters that share it; groups without their momentum are left out. ConfigError if those that share differ."""
        # By tensor, the method, the groups and the parameters that share it.
        sharers: dict[int, tuple[MatrixMethod, list[Mapping[str, Any]], list[ShardedParam]]] = {}
        for actual, group in zip(self.optimizer.param_groups, groups, strict=True):
            method = self.method(actual)
            if not isinstance(method, MatrixMethod) or not actual["params"]:
                continue
            if "momentum" in group or not method.keeps_momentum:
                members = [self.sharded_params[param] for param in actual["params"]]
                _, same_groups, same_params = sharers.setdefault(id(members[0].graph_scalars), (method, [], []))
                same_groups.append(group)
                same_params += members
        results = []
        for method, same_groups, same_params in sharers.values():
            rates = []
            for name in ("momentum", *method.graph_rates):
                values = {float(group.get(name, 0.0)) + (name == STEP.name) for group in same_groups}
                if len(values) > 1:
                    names = listed([group["name"] for group in same_groups])
                    raise config_error(name, values, f"differs between {names}", "give all of them the same")
                rates.append(values.pop())
            results.append((tuple(rates), same_params))
        return results

    def sync_momentum(self) -> None:
        """Write rates of ``param_groups`` to the tensors of graph scalars, and choose the graphs of this step."""
        for rates, sharded_params in self.check_momentum(self.optimizer.param_groups):
            if rates != sharded_params[0].rates:
                # .data: a counted edit would make autograd refuse the backward of graphs that saved this tensor.
                numbers = pinned_numbers([1 - rates[0], *rates], torch.float32, self.device)
                sharded_params[0].graph_scalars.data.copy_(numbers, non_blocking=True)
                for sharded in sharded_params:
                    sharded.rates = rates
        for group in self.optimizer.param_groups:
            method = self.method(group)
            if isinstance(method, MatrixMethod) and method.in_step:
                group_rates = {rate.name: group[rate.name] for rate in method.rates}
                group_rates |= {STEP.name: group_rates[STEP.name] + 1} if method.has(STEP.name) else {}
                phase = None if method.phase is None else method.phase(group_rates)
                joined = method.joined is not None and bool(method.joined(group_rates))
                for param in group["params"]:
                    self.sharded_params[param].enter(phase, joined=joined)

    def count_step(self, steps: int = 1) -> None:
        """Add ``steps`` to the step numbers of groups; -1 takes back a step that is not known to be written."""
        for group in self.optimizer.param_groups:
            if self.method(group).has(STEP.name):
                group[STEP.name] += steps

    @torch.no_grad()
    def own_momenta(self) -> None:
        """Copy states that users put into ``optimizer.state`` to the tensors that graphs read; a removed state begins
        anew, as in torch.optim."""
        if not self.state_provider.all_resident:
            self.state_provider.own()
        for sharded in self.muon:
            if not sharded.spec.muon_settings.resident_momentum:
                continue
            slots = self.optimizer.state[sharded.param]
            user_state = slots.get("momentum_buffer")
            if user_state is sharded.momentum_buffer:
                continue
            if user_state is None:
                sharded.momentum.zero_()
            else:
                sharded.momentum.copy_(local_tensor(user_state))
            slots["momentum_buffer"] = sharded.momentum_buffer
        for sharded, own_tensors in self._further.items():
            slots = self.optimizer.state[sharded.param]
            for name, user_state in {**slots}.items():
                if name in own_tensors and user_state is not own_tensors[name]:
                    local_tensor(own_tensors[name]).copy_(local_tensor(user_state))
                    slots[name] = own_tensors[name]
        if any(not names <= self.optimizer.state[param].keys() for param, names in self._states.items()):
            self.create_state()
