"""``python -m compile_muon convert ds_config.json``: a config in as few of our keys as say the same."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from compile_muon.config.checked import Checked
from compile_muon.config.checks import FILLED
from compile_muon.config.deepspeed import load_config, read_all
from compile_muon.config.groups import GroupConfig
from compile_muon.config.sections import AT_THE_TOP, PARAM_ALIASES, SECTIONS
from compile_muon.config.settings import ARGUMENTS, Config
from compile_muon.errors import ConfigError, config_error

__all__ = ["convert", "run"]

#: MuonZero's arguments that have another name, or another place, in a config.
_IN_PARAMS = {argument: key for key, argument in PARAM_ALIASES.items()}
_ORDER = ("lr", "muon_lr", "adam_lr", *(_IN_PARAMS.get(argument, argument) for argument in ARGUMENTS))


def convert(source: str | os.PathLike | Mapping[str, Any] | Config) -> dict[str, Any]:
    """What differs from the defaults, as JSON's types; :func:`load_config` makes the same ``Config`` of it.

    Raises:
        ConfigError: as :func:`load_config`, and about what only Python can say (a predicate as ``muon_params``).

    >>> convert({"zero_optimization": {"stage": 3, "overlap_comm": True}})
    {'zero_optimization': {'stage': 3}}
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is written nothing is without effect, or said twice
        return _written(load_config(source))


def run(path: Path) -> int:
    """Print what can be taken over of a file; to stderr goes what is left to do, and what has no effect.

    Two things stay as they are though they are left to do, since the rest would train something else without them:
    "auto" where MuonTrainer fills it in, and an optimizer that is not one of ours.

    Returns:
        The exit code: 0, or 1 where something is left to do, or 2 where there is nothing to read.
    """
    try:
        reading = read_all(path)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    written = _written(reading.config)
    for wrong in reading.errors:
        if wrong.field == "optimizer.type" or (wrong.field in FILLED and wrong.shown == repr("auto")):
            _keep(written, reading.source, wrong.field)
    if reading.errors:
        print("left to do:", *reading.errors, sep="\n  ", file=sys.stderr)
    for remark in reading.remarks:
        print(remark, file=sys.stderr)
    print(json.dumps(written, indent=2))
    return 1 if reading.errors else 0


def _keep(written: dict[str, Any], source: Mapping[str, Any], field: str) -> None:
    """Put a value of the source where it was; a schedule, of which a part says little, as a whole."""
    *path, key = ["scheduler"] if field.startswith("scheduler.") else field.split(".")
    for section in path:
        written, source = written.setdefault(section, {}), source[section]
    written[key] = source[key]


def _written(config: Config) -> dict[str, Any]:
    owners = (config, config.muon, config.muon.ns, config.adamw, config.zero)
    parts: dict[type[Checked], Checked] = {type(owner): owner for owner in owners}
    given = {
        argument: getattr(parts[owner], name)
        for argument, (owner, name) in ARGUMENTS.items()
        if getattr(parts[owner], name) != owner.__dataclass_fields__[name].default
    }
    if callable(config.muon_params):
        raise config_error("muon_params", config.muon_params, "is no list of patterns", 'write ["pattern", ...]')
    top = {key: given.pop(key) for key in AT_THE_TOP if key in given}
    zero = {key: given.pop(key) for key in SECTIONS["zero_optimization"] if key in given}
    if (offload := given.pop("offload", None)) is not None:
        zero["offload_optimizer"] = {**_changed(offload), "device": offload.device}
    if "offload_param" in zero:
        zero["offload_param"] = {"device": zero["offload_param"]}
    bf16 = given.get("param_dtype") is torch.bfloat16
    if bf16:
        del given["param_dtype"]
    scheduler = _scheduler(config, given)
    if views := given.pop("muon_views", ()):
        given["muon_views"] = {pattern: dict(view) for pattern, view in views}
    rates, groups, method = given.pop("rates", ()), given.pop("groups", ()), given.pop("method", None)
    optimizer = {
        "type": "AdamW" if config.algorithm == "adamw" else method,
        "params": _params(config, given) | _plain(dict(rates)),
        "groups": [_group(group) for group in groups],
    }
    sections = {
        "compile": _compile(_plain(_changed(config.compile))),
        "optimizer": _filled(optimizer),
        "scheduler": scheduler,
        "zero_optimization": zero,
    }
    last = {
        "bf16": {"enabled": True} if bf16 else {},
        "mesh": {} if config.mesh is None else asdict(config.mesh),
        "expert_parallel": _changed(config.expert_parallel),
        "sequence_parallel": _changed(config.sequence_parallel),
    }
    return _filled(sections) | top | _filled(last)


def _changed(record: Checked) -> dict[str, Any]:
    """The fields that have not their defaults."""
    return {f.name: value for f in fields(record) if (value := getattr(record, f.name)) != f.default}


def _group(group: GroupConfig) -> dict[str, Any]:
    if callable(group.params):
        raise config_error(f"groups[{group.name}].params", group.said, "is no list of patterns", 'write ["pattern"]')
    method = {} if group.method is None else {"method": group.method}
    return {"name": group.name, "params": list(group.params), **method, **_plain(dict(group.rates))}


def _filled(sections: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sections.items() if value}


def _params(config: Config, given: dict[str, Any]) -> dict[str, Any]:
    """optimizer.params; ``weight_decay`` there is of both halves, ``lr`` too, but nobody expects it."""
    both, decay = {}, config.adamw.weight_decay
    if config.algorithm == "adamw":
        both = {key: given.pop(f"adamw_{key}") for key in ("lr", "weight_decay") if f"adamw_{key}" in given}
    elif {"weight_decay", "adamw_weight_decay"} & given.keys():
        if config.muon.weight_decay == decay:
            both["weight_decay"] = decay
            given = {key: value for key, value in given.items() if not key.endswith("weight_decay")}
        elif "weight_decay" in given:  # has no name of Muon's alone
            given["adamw_weight_decay"] = decay
    named = both | {_IN_PARAMS.get(argument, argument): _plain(value) for argument, value in given.items()}
    return {key: named[key] for key in sorted(named, key=_ORDER.index)}


def _scheduler(config: Config, given: dict[str, Any]) -> dict[str, Any]:
    """The section; rates for which DeepSpeed has a default there move to it from ``given``."""
    schedule = config.scheduler
    if schedule is None:
        return {}
    params = _plain(_changed(schedule))
    if schedule.rate_default is not None:
        given.pop("lr", None)
        given.pop("adamw_lr", None)
        muon, adamw = config.muon.lr, config.adamw.lr
        one = config.algorithm == "adamw" or muon == adamw
        params = {schedule.rate_key: adamw if one else [muon, adamw], **params}
    return {"type": type(schedule).__name__, "params": params}


def _compile(options: dict[str, Any]) -> Any:
    """false, true, or an object where there is more to say."""
    enabled = options.pop("enabled", False)
    if not options:
        return enabled
    return options if enabled else {"enabled": False, **options}


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
