"""The facts of a step: numbers that the host knows when it begins, and checks that the device computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compile_muon.engine.decision import Decision, Facts, Mode, mode_of
from compile_muon.engine.dtensors import edits_of, local_tensor
from compile_muon.engine.ledger import Ledger
from compile_muon.engine.recorded import StepInputs
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.speculation import Speculation
from compile_muon.engine.state_provider import StateProvider
from compile_muon.engine.step_agreement import Agreement, Copies
from compile_muon.engine.step_checks import StepChecks
from compile_muon.engine.trained import OptimizerState
from compile_muon.errors import UnsupportedModelError
from compile_muon.passes.eager_traffic import traffic_of_reduction
from compile_muon.passes.exchange import transfers
from compile_muon.passes.norms import not_finite

__all__ = ["StepContext", "add_device_checks", "agreement", "begin", "host_checks", "measure", "read"]

#: directions from backward, by name of the parameter
Ready = Mapping[str, Speculation]


@dataclass(frozen=True, eq=False)
class StepContext:
    """A begun step, before the device has answered."""

    mode: Mode  # how the step goes on
    facts: Facts  # of this rank's host
    checks: StepChecks  # of the device
    agreement: Agreement | None  # None where ranks are not compared
    muon: Sequence[ShardedParam]  # matrices with a gradient
    rest: Sequence[ShardedParam]  # other parameters with a gradient
    candidates: Mapping[ShardedParam, Speculation]  # directions whose momentum and rates are those they were made with
    # Of these, directions the step may use: their gradients are unchanged as well, as far as the host knows.
    ready: Ready

    def used(self, decision: Decision) -> dict[str, Speculation]:
        """Return the directions of backward that the decision takes, in the order of the model."""
        return {name: made for name, made in self.ready.items() if name in decision.use}


def begin(trained: OptimizerState) -> StepContext:
    """Gather the facts of the host, after making gradients whole and taking up users' edits of states and rates.

    UnsupportedModelError (see :class:`~compile_muon.MuonZero`) is raised on all ranks once they have met; LedgerError
    if a gradient was edited between micro-batches.
    """
    problem = _model_problem(trained)
    trained.own_momenta()
    trained.sync_momentum()
    _whole_gradients(ledger := trained.ledger)
    muon = [sharded for sharded in trained.muon if sharded.grad is not None]
    rest = [sharded for sharded in trained.rest if sharded.grad is not None]
    rates = trained.rates()
    own_agreement = agreement(trained, rates) if trained.compares else None
    speculations = {sharded: found for sharded in muon if (found := sharded.speculations.current) is not None}
    candidates = {a: m for a, m in speculations.items() if (m.rates, m.edits) == (a.rates, edits_of(a.momentum_buffer))}
    # Without a wait for fingerprints, the host goes by the edit count that autograd's hook noted.
    ready = {a.name: m for a, m in candidates.items() if not ledger.checks_later or a.sums.untouched(a.grad)}
    facts = Facts(
        frozenset(sharded.name for sharded in muon),
        trained.config.zero.gradient_clipping,
        frozenset(ready),
        # Other ranks may have gradients that this one lacks; directions are collective, so it sends zeros for those.
        frozenset(sharded.name for sharded in (muon if trained.group is None else trained.muon)),
    )
    together = not ledger.hooks.peers.alone
    mode = mode_of(facts, speculating=ledger.speculating, later=ledger.checks_later, together=together)
    ready_used = {} if mode.at_once else ready
    checks = host_checks(trained, own_agreement, rates, ready_used, problem)
    return StepContext(mode, facts, checks, own_agreement, muon, rest, candidates, ready_used)


def measure(trained: OptimizerState, begun: StepContext, inputs: StepInputs | None = None) -> Tensor:
    """Launch the device's checks and sum them over the ranks, without waiting; return the norm of all gradients, 0-dim
    fp32 on the device. ``inputs``: the host's facts on the device; None copies them there."""
    add_device_checks(trained, begun.checks, begun.agreement, begun.ready)
    begun.checks.reduce(None if inputs is None else inputs.facts)
    return begun.checks.total("gradient").sqrt().float()


def read(trained: OptimizerState, checks: StepChecks, known: Facts) -> Facts:
    """Wait for the device, once; return ``known`` with the facts of all ranks."""
    with trained.ledger.range("step wait"):
        checks.wait()
    speculated = checks.speculated() if trained.ledger.speculating else frozenset[str]()
    gradients, directions = checks.numbers("gradient"), frozenset(checks.names("direction"))
    return replace(known, speculated=speculated, gradients=gradients, spoiled=checks.spoiled(), directions=directions)


