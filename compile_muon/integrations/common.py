"""Parts of all trainers: refusals of settings, and ``"auto"`` in a config, which takes the trainer's own setting."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from compile_muon.config import Config
from compile_muon.config.checked import Mistakes
from compile_muon.config.sources import as_mapping
from compile_muon.errors import config_error, raise_all
from compile_muon.model.readers import sharded_params_of

#: arguments of ``compile_muon.load_config``
Source = str | os.PathLike | Mapping[str, Any] | Config


def is_sharded(model: object) -> bool:
    """Return whether `model` is a module of which a MuonZero has sharded any part."""
    return isinstance(model, nn.Module) and any(sharded_params_of(inner) for inner in model.modules())


class Why(NamedTuple):
    """The reason to refuse a trainer's setting, and the remedy."""

    problem: str
    remedy: str


#: reasons that several trainers share
WHY = {
    "casts": Why(
        "scales the loss or casts weights, which Muon's checks take for infinite gradients or an edit",
        'leave it out, or use "bf16"',
    ),
    "compiles": Why("would compile the model a second time", 'leave it out, and set "compile": true in the config'),
    "other": Why("is another optimizer, or belongs to one", "leave it out: the config says what trains what"),
    "shards": Why("shards the model too", "leave it out, and start with torchrun or `accelerate launch --multi_gpu`"),
    "starts over": Why(
        "starts over with a sharded model", "leave it out, and set the value yourself, or give each trial a new model"
    ),
    "tensor": Why(
        "needs the same batches on its ranks, and loaders here give each process its own",
        "leave it out, or write the loop yourself (docs/how-to/meshes.md)",
    ),
}

#: (whether the setting is refused, its name, its value, the problem, the remedy)
Refusal = tuple[Any, str, Any, str, str]


def contradicting(field: str, value: object, setting: str, trainer_value: object, same: bool | None = None) -> Refusal:
    """Return a refusal of `value` at `field` where `trainer_value`, the trainer's `setting`, contradicts it.

    `same`: whether they agree, where the two need not be equal.
    """
    so = None not in (value, trainer_value) and value != trainer_value if same is None else not same
    return so, field, value, f"contradicts {setting} = {trainer_value!r}", 'leave it out of the config, or write "auto"'


def refuse(rows: Iterable[Refusal]) -> None:
    """Raise one ConfigError about all rows whose first entry is true."""
    raise_all(config_error(*row) for so, *row in rows if so)


def filled(source: Source, automatic: Mapping[tuple[str, ...], Any], *, defaults: Mapping[tuple[str, ...], Any]) -> Any:
    """Return `source` as a new mapping, with ``"auto"`` replaced.

    `automatic`: path of keys -> value; `defaults`: the same of absent keys. A :class:`Config` is returned as it is, and
    so is an unreadable source, for ``load_config`` to report.
    """
    if isinstance(source, Config):
        return source
    mistakes, values = Mistakes(), dict[str, Any]()
    with mistakes.collected():
        values = as_mapping(source, mistakes)
    if mistakes.found:
        return source
    for path, value in defaults.items():
        section: Any = values
        for key in path[:-1]:
            section = section.setdefault(key, {}) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.setdefault(path[-1], value)
    for path, value in automatic.items():
        section = values
        for key in path[:-1]:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict) and section.get(path[-1]) == "auto":
            section[path[-1]] = value
    return values
