"""DeepSpeed's vocabulary: JSON or a dict with the keys DeepSpeed users know, read into a :class:`Config`.

Rules (DeepSpeed: ``_muon_param_groups`` in ``runtime/engine.py``):

* ``optimizer.type`` is "Muon" (the default), another method of matrices ("NorMuon"), or "AdamW" to train everything by
  AdamW; case does not matter. ``optimizer.groups`` gives parameters by pattern a method and rates of their own.
* ``optimizer.params.lr`` sets the rate of Muon *and* of AdamW; ``muon_lr`` and ``adam_lr`` (or ``adamw_lr``)
  override their half, most specific last. ``MuonZero(lr=...)`` in Python is the Muon rate alone.
* ``weight_decay`` goes to both halves unless ``adamw_weight_decay`` is given. ``betas`` and ``eps`` are AdamW's.
* In a config of DeepSpeed, which always has a batch size, vectors decay as all else does; otherwise they do not.
* Under "AdamW" ``lr`` and ``weight_decay`` are AdamW's, and keys that only Muon reads are errors.
* What is absent takes the default of :mod:`compile_muon.config.settings`, not DeepSpeed's
  (``zero_optimization.stage`` is 2, not 0).
* ``gradient_clipping: 0`` is off, ``gradient_accumulation_steps: null`` is unknown.
* ``"compile": {...}`` means enabled unless the object says ``"enabled": false``.
* Absolute rates in ``scheduler.params`` win over those of ``optimizer.params``; one number for both halves where they
  have different rates is an error.
* ``compile.deepcompile`` is ``compile.enabled``, ``communication_data_type`` is ``reduce_dtype``, and ``bfloat16`` is
  ``bf16``.
* DeepSpeed's other keys are accepted where they change nothing that is trained, and named in one warning; the rest are
  errors (:mod:`compile_muon.config.foreign`). A key that DeepSpeed does not know either is one, too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import torch

from compile_muon.config.checked import Checked
from compile_muon.config.checks import check_boolean
from compile_muon.config.foreign import off_by
from compile_muon.config.lr_schedule import SCHEDULES, ScheduleConfig, check_rates
from compile_muon.config.offload import check_offload, check_offload_param
from compile_muon.config.sections import AT_THE_TOP, OWN_RATES, PARAM_ALIASES, parameters, section
from compile_muon.config.settings import (
    ALGORITHMS,
    ARGUMENTS,
    NO_MUON,
    VIEWS,
    AdamWConfig,
    CompileConfig,
    Config,
    ExpertParallelConfig,
    Given,
    MeshConfig,
    MuonConfig,
    NSConfig,
    SequenceParallelConfig,
    matches_adamw,
)
from compile_muon.config.sources import as_mapping
from compile_muon.errors import ConfigError, config_error, printable, raise_all, shown, warn_user
from compile_muon.passes.methods import MatrixMethod, method_names

__all__ = ["Reading", "load_config", "read_all"]

C = TypeVar("C", bound=Checked)

_HINTS_SHOWN = 100
_SHARED = ("lr", "weight_decay")
#: DeepSpeed refuses a config without one of these, and nobody else writes them; there vectors decay as all else does.
_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
#: Arguments nothing reads where AdamW trains everything; `lr` and `weight_decay` are in it as those of the Muon half.
_MUON_ONLY = frozenset(name for name, (owner, _) in ARGUMENTS.items() if owner in (MuonConfig, NSConfig)) | {
    "muon_params",
    "method",
    *VIEWS,
}


class Reading(NamedTuple):
    """What there is in a config.

    Attributes:
        source: the keys and values as they were given.
        config: all that could be taken over.
        hints: paths of the keys that have no effect here.
        remarks: what may be meant otherwise.
        errors: about the rest.
    """

    source: Mapping[str, Any]
    config: Config
    hints: list[str]
    remarks: list[str]
    errors: list[ConfigError]


def load_config(source: str | os.PathLike | Mapping[str, Any] | Config) -> Config:
    """Read a config in DeepSpeed's vocabulary: a JSON file, its text, a mapping, or an object that stands for one.

    A dataclass and a namespace stand for their attributes, OmegaConf's ``DictConfig`` for what it resolves to. A
    :class:`Config` comes back as it is.

    Keys of DeepSpeed that have no effect here (batch sizes, buckets, overlap, logging, whatever is switched off) are
    named in one warning; another one says that ``lr`` alone is the rate of both halves.

    Raises:
        ConfigError: naming, for each mistake, the path of the key (``optimizer.params.muon_lr``), its value and the
            remedy: unknown keys (with the nearest known one), DeepSpeed keys that cannot be honoured, values of a
            wrong type or range, settings given twice differently, and files that are missing or are not JSON.

    >>> load_config({"optimizer": {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 1e-3}}}).adamw.lr
    0.001
    """
    if isinstance(source, Config):
        return source
    reading = read_all(source)
    raise_all(reading.errors)
    for remark in reading.remarks:
        warn_user(remark)
    return reading.config


def read_all(source: str | os.PathLike | Mapping[str, Any]) -> Reading:
    """:func:`load_config` of the settings that are right, with a list of those that are not.

    Raises:
        ConfigError: there is nothing to read: the file is missing or not JSON, or the whole is not an object.
    """
    given = Given()
    values = as_mapping(source, given.mistakes)
    top = section(given, "", values)
    optimizer = section(given, "optimizer", top.get("optimizer", {}))
    kind, params = optimizer.get("type", "Muon"), section(given, "optimizer.params", optimizer.get("params", {}))
    algorithm = _read_algorithm(given, kind, optimizer.get("params", {}))
    put_params = _put_adamw_params if algorithm == "adamw" else _put_params
    own = {key: value for key, value in params.items() if key in OWN_RATES}
    put_params(given, {key: value for key, value in params.items() if key not in OWN_RATES})
    if own:
        given.put("rates", own, "optimizer.params")
    if "groups" in optimizer:
        given.put("groups", optimizer["groups"], "optimizer.groups")
    if sizes := [key for key in _BATCH_SIZES if key in values]:
        if "adamw_decay_vectors" not in given.values:
            given.values["adamw_decay_vectors"] = True
            given.hints[:] = [hint for hint in given.hints if hint not in sizes]
            given.remarks.append(
                f"{', '.join(sizes)}: how large batches are is for the loop to say; as in every config of DeepSpeed, "
                "norms, biases and other vectors decay too; write optimizer.params.adamw_decay_vectors, true or false"
            )
        if "optimizer" not in values:
            given.remarks.append(
                "optimizer: this config has none, and DeepSpeed would take the one that is passed to its initialize; "
                'here it is Muon with its default rates; write optimizer.type, "Muon" or "AdamW", and rates'
            )
        if algorithm == "adamw" and not given.mistakes.found:
            _remark_on_defaults(given)
    zero = dict(section(given, "zero_optimization", top.get("zero_optimization", {})))
    _put_offload(given, zero)
    for key, value in zero.items():
        given.put(key, value, f"zero_optimization.{key}")
    for key in AT_THE_TOP:
        if key in top:
            _put(given, key, top[key], key)
    _put_precision(given, top)
    experts = section(given, "expert_parallel", top.get("expert_parallel", {}))
    mesh = section(given, "mesh", top["mesh"]) if "mesh" in top else None
    positions = dict(section(given, "sequence_parallel", top.get("sequence_parallel", {})))
    if (ranks := top.get("sequence_parallel_size")) is not None and positions.setdefault("size", ranks) != ranks:
        problem = f"contradicts sequence_parallel.size = {positions['size']!r}"
        given.mistakes.add(config_error("sequence_parallel_size", ranks, problem, "keep one of the two"))
    config = given.best(
        scheduler=_read_scheduler(given, top["scheduler"], algorithm) if "scheduler" in top else None,
        compile=_read_compile(given, top.get("compile", False)),
        algorithm=algorithm,
        mesh=None if mesh is None else MeshConfig.read(mesh, given.mistakes, "mesh"),
        expert_parallel=ExpertParallelConfig.read(experts, given.mistakes, "expert_parallel") or ExpertParallelConfig(),
        sequence_parallel=SequenceParallelConfig.read(positions, given.mistakes, "sequence_parallel")
        or SequenceParallelConfig(),
    )
    more = f" and {len(given.hints) - _HINTS_SHOWN} more" if len(given.hints) > _HINTS_SHOWN else ""
    listed = ", ".join(hint[:_HINTS_SHOWN] for hint in given.hints[:_HINTS_SHOWN])
    remarks = [printable(f"no effect here: {listed}{more}")] if given.hints else []
    return Reading(values, config, given.hints, remarks + given.remarks, given.mistakes.found)


def _put_offload(given: Given, zero: dict[str, Any]) -> None:
    """``offload_optimizer``, its predecessor ``cpu_offload``, and what says that momenta stay; out of ``zero``, and
    ``offload_param`` where it asks for nothing."""
    if "offload_param" in zero and off_by("device")(zero["offload_param"]):
        if isinstance(weights := zero.pop("offload_param"), Mapping):
            with given.mistakes.collected():
                check_offload_param("zero_optimization.offload_param", weights)  # a key that is none
        given.hints.append("zero_optimization.offload_param")
    key, value = "offload_optimizer", zero.pop("offload_optimizer", None)
    if (cpu := zero.pop("cpu_offload", None)) and value is None:
        key, value = "cpu_offload", {"device": "cpu"} if cpu is True else cpu
    stay = "save_muon_momentum_buffer_in_memory"
    momenta = zero.pop(stay, None)
    nowhere = isinstance(value, Mapping) and value.get("device", "none") in (None, "none")
    if isinstance(value, Mapping) and momenta is not None and not nowhere:
        with given.mistakes.collected():
            value = {**value, "momentum": not check_boolean(f"zero_optimization.{stay}", momenta)}
    elif momenta is not None:
        given.hints.append(f"zero_optimization.{stay}")
    if nowhere:
        with given.mistakes.collected():
            check_offload(f"zero_optimization.{key}", value)
        given.hints.append(f"zero_optimization.{key}")
    elif value is not None:
        given.put("offload", value, f"zero_optimization.{key}")


def _read_algorithm(given: Given, kind: object, params: object) -> str:
    name = kind.lower() if isinstance(kind, str) else ""
    if name == "adam":
        # DeepSpeed's decays as AdamW does, unless told otherwise, and by nothing where nothing is said.
        said = params if isinstance(params, Mapping) else {}
        if said.get("adam_w_mode", True) is not False or not said.get("weight_decay"):
            if "weight_decay" not in said:
                given.put("adamw_weight_decay", 0.0, "optimizer.params.weight_decay")
            return "adamw"
        problem = "with adam_w_mode = False adds the decay to the gradient, which is not done here"
        given.mistakes.add(config_error("optimizer.type", kind, problem, 'use "AdamW", whose decay is decoupled'))
    if name in ALGORITHMS:
        return name
    if name in method_names(MatrixMethod):
        given.put("method", name, "optimizer.type")
        return Config.algorithm
    if name != "adam":
        problem = "is not an optimizer of compile_muon"
        remedy = f'use "Muon" or "AdamW", or one of {", ".join(method_names(MatrixMethod)[1:])}'
        given.mistakes.add(config_error("optimizer.type", kind, problem, remedy))
    return Config.algorithm


def _remark_on_defaults(given: Given) -> None:
    """What DeepSpeed's AdamW would take for settings that are not there."""
    theirs = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    apart = [
        f"{key} = {getattr(AdamWConfig, key)}, there {value}"
        for key, value in theirs.items()
        if f"adamw_{key}" not in given.values
    ]
    if apart:
        given.remarks.append(
            f"optimizer.params: what is left out takes another default than in DeepSpeed: {'; '.join(apart)}; write it"
        )


