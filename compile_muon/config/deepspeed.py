"""DeepSpeed's vocabulary: JSON or a dict with DeepSpeed's keys, read into a :class:`Config`.

The rules are those of docs/reference/configuration.md, after ``_muon_param_groups`` in DeepSpeed's
``runtime/engine.py``: one rate and decay for both halves of the optimizer unless keys name a half, the most specific
key last. Absent keys take the defaults of :mod:`compile_muon.config.settings`, not DeepSpeed's (stage 2, not 0).
:mod:`compile_muon.config.vocabulary` has all keys, DeepSpeed's others among them, which have no effect or are errors.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from compile_muon.config import accept
from compile_muon.config.lr_schedule import SCHEDULES, ScheduleConfig, check_rates
from compile_muon.config.offload import check_offload, check_offload_param
from compile_muon.config.settings import (
    ALGORITHMS,
    ARGUMENTS,
    NO_MUON,
    VIEWS,
    AdamWConfig,
    Config,
    MuonConfig,
    NSConfig,
    UserSettings,
    matches_adamw,
)
from compile_muon.config.sources import as_mapping
from compile_muon.config.vocabulary import KEYS, is_off, parameters, read_keys
from compile_muon.errors import config_error, printable, shown, warn_user
from compile_muon.passes.methods import MatrixMethod, method_names

_HINTS_SHOWN = 100
_PARAMS = "optimizer.params"
_SHARED = ("lr", "weight_decay")
#: DeepSpeed requires one of these keys, and no other source writes them: a config with one lets vectors decay.
_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")
#: Settings without a reader where AdamW trains everything, with `lr` and `weight_decay` of the Muon half.
_MUON_ONLY = {name for name, (owner, _) in ARGUMENTS.items() if owner in (MuonConfig, NSConfig)}
_MUON_ONLY |= {"muon_params", "method", *VIEWS}


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
    config, user_settings = read_all(source)
    user_settings.mistakes.raise_all()
    for remark in user_settings.remarks:
        warn_user(remark)
    return config


def read_all(source: str | os.PathLike | Mapping[str, Any]) -> tuple[Config, UserSettings]:
    """Return the ``Config`` of all valid settings, and a :class:`UserSettings` with the mistakes, hints and remarks.

    Raises a ConfigError if the file is missing or not JSON, or the config is not an object.
    """
    user_settings = UserSettings()
    user_settings.source = values = as_mapping(source, user_settings.mistakes)
    keys = read_keys(user_settings, values)
    params = {path.removeprefix(f"{_PARAMS}."): value for path, value in keys.items() if path.startswith(_PARAMS)}
    algorithm = _read_algorithm(user_settings, keys.get("optimizer.type", "Muon"), values.get("optimizer"))
    _read_offload(user_settings, keys)
    rates = {name: value for name, value in params.items() if KEYS.get(f"{_PARAMS}.{name}") == "rates"}
    if rates:
        user_settings.put("rates", rates, _PARAMS)
    for path, setting in KEYS.items():
        if path in keys and setting != "rates" and path.removeprefix(f"{_PARAMS}.") not in _SHARED:
            _put(user_settings, setting, keys[path], path, algorithm)
    _read_shared(user_settings, params, algorithm)
    _read_precision(user_settings, keys)
    if sizes := [key for key in _BATCH_SIZES if key in values]:
        _remark_on_defaults(user_settings, sizes, algorithm, "optimizer" in values)
    scheduler = _read_scheduler(user_settings, keys, algorithm)
    config = user_settings.best(mesh="mesh" in values, algorithm=algorithm, scheduler=scheduler)
    if user_settings.hints:
        more = f" and {len(user_settings.hints) - _HINTS_SHOWN} more" if len(user_settings.hints) > _HINTS_SHOWN else ""
        listed = ", ".join(hint[:_HINTS_SHOWN] for hint in user_settings.hints[:_HINTS_SHOWN])
        user_settings.remarks.insert(0, printable(f"no effect here: {listed}{more}"))
    return config, user_settings


def _read_algorithm(user_settings: UserSettings, kind: object, optimizer: object) -> str:
    name = kind.lower() if isinstance(kind, str) else ""
    others = ", ".join(method_names(MatrixMethod)[1:])
    problem, remedy = "is not an optimizer of compile_muon", f'use "Muon" or "AdamW", or one of {others}'
    if name == "adam":
        # DeepSpeed's Adam decays as AdamW does unless adam_w_mode is false, with a default decay of 0.
        optimizer_params = optimizer.get("params") if isinstance(optimizer, Mapping) else None
        params = optimizer_params if isinstance(optimizer_params, Mapping) else {}
        if params.get("adam_w_mode", True) is not False or not params.get("weight_decay"):
            if "weight_decay" not in params:
                user_settings.put("adamw_weight_decay", 0.0, "optimizer.params.weight_decay")
            return "adamw"
        problem, remedy = "adds the decay to the gradient (adam_w_mode)", 'use "AdamW", whose decay is decoupled'
    elif name in ALGORITHMS:
        return name
    elif name in method_names(MatrixMethod):
        user_settings.put("method", name, "optimizer.type")
        return Config.algorithm
    user_settings.mistakes.add(config_error("optimizer.type", kind, problem, remedy))
    return Config.algorithm


def _put(user_settings: UserSettings, setting: str, value: object, path: str, algorithm: str) -> None:
    """Put a setting, with clipping by 0 as None (as in DeepSpeed); under "adamw" refuse Muon's settings."""
    if algorithm == "adamw" and setting in _MUON_ONLY:
        remedy = 'remove it (use lr for the rate of AdamW), or set optimizer.type to "Muon"'
        user_settings.mistakes.add(config_error(path, value, NO_MUON, remedy))
    elif value is None and path in ("communication_data_type", "sequence_parallel_size"):
        user_settings.hints.append(path)
    else:
        off = setting == "gradient_clipping" and value == 0 and not isinstance(value, bool)
        user_settings.put(setting, None if off else value, path)


