"""Before anything is sharded: all ranks have the same libraries, configuration, parameters and layouts.

Ranks that differ in any of these exchange different collectives, or the same ones with another meaning.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from compile_muon.agreement.compare import compare, worded
from compile_muon.agreement.heartbeat import Heartbeat
from compile_muon.config import Config
from compile_muon.errors import ConfigError, UnsupportedModelError
from compile_muon.mesh import Mesh
from compile_muon.passes.costs import Costs
from compile_muon.passes.language.spec import ParamSpec

__all__ = ["agree"]

#: what each rank has for itself: its place, its names of the group and of the machine's file, and settings that change
#: no number
_OWN = ("index", "group", "reduce_group", "exchange_group", "dump", "nvtx", "machine")
_ORDER = "order of parameters"


def _versions() -> dict[str, str]:
    found = {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    for name in ("compile_muon", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def _fields(record: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The fields of a dataclass, and of those inside it, as ``(path, text)``."""
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            yield from _fields(value, f"{prefix}{field.name}.")
        elif field.name not in _OWN:
            # What a predicate chooses shows in the layouts; how it prints is an address.
            yield prefix + field.name, "a function" if callable(value) else repr(value)


def _parameters(model: nn.Module) -> dict[str, str]:
    found = {
        name: f"{tuple(p.shape)} {p.dtype}{' frozen' if not p.requires_grad else ''}".replace("torch.", "")
        for name, p in model.named_parameters()
    }
    return found | {_ORDER: _digest([*found]).hex()[:8]}


def _layouts(specs: Mapping[str, ParamSpec], algorithms: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, spec in specs.items():
        yield f"{name} algorithm", algorithms[name]
        yield from _fields(spec, f"{name} ")


def _digest(facts: Any) -> bytes:
    return hashlib.sha256(repr(facts).encode()).digest()[:7]


def agree(
    model: nn.Module,
    config: Config,
    costs: Costs,
    specs: Mapping[str, ParamSpec],
    algorithms: Mapping[str, str],
    mesh: Mesh,
    heartbeat: Heartbeat | None,
) -> None:
    """Compare with the other ranks; collective.

    Args:
        costs: what the file of the machine says on this rank.
        specs: static facts by parameter name, as this rank has them.
        algorithms: what trains each.
        heartbeat: learns the number that each rank's optimizer has.
    Raises:
        ConfigError: versions or settings differ; all ranks raise, naming what differs and on which ranks.
        UnsupportedModelError: parameters or layouts differ.
    """
    sections = {
        "library versions": _versions(),
        "settings": dict(_fields(config)) | dict(_fields(costs, "machine.")),
        "parameters": _parameters(model),
        "layouts": dict(_layouts(specs, algorithms)),
    }
    numbers = [int.from_bytes(_digest(facts), "big") for facts in sections.values()]
    mine = torch.tensor([*numbers, 0 if heartbeat is None else heartbeat.number], device=mesh.device_type)
    everyone = [torch.empty_like(mine) for _ in range(mesh.size)]
    dist.all_gather(everyone, mine, group=mesh.everyone)
    rows = torch.stack(everyone).tolist()
    if heartbeat is not None:
        heartbeat.meet([row[-1] for row in rows])
    for column, (title, facts) in enumerate(sections.items()):
        if len({row[column] for row in rows}) > 1:
            raise _disagreement(title, facts, mesh)


def _disagreement(title: str, mine: dict[str, str], mesh: Mesh) -> Exception:
    """What to raise; collective."""
    found = compare(mine, mesh.everyone, absent="(absent)")
    if len(found) > 1:
        found.pop(_ORDER, None)  # follows from the others
    if title == "layouts":  # the first field of a parameter says enough
        first = {key.split(" ")[0]: key for key in reversed(found)}
        found = {key: values for key, values in found.items() if key in first.values()}
    message = f"ranks disagree on {title}: {worded(found)}; nothing was changed"
    if title in ("library versions", "settings"):
        return ConfigError(f"{message}; start every rank from the same environment with the same settings")
    return UnsupportedModelError(f"{message}; build the same model on every rank")
