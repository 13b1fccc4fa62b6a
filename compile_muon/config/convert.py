"""``python -m compile_muon convert ds_config.json``: a config in as few of our keys as say the same."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from compile_muon.config.checked import Checked
from compile_muon.config.deepspeed import read_config
from compile_muon.config.settings import ARGUMENTS, AdamWConfig, CompileConfig, Config, MuonConfig, NSConfig, ZeroConfig
from compile_muon.errors import ConfigError, config_error

__all__ = ["convert", "run"]

#: MuonZero's arguments that have another name, or another place, in a config.
_IN_PARAMS = {"lr": "muon_lr", "adamw_lr": "adam_lr", "adamw_betas": "betas", "adamw_eps": "eps"}
_ORDER = ("lr", "muon_lr", "adam_lr", *(_IN_PARAMS.get(argument, argument) for argument in ARGUMENTS))
_IN_ZERO = ("stage", "shard_state_over")
_AT_THE_TOP = ("gradient_accumulation_steps", "gradient_clipping", "machine")


def convert(source: str | os.PathLike | Mapping[str, Any] | Config) -> dict[str, Any]:
    """What differs from the defaults, as JSON's types; :func:`load_config` makes the same ``Config`` of it.

    Raises:
        ConfigError: as :func:`load_config`, and about what only Python can say (a predicate as ``muon_params``).

    >>> convert({"train_batch_size": 8, "zero_optimization": {"stage": 3, "overlap_comm": True}})
    {'zero_optimization': {'stage': 3}}
    """
    return _written(read_config(source)[0])


def run(path: Path) -> int:
    """Print the converted file; what is wrong with it, or without effect, goes to stderr. The exit code is 0 or 2."""
    try:
        config, hints = read_config(path)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if hints:
        print(f"no effect here: {', '.join(hints)}", file=sys.stderr)
    print(json.dumps(_written(config), indent=2))
    return 0


def _written(config: Config) -> dict[str, Any]:
    parts: dict[type[Checked], Checked] = {
        Config: config,
        MuonConfig: config.muon,
        NSConfig: config.muon.ns,
        AdamWConfig: config.adamw,
        ZeroConfig: config.zero,
    }
    given = {
        argument: getattr(parts[owner], name)
        for argument, (owner, name) in ARGUMENTS.items()
        if getattr(parts[owner], name) != owner.__dataclass_fields__[name].default
    }
    if config.muon.ns.eps != NSConfig.eps:
        raise config_error("NSConfig.eps", config.muon.ns.eps, "is no key of a config", "leave it out")
    if callable(config.muon_params):
        raise config_error("muon_params", config.muon_params, "is no list of patterns", 'write ["pattern", ...]')
    top = {key: given.pop(key) for key in _AT_THE_TOP if key in given}
    zero = {key: given.pop(key) for key in _IN_ZERO if key in given}
    bf16 = {}
    if config.zero.param_dtype is torch.bfloat16:
        bf16 = {"enabled": True}
        del given["param_dtype"]
    optimizer = {"type": "AdamW" if config.algorithm == "adamw" else None, "params": _params(config, given)}
    sections = {
        "compile": _compile(config.compile),
        "optimizer": {key: value for key, value in optimizer.items() if value},
        "zero_optimization": zero,
    }
    last = {"bf16": bf16, "mesh": {} if config.mesh is None else asdict(config.mesh)}
    return _filled(sections) | top | _filled(last)


def _filled(sections: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sections.items() if value}


def _params(config: Config, given: dict[str, Any]) -> dict[str, Any]:
    """optimizer.params; ``lr`` and ``weight_decay`` there are of both halves, under "AdamW" of the one there is."""
    both = {}
    for key in ("lr", "weight_decay"):
        muon, adamw = getattr(config.muon, key), getattr(config.adamw, key)
        if config.algorithm == "adamw":
            if f"adamw_{key}" in given:
                both[key] = given.pop(f"adamw_{key}")
        elif muon == adamw and {key, f"adamw_{key}"} & given.keys():
            both[key] = muon
            given.pop(key, None)
            given.pop(f"adamw_{key}", None)
        elif key == "weight_decay" and key in given:  # has no name of Muon's alone
            given["adamw_weight_decay"] = adamw
    named = both | {_IN_PARAMS.get(argument, argument): _plain(value) for argument, value in given.items()}
    return {key: named[key] for key in sorted(named, key=_ORDER.index)}


def _compile(config: CompileConfig) -> Any:
    """false, true, or an object where there is more to say."""
    options = {f.name: _plain(v) for f in fields(config) if (v := getattr(config, f.name)) != f.default}
    enabled = options.pop("enabled", False)
    if not options:
        return enabled
    return options if enabled else {"enabled": False, **options}


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