def _read_shared(user_settings: UserSettings, params: Mapping[str, Any], algorithm: str) -> None:
    """Put ``lr`` and ``weight_decay`` into each half whose rate or decay no other key sets."""
    both_halves = algorithm != "adamw"
    if both_halves and "lr" in params and not matches_adamw(params.get("adjust_lr")):
        if "adamw_lr" not in user_settings.values and params["lr"] != AdamWConfig.lr:
            user_settings.remarks.append(_one_rate("optimizer.params.lr", params["lr"], "write muon_lr and adam_lr"))
        elif "lr" not in user_settings.values and params["lr"] == AdamWConfig.lr:
            user_settings.remarks.append(
                f"optimizer.params.lr = {AdamWConfig.lr} is Muon's rate too, whose default is {MuonConfig.lr}; write "
                'muon_lr, or adjust_lr = "match_rms_adamw", by which both have one rate'
            )
    for key in (key for key in _SHARED if key in params):
        path = f"{_PARAMS}.{key}"
        with user_settings.mistakes.collected():
            value = MuonConfig.checked(key, params[key], path)  # checked even if both halves override it
            for setting in (key, f"adamw_{key}") if both_halves else (f"adamw_{key}",):
                if not both_halves or setting not in user_settings.values:
                    user_settings.put(setting, value, path)


def _one_rate(path: str, value: object, remedy: str = "write a list of the two") -> str:
    return (
        f"{path} = {shown(value)} is AdamW's rate too, as in DeepSpeed: that of embeddings, the output head and "
        f"vectors, for which MuonZero takes {AdamWConfig.lr} otherwise; {remedy}"
    )


def _remark_on_defaults(user_settings: UserSettings, sizes: list[str], algorithm: str, optimizer: bool) -> None:
    """Let vectors decay, as in DeepSpeed, and remark on absent settings whose default differs in DeepSpeed.

    `sizes`: the batch size keys that mark a config of DeepSpeed; `optimizer`: whether the config names an optimizer.
    """
    if "adamw_decay_vectors" not in user_settings.values:
        user_settings.values["adamw_decay_vectors"] = True
        user_settings.hints[:] = [hint for hint in user_settings.hints if hint not in sizes]
        user_settings.remarks.append(
            f"{', '.join(sizes)}: how large batches are is for the loop to say; as in every config of DeepSpeed, "
            "norms, biases and other vectors decay too; write optimizer.params.adamw_decay_vectors, true or false"
        )
    if not optimizer:
        user_settings.remarks.append(
            "optimizer: this config has none, and DeepSpeed would take the one that is passed to its initialize; "
            'here it is Muon with its default rates; write optimizer.type, "Muon" or "AdamW", and rates'
        )
    deepspeed_defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    deltas = [
        f"{key} = {getattr(AdamWConfig, key)}, there {value}"
        for key, value in deepspeed_defaults.items()
        if f"adamw_{key}" not in user_settings.values
    ]
    has_mistakes = any(error.field.startswith(_PARAMS) for error in user_settings.mistakes.found)
    if algorithm == "adamw" and deltas and not has_mistakes:
        user_settings.remarks.append(
            f"optimizer.params: what is left out takes another default than in DeepSpeed: {'; '.join(deltas)}; write it"
        )


