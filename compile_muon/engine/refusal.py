"""Reasons to write nothing in a step: ranks that disagree, or a non-finite number."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Sequence

import torch

from compile_muon.agreement.compare import gather_objects, ranks_named
from compile_muon.engine.ledger import Counters, Ledger
from compile_muon.engine.step_agreement import Agreement
from compile_muon.engine.step_checks import StepChecks
from compile_muon.engine.trained import OptimizerState
from compile_muon.errors import LedgerError, NonFiniteError, listed
from compile_muon.passes.norms import not_finite
from compile_muon.progress import is_first_rank

__all__ = ["SHOWN", "check_agreement", "refused"]

#: skipped steps that are logged one by one
SHOWN = 5
_log = logging.getLogger("compile_muon")
#: largest norm of a gradient whose square is finite in fp32
_LARGEST = math.sqrt(torch.finfo(torch.float32).max)


def check_agreement(trained: OptimizerState, checks: StepChecks, agreement: Agreement | None) -> None:
    """Raise on every rank if one rank refuses the step or differs from the others; nothing has been written."""
    if trained.group is None:
        return
    if checks.names("refused"):
        raise checks.refusal or LedgerError(
            "step() was refused by another rank, whose own error says why: nothing was updated; do to the model on "
            "every rank what is done to it on one"
        )
    missing = [name for name, count in checks.numbers("missing").items() if 0 < count < trained.group.size()]
    if missing:
        where = checks.ranks({"missing": missing})
        raise LedgerError(
            f"gradient of {listed(missing)} = None{where} only: nothing was updated in "
            f"step {checks.step}; every rank must use the same parameters in a step, e.g. by adding "
            "0 * parameter.sum() to the loss where one is not used"
        )
    if agreement is not None:
        agreement.check(checks, trained.group)
    if trained.ledger.checks_later:
        # A rank whose own directions all hold goes on without waiting for the other ranks' numbers.
        some = [name for name, count in checks.numbers("ready").items() if 0 < count < trained.group.size()]
        if some:
            raise LedgerError(
                f"gradient of {listed(some)} was edited{checks.ranks({'ready': some})} only: nothing was updated "
                f"in step {checks.step}; edit gradients on every rank, or set checks='in_step'"
            )


def refused(trained: OptimizerState, checks: StepChecks, wrong: dict[str, list[str]], *, later: bool = False) -> bool:
    """Raise for, or skip, a step that would write ``wrong`` (names by kind) non-finite numbers; nothing has been
    written. ``later``: its gradients may be gone."""
    others = trained.ledger.hooks.peers.elsewhere()
    if not wrong and not others:
        return False
    zero = trained.config.zero
    if wrong:
        finding = _named(trained, checks, wrong, later=later)
    else:
        finding = f"{others} found inf or nan, and itself says where"
    for why in trained.ledger.hooks.why_not_finite:
        if (explanation := why()) is not None:
            raise NonFiniteError(f"{explanation[0]}: nothing was updated in step {checks.step}; {explanation[1]}")
    problem = f"{finding}: nothing was updated in step {checks.step}"
    if zero.nonfinite == "error":
        raise NonFiniteError(
            f"{problem}; lower the learning rate, look at the batch, or set nonfinite='skip' to leave such steps out"
        )
    in_a_row = trained.ledger.skipped()
    if in_a_row >= zero.max_skipped_steps:
        raise NonFiniteError(
            f"{problem}; {in_a_row} steps in a row were skipped (max_skipped_steps): training "
            "does not recover by itself, go back to a checkpoint"
        )
    if is_first_rank():
        _tell(trained.ledger, problem)
    return True


def _tell(ledger: Ledger, problem: str) -> None:
    """Log the first skipped steps, and the number of all at the end of the optimizer or the interpreter."""
    skipped = ledger.counters.skipped
    if skipped == 1:
        weakref.finalize(ledger, _tell_number, ledger.counters)
    if skipped <= SHOWN:
        quiet = "; later ones are only counted (optimizer.totals()['skipped_steps'])" if skipped == SHOWN else ""
        _log.warning(f"{problem}; the step was skipped{quiet}")


def _tell_number(counters: Counters) -> None:
    _log.warning(f"steps skipped for inf or nan (nonfinite='skip'): {counters.skipped}")


def _named(trained: OptimizerState, checks: StepChecks, wrong: dict[str, list[str]], *, later: bool) -> str:
    """Return the non-finite tensors and their ranks in words; collective."""
    value, large = "inf or nan", frozenset[str]()
    squares = checks.numbers("gradient")
    together = trained.compares and (not later or trained.config.zero.nonfinite == "error")
    spoiled = _spoiled(trained, wrong.get("direction", ()), together)
    if any(spoiled):
        momenta = sorted(frozenset().union(*spoiled))
        others = [name for name in wrong["direction"] if name not in momenta]
        wrong = {**wrong, "momentum": momenta, "direction": others}
    if infinite := [name for name in wrong.get("gradient", ()) if squares[name] == math.inf]:
        if later:
            value = f"inf, nan or over {_LARGEST:.1e} (whose square is inf in float32)"
        else:
            large = _finite(trained, infinite)
    kinds = {what: [name for name in names if what != "gradient" or name not in large] for what, names in wrong.items()}
    parts = ["; ".join(f"{what} of {listed(names)}" for what, names in kinds.items() if names)]
    parts[0] += f" = {value}" if parts[0] else ""
    if large:
        named = listed([name for name in infinite if name in large])
        parts.append(f"gradient of {named} = over {_LARGEST:.1e}, finite, but its square is inf in float32")
    where = ""
    if trained.compares and trained.config.zero.nonfinite == "error":
        holders = [rank for rank, names in enumerate(spoiled) if names]
        where = f" on {ranks_named(holders)}" if 0 < len(holders) < len(spoiled) else checks.ranks(wrong)
    return "; ".join(filter(None, parts)) + where + trained.ledger.hooks.peers.here()


def _spoiled(trained: OptimizerState, names: Sequence[str], together: bool) -> list[set[str]]:
    """Return for each rank the names, of these, whose momentum is not finite, which explains the direction. Collective
    if ``together``; else of this rank alone."""
    resident = [a for a in trained.muon if a.name in names and a.momentum.numel()]
    flags = not_finite([sharded.momentum for sharded in resident]).tolist() if resident else []
    mine = {sharded.name for sharded, flag in zip(resident, flags, strict=True) if flag}
    return _of_ranks(trained, mine, together=together and bool(names))


def _finite(trained: OptimizerState, names: Sequence[str]) -> frozenset[str]:
    """Return the names of these gradients that hold no inf on any rank; collective."""
    named = {sharded.name: sharded for sharded in (*trained.muon, *trained.rest)}
    with_gradient = [name for name in names if named[name].grad is not None]
    infinite = {name for name in with_gradient if not_finite([named[name].local_grad]).item()}
    return frozenset(names).difference(*_of_ranks(trained, infinite, together=trained.compares))


def _of_ranks(trained: OptimizerState, mine: set[str], *, together: bool) -> list[set[str]]:
    """Return the names of every rank, collectively, or of this rank alone unless ``together``."""
    return gather_objects(mine, trained.group) if together and trained.group is not None else [mine]