def host_checks(
    trained: OptimizerState,
    agreement: Agreement | None,
    rates: Mapping[str, Any],
    ready: Ready,
    problem: Exception | None = None,
) -> StepChecks:
    """Return checks with the numbers that the host knows. ``problem``: why this rank refuses the step."""
    checks = StepChecks(trained.group, trained.device, trained.ledger.status.step, problem)
    checks.add_facts("missing", {a.name: float(a.grad is None) for a in (*trained.muon, *trained.rest)})
    checks.add_facts("ready", {a.name: float(a.name in ready) for a in trained.muon})
    checks.add_rates({name: rate for name, rate in rates.items() if not isinstance(rate, Tensor)})
    if agreement is not None:
        agreement.put(checks)
    return checks


def add_device_checks(trained: OptimizerState, checks: StepChecks, agreement: Agreement | None, ready: Ready) -> None:
    """Add the numbers that the device computes."""
    checks.add_gradients([*trained.muon, *trained.rest], ready)
    states_of_kind: dict[str, dict[ShardedParam, Tensor]] = {}  # by kind, over all groups, for few launches
    for group in trained.optimizer.param_groups:
        for state in trained.method(group).states:
            if state.each != "parameter":
                sharded_params = [trained.sharded_params[param] for param in group["params"]]
                # {**state}: indexing an offloaded state itself waits for the GPU that writes it to the host.
                shards = {a: local_tensor({**trained.optimizer.state[a.param]}[state.name]) for a in sharded_params}
                states_of_kind.setdefault(state.label, {}).update(shards)
    for label, tensors in states_of_kind.items():
        checks.add(label, [a.name for a in tensors], _not_finite(trained.state_provider, label, tensors))
    for name, rate in trained.rates().items():
        if isinstance(rate, Tensor):
            checks.add_rate(name, rate)
    if agreement is not None:
        agreement.measure(checks)
    checks.add_speculations(trained.muon, ready)
    for add in trained.ledger.hooks.facts:
        add(checks)


def _not_finite(provider: StateProvider, label: str, states: Mapping[ShardedParam, Tensor]) -> Tensor:
    """Return whether each state is not finite; the provider has checked offloaded states when they were written."""
    flags = {} if provider.all_resident else {a: flag for a in states if (flag := provider.wrong(a, label)) is not None}
    resident = [a for a in states if a not in flags]
    tensors = [states[a] for a in resident]
    if not flags:
        return not_finite(tensors)
    all_flags = flags | dict(zip(resident, not_finite(tensors).unbind() if resident else (), strict=True))
    return torch.stack([all_flags[a] for a in states])


def agreement(trained: OptimizerState, rates: Mapping[str, Any]) -> Agreement:
    """Return this rank's half of the step's agreement."""
    scalars = {name: rate for name, rate in rates.items() if isinstance(rate, Tensor)}
    settings = {name: repr(rate) for name, rate in rates.items() if name not in scalars}
    step, every = trained.ledger.status.step, trained.config.zero.check_replicas
    copies = Copies.of(trained.ledger.sharded_params, trained.optimizer.state) if every and step % every == 0 else None
    return Agreement(step, settings, scalars, trained.ledger.frame_log, copies)


def _whole_gradients(ledger: Ledger) -> None:
    """Make every ``.grad`` the averaged gradient, placed as the parameter is. At stage 1 a step ahead of the last
    micro-batch reduces the sums kept so far."""
    for sharded in ledger.sharded_params:
        sharded.place_gradient()
        if not sharded.spec.layout.accumulates:
            continue
        sharded.sums.check(sharded.grad, sharded.name)
        if sharded.sums.delivered is not None:
            sharded.add_gradient(transfers.reduce_grad(sharded.sums.delivered, sharded.spec))
            ledger.count(traffic_of_reduction(sharded.text))
            sharded.speculations.drop()
        sharded.sums.close()


def _model_problem(trained: OptimizerState) -> UnsupportedModelError | None:
    """Return the error of an unsupported model, for all ranks to raise once they have met; a single process raises at
    once."""
    try:
        trained.check_model()
        for check in trained.ledger.hooks.check:
            check()
    except UnsupportedModelError as problem:
        if trained.group is None:
            raise
        return problem
    return None
