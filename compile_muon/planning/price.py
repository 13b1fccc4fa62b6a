"""What Muon adds to a step of AdamW's, by how many tokens the step has.

Newton-Schulz is done once a step, whatever the step computes: a step of more micro-batches pays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from compile_muon.config import Config
from compile_muon.planning.candidates import with_adamw
from compile_muon.planning.capture import Captured
from compile_muon.planning.machine import Machine
from compile_muon.planning.simulate import Timeline
from compile_muon.planning.trace import Target, Trace

__all__ = ["Price", "percent", "prices", "with_micro_batches"]

#: micro-batches of a traced step that has a first, one in the midst and a last
_SEVERAL = 3


@dataclass(frozen=True)
class Price:
    """A step with Muon, and with AdamW for every parameter.

    Args:
        tokens: of a rank and step; where ranks share a sequence, of these together.
        fits: both, on the device.
        seconds, adamw_seconds: of the step.
        exposed_seconds, adamw_exposed_seconds: of it, compute waits.
    """

    tokens: int
    fits: bool
    seconds: float
    exposed_seconds: float
    adamw_seconds: float
    adamw_exposed_seconds: float

    @property
    def share(self) -> float:
        """What is added, as a fraction of AdamW's step."""
        return self.seconds / self.adamw_seconds - 1

    @property
    def computed_share(self) -> float:
        """The same of what is computed."""
        return self.share - self.exposed_share

    @property
    def exposed_share(self) -> float:
        """The same of what is waited for; less than 0 where Newton-Schulz hides what AdamW waits for."""
        return (self.exposed_seconds - self.adamw_exposed_seconds) / self.adamw_seconds

    def to_json(self) -> dict[str, Any]:
        """Seconds, tokens and shares."""
        return asdict(self) | {
            "share": self.share,
            "computed_share": self.computed_share,
            "exposed_share": self.exposed_share,
        }


def percent(share: float) -> str:
    """A share as tables have it, with its sign; what rounds to nothing is not negative."""
    return f"{round(share, 3) or 0.0:+.1%}"


def with_micro_batches(config: Config, count: int) -> Config:
    """``config`` with so many micro-batches a step."""
    return replace(config, zero=replace(config.zero, gradient_accumulation_steps=count))


def prices(
    traced: Callable[[int], Trace], target: Target, machine: Machine, *, rank: int, tokens: int, counts: Sequence[int]
) -> Iterator[Price]:
    """Of steps of so many micro-batches each, in the order of ``counts``.

    Up to three are played; each further one takes what the one in the midst of three does.

    Args:
        traced: a step of so many micro-batches: 1 is asked for where ``counts`` has it, and 3 where it has more.
        target: the sharding; its micro-batches are replaced.
        rank: that is played.
        tokens: of a rank and micro-batch.
    """
    limit = machine.shared_by(target.world).memory_bytes

    @cache
    def captured(micro_batches: int, adamw: bool) -> Captured:
        config = with_micro_batches(with_adamw(target.config) if adamw else target.config, micro_batches)
        return traced(micro_batches).captured(replace(target, config=config), rank=rank)

    @cache
    def step(count: int, adamw: bool) -> Timeline:
        played = captured(1, adamw) if count == 1 else captured(_SEVERAL, adamw)
        if count == _SEVERAL - 1:  # without the one in the midst
            each = len(traced(_SEVERAL).visits) // _SEVERAL
            played = replace(played, graphs=(*played.graphs[:each], *played.graphs[2 * each :]))
        return played.simulated(machine)

    def steps(count: int, adamw: bool) -> tuple[float, float, int]:
        """Seconds, of them exposed, and the most that is live."""
        played = step(min(count, _SEVERAL), adamw)
        seconds, exposed = played.seconds, sum(played.exposed.values())
        if more := max(0, count - _SEVERAL):
            fewer = step(_SEVERAL - 1, adamw)
            seconds += more * (seconds - fewer.seconds)
            exposed += more * (exposed - sum(fewer.exposed.values()))
        return seconds, exposed, played.peak.total

    for count in counts:
        seconds, exposed, peak = steps(count, adamw=False)
        adamw_seconds, adamw_exposed, adamw_peak = steps(count, adamw=True)
        fits = max(peak, adamw_peak) <= limit
        yield Price(tokens * count, fits, seconds, exposed, adamw_seconds, adamw_exposed)