def _read_offload(user_settings: UserSettings, keys: dict[str, Any]) -> None:
    """Merge DeepSpeed's three keys of optimizer offload into one, in `keys`; keys that are off become hints."""
    at = "zero_optimization."
    optimizer, cpu, stay = f"{at}offload_optimizer", f"{at}cpu_offload", f"{at}save_muon_momentum_buffer_in_memory"
    momenta = keys.pop(stay, None)
    if keys.get(optimizer) is None and keys.get(cpu):
        keys.pop(optimizer, None)
        optimizer = cpu
        keys[cpu] = {"device": "cpu"} if keys[cpu] is True else keys[cpu]
    else:
        keys.pop(cpu, None)
    for path, check in ((optimizer, check_offload), (f"{at}offload_param", check_offload_param)):
        if path in keys and is_off(keys[path], heeded=("device",)):
            value = keys.pop(path)
            with user_settings.mistakes.collected():
                check(path, value if isinstance(value, Mapping) else {})  # raises about unknown keys
            user_settings.hints.append(path)
    if momenta is not None and isinstance(value := keys.get(optimizer), Mapping):
        with user_settings.mistakes.collected():
            keys[optimizer] = {**value, "momentum": not accept.boolean(stay, momenta)}
    elif momenta is not None:
        user_settings.hints.append(stay)


def _read_precision(user_settings: UserSettings, keys: Mapping[str, Any]) -> None:
    """Read bf16.enabled as param_dtype=bfloat16, and refuse fp16.enabled: the loop scales the loss."""
    fp16 = keys.get("fp16.enabled", False)
    if fp16 == "auto":  # the Trainer of Transformers fills in "auto"; without one, fp16 is off
        user_settings.hints.append("fp16.enabled")
        fp16 = False
    with user_settings.mistakes.collected():
        if accept.boolean("fp16.enabled", fp16):
            problem = "scales the loss in DeepSpeed's engine, and here the loop does"
            scaler = 'torch.amp.GradScaler and param_dtype "float16" in optimizer.params'
            raise config_error("fp16.enabled", True, problem, f'use "bf16": {{"enabled": true}}, or {scaler}')
    for path in ("bf16.enabled", "bfloat16.enabled"):
        with user_settings.mistakes.collected():
            if accept.boolean(path, keys.get(path, False)):
                user_settings.put("param_dtype", torch.bfloat16, path)
            elif path in keys and user_settings.values.get("param_dtype") is torch.bfloat16:
                raise user_settings.contradiction("param_dtype", False, path)


def _read_scheduler(user_settings: UserSettings, keys: Mapping[str, Any], algorithm: str) -> ScheduleConfig | None:
    """Return the schedule; its peak rate (``kind.rate_key``) becomes the rate of the optimizer's halves."""
    name = keys.get("scheduler.type")
    if not name:
        return None
    if name not in [*SCHEDULES]:
        remedy = f"use one of {', '.join(SCHEDULES)}, or remove it and make one of torch.optim.lr_scheduler"
        user_settings.mistakes.add(config_error("scheduler.type", name, "is not a schedule that is built here", remedy))
        return None
    kind, prefix = SCHEDULES[name], "scheduler.params."
    source_params = {path.removeprefix(prefix): value for path, value in keys.items() if path.startswith(prefix)}
    params = {}
    for key, value in source_params.items():
        with user_settings.mistakes.collected():
            param_names = parameters(kind)
            remedies = {key: f"remove it: there are {', '.join(param_names)}"}
            accept.known(prefix + key, value, key, param_names, f"a parameter of {kind.__name__}", remedies=remedies)
            if algorithm == "adamw" and isinstance(value, (list, tuple)):  # DeepSpeed has one group there
                if len(value) != 1:
                    problem = "is a list, and AdamW trains everything here"
                    raise config_error(prefix + key, value, problem, "write one number")
                value = value[0]
            params[key] = value
    has_rate_key = kind.rate_key in source_params
    if kind.rate_key in params or not has_rate_key:
        rates = params.pop(kind.rate_key, kind.rate_default)
        if rates is not None or kind.rate_default is not None:
            with user_settings.mistakes.collected():
                _put_rates(user_settings, rates, prefix + kind.rate_key, algorithm, has_rate_key=has_rate_key)
    return kind.read(params, user_settings.mistakes, "scheduler.params")


def _put_rates(user_settings: UserSettings, value: object, path: str, algorithm: str, *, has_rate_key: bool) -> None:
    """Overwrite the rates of the halves by that of a schedule, as in DeepSpeed.

    One number for halves with two different rates is an error. `has_rate_key`: the config has the key, else `value` is
    DeepSpeed's default.
    """
    rates = check_rates(path, value)
    muon, adamw = rates if isinstance(rates, tuple) else (rates, rates)
    if algorithm == "adamw":
        user_settings.values["adamw_lr"] = adamw
        return
    rates_set = user_settings.values.keys() & {"lr", "adamw_lr"}
    if not isinstance(rates, tuple):
        halves = [user_settings.values.get("lr", MuonConfig.lr), user_settings.values.get("adamw_lr", AdamWConfig.lr)]
        if rates_set and halves[0] != halves[1]:
            problem = f"would be the rate of both halves, which are {halves[0]} for Muon and {halves[1]} for AdamW"
            raise config_error(path, value, problem, f"write {halves}, or remove the scheduler")
        if has_rate_key and not rates_set:
            user_settings.remarks.append(_one_rate(path, rates))
    user_settings.values |= {"lr": muon, "adamw_lr": adamw}
