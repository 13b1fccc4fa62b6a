"""The sequence of ``optimizer.step()``: gather facts, decide, make directions, commit.

:mod:`~compile_muon.engine.facts` gathers, :mod:`~compile_muon.engine.decision` decides as a function of the facts,
:mod:`~compile_muon.engine.directions` makes directions, :mod:`~compile_muon.engine.refusal` raises or skips, and
:mod:`~compile_muon.engine.commit` writes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

import torch
from torch import Tensor

from compile_muon.engine.commit import commit
from compile_muon.engine.decision import Decision, Facts, decide
from compile_muon.engine.directions import fetches_of, make, note
from compile_muon.engine.facts import StepContext, begin, measure, read
from compile_muon.engine.recorded import StepGraphCache, StepInputs, StepResult
from compile_muon.engine.refusal import check_agreement, refused
from compile_muon.engine.resident import start_refresh
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.step_agreement import Agreement
from compile_muon.engine.step_checks import StepChecks
from compile_muon.engine.trained import OptimizerState
from compile_muon.engine.writes_ahead import compile_writes
from compile_muon.errors import LedgerError, listed
from compile_muon.passes.collectives import Traffic

__all__ = ["Step"]


@dataclass(eq=False)
class Step(OptimizerState):
    """The steps of one optimizer, and results of the latest one."""

    # The fetch of the offloaded momentum that each direction was made of.
    fetches: Mapping[ShardedParam, int] = field(default_factory=dict)
    grad_norm: Tensor | None = None  # of all gradients, 0-dim fp32 on the device
    norm: float = float("nan")  # ``grad_norm`` on the host; NaN until it is read
    # Checks and agreement that the host has not read yet, and names of the directions in use.
    pending: tuple[StepChecks, Agreement | None, frozenset[str]] | None = None
    recorded: StepGraphCache | None = None  # CUDA graphs of steps; None without a GPU
    compiles_writes: bool = True  # whether the next backward with generated code compiles the writes

    def before_backward(self) -> None:
        """Bring rates up to date ahead of a backward graph; with the first that has generated code, compile the step's
        kernels too."""
        self.sync_momentum()
        if self.compiles_writes and self.ledger.options.codegen == "inductor":
            self.compiles_writes = False
            compile_writes(self)

    def run(self) -> bool:
        """Run one step on ``.grad``; return False if it was skipped. NonFiniteError, LedgerError and
        UnsupportedModelError leave everything unwritten."""
        begun = begin(self)
        with ExitStack() as writes:
            written = (self._launch if begun.mode.later else self._wait_and_write)(begun, writes)
            self.ledger.close([*begun.muon, *begun.rest])
            self.torn = False
        return written

    def _wait_and_write(self, begun: StepContext, writes: ExitStack) -> bool:
        """Run a step that writes only what the host has checked. The host waits for the device once, and again if some
        directions come from backward and others are made here."""
        self.grad_norm = norm = measure(self, begun)
        facts = begun.facts if begun.mode.at_once else self._read(begun, begun.facts)
        peers = self.ledger.hooks.peers
        if not peers.alone:
            facts = peers.confer(facts)
            self.norm = facts.norm
            self.grad_norm = norm = torch.tensor(facts.norm, dtype=torch.float32, device=self.device)
        decision = decide(facts, begun.mode)
        if refused(self, begun.checks, decision.wrong):
            return False
        made = make(self, begun, decision, norm)
        self._count(begun, decision, made.traffic)
        if decision.wait:
            facts = self._read(begun, facts)
        wrong = facts.wrong(facts.wanted)
        peers.confirm(wrong=bool(wrong))
        if refused(self, begun.checks, wrong):
            return False
        writes.enter_context(_uninterrupted())
        self.ledger.written()
        note(self, begun, decision, clipped=facts.clipped)
        self.fetches = fetches_of(self, begun, decision)
        commit(self, made, self.fetches)
        self.count_step()
        self.ledger.count(start_refresh(self._refreshed(begun)))
        return True

    def _launch(self, begun: StepContext, writes: ExitStack) -> bool:
        """Launch a step whose checks the host reads in the next one, without waiting. A CUDA graph does it where
        :attr:`recorded` has one."""
        writes.enter_context(_uninterrupted())
        decision = decide(begun.facts, begun.mode)
        self.fetches = fetches_of(self, begun, decision)
        if self.recorded is not None and self.ledger.options.cuda_graphs and self.outside is None:
            alike = None if begun.agreement is not None and begun.agreement.copies is not None else begun.used(decision)
            found = self.recorded.run(self, partial(self.launch, begun, decision), begun.checks, alike)
        else:
            found = self.launch(begun, decision, None)
        self.grad_norm = found.norm
        self.pending = found.checks, begun.agreement, decision.use | decision.make
        self.count_step()
        self._count(begun, decision, found.traffic)
        note(self, begun, decision, clipped=False)
        return True

    def launch(self, begun: StepContext, decision: Decision, inputs: StepInputs | None) -> StepResult:
        """Launch all device work of such a step: the same launches in every step with the same parameters and tensors.

        ``inputs``: the numbers that differ between steps, on the device. With None they are copied there, the checks
        are sent to the host here, and resident weights may still be arriving on return.
        """
        checks = begun.checks
        norm = measure(self, begun, inputs)
        made = make(self, begun, decision, norm)
        checks.reduce()
        if inputs is None:
            checks.send()
        found_inf = checks.found_inf()
        if found_inf.is_cuda or found_inf.item() == 0:
            rates = None if inputs is None else inputs.rates
            commit(self, made, self.fetches, found_inf if found_inf.is_cuda else None, rates)
        refreshed = self._refreshed(begun)
        traffic = made.traffic + start_refresh(refreshed)
        if inputs is not None:
            for sharded in refreshed:
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
        checks, agreement, directions = self.pending
        facts = read(self, checks, Facts())  # a wait that is interrupted is repeated
        self.pending = None
        self.count_step(-1)  # counted again below, once it is known to be written
        self.norm = facts.norm
        check_agreement(self, checks, agreement)
        edited = sorted(checks.names("differs"))
        if edited:
            raise LedgerError(
                f"gradient of {listed(edited)} was edited in a way that PyTorch does not count (.data) after the "
                f"backward that made its direction: nothing was updated in step {checks.step}; edit .grad itself, or "
                "set checks='in_step' or update='step'"
            )
        if refused(self, checks, facts.wrong(directions), later=True):
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

    def _read(self, begun: StepContext, known: Facts) -> Facts:
        """Wait for the device; return the facts of all ranks, after checking that ranks agree."""
        facts = read(self, begun.checks, known)
        check_agreement(self, begun.checks, begun.agreement)
        self.norm = facts.norm
        return facts

    def _count(self, begun: StepContext, decision: Decision, traffic: Traffic) -> None:
        self.ledger.count(traffic, in_step=len(decision.make & begun.facts.wanted))

    def _refreshed(self, begun: StepContext) -> list[ShardedParam]:
        """Return the parameters to refresh, in the order of the model, which is about that of their use in forward."""
        # Refreshes are collective, and with unread checks it is unknown whether all ranks have the same gradients.
        trained = {*self.muon, *self.rest} if self.ledger.checks_later else {*begun.muon, *begun.rest}
        return [sharded for sharded in self.ledger.sharded_params if sharded in trained]


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C until the end of this block; a second one comes through."""
    handler, came = signal.getsignal(signal.SIGINT), list[FrameType | None]()
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def later(number: int, frame: FrameType | None) -> None:
        signal.signal(number, handler)
        came.append(frame)

    signal.signal(signal.SIGINT, later)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            handler(signal.SIGINT, came[0])