def _put(given: Given, argument: str, value: object, path: str) -> None:
    """``given.put``, but clipping by 0 is none, as in DeepSpeed."""
    off = argument == "gradient_clipping" and value == 0 and not isinstance(value, bool)
    given.put(argument, None if off else value, path)


def _put_params(given: Given, params: Mapping[str, Any]) -> None:
    """optimizer.params: specific keys first, then the two that are shared by both halves."""
    for key, value in params.items():
        if key not in _SHARED:
            _put(given, PARAM_ALIASES.get(key, key), value, f"optimizer.params.{key}")
    of_both = "lr" in params and "adamw_lr" not in given.values
    if of_both and params["lr"] != AdamWConfig.lr and not matches_adamw(params.get("adjust_lr")):
        given.remarks.append(_one_rate("optimizer.params.lr", params["lr"], "write muon_lr and adam_lr"))
    for key in _SHARED:
        if key in params:
            path = f"optimizer.params.{key}"
            with given.mistakes.collected():
                value = MuonConfig.checked(key, params[key], path)  # also where both halves override it
                for argument in (key, f"adamw_{key}"):
                    if argument not in given.values:
                        given.put(argument, value, path)


def _one_rate(path: str, value: object, remedy: str = "write a list of the two") -> str:
    return (
        f"{path} = {shown(value)} is AdamW's rate too, as in DeepSpeed: that of embeddings, the output head and "
        f"vectors, for which MuonZero takes {AdamWConfig.lr} otherwise; {remedy}"
    )


