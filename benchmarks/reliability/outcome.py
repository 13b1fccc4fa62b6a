"""A campaign's report: a row for each fault, with the command line that repeats it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Request", "Row", "again"]


@dataclass(frozen=True)
class Request:
    """The command line's options of a campaign; None for the campaign's own value."""

    seed: int = 0  # of all random draws
    quick: bool = False  # a part of the campaign, in well under a minute
    runs: int | None = None  # number of injected faults
    only: str = ""  # faults whose name contains this; empty for all
    stages: tuple[int, ...] | None = None  # ZeRO stages
    world: int | None = None  # number of ranks
    jobs: int = 3  # runs at a time, where most of a run is waiting
    arguments: dict[str, Any] = field(default_factory=dict)  # of MuonZero on every rank, beside the campaign's own

    def wants(self, name: str) -> bool:
        """Tell whether the request includes a fault of this name."""
        return self.only in name


@dataclass
class Row:
    """The outcomes of one fault."""

    campaign: str
    fault: str
    again: str  # command that repeats it
    tried: int = 0  # number of attempts
    outcomes: dict[str, int] = field(default_factory=dict)  # outcome -> number of times
    wrong: int = 0  # outcomes that should not have happened
    longest_s: float | None = None  # seconds from the fault until the last rank had ended; None if nothing is awaited
    details: dict[str, Any] = field(default_factory=dict)  # further facts, JSON

    def count(self, outcome: str, *, wrong: bool = False, seconds: float | None = None) -> None:
        """Count an attempt that ended with ``outcome``."""
        self.tried += 1
        self.note(outcome, wrong=wrong)
        if seconds is not None:
            self.longest_s = max(seconds, self.longest_s or 0.0)

    def note(self, outcome: str, *, wrong: bool = False) -> None:
        """Note a further ``outcome`` of an attempt that is counted."""
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
        self.wrong += wrong


def again(campaign: str, request: Request, only: str = "", *, sized: bool = False) -> str:
    """Return the command line that repeats ``only`` of a campaign; ``sized``: draws depend on the number of runs."""
    words = ["python", "benchmarks/faults.py", campaign]
    words += ["--only", only] if only else []
    words += ["--arguments", json.dumps(request.arguments)] if request.arguments else []
    words += ["--seed", str(request.seed)] if request.seed else []
    words += ["--quick"] if request.quick and sized else []
    words += ["--runs", str(request.runs)] if request.runs is not None and sized else []
    return shlex.join(words)
