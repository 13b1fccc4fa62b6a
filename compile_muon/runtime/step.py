"""What ``optimizer.step()`` does: gather facts, decide, make directions, commit, in this order on the page.

Facts are what :mod:`~compile_muon.runtime.survey` finds, the decision is a function of them
(:mod:`~compile_muon.runtime.decision`), directions come from backward or the step graph, and
:mod:`~compile_muon.runtime.commit` writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from compile_muon.agreement.compare import gather_objects, ranks_named
from compile_muon.config import Config
from compile_muon.errors import (
    LedgerError,
    NonFiniteError,
    UnsupportedModelError,
    config_error,
    listed,
    warn_user,
)
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.eager_traffic import traffic_of_reduction
from compile_muon.passes.exchange import transfers
from compile_muon.passes.methods import ElementMethod, MatrixMethod, Method, matrix_method
from compile_muon.passes.norms import not_finite
from compile_muon.runtime.account import Account
from compile_muon.runtime.commit import Matrices, commit_elements, commit_states, commit_weights
from compile_muon.runtime.decision import Decision, Facts, decide, over
from compile_muon.runtime.finite import directions_not_finite
from compile_muon.runtime.handouts import Handouts
from compile_muon.runtime.ledger import Ledger
from compile_muon.runtime.lender import Lender, Lent
from compile_muon.runtime.pinned import pinned_numbers
from compile_muon.runtime.pipeline_stages import Outlook, PipelineStages
from compile_muon.runtime.qk_clip import check_heads, clip_heads
from compile_muon.runtime.recorded import Given, Launched, Recorded
from compile_muon.runtime.replicas import start_refresh
from compile_muon.runtime.shards import edits_of, local_tensor, new_state
from compile_muon.runtime.speculation import Speculation
from compile_muon.runtime.step_agreement import Agreement, Copies
from compile_muon.runtime.step_graph import StepGraphs
from compile_muon.runtime.survey import Survey

__all__ = ["Step"]

#: of a gradient's norm, whose square is finite in fp32
_LARGEST = math.sqrt(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class _Pending:
    """What the checks of a step found, which the host reads in the next.

    Args:
        directions: names of those that the step used.
    """

    survey: Survey
    agreement: Agreement | None
    directions: frozenset[str]


class _Made(NamedTuple):
    """What backward has made for a step.

    Args:
        candidates: directions whose momentum is what they were made with.
        ready: by name, those whose gradient is, too, as far as the host knows.
        at_once: there are none, since all are made in the step.
    """

    candidates: dict[Account, Speculation]
    ready: dict[str, Speculation]
    at_once: bool

    @property
    def used(self) -> dict[str, Speculation]:
        """Those that the step may use."""
        return {} if self.at_once else self.ready


@dataclass(eq=False)
class Step:
    """The steps of one optimizer.

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
        home: of the states that are not beside their parameters, None if all are; ``fetches`` says which of the
            momenta the directions of the latest step are made of.
        grad_norm: of the latest step, on the device.
        norm: the same as the host knows it, NaN before.
        max_logit: with ``qk_clip``, of the latest step, on the device.
        pending: what the host has not read yet of the latest step.
        recorded: steps as CUDA graphs; None where there are none.
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
    fetches: dict[Account, int] = field(default_factory=dict)
    step_graphs: StepGraphs = field(default_factory=StepGraphs)
    grad_norm: Tensor | None = None
    norm: float = float("nan")
    max_logit: Tensor | None = None
    pending: _Pending | None = None
    recorded: Recorded | None = None

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

    def with_gradient(self, group: Mapping[str, Any]) -> list[Account]:
        """Those of a parameter group that have one."""
        return [self.accounts[param] for param in group["params"] if param.grad is not None]

    def create_state(self) -> None:
        """All state exists from the start, so checkpoints and sharding see it before the first step."""
        for group in self.optimizer.param_groups:
            for param in group["params"]:
                account, slots = self.accounts[param], self.optimizer.state[param]
                away = set() if self.home is None else self.home.names(account)
                if account.spec.muon is not None and not account.spec.muon.fetched:
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
            if "momentum" in group and own["params"]:
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
            if account.spec.muon_settings.fetched:
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

    def run(self) -> bool:
        """One step on what ``.grad`` holds; returns whether it was not left out.

        Raises:
            NonFiniteError, LedgerError, UnsupportedModelError: nothing was written.
        """
        problem = self._model_problem()
        self.own_momenta()
        self.sync_momentum()
        self._whole_gradients()
        muon = [account for account in self.muon if account.grad is not None]
        rest = [account for account in self.rest if account.grad is not None]
        agreement = self.agreement() if self.compares else None
        # The norm over all pipeline stages is known once they have met.
        at_once = not self.ledger.speculating and self.stages is None
        candidates = {account: found for account in muon if (found := self._ready(account)) is not None}
        ready = {account.name: found for account, found in candidates.items() if self._untouched(account)}
        made = _Made(candidates, ready, at_once)
        if self._may_wait(at_once, len(ready) == len(muon)):
            self._launch_all(muon, self._told(problem, agreement, made.used), agreement, made)
            written = True
        else:
            directions = self._directions(muon, self.survey(problem, agreement, made.used), agreement, made)
            written = directions is not None
            if directions is not None:
                self.commit(directions)
                self.ledger.count(start_refresh(self._refreshed(muon, rest)))
        self.ledger.close([*muon, *rest])
        return written

    def _refreshed(self, muon: Sequence[Account], rest: Sequence[Account]) -> list[Account]:
        """Whose resident weights follow this step, in the order in which the model has them, which is about that of
        their use in the next forward."""
        # Whether all ranks have the same gradients may not be known yet, and they must refresh the same.
        trained = {*self.muon, *self.rest} if self.ledger.checks_later else {*muon, *rest}
        return [account for account in self.ledger.accounts if account in trained]

    @property
    def outside(self) -> str | None:
        """Why no step is in a CUDA graph where forward and backward are; None if they are, or there is no GPU."""
        return None if self.recorded is None else self.recorded.left_out(self)

    def release(self) -> None:
        """Let go of what was recorded, and of what the latest step has found."""
        if self.recorded is not None:
            self.recorded.release()
        self.pending = None

    def check(self) -> bool | None:
        """Read what the checks of the latest step found, if the host has not yet (``checks="next_step"``).

        Returns:
            Whether it was not left out; None if there was nothing to read.
        Raises:
            NonFiniteError, LedgerError: for that step, which has written nothing.
        """
        pending, self.pending = self.pending, None
        if pending is None:
            return None
        survey = pending.survey
        facts = self._read(survey)
        self.norm = facts.norm
        self._check_agreement(survey, pending.agreement)
        edited = sorted(survey.names("differs"))
        if edited:
            raise LedgerError(
                f"gradient of {listed(edited)} was edited in a way that PyTorch does not count (.data) after the "
                f"backward that made its direction: nothing was updated in step {survey.step}; edit .grad itself, or "
                "set checks='in_step' or update='step'"
            )
        if self._refused(survey, facts.wrong(pending.directions), later=True):
            return False
        self.ledger.counters.skipped_in_a_row = 0
        return True

    # ------------------------------------------------------------------ facts

    def survey(
        self,
        problem: UnsupportedModelError | None,
        agreement: Agreement | None,
        ready: Mapping[str, Speculation],
    ) -> Survey:
        """Ask everything that can be asked before directions are made; nothing is waited for.

        On every rank the same numbers in the same order, whatever gradients it has.

        Args:
            ready: directions of backward that may be used, by name.
        """
        survey = self._told(problem, agreement, ready)
        self._measure(survey, agreement, ready)
        return survey

    def _told(
        self,
        problem: UnsupportedModelError | None,
        agreement: Agreement | None,
        ready: Mapping[str, Speculation],
    ) -> Survey:
        """The half of a survey that the host knows."""
        survey = Survey(self.group, self.device, self.ledger.status.step, problem)
        survey.add_presence([*self.muon, *self.rest], ready)
        for group in self.optimizer.param_groups:
            for rate in self.method(group).rates:
                if not isinstance(group[rate.name], Tensor):
                    survey.add_rate(f"{group['name']} {rate.name}", group[rate.name])
        if agreement is not None:
            agreement.put(survey)
        return survey

    def _measure(self, survey: Survey, agreement: Agreement | None, ready: Mapping[str, Speculation]) -> None:
        """The other half, which is on the device."""
        survey.add_gradients([*self.muon, *self.rest], ready)
        # One beside its parameter is seen by the direction that is made of it, all of which is NaN then.
        away = {a.name: flag for a in self.muon if self.home and (flag := self.home.wrong(a, "momentum")) is not None}
        if away:
            survey.add("momentum", list(away), torch.stack(list(away.values())))
        held: dict[str, dict[Account, Tensor]] = {}  # by kind, for all groups at once: few launches
        for group in self.optimizer.param_groups:
            for state in self.method(group).states:
                if state.each != "parameter":
                    accounts = [self.accounts[param] for param in group["params"]]
                    # Copied first: to read one that a GPU still writes to the host is to wait.
                    own = {a: local_tensor({**self.optimizer.state[a.param]}[state.name]) for a in accounts}
                    held.setdefault(state.label, {}).update(own)
        for label, tensors in held.items():
            survey.add(label, [a.name for a in tensors], self._not_finite(label, tensors))
        for group in self.optimizer.param_groups:
            for rate in self.method(group).rates:
                if isinstance(group[rate.name], Tensor):
                    survey.add_rate(f"{group['name']} {rate.name}", group[rate.name])
        if agreement is not None:
            agreement.measure(survey)
        survey.add_speculations(self.muon, ready)

    def _not_finite(self, label: str, states: Mapping[Account, Tensor]) -> Tensor:
        """Which of these states are not finite: what is away was looked at when it was written."""
        known = {a: flag for a in states if self.home is not None and (flag := self.home.wrong(a, label)) is not None}
        here = [a for a in states if a not in known]
        tensors = [states[a] for a in here]
        if not known:
            return not_finite(tensors)
        found = known | dict(zip(here, not_finite(tensors).unbind() if here else (), strict=True))
        return torch.stack([found[a] for a in states])

    def agreement(self) -> Agreement:
        """What every rank must bring to this step alike."""
        values = {
            f"{g['name']} {rate.name}": g[rate.name]
            for g in self.optimizer.param_groups
            for rate in self.method(g).rates
        }
        scalars = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        settings = {name: repr(value) for name, value in values.items() if name not in scalars}
        step, every = self.ledger.status.step, self.config.zero.check_replicas
        copies = Copies.of(self.ledger.accounts, self.optimizer.state) if every and step % every == 0 else None
        return Agreement(step, settings, scalars, self.ledger.frame_log, copies)

    def _whole_gradients(self) -> None:
        """See to it that ``.grad`` is the whole gradient, placed as the parameter is.

        Stage 1: a step that comes before its last micro-batch finds sums, and reduces them.
        """
        for account in self.ledger.accounts:
            account.place_gradient()
            account.sums.check(account.grad, account.name)
            if account.sums.delivered is not None:
                account.add_gradient(transfers.reduce_grad(account.sums.delivered, account.spec))
                self.ledger.count(traffic_of_reduction(account.text))
                account.speculations.drop()
            account.sums.close()

    def _model_problem(self) -> UnsupportedModelError | None:
        """What of the model forbids a step; raised only when all ranks know of it, or the others would wait for this.

        One process raises at once.
        """
        try:
            self.check_model()
            self.handouts.check(thoroughly=True)
            if self.config.muon.qk_clip is not None:
                check_heads(self.muon, self.config.muon.qk_clip_alpha)
        except UnsupportedModelError as problem:
            if self.group is None:
                raise
            return problem
        return None

    def _read(self, survey: Survey) -> Facts:
        """Wait for the device, once; what the survey has found by now."""
        with self.ledger.range("step wait"):
            survey.wait()
        held = survey.held() if self.ledger.speculating else frozenset[str]()
        return Facts(survey.numbers("gradient"), survey.spoiled(), held, frozenset(survey.names("direction")))

    # ------------------------------------------------------------------ directions

    def _directions(
        self, muon: Sequence[Account], survey: Survey, agreement: Agreement | None, made_in_backward: _Made
    ) -> dict[str, Tensor] | None:
        """Directions of these matrices by name: those of backward where they hold, the others made here.

        Waits for the device once, and again only where some were made in backward and others must be made here, or
        where pipeline stages must know of each other before any is made. Gradients are scaled in place where their norm
        is over the limit, as ``clip_grad_norm_`` does.

        Returns:
            None for a step to leave out (``nonfinite="skip"``).
        """
        candidates, ready, at_once = made_in_backward
        survey.reduce()
        self.grad_norm = survey.total("gradient").sqrt().float()
        made: dict[str, Tensor] = {}
        if at_once:
            self._clip(self.grad_norm)
            made = self._orthogonalize(self._in_step(muon), survey)
        facts = self._read(survey)
        self._check_agreement(survey, agreement)
        wanted = [account.name for account in muon]
        decision = self._decide(facts, wanted, at_once)
        if self._refused(survey, decision.wrong):
            return None
        if not at_once:
            if decision.clip:
                self._clip(self.grad_norm)
            made = {name: ready[name].direction for name in decision.use}
            if late := [account for account in muon if account.name in decision.make]:
                made |= self._orthogonalize(late, survey)
                facts = self._read(survey)
            wrong = facts.wrong(made)
            if self.stages is not None:
                self.stages.confirm(wrong=bool(wrong))
            if (late or self.stages is not None) and self._refused(survey, wrong):
                return None
        self.ledger.counters.skipped_in_a_row = 0
        self._account(list(candidates), decision.use, clipped=decision.clip)
        self._made_of(muon, {name: ready[name] for name in decision.use})
        return {name: made[name] for name in wanted}

    def _launch_all(self, muon: Sequence[Account], survey: Survey, agreement: Agreement | None, made: _Made) -> None:
        """A step whose checks are read in the next one, and on which nothing here depends: all of it is launched, and
        nothing waited for. A CUDA graph holds it where there is :attr:`recorded`."""
        self._made_of(muon, made.used)
        launch = partial(self.launch, muon, survey, agreement, made)
        names = (account.name for account in self._in_step(muon)) if made.at_once else made.used
        pending = _Pending(survey, agreement, frozenset(names))
        recorded = None if self.recorded is None or not self.ledger.options.cuda_graphs else self.recorded
        if recorded is not None and recorded.left_out(self) is None:
            alike = None if agreement is not None and agreement.copies is not None else made.used
            found = recorded.run(self, launch, survey, alike)
            pending = replace(pending, survey=found.survey)
        else:
            found = launch(None)
        self.grad_norm, self.pending = found.norm, pending
        self.ledger.count(found.traffic)
        self.ledger.counters.in_step += len(muon) if made.at_once else 0
        self._account(list(made.candidates), frozenset(made.used), clipped=False)

    def launch(
        self,
        muon: Sequence[Account],
        survey: Survey,
        agreement: Agreement | None,
        made: _Made,
        given: Given | None,
    ) -> Launched:
        """All that such a step asks of the device: of the same parameters and tensors the same in every step.

        Args:
            given: what differs from step to step, on the device; None for it to be copied there, and for the survey to
                be sent to the host. Then resident weights are still on their way when this returns.
        """
        self._measure(survey, agreement, made.used)
        survey.reduce(None if given is None else given.facts)
        norm = survey.total("gradient").sqrt().float()
        directions, traffic = {name: speculation.direction for name, speculation in made.used.items()}, Traffic()
        if made.at_once:
            self._clip(norm)
            directions, traffic = self._made_in_step(self._in_step(muon), survey)
            survey.reduce()
        if given is None:
            survey.send()
        used = {account.name: directions[account.name] for account in muon}
        self.commit(used, survey.withheld(), None if given is None else given.rates)
        refreshed = self._refreshed((), ())
        traffic = traffic + start_refresh(refreshed)
        if given is not None:
            for account in refreshed:
                account.await_refresh()
        return Launched(survey, norm, traffic)

    def _in_step(self, muon: Sequence[Account]) -> Sequence[Account]:
        """Of which matrices a step makes the directions that it makes at once."""
        # Whether the others have the same gradients is not known yet: of what one lacks it sends zeros.
        return muon if self.group is None else self.muon

    def _may_wait(self, at_once: bool, all_ready: bool) -> bool:
        """Whether the host need not know what the survey finds: the device does."""
        unclipped = self.config.zero.gradient_clipping is None
        return self.ledger.checks_later and (at_once or (unclipped and all_ready))

    def _decide(self, facts: Facts, wanted: Sequence[str], at_once: bool) -> Decision:
        """:func:`~compile_muon.runtime.decision.decide`, over all pipeline stages where there are some."""
        limit = self.config.zero.gradient_clipping
        self.norm = facts.norm
        if self.stages is not None:
            # What follows here if the norm of all is under the limit, and if it is over it.
            under, beyond = (self._outlook(decide(facts, wanted, limit, norm)) for norm in (0.0, float("inf")))
            self.norm = self.stages.decide(self.norm, under, beyond, partial(over, limit))
            self.grad_norm = torch.tensor(self.norm, dtype=torch.float32, device=self.device)
        decision = decide(facts, wanted, limit, self.norm)
        if at_once:  # all were made from gradients that the device has scaled
            return Decision(decision.clip, frozenset(), frozenset(wanted), facts.wrong(wanted))
        return decision

    @staticmethod
    def _outlook(decision: Decision) -> Outlook:
        """What follows for this pipeline stage."""
        if decision.wrong:
            return Outlook.WRONG
        return Outlook.LATER if decision.make else Outlook.READY

    def _ready(self, account: Account) -> Speculation | None:
        """A direction of backward, if the momentum is what it was made with."""
        made = account.speculations.current
        if made is None or made.factor != account.factor:
            return None
        return made if made.edits == edits_of(account.momentum_buffer) else None

    def _untouched(self, account: Account) -> bool:
        """Whether the gradient is what backward wrote as far as the host knows, where it must know."""
        return not self.ledger.checks_later or account.sums.untouched(account.grad)

    def _orthogonalize(self, accounts: Sequence[Account], survey: Survey) -> dict[str, Tensor]:
        made, traffic = self._made_in_step(accounts, survey)
        self.ledger.count(traffic)
        self.ledger.counters.in_step += sum(account.grad is not None for account in accounts)
        return made

    def _made_in_step(self, accounts: Sequence[Account], survey: Survey) -> tuple[dict[str, Tensor], Traffic]:
        if not accounts:
            return {}, Traffic()
        grads = [a.local_grad if a.grad is not None else torch.zeros_like(a.local) for a in accounts]
        with self.ledger.range("step directions", payload=len(accounts)):
            results, traffic = self.step_graphs.orthogonalize(accounts, grads, self.ledger.options)
        wrong = directions_not_finite([account.spec for account in accounts], results)
        survey.add("direction", [account.name for account in accounts], wrong)
        return {account.name: result for account, result in zip(accounts, results, strict=True)}, traffic

    def _made_of(self, muon: Sequence[Account], used: Mapping[str, Speculation]) -> None:
        """Note which fetch of the momentum the directions of this step are made of, where they were fetched."""
        if self.home is not None:
            self.fetches = {a: used[a.name].fetches if a.name in used else a.fetches for a in muon}

    def _account(self, candidates: Sequence[Account], held: Collection[str], *, clipped: bool) -> None:
        """Note in the accounts what has become of the directions of backward."""
        for account in candidates:
            if account.name in held:
                account.speculations.used()
        self.ledger.counters.used += len(held)
        reason = "clipped" if clipped else "edited"
        self.ledger.discarded([account for account in candidates if account.name not in held], reason)
        for account in self.muon:
            account.speculations.note_norm(under_limit=not clipped)

    # ------------------------------------------------------------------ clipping and finiteness

    def _clip(self, norm: Tensor) -> None:
        """Scale all gradients by torch's ``limit / (norm + 1e-6)`` where that is under 1; not waited for."""
        limit = self.config.zero.gradient_clipping
        gradients = [a.local_grad for a in (*self.muon, *self.rest) if a.grad is not None]
        if limit is None or not gradients:
            return
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        # A step that will be refused leaves gradients as they are.
        torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), factor, torch.ones_like(factor)))

    def _check_agreement(self, survey: Survey, agreement: Agreement | None) -> None:
        """Raise, on every rank, what one rank refuses or does otherwise than the others; nothing has been written."""
        if self.group is None:
            return
        if survey.names("refused"):
            raise survey.refusal or LedgerError(
                "step() was refused by another rank, whose own error says why: nothing was updated; do to the model on "
                "every rank what is done to it on one"
            )
        missing = [name for name, count in survey.numbers("missing").items() if 0 < count < self.group.size()]
        if missing:
            where = survey.ranks({"missing": missing})
            raise LedgerError(
                f"gradient of {listed(missing)} = None{where} only: nothing was updated in "
                f"step {survey.step}; every rank must use the same parameters in a step, e.g. by adding "
                "0 * parameter.sum() to the loss where one is not used"
            )
        if agreement is not None:
            agreement.check(survey, self.group)
        if self.ledger.checks_later:
            # A rank on which all directions hold does not wait to hear that they do not on another.
            some = [name for name, count in survey.numbers("ready").items() if 0 < count < self.group.size()]
            if some:
                raise LedgerError(
                    f"gradient of {listed(some)} was edited{survey.ranks({'ready': some})} only: nothing was updated "
                    f"in step {survey.step}; edit gradients on every rank, or set checks='in_step'"
                )

    def _refused(self, survey: Survey, wrong: dict[str, list[str]], *, later: bool = False) -> bool:
        """Raise for, or skip, a step that would write something that is not finite; nothing has been written yet.

        Args:
            wrong: names by kind.
            later: whether its gradients may be gone.
        """
        others = "" if self.stages is None else self.stages.elsewhere()
        if not wrong and not others:
            return False
        zero, counters = self.config.zero, self.ledger.counters
        if wrong:
            found = self._named(survey, wrong, later=later)
        else:
            found = f"{others} found inf or nan, and itself says where"
        if batches := self.differing_batches():
            raise NonFiniteError(
                f"{batches}, which makes them NaN: nothing was updated in step {survey.step}; optimizer.data_place "
                "says which data a rank is to load"
            )
        problem = f"{found}: nothing was updated in step {survey.step}"
        if zero.nonfinite == "error":
            raise NonFiniteError(
                f"{problem}; lower the learning rate, look at the batch, or set nonfinite='skip' to leave such steps "
                "out"
            )
        counters.skipped += 1
        counters.skipped_in_a_row += 1
        if counters.skipped_in_a_row >= zero.max_skipped_steps:
            raise NonFiniteError(
                f"{problem}; {counters.skipped_in_a_row} steps in a row were skipped (max_skipped_steps): training "
                "does not recover by itself, go back to a checkpoint"
            )
        if counters.skipped == 1:
            warn_user(
                f"{problem}; the step was skipped, and so will others be without a word "
                "(optimizer.totals()['skipped_steps'] counts them)"
            )
        return True

    def _named(self, survey: Survey, wrong: dict[str, list[str]], *, later: bool) -> str:
        """What is not finite, and where; collective."""
        value, large = "inf or nan", frozenset[str]()
        squares = survey.numbers("gradient")
        together = self.compares and (not later or self.config.zero.nonfinite == "error")
        spoiled = self._spoiled(wrong.get("direction", ()), together)
        if any(spoiled):
            momenta = sorted(frozenset().union(*spoiled))
            others = [name for name in wrong["direction"] if name not in momenta]
            wrong = {**wrong, "momentum": momenta, "direction": others}
        if infinite := [name for name in wrong.get("gradient", ()) if squares[name] == math.inf]:
            if later:
                value = f"inf, nan or over {_LARGEST:.1e} (whose square is inf in float32)"
            else:
                large = self._finite(infinite)
        found = {
            what: [name for name in names if what != "gradient" or name not in large] for what, names in wrong.items()
        }
        parts = ["; ".join(f"{what} of {listed(names)}" for what, names in found.items() if names)]
        parts[0] += f" = {value}" if parts[0] else ""
        if large:
            named = listed([name for name in infinite if name in large])
            parts.append(f"gradient of {named} = over {_LARGEST:.1e}, finite, but its square is inf in float32")
        where = ""
        if self.compares and self.config.zero.nonfinite == "error":
            holders = [rank for rank, names in enumerate(spoiled) if names]
            where = f" on {ranks_named(holders)}" if 0 < len(holders) < len(spoiled) else survey.ranks(wrong)
        return "; ".join(filter(None, parts)) + where + ("" if self.stages is None else self.stages.here())

    def _spoiled(self, names: Sequence[str], together: bool) -> list[set[str]]:
        """Of each rank, of which of these the momentum is not finite, whence the direction is not.

        Args:
            together: collective; else of this rank alone.
        """
        beside = [a for a in self.muon if a.name in names and a.momentum.numel()]
        wrong = not_finite([account.momentum for account in beside]).tolist() if beside else []
        mine = {account.name for account, flag in zip(beside, wrong, strict=True) if flag}
        return self._of_ranks(mine, together=together and bool(names))

    def _finite(self, names: Sequence[str]) -> frozenset[str]:
        """Those of these gradients that hold no inf on any rank; collective."""
        named = {account.name: account for account in (*self.muon, *self.rest)}
        held = [name for name in names if named[name].grad is not None]
        infinite = {name for name in held if not_finite([named[name].local_grad]).item()}
        return frozenset(names).difference(*self._of_ranks(infinite, together=self.compares))

    def _of_ranks(self, mine: set[str], *, together: bool) -> list[set[str]]:
        """These names of every rank, which is collective; of this one alone unless ``together``."""
        return gather_objects(mine, self.group) if together and self.group is not None else [mine]

    def commit(
        self,
        directions: dict[str, Tensor],
        withheld: Tensor | None = None,
        rates: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
    ) -> None:
        """Write momenta, moments and parameters.

        Args:
            directions: by name; each is let go once it is written.
            withheld: 1.0 on the device for nothing to be written; None if the host knows that all may be.
            rates: of a group; None for those that it holds.
        """
        if withheld is not None and not withheld.is_cuda:
            if withheld.item() != 0:
                return
            withheld = None
        matrices, rest = [], []
        for group in self.optimizer.param_groups:
            method, own = self.method(group), self.with_gradient(group)
            own_rates: Mapping[str, Any] = group if rates is None else rates(group)
            if isinstance(method, MatrixMethod):
                made = {account: directions.pop(account.name) for account in own}
                scale = partial(self.scale, self.config.muon.adjust_lr or method.adjust_lr)
                matrices.append(Matrices(method, own_rates, made, scale))
            elif isinstance(method, ElementMethod):
                rest.append((method, own_rates, own))
        beside = self.home is None
        # Where the device decides whether to write, no momentum has been moved for good.
        moved = self.home.moved(self.fetches) if self.home is not None and withheld is None else frozenset[Account]()
        # What a disk keeps of weights is written with the states; else one that fails has moved nothing.
        masters = any(account.spec.master for account in self.muon)
        with self.home.writing(withheld) if self.home is not None else nullcontext():
            with self.ledger.range("step commit muon"):
                prepared = commit_states(matrices, partial(self.lend, moved=moved), withheld, beside=beside)
                if self.home is not None and masters and self.summed:
                    self.home.confirm()
                if beside or masters:
                    commit_weights(prepared, self.summed, self.group, withheld, self.lend if masters else None)
            with self.ledger.range("step commit adamw"):
                for method, taken, own in rest:
                    for chosen, states in self.lend(own, Lent.ALL):
                        commit_elements(method, taken, chosen, states, withheld)
        if not (beside or masters):
            with self.ledger.range("step commit muon"):
                commit_weights(prepared, self.summed, self.group, withheld)
        if (threshold := self.config.muon.qk_clip) is not None:
            self.max_logit = clip_heads(self.muon, threshold, self.group, withheld)

    def lend(
        self, accounts: Sequence[Account], what: Lent, *, moved: Collection[Account] = ()
    ) -> Iterator[tuple[Sequence[Account], Sequence[MutableMapping[str, Tensor]]]]:
        """Their states, to be read and written; all at once where they are beside the parameters.

        Args:
            moved: whose momentum has been moved already.
        """
        if self.home is not None:
            yield from self.home.lend(accounts, what, self.ledger.status.step, moved=moved)
        elif accounts:
            yield accounts, [self.optimizer.state[account.param] for account in accounts]
