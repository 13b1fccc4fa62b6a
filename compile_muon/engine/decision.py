"""The decision of a step: functions of the facts that the ranks share, so equal on every rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Facts:
    """The facts that decide over a step: of one rank's host at first, of all ranks once the checks are read."""

    wanted: frozenset[str] = frozenset()  # matrices with a gradient
    limit: float | None = None  # ``gradient_clipping``
    # Matrices whose direction every rank has from backward, made from the gradient that it has.
    speculated: frozenset[str] = frozenset()
    anywhere: frozenset[str] = frozenset()  # matrices of which some rank may have a gradient
    remake: bool = False  # the step makes all directions, those of backward too, before the host knows the norm
    wait: bool = True  # the host waits for the norm, and all other checks, before the step writes
    # Squared norm of each gradient; empty, as all below, until the checks are read.
    gradients: Mapping[str, float] = field(default_factory=dict)
    # Names of momenta, states and rates that are not finite, by kind.
    spoiled: Mapping[str, Sequence[str]] = field(default_factory=dict)
    directions: frozenset[str] = frozenset()  # matrices whose direction is not finite
    total: float | None = None  # norm over all optimizers that decide together; None without others

    @property
    def norm(self) -> float:
        """The norm of all gradients."""
        return math.sqrt(sum(self.gradients.values())) if self.total is None else self.total

    @property
    def clipped(self) -> bool:
        """Whether the norm is known to be over the limit."""
        return bool(self.gradients or self.total is not None) and over(self.limit, self.norm)

    def wrong(self, used: Collection[str]) -> dict[str, list[str]]:
        """Return the non-finite inputs of a step that uses these directions, names by kind. Directions are among them
        only where all they were made of is finite."""
        not_finite = {"gradient": [name for name, square in self.gradients.items() if not math.isfinite(square)]}
        not_finite |= {what: list(names) for what, names in self.spoiled.items()}
        if not any(not_finite.values()):
            not_finite["direction"] = sorted(self.directions.intersection(used))
        return {what: names for what, names in not_finite.items() if names}


@dataclass(frozen=True)
class Decision:
    """The course of a step."""

    clip: bool  # the device scales gradients whose norm is over the limit
    use: frozenset[str]  # matrices that take the direction of backward
    make: frozenset[str]  # matrices whose direction the step makes
    wait: bool  # the host reads the new directions' checks before anything is written
    wrong: dict[str, list[str]]  # non-finite inputs, names by kind; if any, nothing is made or written


def over(limit: float | None, norm: float) -> bool:
    """Return whether gradients of this norm are scaled: torch's ``limit / (norm + 1e-6) < 1``."""
    return limit is not None and limit / (norm + 1e-6) < 1


def planned(facts: Facts, *, speculating: bool, later: bool, together: bool) -> Facts:
    """Return these facts of the host with ``remake`` and ``wait``. ``speculating``: backwards may make directions.
    ``later``: the next step may read checks; never with ``together``, other optimizers that decide with this one."""
    remake = not (speculating or together)
    # A limit, or a direction to be made beside those of backward, needs the norm before the step goes on.
    blind = remake or (facts.limit is None and facts.wanted <= facts.speculated)
    return replace(facts, remake=remake, wait=not (later and blind))


def decide(facts: Facts) -> Decision:
    """Return the decision: by facts of the host where it remakes or does not wait, else by facts of all ranks."""
    if facts.remake:
        return Decision(facts.limit is not None, frozenset(), facts.anywhere, facts.wait, facts.wrong(()))
    # Newton-Schulz ignores scale up to its eps, but momentum mixes gradients: once the gradient is clipped, the
    # direction made of the unscaled one is wrong.
    use = frozenset[str]() if facts.clipped else facts.speculated & facts.wanted
    make = facts.wanted - use
    return Decision(facts.clipped, use, make, bool(make), facts.wrong(use))
