"""The sequence of ``optimizer.step()``: gather facts, decide, make directions, commit.

:mod:`~compile_muon.engine.step_checks` asks host and device for the facts, :mod:`~compile_muon.engine.decision` decides
as a function of them, :mod:`~compile_muon.engine.directions` makes directions, and :mod:`~compile_muon.engine.commit`
writes.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compile_muon.agreement.status import held_back
from compile_muon.engine.commit import commit
from compile_muon.engine.decision import Decision, Facts, decide, planned
from compile_muon.engine.directions import make
from compile_muon.engine.gradient import Speculation
from compile_muon.engine.recorded import StepGraphCache, StepInputs, StepResult
from compile_muon.engine.resident import start_refresh
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.step_checks import StepChecks
from compile_muon.engine.trained import OptimizerState
from compile_muon.engine.writes_ahead import compile_writes
from compile_muon.errors import LedgerError, UnsupportedModelError


@dataclass(frozen=True, eq=False)
class _StepContext:
    """The facts and parameters of a step that has begun, before the device has answered."""

    facts: Facts  # of this rank's host
    checks: StepChecks  # of the device
    graded: Sequence[ShardedParam]  # parameters with a gradient, matrices first
    refreshed: Sequence[ShardedParam]  # in the order of the model, which is about that of their use in forward
    candidates: Mapping[ShardedParam, Speculation]  # directions whose momentum and rates are those they were made with


@dataclass(eq=False)
class Step(OptimizerState):
    """The steps of one optimizer, and results of the latest one."""

    grad_norm: Tensor | None = None  # of all gradients, 0-dim fp32 on the device
    norm: float = float("nan")  # ``grad_norm`` on the host; NaN until it is read
    # Checks that the host has not read yet, and names of the directions in use.
    pending: tuple[StepChecks, frozenset[str]] | None = None
    recorded: StepGraphCache | None = None  # CUDA graphs of steps; None without a GPU
    compiles_writes: bool = True  # whether the next backward with generated code compiles the writes

    def before_backward(self) -> None:
        """Bring rates up to date ahead of a backward graph; the first with generated code also compiles the writes."""
        self.sync_momentum()
        if self.compiles_writes and self.ledger.options.codegen == "inductor":
            self.compiles_writes = False
            compile_writes(self)

    def run(self) -> bool:
        """Run one step on ``.grad``; return False if it was skipped. NonFiniteError, LedgerError and
        UnsupportedModelError leave everything unwritten."""
        context = self.begin()
        with ExitStack() as writes:
            written = (self._wait_and_write if context.facts.wait else self._launch)(context, writes)
            self.ledger.close(context.graded)
            self.torn = False
        return written

    def begin(self) -> _StepContext:
        """Gather the facts of the host, after making gradients whole and taking up users' edits of states and rates.

        UnsupportedModelError (see :class:`~compile_muon.MuonZero`) is raised on all ranks once they have met;
        LedgerError if a gradient was edited between micro-batches.
        """
        ledger, refusal = self.ledger, self._model_problem()
        self.own_momenta()
        self.sync_momentum()
        for sharded in ledger.sharded_params:
            sharded.complete_gradient()
        muon = [sharded for sharded in self.muon if sharded.grad is not None]
        wanted = frozenset(sharded.name for sharded in muon)
        # Other ranks may have gradients that this one lacks; directions are collective, so it sends zeros for those.
        anywhere = wanted if self.group is None else frozenset(sharded.name for sharded in self.muon)
        candidates = {sharded: now for sharded in muon if (now := sharded.candidate()) is not None}
        # Without a wait for fingerprints, the host goes by the edit count that autograd's hook noted.
        ready = {a.name: m for a, m in candidates.items() if not ledger.checks_later or a.sums.untouched(a.grad)}
        facts = planned(
            Facts(wanted, self.config.zero.gradient_clipping, frozenset(ready), anywhere),
            speculating=ledger.speculating, later=ledger.checks_later, together=ledger.hooks.peers is not None,
        )  # fmt: skip
        checks = StepChecks(self, {} if facts.remake else ready, refusal, later=not facts.wait)
        graded = [*muon, *(sharded for sharded in self.rest if sharded.grad is not None)]
        # Refreshes are collective, and with unread checks it is unknown whether all ranks have the same gradients.
        trained = {*self.muon, *self.rest} if ledger.checks_later else {*graded}
        refreshed = [sharded for sharded in ledger.sharded_params if sharded in trained]
        return _StepContext(facts, checks, graded, refreshed, candidates)

    def _wait_and_write(self, context: _StepContext, writes: ExitStack) -> bool:
        """Run a step that writes only what the host has checked. The host waits for the device once, and again if some
        directions come from backward and others are made here."""
        checks, facts, peers = context.checks, context.facts, self.ledger.hooks.peers
        self.grad_norm = norm = checks.measure()
        if not facts.remake:
            facts = checks.read(facts)
            self.norm = facts.norm
        if peers is not None:
            facts = peers.confer(facts)
            self.norm = facts.norm
            self.grad_norm = norm = torch.tensor(facts.norm, dtype=torch.float32, device=self.device)
        decision = decide(facts)
        if checks.skips(decision.wrong):
            return False
        directions = make(self, checks, checks.used(decision), decision, norm)
        if decision.wait:
            self.ledger.count(directions.traffic, in_step=len(decision.make & facts.wanted))
            facts = checks.read(facts)
            self.norm = facts.norm
        wrong = facts.wrong(facts.wanted)
        if peers is not None:
            peers.confirm(wrong=bool(wrong))
        if checks.skips(wrong):
            return False
        writes.enter_context(held_back(signal.SIGINT))
        self.ledger.written()
        self.ledger.note_directions(context.candidates, decision.use, clipped=facts.clipped)
        commit(self, directions)
        self.count_step()
        self.ledger.count(start_refresh(context.refreshed))
        return True

    def _launch(self, context: _StepContext, writes: ExitStack) -> bool:
        """Launch a step, by its CUDA graph if :attr:`recorded` has one; the host reads its checks in the next step."""
        writes.enter_context(held_back(signal.SIGINT))
        decision = decide(context.facts)
        if self.recorded is not None and self.ledger.options.cuda_graphs and self.outside is None:
            # A step that compares replicas is not recorded.
            used = context.checks.used(decision) if context.checks.copies is None else None
            result = self.recorded.run(self, partial(self.launch, context, decision), context.checks, used)
        else:
            result = self.launch(context, decision, None)
        self.grad_norm = result.norm
        self.pending = result.checks, decision.use | decision.make
        self.count_step()
        self.ledger.count(result.traffic, in_step=len(decision.make & context.facts.wanted))
        self.ledger.note_directions(context.candidates, decision.use, clipped=False)
        return True

    def launch(self, context: _StepContext, decision: Decision, inputs: StepInputs | None) -> StepResult:
        """Launch all device work of such a step: the same launches in every step with the same parameters and tensors.

        ``inputs``: the numbers that differ between steps, on the device. With None they are copied there, the checks
        are sent to the host here, and resident weights may still be arriving on return.
        """
        checks = context.checks
        norm = checks.measure(None if inputs is None else inputs.facts)
        directions = make(self, checks, checks.used(decision), decision, norm)
        checks.reduce() if inputs is not None else checks.send()
        found_inf = checks.found_inf()
        if found_inf.is_cuda or found_inf.item() == 0:
            rates = None if inputs is None else inputs.rates
            commit(self, directions, found_inf if found_inf.is_cuda else None, rates)
        traffic = directions.traffic + start_refresh(context.refreshed)
        if inputs is not None:
            for sharded in context.refreshed:
                sharded.await_refresh()
        return StepResult(checks, norm, traffic)

    def check(self) -> bool | None:
        """Read the pending checks of the latest step (``checks="next_step"``).

        Returns:
            False if that step was skipped, None if nothing was pending.
        Raises:
            NonFiniteError, LedgerError: for that step, which has written nothing; or a step broke off while it wrote.
        """
        if self.torn:
            raise LedgerError(
                "a step broke off while it wrote: weights and state are partly those of before, and nothing puts them "
                "back; load a checkpoint"
            )
        if self.pending is None:
            return None
        checks, directions = self.pending
        checks.wait()  # a wait that is interrupted is repeated
        self.pending = None
        self.count_step(-1)  # counted again below, once it is known to be written
        facts = checks.read(Facts())
        self.norm = facts.norm
        if checks.skips(facts.wrong(directions)):
            return False
        self.count_step()
        self.ledger.written()
        return True

    @property
    def outside(self) -> str | None:
        """Why steps are in no CUDA graph where forward and backward are; None if they are, or without a GPU."""
        return None if self.recorded is None else self.recorded.left_out(self)

    @property
    def launched(self) -> str | None:
        """Phases of methods whose steps are in no CUDA graph, where others are; None if there are none."""
        return None if self.recorded is None else self.recorded.launched(self)

    def release(self) -> None:
        """Free the recorded graphs, and forget pending checks."""
        if self.recorded is not None:
            self.recorded.release()
        self.pending = None

    def _model_problem(self) -> UnsupportedModelError | None:
        """Return the error of an unsupported model, to be raised once ranks have met; a single process raises it."""
        try:
            self.check_model()
            for check in self.ledger.hooks.check:
                check()
        except UnsupportedModelError as problem:
            if self.group is None:
                raise
            return problem
        return None