def _put_adamw_params(given: Given, params: Mapping[str, Any]) -> None:
    """optimizer.params of type "AdamW": the shared keys are AdamW's, those of Muon are refused."""
    for key, value in params.items():
        path = f"optimizer.params.{key}"
        argument = f"adamw_{key}" if key in _SHARED else PARAM_ALIASES.get(key, key)
        if argument in _MUON_ONLY:
            remedy = "use lr, the rate of AdamW here" if key == "muon_lr" else "remove it"
            given.mistakes.add(config_error(path, value, NO_MUON, f'{remedy}, or set optimizer.type to "Muon"'))
        else:
            _put(given, argument, value, path)


def _put_precision(given: Given, top: Mapping[str, Any]) -> None:
    """bf16.enabled is param_dtype=bfloat16; fp16.enabled is loss scaling, which a loop does."""
    fp16 = _precision(given, top, "fp16").get("enabled", False)
    if fp16 == "auto":  # a choice of whoever fills it in, and here there is none
        given.hints.append("fp16.enabled")
        fp16 = False
    with given.mistakes.collected():
        if check_boolean("fp16.enabled", fp16):
            problem = "scales the loss in DeepSpeed's engine, and here the loop does"
            scaler = 'torch.amp.GradScaler and param_dtype "float16" in optimizer.params'
            remedy = f'use "bf16": {{"enabled": true}}, or {scaler}'
            raise config_error("fp16.enabled", True, problem, remedy)
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


