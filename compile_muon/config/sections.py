"""Which keys a config has and in which sections, and what becomes of those that nothing here reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from compile_muon.config.checks import key_name, nearest
from compile_muon.config.foreign import FOREIGN, full_name, refusal
from compile_muon.config.lr_schedule import SCHEDULES, ScheduleConfig
from compile_muon.config.settings import (
    ARGUMENTS,
    CompileConfig,
    ExpertParallelConfig,
    Given,
    MeshConfig,
    SequenceParallelConfig,
)
from compile_muon.errors import config_error
from compile_muon.passes.methods import rates_of_methods

__all__ = ["AT_THE_TOP", "OWN_RATES", "PARAM_ALIASES", "SECTIONS", "parameters", "section"]

#: MuonZero's arguments that are keys of no section
_UNKNOWN = 20  # unknown keys of a section that are named one by one
AT_THE_TOP = ("gradient_accumulation_steps", "gradient_clipping", "machine")
_TOP = (
    "compile",
    "optimizer",
    "scheduler",
    "zero_optimization",
    *AT_THE_TOP,
    "bf16",
    "bfloat16",
    "fp16",
    "communication_data_type",
    "mesh",
    "expert_parallel",
    "sequence_parallel",
    "sequence_parallel_size",
)
#: optimizer.params keys beside MuonZero's own -> the argument they set. `lr` and `weight_decay` are handled apart.
PARAM_ALIASES = {"muon_lr": "lr", "adam_lr": "adamw_lr", "betas": "adamw_betas", "eps": "adamw_eps"}


#: rates of methods that are no arguments of MuonZero; each is said as it is
OWN_RATES = tuple(
    name
    for name, rate in rates_of_methods().items()
    if rate.default is not None and name not in PARAM_ALIASES and name not in ARGUMENTS
)


def parameters(schedule: type[ScheduleConfig]) -> tuple[str, ...]:
    """The parameters that DeepSpeed's schedule of this name has, as far as they are read here."""
    return (*filter(None, [schedule.rate_key]), *(f.name for f in fields(schedule)))


SECTIONS: dict[str, tuple[str, ...]] = {
    "": _TOP,
    "compile": (*(f.name for f in fields(CompileConfig)), "deepcompile"),
    "optimizer": ("type", "params", "groups"),
    "zero_optimization": (
        "stage",
        "shard_state_over",
        "offload_optimizer",
        "offload_param",
        "cpu_offload",
        "save_muon_momentum_buffer_in_memory",
    ),  # fmt: skip
    "optimizer.params": (*PARAM_ALIASES, *(name for name in ARGUMENTS if name not in ("groups", "rates")), *OWN_RATES),
    "bf16": ("enabled",),
    "bfloat16": ("enabled",),
    "fp16": ("enabled",),
    "mesh": tuple(f.name for f in fields(MeshConfig)),
    "expert_parallel": tuple(f.name for f in fields(ExpertParallelConfig)),
    "sequence_parallel": tuple(f.name for f in fields(SequenceParallelConfig)),
    "scheduler": ("type", "params"),
    "scheduler.params": tuple(dict.fromkeys(key for kind in SCHEDULES.values() for key in parameters(kind))),
}


def section(given: Given, path: str, value: object) -> Mapping[str, Any]:
    """The keys of ``value`` that are read here; of the others DeepSpeed's are hints or mistakes, the rest mistakes."""
    if not isinstance(value, Mapping):
        examples = {"bf16": '{"enabled": true}', "bfloat16": '{"enabled": true}', "fp16": '{"enabled": false}'}
        example = examples.get(path, "{...}")
        if path == "zero_optimization":  # DeepSpeed still takes an old true, which is stage 1
            example = f'{{"stage": {int(value) if isinstance(value, bool) else 2}}}'
        problem = f"must be an object, not {type(value).__name__}"
        given.mistakes.add(config_error(path, value, problem, f"write {example}"))
        return {}
    unknown = []
    for key in value:
        if key in SECTIONS[path]:
            continue
        name = full_name(path, key_name(key))
        if key_name(key).startswith("_"):  # how comments are written in JSON, of which DeepSpeed takes no notice
            given.hints.append(name)
        elif key not in FOREIGN.get(path, ()):
            unknown.append(key)
        elif error := refusal(path, key, value[key]):
            given.mistakes.add(error)
        else:
            given.hints.append(name)
    for key in unknown[:_UNKNOWN]:
        name, problem = full_name(path, key_name(key)), "is not a known key"
        given.mistakes.add(config_error(name, value[key], problem, _nearest_key(path, key)))
    if (more := len(unknown) - _UNKNOWN) > 0:
        name, problem = full_name(path, key_name(unknown[-1])), f"is one of {more} more keys that are not known"
        given.mistakes.add(config_error(name, value[unknown[-1]], problem, f"remove them: {_known(path)}"))
    return {key: entry for key, entry in value.items() if key in SECTIONS[path]}


def _nearest_key(section: str, key: object) -> str:
    """A hint: the same key in another section, else the nearest in this one, else the nearest anywhere."""
    if not isinstance(key, str):
        return f"write names of settings as strings; {_known(section)}"
    names = {place: (*own, *FOREIGN.get(place, ())) for place, own in SECTIONS.items()}
    for place in SECTIONS:
        if place != section and key in names[place] and key != "enabled":
            return f"did you mean {full_name(place, key)}?"
    if near := nearest(key, names[section]):
        return f"did you mean {full_name(section, near)}?"
    paths = {name: full_name(place, name) for place in SECTIONS for name in names[place]}
    if near := nearest(key, paths, cutoff=0.75):
        return f"did you mean {paths[near]}?"
    return _known(section)


def _known(section: str) -> str:
    return f"known here are {', '.join(SECTIONS[section])}"
