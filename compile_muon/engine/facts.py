"""The facts of a step: what the host knows when it begins, and the checks that ask the device for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compile_muon.engine.decision import Decision, Facts, Mode, mode_of
from compile_muon.engine.dtensors import edits_of, local_tensor
from compile_muon.engine.ledger import Ledger
from compile_muon.engine.recorded import Given
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.speculation import Speculation
from compile_muon.engine.state_provider import StateProvider
from compile_muon.engine.step_agreement import Agreement, Copies
from compile_muon.engine.step_checks import StepChecks
from compile_muon.engine.trained import Trained
from compile_muon.errors import UnsupportedModelError
from compile_muon.passes.eager_traffic import traffic_of_reduction
from compile_muon.passes.exchange import transfers
from compile_muon.passes.norms import not_finite

__all__ = ["Begun", "agreement", "asked", "begin", "measure", "read", "told"]

#: directions of backward, by name
Ready = Mapping[str, Speculation]


@dataclass(frozen=True, eq=False)
class Begun:
    """A step of which the host knows what it can know by itself.

    Args:
        mode: how it goes on.
        facts: of this rank's host.
        checks: that ask the device for the others.
        agreement: what the ranks compare; None where none answers.
        muon, rest: parameters with a gradient.
        candidates: directions of backward whose momentum is what they were made with.
        ready: by name, those that the step may use: their gradient is, too, as far as the host knows.
    """

    mode: Mode
    facts: Facts
    checks: StepChecks
    agreement: Agreement | None
    muon: Sequence[ShardedParam]
    rest: Sequence[ShardedParam]
    candidates: Mapping[ShardedParam, Speculation]
    ready: Ready

    def used(self, decision: Decision) -> dict[str, Speculation]:
        """The directions of backward that a decision takes, in the order of the model."""
        return {name: made for name, made in self.ready.items() if name in decision.use}


def begin(trained: Trained) -> Begun:
    """Gather what the host knows. Gradients are whole then, and momenta the optimizer's.

    Raises:
        UnsupportedModelError: see :class:`~compile_muon.MuonZero`; of several ranks all raise it when they have met.
        LedgerError: a gradient was edited between micro-batches.
    """
    problem = _model_problem(trained)
    trained.own_momenta()
    trained.sync_momentum()
    _whole_gradients(ledger := trained.ledger)
    muon = [sharded for sharded in trained.muon if sharded.grad is not None]
    rest = [sharded for sharded in trained.rest if sharded.grad is not None]
    rates = trained.rates()
    agreed = agreement(trained, rates) if trained.compares else None
    made = {sharded: found for sharded in muon if (found := sharded.speculations.current) is not None}
    candidates = {a: m for a, m in made.items() if (m.rates, m.edits) == (a.rates, edits_of(a.momentum_buffer))}
    # Where the host must know of edits, autograd has noted how it left the gradient.
    ready = {a.name: m for a, m in candidates.items() if not ledger.checks_later or a.sums.untouched(a.grad)}
    facts = Facts(
        frozenset(sharded.name for sharded in muon),
        trained.config.zero.gradient_clipping,
        frozenset(ready),
        # Whether the others have the same gradients is not known yet: of what one lacks it sends zeros.
        frozenset(sharded.name for sharded in (muon if trained.group is None else trained.muon)),
    )
    together = not ledger.hooks.peers.alone
    mode = mode_of(facts, speculating=ledger.speculating, later=ledger.checks_later, together=together)
    used = {} if mode.at_once else ready
    checks = told(trained, agreed, rates, used, problem)
    return Begun(mode, facts, checks, agreed, muon, rest, candidates, used)


def measure(trained: Trained, begun: Begun, given: Given | None = None) -> Tensor:
    """Have the device find the rest, and sum it over the ranks; nothing is waited for.

    Args:
        given: what the host knows, on the device; None for it to be copied there.
    Returns:
        The norm of all gradients, 0-dim fp32 on the device.
    """
    asked(trained, begun.checks, begun.agreement, begun.ready)
    begun.checks.reduce(None if given is None else given.facts)
    return begun.checks.total("gradient").sqrt().float()


def read(trained: Trained, checks: StepChecks, known: Facts) -> Facts:
    """Wait for the device, once; the facts of all ranks by now.

    Args:
        known: before.
    """
    with trained.ledger.range("step wait"):
        checks.wait()
    held = checks.held() if trained.ledger.speculating else frozenset[str]()
    gradients, directions = checks.numbers("gradient"), frozenset(checks.names("direction"))
    return replace(known, held=held, gradients=gradients, spoiled=checks.spoiled(), directions=directions)


def told(
    trained: Trained,
    agreement: Agreement | None,
    rates: Mapping[str, Any],
    ready: Ready,
    problem: Exception | None = None,
) -> StepChecks:
    """The half of a step's checks that the host knows.

    Args:
        rates: of all groups.
        problem: why this rank refuses the step, if it does.
    """
    checks = StepChecks(trained.group, trained.device, trained.ledger.status.step, problem)
    checks.add_facts("missing", {a.name: float(a.grad is None) for a in (*trained.muon, *trained.rest)})
    checks.add_facts("ready", {a.name: float(a.name in ready) for a in trained.muon})
    checks.add_rates({name: rate for name, rate in rates.items() if not isinstance(rate, Tensor)})
    if agreement is not None:
        agreement.put(checks)
    return checks


def asked(trained: Trained, checks: StepChecks, agreement: Agreement | None, ready: Ready) -> None:
    """The other half, which is on the device."""
    checks.add_gradients([*trained.muon, *trained.rest], ready)
    held: dict[str, dict[ShardedParam, Tensor]] = {}  # by kind, for all groups at once: few launches
    for group in trained.optimizer.param_groups:
        for state in trained.method(group).states:
            if state.each != "parameter":
                sharded_params = [trained.sharded_params[param] for param in group["params"]]
                # Copied first: to read one that a GPU still writes to the host is to wait.
                own = {a: local_tensor({**trained.optimizer.state[a.param]}[state.name]) for a in sharded_params}
                held.setdefault(state.label, {}).update(own)
    for label, tensors in held.items():
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
    """Which of these states are not finite: what is offloaded was looked at when it was written."""
    known = {} if provider.all_resident else {a: flag for a in states if (flag := provider.wrong(a, label)) is not None}
    here = [a for a in states if a not in known]
    tensors = [states[a] for a in here]
    if not known:
        return not_finite(tensors)
    found = known | dict(zip(here, not_finite(tensors).unbind() if here else (), strict=True))
    return torch.stack([found[a] for a in states])


def agreement(trained: Trained, rates: Mapping[str, Any]) -> Agreement:
    """What every rank must bring to this step alike.

    Args:
        rates: of all groups.
    """
    scalars = {name: rate for name, rate in rates.items() if isinstance(rate, Tensor)}
    settings = {name: repr(rate) for name, rate in rates.items() if name not in scalars}
    step, every = trained.ledger.status.step, trained.config.zero.check_replicas
    copies = Copies.of(trained.ledger.sharded_params, trained.optimizer.state) if every and step % every == 0 else None
    return Agreement(step, settings, scalars, trained.ledger.frame_log, copies)


def _whole_gradients(ledger: Ledger) -> None:
    """See to it that ``.grad`` is the whole gradient, placed as the parameter is.

    Stage 1: a step that comes before its last micro-batch finds sums, and reduces them.
    """
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


def _model_problem(trained: Trained) -> UnsupportedModelError | None:
    """What of the model forbids a step; raised only when all ranks know of it, or the others would wait for this.

    One process raises at once.
    """
    try:
        trained.check_model()
        for check in trained.ledger.hooks.check:
            check()
    except UnsupportedModelError as problem:
        if trained.group is None:
            raise
        return problem
    return None
