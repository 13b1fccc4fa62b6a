"""What a step does, decided from what the ranks have found: functions of facts alone, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Decision", "Facts", "Mode", "decide", "mode_of", "over"]


class Mode(Enum):
    """Whose directions a step takes, and when the host reads what the device finds."""

    IN_STEP = "read, take the directions of backward that hold, and make the others"
    TOGETHER = "the same by the norm of several optimizers, which is known once they have met"
    AT_ONCE = "make all, since backward makes none, and read"
    LATER = "take all from backward, let the device decide whether to write, and read in the next step"
    AT_ONCE_LATER = "make all, let the device decide whether to write, and read in the next step"

    @property
    def at_once(self) -> bool:
        """Whether all directions are made in the step, before the host knows anything of the device."""
        return self in (Mode.AT_ONCE, Mode.AT_ONCE_LATER)

    @property
    def later(self) -> bool:
        """Whether the host reads in the next step."""
        return self in (Mode.LATER, Mode.AT_ONCE_LATER)


@dataclass(frozen=True)
class Facts:
    """What decides over a step: at first what the host of one rank knows, then what its checks read of all ranks.

    Args:
        wanted: names of the matrices with a gradient.
        limit: ``gradient_clipping``.
        held: names of the directions of backward that every rank has, made from the gradient it has.
        anywhere: names of the matrices of which some rank may have a gradient.
        gradients: squared norm of each gradient, by name; empty until it is read, as is all below.
        spoiled: names of what else is not finite, by kind: momenta, states, rates.
        directions: names of the directions that are not finite.
        total: norm of the gradients of all optimizers that decide together; None for those of this one.
    """

    wanted: frozenset[str] = frozenset()
    limit: float | None = None
    held: frozenset[str] = frozenset()
    anywhere: frozenset[str] = frozenset()
    gradients: Mapping[str, float] = field(default_factory=dict)
    spoiled: Mapping[str, Sequence[str]] = field(default_factory=dict)
    directions: frozenset[str] = frozenset()
    total: float | None = None

    @property
    def norm(self) -> float:
        """Of all gradients."""
        return math.sqrt(sum(self.gradients.values())) if self.total is None else self.total

    @property
    def clipped(self) -> bool:
        """Whether the norm is known to be over the limit."""
        return bool(self.gradients or self.total is not None) and over(self.limit, self.norm)

    def wrong(self, used: Collection[str]) -> dict[str, list[str]]:
        """What is not finite of all that a step would use, names by kind; what follows from other things is not named.

        Args:
            used: names of the directions; what has become of others does not matter.
        """
        found = {"gradient": [name for name, square in self.gradients.items() if not math.isfinite(square)]}
        found |= {what: list(names) for what, names in self.spoiled.items()}
        if not any(found.values()):
            found["direction"] = sorted(self.directions.intersection(used))
        return {what: names for what, names in found.items() if names}


@dataclass(frozen=True)
class Decision:
    """What a step does.

    Args:
        clip: whether the device scales gradients whose norm is over the limit.
        use: names of the directions of backward that it takes.
        make: names of those that it makes itself.
        wait: whether the host reads what the device finds, once these are made and before anything is written.
        wrong: what is not finite, names by kind: then nothing is made or written.
    """

    clip: bool
    use: frozenset[str]
    make: frozenset[str]
    wait: bool
    wrong: dict[str, list[str]]


def over(limit: float | None, norm: float) -> bool:
    """Whether gradients of this norm are scaled: torch's ``limit / (norm + 1e-6) < 1``."""
    return limit is not None and limit / (norm + 1e-6) < 1


def mode_of(facts: Facts, *, speculating: bool, later: bool, together: bool) -> Mode:
    """How a step goes on.

    Args:
        facts: of the host.
        speculating: whether any backward may make directions.
        later: whether checks are read in the next step; never so with other optimizers.
        together: whether there are others that decide with this one.
    """
    if together:
        return Mode.TOGETHER
    if not speculating:
        return Mode.AT_ONCE_LATER if later else Mode.AT_ONCE
    # What a step must know for its own course it waits for.
    return Mode.LATER if later and facts.limit is None and facts.wanted <= facts.held else Mode.IN_STEP


def decide(facts: Facts, mode: Mode) -> Decision:
    """What a step does with these facts: of the host where ``mode`` reads nothing before, else of all ranks."""
    if mode.at_once:
        return Decision(facts.limit is not None, frozenset(), facts.anywhere, not mode.later, facts.wrong(()))
    # A direction of an unscaled gradient is right up to Newton-Schulz's eps, but its momentum is not.
    use = frozenset[str]() if facts.clipped else facts.held & facts.wanted
    make = facts.wanted - use
    return Decision(facts.clipped, use, make, bool(make), facts.wrong(use))