def _precision(given: Given, top: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object called ``name``; null and false are an absent one."""
    value = top.get(name, {})
    if value is None or value is False:
        given.hints.append(name)
        return {}
    return section(given, name, value)


def _read_compile(given: Given, value: object) -> CompileConfig:
    if isinstance(value, bool):
        return CompileConfig(enabled=value)
    if not isinstance(value, Mapping):
        problem = "must be true, false or an object"
        given.mistakes.add(config_error("compile", value, problem, 'use "compile": true'))
        return CompileConfig()
    settings = dict(section(given, "compile", value))
    if "deepcompile" in settings:
        with given.mistakes.collected():
            deep = check_boolean("compile.deepcompile", settings.pop("deepcompile"))
            enabled = settings.setdefault("enabled", deep)
            if isinstance(enabled, bool) and enabled != deep:
                problem = f"contradicts compile.enabled = {enabled!r}"
                raise config_error("compile.deepcompile", deep, problem, "keep one of the two")
    return CompileConfig.read({"enabled": True, **settings}, given.mistakes, "compile") or CompileConfig()


def _read_scheduler(given: Given, value: object, algorithm: str) -> ScheduleConfig | None:
    """The schedule; rates in it that stand for those of the optimizer become those of its halves."""
    if not value or (isinstance(value, Mapping) and not value.get("type")):
        given.hints.append("scheduler")
        return None
    top = section(given, "scheduler", value)
    name = top.get("type")
    kind = SCHEDULES.get(name) if isinstance(name, str) else None
    if kind is None:
        if name is not None:  # else the section is no object
            remedy = f"use one of {', '.join(SCHEDULES)}, or remove it and make one of torch.optim.lr_scheduler"
            given.mistakes.add(config_error("scheduler.type", name, "is not a schedule that is built here", remedy))
        return None
    said = section(given, "scheduler.params", top.get("params", {}))
    params = {}
    for key, entry in said.items():
        with given.mistakes.collected():
            params[key] = _read_param(kind, key, entry, algorithm)
    if kind.rate_key in params or kind.rate_key not in said:
        rates = params.pop(kind.rate_key, kind.rate_default)
        if rates is not None or kind.rate_default is not None:
            with given.mistakes.collected():
                path = f"scheduler.params.{kind.rate_key}"
                _put_rates(given, rates, path, algorithm, written=kind.rate_key in said)
    return kind.read(params, given.mistakes, "scheduler.params")


def _read_param(kind: type[ScheduleConfig], key: str, value: object, algorithm: str) -> object:
    """One value of ``scheduler.params``; a list of one, for DeepSpeed's one group under "AdamW", is what is in it."""
    path = f"scheduler.params.{key}"
    if key not in parameters(kind):
        remedy = f"remove it: there are {', '.join(parameters(kind))}"
        raise config_error(path, value, f"is not a parameter of {kind.__name__}", remedy)
    if algorithm != "adamw" or not isinstance(value, (list, tuple)):
        return value
    if len(value) != 1:
        raise config_error(path, value, "is a list, and AdamW trains everything here", "write one number")
    return value[0]


def _put_rates(given: Given, value: object, path: str, algorithm: str, *, written: bool) -> None:
    """What a schedule says of rates is the last word, as in DeepSpeed, but it does not make one of two.

    Args:
        written: whether it says so, and does not take DeepSpeed's default.
    """
    rates = check_rates(path, value)
    muon, adamw = rates if isinstance(rates, tuple) else (rates, rates)
    if algorithm == "adamw":
        given.values["adamw_lr"] = adamw
        return
    own = [given.values.get("lr", MuonConfig.lr), given.values.get("adamw_lr", AdamWConfig.lr)]
    apart = own[0] != own[1] and not {"lr", "adamw_lr"}.isdisjoint(given.values)
    if apart and not isinstance(rates, tuple):
        problem = f"would be the rate of both halves, which are {own[0]} for Muon and {own[1]} for AdamW"
        raise config_error(path, value, problem, f"write {own}, or remove the scheduler")
    said = given.values.keys() & {"lr", "adamw_lr"}
    if written and not said and not isinstance(rates, tuple):
        given.remarks.append(_one_rate(path, rates))
    given.values |= {"lr": muon, "adamw_lr": adamw}
