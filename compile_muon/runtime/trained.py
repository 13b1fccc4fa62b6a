"""What the steps of one optimizer share: its settings, its parameters by group, and the states that methods keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from compile_muon.config import Config
from compile_muon.errors import config_error, listed
from compile_muon.passes.methods import MatrixMethod, Method, matrix_method
from compile_muon.runtime.account import Account
from compile_muon.runtime.handouts import Handouts
from compile_muon.runtime.ledger import Ledger
from compile_muon.runtime.lender import Lender
from compile_muon.runtime.pinned import pinned_numbers
from compile_muon.runtime.pipeline_stages import PipelineStages
from compile_muon.runtime.shards import local_tensor, new_state
from compile_muon.runtime.step_graph import StepGraphs

__all__ = ["Trained"]


@dataclass(eq=False)
class Trained:
    """What one optimizer trains.

    Args:
        optimizer: whose ``param_groups`` and ``state`` are read anew each time: loading replaces them.
        config: of it.
        methods: of its groups, by name.
        ledger: with the accounts of all parameters.
        group: all its ranks, None for one process.
        stages: of a pipeline, None without.
        device: of all tensors.
        compares: whether ranks answer.
        check_model: raises UnsupportedModelError where the model does not hold what was sharded any more.
        handouts: what eager code was given.
        scale: of the rate, by ``adjust_lr``, rows and columns of a matrix.
        differing_batches: says which ranks that share a sequence were given different batches; collective.
        home: of the states that are not beside their parameters, None if all are.
    Attributes:
        accounts: of trained parameters; ``muon`` are the matrices, ``rest`` all else, each in the order of the model.
        summed: matrices of methods that need sums over whole ones.
    """

    optimizer: Optimizer
    config: Config
    methods: Mapping[str, Method]
    ledger: Ledger
    group: dist.ProcessGroup | None
    stages: PipelineStages | None
    device: torch.device
    compares: bool
    check_model: Callable[[], None]
    handouts: Handouts
    scale: Callable[[str | float, int, int], float]
    differing_batches: Callable[[], str] = str
    home: Lender | None = None
    step_graphs: StepGraphs = field(default_factory=StepGraphs)

    def __post_init__(self) -> None:
        self.accounts: dict[Tensor, Account] = {}
        self._states: dict[Tensor, set[str]] = {}  # that a method keeps beside each parameter, by name
        self._know([account for account in self.ledger.accounts if account.param.requires_grad])

    def take_up(self, accounts: Sequence[Account], methods: Mapping[str, Method]) -> None:
        """Update these as well, which groups hold from now on.

        Args:
            methods: of their groups, by name.
        """
        self.methods = {**self.methods, **methods}
        self._know(accounts)
        self.create_state()

    def _know(self, accounts: Sequence[Account]) -> None:
        known = {*self.accounts.values(), *accounts}
        trained = [account for account in self.ledger.accounts if account in known]  # in the same order on every rank
        self.accounts = {account.param: account for account in trained}
        self.muon = [account for account in trained if account.spec.muon is not None]
        self.rest = [account for account in trained if account.spec.muon is None]
        # with a gradient or without, the same on every rank
        self.summed = [a for a in self.muon if matrix_method(a.spec.muon_settings.algorithm).facts]

    def method(self, group: Mapping[str, Any]) -> Method:
        """Of a parameter group."""
        return self.methods[group["name"]]

    def rates(self) -> dict[str, Any]:
        """Of all groups, by name of the group and of the rate."""
        groups = self.optimizer.param_groups
        return {
            f"{group['name']} {rate.name}": group[rate.name] for group in groups for rate in self.method(group).rates
        }

    def with_gradient(self, group: Mapping[str, Any]) -> list[Account]:
        """Those of a parameter group that have one."""
        return [self.accounts[param] for param in group["params"] if param.grad is not None]

    def create_state(self) -> None:
        """All state exists from the start, so checkpoints and sharding see it before the first step."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                account, slots = self.accounts[param], self.optimizer.state[param]
                away = set() if self.home is None else self.home.names(account)
                if account.spec.muon is not None and account.spec.muon.beside:
                    slots["momentum_buffer"] = account.momentum_buffer
                own = [state for state in self.method(group).states if state.name not in away]
                for state in own:
                    if state.name not in slots:
                        slots[state.name] = new_state(account, state)
                self._states[param] = {state.name for state in own}

    def check_momentum(self, groups: Sequence[Mapping[str, Any]]) -> list[tuple[float, list[Account]]]:
        """The momenta of ``groups``, which stand for ``param_groups``, and the accounts that share a tensor of each.

        Raises:
            ConfigError: groups that share one differ.
        """
        shared: dict[int, list[tuple[Mapping[str, Any], list[Account]]]] = {}
        for own, group in zip(self.optimizer.param_groups, groups, strict=True):
            method = self.method(own)
            if isinstance(method, MatrixMethod) and method.keeps_momentum and own["params"]:
                accounts = [self.accounts[param] for param in own["params"]]
                shared.setdefault(id(accounts[0].hyper), []).append((group, accounts))
        found = []
        for sharing in shared.values():
            factors = {float(group["momentum"]) for group, _ in sharing}
            if len(factors) > 1:
                names = listed([group["name"] for group, _ in sharing])
                raise config_error("momentum", factors, f"differs between {names}", "give all of them the same")
            found.append((factors.pop(), [account for _, accounts in sharing for account in accounts]))
        return found

    def sync_momentum(self) -> None:
        """Bring the tensors that graphs read in line with ``param_groups`` (schedulers may change the momentum)."""
        for momentum, accounts in self.check_momentum(self.optimizer.param_groups):
            if momentum != accounts[0].factor:
                # .data: graphs saved this tensor for backward; a new value is no reason to refuse their backward.
                rates = pinned_numbers([1 - momentum, momentum], torch.float32, self.device)
                accounts[0].hyper.data.copy_(rates, non_blocking=True)
                for account in accounts:
                    account.use_factor(momentum)

    @torch.no_grad()
    def own_momenta(self) -> None:
        """States that users put into the optimizer's, as they may, become those that graphs read; what they took out
        begins anew, as in torch.optim."""
        if self.home is not None:
            self.home.own()
        for account in self.muon:
            if not account.spec.muon_settings.beside:
                continue
            slots = self.optimizer.state[account.param]
            held = slots.get("momentum_buffer")
            if held is account.momentum_buffer:
                continue
            if held is None:
                account.momentum.zero_()
            else:
                account.momentum.copy_(local_tensor(held))
            slots["momentum_buffer"] = account.momentum_buffer
        if any(not names <= self.optimizer.state[param].keys() for param, names in self._states.items()):
            self.create_state()
