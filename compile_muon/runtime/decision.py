"""What a step does, decided from what the ranks have found: a function of facts alone, the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Decision", "Facts", "decide", "over"]


@dataclass(frozen=True)
class Facts:
    """What one survey has read, of all ranks together.

    Args:
        gradients: squared norm of each gradient, by name.
        spoiled: names of what else is not finite, by kind: momenta, states, rates.
        held: names of the directions of backward that every rank has, made from the gradient it has.
        directions: names of the directions that are not finite.
    """

    gradients: Mapping[str, float]
    spoiled: Mapping[str, Sequence[str]] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    directions: frozenset[str] = frozenset()

    @property
    def norm(self) -> float:
        """Of all gradients."""
        return math.sqrt(sum(self.gradients.values()))

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
        clip: whether gradients are scaled to the limit.
        use: names of the directions of backward that it takes.
        make: names of those that it makes itself.
        wrong: what is not finite, names by kind: then nothing is written.
    """

    clip: bool
    use: frozenset[str]
    make: frozenset[str]
    wrong: dict[str, list[str]]


def over(limit: float | None, norm: float) -> bool:
    """Whether gradients of this norm are scaled: torch's ``limit / (norm + 1e-6) < 1``."""
    return limit is not None and limit / (norm + 1e-6) < 1


def decide(facts: Facts, wanted: Collection[str], limit: float | None, norm: float | None = None) -> Decision:
    """What a step does with these facts.

    Args:
        wanted: names of the matrices with a gradient.
        limit: ``gradient_clipping``.
        norm: of the gradients of all pipeline stages; None for those of ``facts``.
    """
    clip = over(limit, facts.norm if norm is None else norm)
    # A direction of an unscaled gradient is right up to Newton-Schulz's eps, but its momentum is not.
    use = frozenset() if clip else facts.held.intersection(wanted)
    return Decision(clip, use, frozenset(wanted) - use, facts.wrong(use))
