"""What a campaign reports: a row for each fault, which can be repeated from the command line."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Request", "Row", "again"]


@dataclass(frozen=True)
class Request:
    """What the command line asks of a campaign.

    Args:
        seed: of everything that is drawn.
        quick: a part of it, in well under a minute.
        runs: how often faults are put in; None for the campaign's own number.
        only: faults whose name holds this; empty for all.
        stages: ZeRO stages; None for the campaign's own.
        world: number of ranks; None for the campaign's own.
        jobs: how many runs at a time, where most of a run is waiting.
        arguments: of ``MuonZero`` on every rank, beside the campaign's own.
    """

    seed: int = 0
    quick: bool = False
    runs: int | None = None
    only: str = ""
    stages: tuple[int, ...] | None = None
    world: int | None = None
    jobs: int = 3
    arguments: dict[str, Any] = field(default_factory=dict)

    def wants(self, name: str) -> bool:
        """Whether a fault of this name was asked for."""
        return self.only in name


@dataclass
class Row:
    """One fault.

    Args:
        campaign, fault: which one.
        tried: how often.
        outcomes: what happened, how often.
        wrong: how many of them should not have happened.
        longest_s: seconds until the last rank had ended, from the fault on; None where nothing is waited for.
        again: the command that repeats it.
        details: whatever else is known, JSON.
    """

    campaign: str
    fault: str
    again: str
    tried: int = 0
    outcomes: dict[str, int] = field(default_factory=dict)
    wrong: int = 0
    longest_s: float | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def count(self, outcome: str, *, wrong: bool = False, seconds: float | None = None) -> None:
        """One more attempt ended with ``outcome``."""
        self.tried += 1
        self.note(outcome, wrong=wrong)
        if seconds is not None:
            self.longest_s = max(seconds, self.longest_s or 0.0)

    def note(self, outcome: str, *, wrong: bool = False) -> None:
        """``outcome`` happened as well, in an attempt that is counted."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.wrong += wrong


def again(campaign: str, request: Request, only: str = "", *, sized: bool = False) -> str:
    """The command line that repeats ``only`` of a campaign.

    Args:
        sized: whether how many runs were asked for decides what is drawn for each.
    """
    words = ["python", "benchmarks/faults.py", campaign]
    words += ["--only", only] if only else []
    words += ["--arguments", json.dumps(request.arguments)] if request.arguments else []
    words += ["--seed", str(request.seed)] if request.seed else []
    words += ["--quick"] if request.quick and sized else []
    words += ["--runs", str(request.runs)] if request.runs is not None and sized else []
    return shlex.join(words)
