"""``python -m compile_muon convert ds_config.json``: rewrite a config with the fewest keys that say the same."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from compile_muon.config import accept
from compile_muon.config.checked import Checked
from compile_muon.config.deepspeed import load_config, read_all
from compile_muon.config.groups import GroupConfig
from compile_muon.config.settings import SETTINGS, Config, MeshConfig, NSConfig
from compile_muon.config.vocabulary import KEYS, SECTIONS
from compile_muon.errors import ConfigError


def convert(source: str | os.PathLike | Mapping[str, Any] | Config) -> dict[str, Any]:
    """Return the settings that differ from their defaults, in JSON's types; :func:`load_config` reads them back.

    Raises a ConfigError as :func:`load_config` does, and about a setting that JSON cannot hold (a predicate as
    ``muon_params``).

    >>> convert({"zero_optimization": {"stage": 3, "overlap_comm": True}})
    {'zero_optimization': {'stage': 3}}
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about keys of `source` that the result does not contain
        return _written(load_config(source))


def run(path: Path) -> int:
    """Print the converted config of a file, and to stderr the errors and the keys without effect.

    Returns the exit code: 0, 1 if the user has errors to correct, 2 if the file is unreadable.
    """
    try:
        config, user_settings = read_all(path)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    result, errors = _written(config), user_settings.mistakes.found
    for mistake in errors:
        # Without these two, the config would train something else: "auto" that MuonTrainer fills in, and a foreign
        # optimizer.
        if mistake.field == "optimizer.type" or (mistake.field in accept.FILLED and mistake.shown == repr("auto")):
            _keep(result, user_settings.source, mistake.field)
    if errors:
        print("left to do:", *errors, sep="\n  ", file=sys.stderr)
    for remark in user_settings.remarks:
        print(remark, file=sys.stderr)
    print(json.dumps(result, indent=2))
    return 1 if errors else 0


def _keep(target: dict[str, Any], source: Mapping[str, Any], field: str) -> None:
    """Copy the value at the path `field` from `source` to `target`; of a schedule, copy the whole section."""
    *path, key = ["scheduler"] if field.startswith("scheduler.") else field.split(".")
    for section in path:
        target, source = target.setdefault(section, {}), source[section]
    target[key] = source[key]


def _written(config: Config) -> dict[str, Any]:
    if config.muon_params is not None:
        _patterns("muon_params", config.muon_params)
    parts: dict[type[Checked], Checked] = {NSConfig: config.muon.ns, MeshConfig: MeshConfig(), Config: config}
    parts |= {type(part): part for f in fields(config) if isinstance(part := getattr(config, f.name), Checked)}
    settings = {
        setting: value
        for setting, (owner, name) in SETTINGS.items()
        if (value := getattr(parts[owner], name)) != owner.__dataclass_fields__[name].default
        or (owner is MeshConfig and config.mesh is not None)
    }
    keys = _schedule(config, settings)
    kind = "AdamW" if config.algorithm == "adamw" else settings.pop("method", None)
    if kind is not None:
        keys["optimizer.type"] = kind
    if settings.get("param_dtype") is torch.bfloat16:
        del settings["param_dtype"]
        keys["bf16.enabled"] = True
    paths = _paths(config, settings)
    for setting, value in settings.items():
        if setting == "rates":
            keys |= {f"optimizer.params.{name}": _plain(rate) for name, rate in value}
        else:
            keys[paths[setting]] = _AS_KEYS.get(setting, _plain)(value)
    if any(path.startswith("compile.") for path in keys):
        keys.setdefault("compile.enabled", False)
    return _nested(keys)


def _nested(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested sections, in the order of ``SECTIONS``, from a mapping of dotted paths to values."""
    nested: dict[str, Any] = {}
    for path in sorted(keys, key=lambda path: SECTIONS[""].index(path.partition(".")[0])):
        *sections, key = path.split(".")
        section_keys = nested
        for section in sections:
            section_keys = section_keys.setdefault(section, {})
        section_keys[key] = keys[path]
    compiled = nested.get("compile", {})
    if compiled.get("enabled"):  # an object means enabled, unless it says otherwise
        del compiled["enabled"]
        nested["compile"] = compiled or True
    return nested


def _group(group: GroupConfig) -> dict[str, Any]:
    method = {} if group.method is None else {"method": group.method}
    params = _patterns(f"groups[{group.name}].params", group.params)
    return {"name": group.name, "params": params, **method, **_plain(dict(group.rates))}


def _patterns(field: str, params: object) -> list[str]:
    return list(accept.strings(field, params, "name patterns", 'write ["pattern", ...]'))


def _paths(config: Config, settings: dict[str, Any]) -> dict[str, str]:
    """Return the key that each setting is written at, and adapt the decays in `settings` to these keys.

    The keys ``lr`` and ``weight_decay`` set both halves; rates are written as ``muon_lr`` and ``adam_lr``, which name
    their half.
    """
    paths = {setting: path for path, setting in reversed(KEYS.items())}
    if config.algorithm == "adamw":
        return paths | {f"adamw_{key}": f"optimizer.params.{key}" for key in ("lr", "weight_decay")}
    if config.muon.weight_decay == config.adamw.weight_decay:
        settings.pop("adamw_weight_decay", None)  # the key ``weight_decay`` says both
    elif "weight_decay" in settings:  # no key sets Muon's decay alone
        settings["adamw_weight_decay"] = config.adamw.weight_decay
    return paths


def _schedule(config: Config, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the schedule's keys; rates that its default would overwrite move from `settings` into it."""
    schedule = config.scheduler
    if schedule is None:
        return {}
    params = _plain(schedule.changed())
    if schedule.rate_default is not None:
        settings.pop("lr", None)
        settings.pop("adamw_lr", None)
        muon, adamw = config.muon.lr, config.adamw.lr
        one_rate = config.algorithm == "adamw" or muon == adamw
        params = {schedule.rate_key: adamw if one_rate else [muon, adamw], **params}
    return {"scheduler.type": type(schedule).__name__, "scheduler.params": params}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


#: Setting -> function from its value to the value of its key, where JSON writes it otherwise than Python.
_AS_KEYS: dict[str, Callable[[Any], Any]] = {
    "offload": lambda offload: {**offload.changed(), "device": offload.device},
    "offload_param": lambda device: {"device": device},
    "groups": lambda groups: [_group(group) for group in groups],
    "muon_views": lambda views: {pattern: _plain(dict(view)) for pattern, view in views},
}
