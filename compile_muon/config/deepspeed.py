"""DeepSpeed's vocabulary: JSON or a dict with the keys DeepSpeed users know, read into a :class:`Config`.

Rules (DeepSpeed: ``_muon_param_groups`` in ``runtime/engine.py``):

* ``optimizer.type`` is "Muon" (the default), or "AdamW" to train everything by AdamW; case does not matter.
* ``optimizer.params.lr`` sets the rate of Muon *and* of AdamW; ``muon_lr`` and ``adam_lr`` (or ``adamw_lr``)
  override their half, most specific last. ``MuonZero(lr=...)`` in Python is the Muon rate alone.
* ``weight_decay`` goes to both halves unless ``adamw_weight_decay`` is given. ``betas`` and ``eps`` are AdamW's.
* Under "AdamW" ``lr`` and ``weight_decay`` are AdamW's, and keys that only Muon reads are errors.
* What is absent takes the default of :mod:`compile_muon.config.settings`, not DeepSpeed's
  (``zero_optimization.stage`` is 2, not 0).
* ``gradient_clipping: 0`` is off, ``gradient_accumulation_steps: null`` is unknown.
* ``"compile": {...}`` means enabled unless the object says ``"enabled": false``.
* ``compile.deepcompile`` is ``compile.enabled``, ``communication_data_type`` is ``reduce_dtype``, and ``bfloat16`` is
  ``bf16``.
* DeepSpeed's other keys are accepted where they change nothing that is trained, and named in one warning; the rest are
  errors (:mod:`compile_muon.config.foreign`). A key that DeepSpeed does not know either is one, too.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

import torch

from compile_muon.config.checked import Checked
from compile_muon.config.checks import check_boolean
from compile_muon.config.foreign import FOREIGN, refusal
from compile_muon.config.settings import (
    ALGORITHMS,
    ARGUMENTS,
    NO_MUON,
    Arguments,
    CompileConfig,
    Config,
    ExpertParallelConfig,
    MeshConfig,
    MuonConfig,
    NSConfig,
)
from compile_muon.errors import ConfigError, config_error, warn_user

__all__ = ["load_config", "read_config"]

C = TypeVar("C", bound=Checked)

_TOP = (
    "compile",
    "optimizer",
    "zero_optimization",
    "gradient_clipping",
    "gradient_accumulation_steps",
    "bf16",
    "bfloat16",
    "fp16",
    "communication_data_type",
    "mesh",
    "expert_parallel",
    "machine",
)
#: optimizer.params keys beside MuonZero's own -> the argument they set. `lr` and `weight_decay` are handled apart.
_PARAM_ALIASES = {"muon_lr": "lr", "adam_lr": "adamw_lr", "betas": "adamw_betas", "eps": "adamw_eps"}
_SHARED = ("lr", "weight_decay")
#: Arguments nothing reads where AdamW trains everything; `lr` and `weight_decay` are in it as those of the Muon half.
_MUON_ONLY = frozenset(name for name, (owner, _) in ARGUMENTS.items() if owner in (MuonConfig, NSConfig)) | {
    "exchange",
    "muon_params",
}
_SECTIONS: dict[str, tuple[str, ...]] = {
    "": _TOP,
    "compile": (*(f.name for f in fields(CompileConfig)), "deepcompile"),
    "optimizer": ("type", "params"),
    "zero_optimization": ("stage", "shard_state_over"),
    "optimizer.params": (*_PARAM_ALIASES, *ARGUMENTS),
    "bf16": ("enabled",),
    "bfloat16": ("enabled",),
    "fp16": ("enabled",),
    "mesh": tuple(f.name for f in fields(MeshConfig)),
    "expert_parallel": tuple(f.name for f in fields(ExpertParallelConfig)),
}


class _Given(Arguments):
    """What a config gives; ``hints`` are the paths of its keys that have no effect here."""

    def __init__(self) -> None:
        super().__init__()
        self.hints: list[str] = []


def load_config(source: str | os.PathLike | Mapping[str, Any] | Config) -> Config:
    """Read a config from a JSON file or a mapping in DeepSpeed's vocabulary; a ``Config`` comes back as it is.

    Keys of DeepSpeed that have no effect here (batch sizes, buckets, overlap, logging, whatever is switched off) are
    named in one warning.

    Raises:
        ConfigError: naming, for each mistake, the path of the key (``optimizer.params.muon_lr``), its value and the
            remedy: unknown keys (with the nearest known one), DeepSpeed keys that cannot be honoured, values of a
            wrong type or range, settings given twice differently, and files that are missing or are not JSON.

    >>> load_config({"optimizer": {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 1e-3}}}).adamw.lr
    0.001
    """
    config, hints = read_config(source)
    if hints:
        warn_user(f"no effect here: {', '.join(hints)}")
    return config


def read_config(source: str | os.PathLike | Mapping[str, Any] | Config) -> tuple[Config, list[str]]:
    """:func:`load_config` without the warning: beside the ``Config``, the paths of keys without effect."""
    if isinstance(source, Config):
        return source, []
    given = _Given()
    top = _section(given, "", _read_json(given, source) if isinstance(source, (str, os.PathLike)) else source)
    optimizer = _section(given, "optimizer", top.get("optimizer", {}))
    algorithm = _read_algorithm(given, optimizer.get("type", "Muon"))
    put_params = _put_adamw_params if algorithm == "adamw" else _put_params
    put_params(given, _section(given, "optimizer.params", optimizer.get("params", {})))
    for key, value in _section(given, "zero_optimization", top.get("zero_optimization", {})).items():
        given.put(key, value, f"zero_optimization.{key}")
    for key in ("gradient_clipping", "gradient_accumulation_steps", "machine"):
        if key in top:
            _put(given, key, top[key], key)
    _put_precision(given, top)
    config = given.config(
        compile=_read_compile(given, top.get("compile", False)),
        algorithm=algorithm,
        mesh=_read(given, top, "mesh", MeshConfig) if "mesh" in top else None,
        expert_parallel=_read(given, top, "expert_parallel", ExpertParallelConfig) or ExpertParallelConfig(),
    )
    return config, given.hints


def _read_algorithm(given: _Given, kind: object) -> str:
    if isinstance(kind, str) and kind.lower() in ALGORITHMS:
        return kind.lower()
    remedy = 'use "Muon" or "AdamW"'
    if isinstance(kind, str) and kind.lower() == "adam":
        remedy += ", which DeepSpeed's Adam is unless adam_w_mode is false"
    given.mistakes.add(config_error("optimizer.type", kind, "is not an optimizer of compile_muon", remedy))
    return Config.algorithm


def _put(given: _Given, argument: str, value: object, path: str) -> None:
    """``given.put``, but clipping by 0 is none, as in DeepSpeed."""
    off = argument == "gradient_clipping" and value == 0 and not isinstance(value, bool)
    given.put(argument, None if off else value, path)


def _put_params(given: _Given, params: Mapping[str, Any]) -> None:
    """optimizer.params: specific keys first, then the two that are shared by both halves."""
    for key, value in params.items():
        if key not in _SHARED:
            _put(given, _PARAM_ALIASES.get(key, key), value, f"optimizer.params.{key}")
    for key in _SHARED:
        if key in params:
            path = f"optimizer.params.{key}"
            with given.mistakes.collected():
                value = MuonConfig.checked(key, params[key], path)  # also where both halves override it
                for argument in (key, f"adamw_{key}"):
                    if argument not in given.values:
                        given.put(argument, value, path)


def _put_adamw_params(given: _Given, params: Mapping[str, Any]) -> None:
    """optimizer.params of type "AdamW": the shared keys are AdamW's, those of Muon are refused."""
    for key, value in params.items():
        path = f"optimizer.params.{key}"
        argument = f"adamw_{key}" if key in _SHARED else _PARAM_ALIASES.get(key, key)
        if argument in _MUON_ONLY:
            remedy = "use lr, the rate of AdamW here" if key == "muon_lr" else "remove it"
            given.mistakes.add(config_error(path, value, NO_MUON, f'{remedy}, or set optimizer.type to "Muon"'))
        else:
            _put(given, argument, value, path)


