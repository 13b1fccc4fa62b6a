"""The check before sharding that all ranks have the same libraries, configuration, parameters and layouts.

Ranks that differ in any of these would run different collectives, or the same ones with another meaning.
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

#: fields that may differ by rank: its index, names of process groups and of the machine's file, and settings that
#: change no number
_OWN = ("index", "group", "reduce_group", "exchange_group", "dump", "nvtx", "machine")
_ORDER = "order of parameters"


def _versions() -> dict[str, str]:
    versions = {"python": ".".join(platform.python_version_tuple()[:2]), "torch": torch.__version__}
    for name in ("compile_muon", "triton"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return versions


def _fields(record: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the fields of a dataclass, and of dataclasses inside it, as ``(path, text)``."""
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            yield from _fields(value, f"{prefix}{field.name}.")
        elif field.name not in _OWN:
            # A predicate prints as an address, which differs by rank; its choices are compared with the layouts.
            yield prefix + field.name, "a function" if callable(value) else repr(value)


def _parameters(model: nn.Module) -> dict[str, str]:
    facts = {
        name: f"{tuple(p.shape)} {p.dtype}{' frozen' if not p.requires_grad else ''}".replace("torch.", "")
        for name, p in model.named_parameters()
    }
    return facts | {_ORDER: _digest([*facts]).hex()[:8]}


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
    """Compare this rank's facts with the other ranks'; collective: one all-gather of a few digests; all ranks raise.

    ``costs``: the cost model read from this rank's machine file; ``specs``, ``algorithms``: static facts and method by
    parameter name; ``heartbeat`` learns the number of each rank's optimizer.
    """
    sections = {
        "library versions": _versions(),
        "settings": dict(_fields(config)) | dict(_fields(costs, "machine.")),
        "parameters": _parameters(model),
        "layouts": dict(_layouts(specs, algorithms)),
    }
    numbers = [int.from_bytes(_digest(facts), "big") for facts in sections.values()]
    local_numbers = torch.tensor([*numbers, 0 if heartbeat is None else heartbeat.number], device=mesh.device_type)
    gathered = [torch.empty_like(local_numbers) for _ in range(mesh.size)]
    dist.all_gather(gathered, local_numbers, group=mesh.everyone)
    rows = torch.stack(gathered).tolist()
    if heartbeat is not None:
        heartbeat.meet([row[-1] for row in rows])
    for column, (title, facts) in enumerate(sections.items()):
        if len({row[column] for row in rows}) > 1:
            raise _disagreement(title, facts, mesh)


def _disagreement(title: str, mine: dict[str, str], mesh: Mesh) -> Exception:
    """Return the error to raise; collective, since ranks exchange the facts that differ."""
    differences = compare(mine, mesh.everyone, absent="(absent)")
    if len(differences) > 1:
        differences.pop(_ORDER, None)  # other names or shapes imply another order
    if title == "layouts":  # the first field of a parameter says enough
        first = {key.split(" ")[0]: key for key in reversed(differences)}
        differences = {key: values for key, values in differences.items() if key in first.values()}
    message = f"ranks disagree on {title}: {worded(differences)}; nothing was changed"
    if title in ("library versions", "settings"):
        return ConfigError(f"{message}; start every rank from the same environment with the same settings")
    return UnsupportedModelError(f"{message}; build the same model on every rank")
