"""What a plan compares: ZeRO stages on meshes, as settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compile_muon.config import Config, SequenceParallelConfig
from compile_muon.config.settings import VIEWS, MuonConfig
from compile_muon.errors import config_error
from compile_muon.kernels import resolve_coefficients, resolve_dtype
from compile_muon.mesh import axis_sizes
from compile_muon.planning.machine import Machine

__all__ = ["Candidate", "candidates", "meshes", "planned_for", "with_adamw", "with_sharing"]

#: replicas of the next size have as many times the nodes: halves and doubles of one are within a few per cent of it
_LARGER = 8


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


def with_sharing(config: Config, ranks: int) -> Config:
    """``config`` with so many ranks to a sequence, which compare nothing."""
    shared = replace(config.sequence_parallel, size=ranks, check=False) if ranks > 1 else SequenceParallelConfig()
    return replace(config, sequence_parallel=shared)


def with_adamw(config: Config) -> Config:
    """The same training with every parameter under AdamW."""
    update = "auto" if config.zero.update == "backward" else config.zero.update
    zero = replace(config.zero, update=update)
    own: dict[str, Any] = {
        name: Config.__dataclass_fields__[name].default for name in ("muon_params", "method", "groups", *VIEWS)
    }
    return replace(config, algorithm="adamw", muon=MuonConfig(), zero=zero, **own)
