"""The alternatives of a plan: ZeRO stages on meshes, and Muon against AdamW by tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from compile_muon.config import Config
from compile_muon.config.settings import VIEWS, MuonConfig
from compile_muon.errors import config_error
from compile_muon.kernels import resolve_coefficients, resolve_dtype
from compile_muon.mesh import axis_sizes
from compile_muon.planning.capture import Captured
from compile_muon.planning.trace import Target, Trace, with_sharing
from compile_muon.simulate import Timeline
from compile_muon.simulate.machine import Machine

#: ratio of replica sizes, in nodes; halves and doubles of a size differ by a few per cent only
_LARGER = 8
#: micro-batches of a traced step with a first, a middle and a last one
_SEVERAL = 3


@dataclass(frozen=True)
class Candidate:
    """A way to shard: a ZeRO stage on a mesh."""

    stage: int  # of ZeRO
    axes: Mapping[str, int]  # size of each mesh dimension by name, in order
    asked: bool  # this is the choice of the config

    @property
    def sharing(self) -> int:
        """The number of ranks that share a sequence."""
        return self.axes.get("sequence", 1)

    def config(self, config: Config) -> Config:
        """Return `config` with this stage and all optimizer state on the device; the mesh is passed separately."""
        weights = config.zero.offload_param if self.stage == 3 else None
        zero = replace(config.zero, stage=self.stage, check_replicas=None, offload=None, offload_param=weights)
        return with_sharing(replace(config, zero=zero, mesh=None), self.sharing)


def candidates(config: Config, world: int, machine: Machine) -> list[Candidate]:
    """Return every stage on one mesh dimension and with replicas of 1, 8, 64, ... nodes, and the choice of `config`.

    If ranks share sequences in `config`, each candidate comes with and without. Raises a ConfigError if the mesh of
    `config` does not multiply to `world` ranks, or splits parameters (tensor or expert parallelism).
    """
    configured_axes = axis_sizes(config, world) or {"shard": 1}
    for axis, key in {"tensor": "mesh.tensor", "expert": "expert_parallel.size"}.items():
        if axis in configured_axes:
            raise config_error(key, configured_axes[axis], "a plan has the whole model on every rank", "leave it out")
    compared = [
        Candidate(stage, axes, (stage, axes) == (config.zero.stage, configured_axes))
        for sharing in sorted({1, configured_axes.get("sequence", 1)})
        for axes_of_meshes in [meshes(world, sharing, machine)]
        for stage in range(4)
        for axes in (axes_of_meshes if stage else axes_of_meshes[:1])  # at stage 0 every rank is a replica
    ]
    if not any(candidate.asked for candidate in compared):
        compared.append(Candidate(config.zero.stage, configured_axes, True))
    return compared


def meshes(world: int, sharing: int, machine: Machine) -> list[dict[str, int]]:
    """Return meshes of `world` ranks, `sharing` of them to a sequence: one replica, then more and smaller ones."""

    def axes(replicas: int, ranks: int) -> dict[str, int]:
        sizes = {"replicate": replicas, "shard": ranks // sharing, "sequence": sharing}
        return {name: size for name, size in sizes.items() if size > 1} or {"shard": 1}

    sizes_of_axes = [axes(1, world)]
    replica = machine.node or world
    while 1 < replica < world and world % replica == 0:
        if replica % sharing == 0:
            sizes_of_axes.append(axes(world // replica, replica))
        replica *= _LARGER
    return sizes_of_axes


def planned_for(config: Config, machine: Machine, name: str) -> Config:
    """Return `config` resolved as it would be on `machine`, wherever the plan is made.

    `name` is the machine as :func:`~compile_muon.simulate.machine.load_machine` takes it.
    """
    ns = config.muon.ns
    if machine.device == "cuda":
        # "auto" would resolve for the machine that plans, and a GPU backend be refused where there is no GPU.
        chosen = resolve_coefficients(ns.coefficients, ns.steps)
        dtype = str(resolve_dtype(ns.dtype, "cuda", chosen, ns.method)).removeprefix("torch.")
        ns = replace(ns, dtype=dtype, backend="aten" if ns.backend == "aten" else "auto")
    muon = replace(config.muon, ns=ns) if config.algorithm == "muon" else config.muon
    return replace(config, muon=muon, machine=config.machine or name)


def with_adamw(config: Config) -> Config:
    """Return the same training with every parameter under AdamW."""
    zero = replace(config.zero, update="auto" if config.zero.update == "backward" else config.zero.update)
    defaults = {name: getattr(Config(), name) for name in ("muon_params", "method", "groups", *VIEWS)}
    return replace(config, algorithm="adamw", muon=MuonConfig(), zero=zero, **defaults)


def with_micro_batches(config: Config, count: int) -> Config:
    """Return `config` with `count` micro-batches a step."""
    return replace(config, zero=replace(config.zero, gradient_accumulation_steps=count))


@dataclass(frozen=True)
class Price:
    """A step with Muon against the same step with AdamW for every parameter.

    Newton-Schulz runs once a step, so its price does not grow with the number of micro-batches.
    """

    tokens: int  # of a rank and step; of all ranks that share a sequence together
    fits: bool  # both steps fit the device
    seconds: float  # of the step
    exposed_seconds: float  # part of it in which the compute stream waits
    adamw_seconds: float
    adamw_exposed_seconds: float
    share: float  # time that Muon adds, as a fraction of AdamW's step
    computed_share: float  # part of `share` that is computed
    exposed_share: float  # part that is exposed; below 0 where Newton-Schulz hides communication that AdamW waits for


def percent(share: float) -> str:
    """Format a share with its sign; a share that rounds to zero is not negative."""
    return f"{round(share, 3) or 0.0:+.1%}"


def prices(
    traced: Callable[[int], Trace], target: Target, machine: Machine, *, rank: int, tokens: int, counts: Sequence[int]
) -> Iterator[Price]:
    """Yield the price of a step for each number of micro-batches in `counts`, in order.

    Steps of up to three micro-batches are simulated; each further one adds the time of the middle one of three.
    `traced` maps 1 (if in `counts`) and 3 (if any is more) micro-batches to the trace; `target` is the sharding;
    `tokens` are those of a rank and micro-batch.
    """
    limit = machine.shared_by(target.world).memory_bytes

    @cache
    def captured(micro_batches: int, adamw: bool) -> Captured:
        config = with_micro_batches(with_adamw(target.config) if adamw else target.config, micro_batches)
        return traced(micro_batches).captured(replace(target, config=config), rank=rank)

    @cache
    def step(count: int, adamw: bool) -> Timeline:
        capture = captured(1 if count == 1 else _SEVERAL, adamw)
        if count == _SEVERAL - 1:  # drop the middle micro-batch
            visits = len(traced(_SEVERAL).visits) // _SEVERAL
            capture = replace(capture, graphs=(*capture.graphs[:visits], *capture.graphs[2 * visits :]))
        return capture.simulated(machine)

    def steps(count: int, adamw: bool) -> tuple[float, float]:
        """Return seconds of a step, and the exposed part of them."""
        counts = (min(count, _SEVERAL), min(count, _SEVERAL - 1))
        (seconds, exposed), fewer = ((s.seconds, sum(s.exposed.values())) for s in (step(n, adamw) for n in counts))
        extra = max(0, count - _SEVERAL)
        return seconds + extra * (seconds - fewer[0]), exposed + extra * (exposed - fewer[1])

    for count in counts:
        fits = all(step(min(count, _SEVERAL), adamw).peak.total <= limit for adamw in (False, True))
        (seconds, exposed), (adamw_seconds, adamw_exposed) = steps(count, False), steps(count, True)
        share, exposed_share = seconds / adamw_seconds - 1, (exposed - adamw_exposed) / adamw_seconds
        yield Price(
            tokens * count, fits, seconds, exposed, adamw_seconds, adamw_exposed,
            share, share - exposed_share, exposed_share,
        )  # fmt: skip