def _put_precision(given: _Given, top: Mapping[str, Any]) -> None:
    """bf16.enabled is param_dtype=bfloat16; fp16.enabled would need loss scaling."""
    fp16 = _precision(given, top, "fp16")
    with given.mistakes.collected():
        if check_boolean("fp16.enabled", fp16.get("enabled", False)):
            problem = "needs loss scaling, which compile_muon does not do"
            raise config_error("fp16.enabled", True, problem, 'use "bf16": {"enabled": true}')
    for name in ("bf16", "bfloat16"):
        bf16, path = _precision(given, top, name), f"{name}.enabled"
        with given.mistakes.collected():
            if check_boolean(path, bf16.get("enabled", False)):
                given.put("param_dtype", torch.bfloat16, path)
            elif "enabled" in bf16 and given.values.get("param_dtype") is torch.bfloat16:
                first = given.names["param_dtype"]
                raise config_error(path, False, f"contradicts {first} = torch.bfloat16", "keep one of the two")
    if top.get("communication_data_type") is not None:
        given.put("reduce_dtype", top["communication_data_type"], "communication_data_type")
    elif "communication_data_type" in top:
        given.hints.append("communication_data_type")


def _precision(given: _Given, top: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object called ``name``; null and false are an absent one."""
    value = top.get(name, {})
    if value is None or value is False:
        given.hints.append(name)
        return {}
    return _section(given, name, value)


def _read_compile(given: _Given, value: object) -> CompileConfig:
    if isinstance(value, bool):
        return CompileConfig(enabled=value)
    if not isinstance(value, Mapping):
        problem = "must be true, false or an object"
        given.mistakes.add(config_error("compile", value, problem, 'use "compile": true'))
        return CompileConfig()
    settings = dict(_section(given, "compile", value))
    if "deepcompile" in settings:
        with given.mistakes.collected():
            deep = check_boolean("compile.deepcompile", settings.pop("deepcompile"))
            enabled = settings.setdefault("enabled", deep)
            if isinstance(enabled, bool) and enabled != deep:
                problem = f"contradicts compile.enabled = {enabled!r}"
                raise config_error("compile.deepcompile", deep, problem, "keep one of the two")
    settings = {"enabled": True, **settings}
    return CompileConfig(**CompileConfig.canonical(settings, given.mistakes, lambda key: f"compile.{key}"))


def _read(given: _Given, top: Mapping[str, Any], key: str, kind: type[C]) -> C | None:
    """The section ``key`` as a dataclass; None where it contradicts itself."""
    values = kind.canonical(_section(given, key, top.get(key, {})), given.mistakes, lambda name: f"{key}.{name}")
    try:
        return kind(**values)
    except ConfigError as error:
        for each in error.errors:
            given.mistakes.add(each.renamed(each.field.replace(kind.__name__, key)))
        return None


def _section(given: _Given, path: str, value: object) -> Mapping[str, Any]:
    """The keys of ``value`` that are read here; of the others DeepSpeed's are hints or mistakes, the rest mistakes."""
    if not isinstance(value, Mapping):
        example = '{"enabled": true}' if path in ("bf16", "bfloat16", "fp16") else "{...}"
        if path == "zero_optimization":  # DeepSpeed still takes an old true, which is stage 1
            example = f'{{"stage": {int(value) if isinstance(value, bool) else 2}}}'
        problem = f"must be an object, not {type(value).__name__}"
        given.mistakes.add(config_error(path or "config", value, problem, f"write {example}"))
        return {}
    for key in value:
        if key in _SECTIONS[path]:
            continue
        name = _full(path, str(key))
        if key not in FOREIGN.get(path, ()):
            problem = "is not a known key"
            given.mistakes.add(config_error(name, value[key], problem, _nearest_key(path, str(key))))
        elif error := refusal(path, key, value[key]):
            given.mistakes.add(error)
        else:
            given.hints.append(name)
    return {key: entry for key, entry in value.items() if key in _SECTIONS[path]}


def _full(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _nearest_key(section: str, key: str) -> str:
    """A hint: the same key in another section, else the nearest in this one, else the nearest anywhere."""
    names = {place: (*own, *FOREIGN.get(place, ())) for place, own in _SECTIONS.items()}
    for place in _SECTIONS:
        if place != section and key in names[place] and key != "enabled":
            return f"did you mean {_full(place, key)}?"
    near = difflib.get_close_matches(key, names[section], n=1)
    if near:
        return f"did you mean {_full(section, near[0])}?"
    paths = {name: _full(place, name) for place in _SECTIONS for name in names[place]}
    near = difflib.get_close_matches(key, paths, n=1, cutoff=0.75)
    if near:
        return f"did you mean {paths[near[0]]}?"
    return f"known here are {', '.join(_SECTIONS[section])}"


def _read_json(given: _Given, source: str | os.PathLike) -> object:
    path = os.fspath(source)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                given.mistakes.add(config_error(key, value, f"is given twice in {path}", "keep one of the two"))
            found[key] = value
        return found

    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file, object_pairs_hook=unique)
    except OSError as error:
        raise config_error("config", path, f"cannot be read ({error.strerror})", "give a JSON file or a dict") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise config_error("config", path, f"is not JSON ({error})", "fix the file at that place") from None
