"""What a plan compares: ZeRO stages on meshes, as settings, and Muon with AdamW by the tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from compile_muon.config import Config
from compile_muon.config.settings import VIEWS, MuonConfig
from compile_muon.errors import config_error
from compile_muon.kernels import resolve_coefficients, resolve_dtype
from compile_muon.mesh import axis_sizes
from compile_muon.planning.capture import Captured
from compile_muon.planning.machine import Machine
from compile_muon.planning.simulate import Timeline
from compile_muon.planning.trace import Target, Trace, with_sharing

__all__ = [
    "Candidate", "Price", "candidates", "meshes", "percent", "planned_for", "prices", "with_adamw",
    "with_micro_batches",
]  # fmt: skip

#: replicas of the next size have as many times the nodes: halves and doubles of one are within a few per cent of it
_LARGER = 8
#: micro-batches of a traced step that has a first, one in the midst and a last
_SEVERAL = 3


@dataclass(frozen=True)
class Candidate:
    """One way to shard.

    Args:
        stage: of ZeRO.
        axes: size by name, in order.
        asked: whether it is what the config says.
    """

    stage: int
    axes: Mapping[str, int]
    asked: bool

    @property
    def sharing(self) -> int:
        """Ranks that share a sequence."""
        return self.axes.get("sequence", 1)

    def config(self, config: Config) -> Config:
        """``config`` with this stage and all state on the device; the mesh is given beside it."""
        weights = config.zero.offload_param if self.stage == 3 else None
        zero = replace(config.zero, stage=self.stage, check_replicas=None, offload=None, offload_param=weights)
        return with_sharing(replace(config, zero=zero, mesh=None), self.sharing)


def candidates(config: Config, world: int, machine: Machine) -> list[Candidate]:
    """Every stage on one axis of all ranks, and with replicas of 1, 8, 64, ... nodes; and what ``config`` says.

    At stage 0 every rank is a replica, so axes make no difference. Where ``config`` has ranks share sequences, all of
    them with and without it.

    Raises:
        ConfigError: the mesh of ``config`` does not make up ``world`` ranks, or splits parameters.
    """
    asked = axis_sizes(config, world) or {"shard": 1}
    fields = {"tensor": "mesh.tensor", "expert": "expert_parallel.size"}
    split = next((name for name in fields if name in asked), None)
    if split is not None:
        raise config_error(fields[split], asked[split], "a plan has the whole model on every rank", "leave it out")
    found = [
        Candidate(stage, axes, (stage, axes) == (config.zero.stage, asked))
        for sharing in sorted({1, asked.get("sequence", 1)})
        for several in [meshes(world, sharing, machine)]
        for stage in range(4)
        for axes in (several if stage else several[:1])
    ]
    if not any(candidate.asked for candidate in found):
        found.append(Candidate(config.zero.stage, asked, True))
    return found


def meshes(world: int, sharing: int, machine: Machine) -> list[dict[str, int]]:
    """Sizes of axes: all ranks in one replica, and in more; ``sharing`` of them to a sequence."""

    def axes(replicas: int, ranks: int) -> dict[str, int]:
        sizes = {"replicate": replicas, "shard": ranks // sharing, "sequence": sharing}
        return {name: size for name, size in sizes.items() if size > 1} or {"shard": 1}

    found = [axes(1, world)]
    replica = machine.node or world
    while 1 < replica < world and world % replica == 0:
        if replica % sharing == 0:
            found.append(axes(world // replica, replica))
        replica *= _LARGER
    return found


def planned_for(config: Config, machine: Machine, name: str) -> Config:
    """``config`` as it resolves on ``machine``, wherever the plan is made.

    Args:
        name: of the machine, as :func:`~compile_muon.planning.machine.load_machine` takes it.
    """
    ns = config.muon.ns
    if machine.device == "cuda":
        # On this machine they would resolve to what CPUs have, and be refused where there are no GPUs.
        chosen = resolve_coefficients(ns.coefficients, ns.steps)
        dtype = str(resolve_dtype(ns.dtype, "cuda", chosen, ns.method)).removeprefix("torch.")
        ns = replace(ns, dtype=dtype, backend="aten" if ns.backend == "aten" else "auto")
    muon = replace(config.muon, ns=ns) if config.algorithm == "muon" else config.muon
    return replace(config, muon=muon, machine=config.machine or name)


def with_adamw(config: Config) -> Config:
    """The same training with every parameter under AdamW."""
    update = "auto" if config.zero.update == "backward" else config.zero.update
    zero = replace(config.zero, update=update)
    own: dict[str, Any] = {
        name: Config.__dataclass_fields__[name].default for name in ("muon_params", "method", "groups", *VIEWS)
    }
    return replace(config, algorithm="adamw", muon=MuonConfig(), zero=zero, **own)


def with_micro_batches(config: Config, count: int) -> Config:
    """``config`` with so many micro-batches a step."""
    return replace(config, zero=replace(config.zero, gradient_accumulation_steps=count))


@dataclass(frozen=True)
class Price:
    """A step with Muon, and with AdamW for every parameter.

    Newton-Schulz is done once a step, whatever the step computes: a step of more micro-batches pays the same.

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
        return asdict(self) | {name: getattr(self, name) for name in ("share", "computed_share", "exposed_share")}


def percent(share: float) -> str:
    """A share as tables have it, with its sign; what rounds to nothing is not negative."""
    return f"{round(share, 3) or 0.0:+.1%}"


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
        played = captured(1 if count == 1 else _SEVERAL, adamw)
        if count == _SEVERAL - 1:  # without the one in the midst
            each = len(traced(_SEVERAL).visits) // _SEVERAL
            played = replace(played, graphs=(*played.graphs[:each], *played.graphs[2 * each :]))
        return played.simulated(machine)

    def steps(count: int, adamw: bool) -> tuple[float, float]:
        """Seconds, and of them exposed."""
        played = step(min(count, _SEVERAL), adamw)
        seconds, exposed = played.seconds, sum(played.exposed.values())
        if more := max(0, count - _SEVERAL):
            fewer = step(_SEVERAL - 1, adamw)
            seconds += more * (seconds - fewer.seconds)
            exposed += more * (exposed - sum(fewer.exposed.values()))
        return seconds, exposed

    for count in counts:
        fits = all(step(min(count, _SEVERAL), adamw).peak.total <= limit for adamw in (False, True))
        yield Price(tokens * count, fits, *steps(count, False), *steps(count, True))
