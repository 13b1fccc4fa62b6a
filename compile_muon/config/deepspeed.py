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
* A DeepSpeed key that has no meaning here is an error, even where it is only a hint: a flag that does nothing is
  worse than one that is refused.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

import torch

from compile_muon.config.checks import check_boolean
from compile_muon.config.settings import (
    ALGORITHMS,
    ARGUMENTS,
    NO_MUON,
    Arguments,
    CompileConfig,
    Config,
    MuonConfig,
    NSConfig,
)
from compile_muon.errors import ConfigError, config_error

__all__ = ["load_config"]

_TOP = (
    "compile",
    "optimizer",
    "zero_optimization",
    "gradient_clipping",
    "gradient_accumulation_steps",
    "bf16",
    "fp16",
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
    "compile": tuple(f.name for f in fields(CompileConfig)),
    "optimizer": ("type", "params"),
    "zero_optimization": ("stage",),
    "optimizer.params": (*_PARAM_ALIASES, *ARGUMENTS),
    "bf16": ("enabled",),
    "fp16": ("enabled",),
}

_NO_MEANING = "is a DeepSpeed key without meaning here"

#: DeepSpeed keys that cannot be honoured, first match wins: ({section: key patterns}, problem, what to do instead).
_FOREIGN: tuple[tuple[dict[str, str], str, str], ...] = (
    (
        {
            "zero_optimization": "*offload* zenflow sub_group_size",
            "compile": "offload_*",
            "": "aio zero_force_ds_cpu_optimizer",
        },
        "asks for DeepSpeed's offload",
        "compile_muon does not offload; stage 3 on more ranks lowers the memory of each",
    ),
    (
        {"": "train_batch_size train_micro_batch_size_per_gpu dataloader_drop_last data_efficiency"},
        _NO_MEANING,
        "the training loop loads the data and chooses the batch size",
    ),
    (
        {
            "": "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level flops_profiler tensorboard "
            "wandb comet csv_monitor comms_logger"
        },
        _NO_MEANING,
        "log from the training loop, or use torch.profiler",
    ),
    ({"": "scheduler"}, _NO_MEANING, "pass the optimizer to a scheduler of torch.optim.lr_scheduler"),
    ({"": "communication_data_type"}, _NO_MEANING, "optimizer.params.reduce_dtype is what gradients are reduced in"),
    (
        {"": "torch_autocast data_types bfloat16 amp"},
        "is a DeepSpeed precision setting that is not honoured here",
        'use "bf16": {"enabled": true}, or param_dtype and reduce_dtype in optimizer.params',
    ),
    (
        {
            "fp16": "auto_cast loss_scale* initial_scale_power hysteresis consecutive_hysteresis min_loss_scale "
            "fp16_master_weights_and_grads"
        },
        "belongs to loss scaling, which compile_muon does not do",
        'use "bf16": {"enabled": true}',
    ),
    ({"bf16": "check_grad_overflow check_overflow"}, _NO_MEANING, "optimizer.params.nonfinite is about inf and NaN"),
    (
        {"bf16": "immediate_grad_update bf16_master_weights_and_grads bf16_optimizer_states"},
        "is not honoured here",
        "master weights and optimizer states keep the dtype the model was built in",
    ),
    (
        {"": "prescale_gradients gradient_predivide_factor gradient_allreduce_op"},
        "would change how gradients are averaged, which is not honoured here",
        "gradients are averaged over the ranks",
    ),
    (
        {
            "compile": "deepcompile backend kwargs passes double_buffer symmetric_memory free_activation* sync_* "
            "keep_* debug_log autoep_non_moe"
        },
        "belongs to DeepSpeed's DeepCompile, which is not used here",
        '"compile": true is the whole switch',
    ),
    ({"optimizer.params": "max_grad_norm"}, "is not an optimizer parameter", "use gradient_clipping"),
    (
        {
            "optimizer.params": "torch_adam adam_w_mode fp32_optimizer_states bias_correction amsgrad set_grad_none "
            "freeze_step fused foreach maximize capturable"
        },
        "chooses another Adam, which is not used here",
        "parameters without Muon are trained by the AdamW of torch, decoupled and bias-corrected",
    ),
    ({"optimizer.params": "per_head_muon"}, "is not supported: a fused projection is orthogonalized as one matrix", ""),
    ({"zero_optimization": "save_muon_momentum_buffer_in_memory"}, _NO_MEANING, "the momentum always stays in memory"),
    (
        {"zero_optimization": "zero_quantized_* zero_hpz_partition_size zeropp_* mics_*"},
        "asks for a ZeRO++ or MiCS feature that is not honoured here",
        "",
    ),
    (
        {"zero_optimization": "*max_live_parameters *max_reuse_distance"},
        _NO_MEANING,
        '"compile": {"reshard_after_forward": false} keeps all gathered weights for backward',
    ),
    ({"zero_optimization": "*bucket*"}, _NO_MEANING, '"compile": {"bucket_mb": 25} limits fused collectives, in MiB'),
    (
        {
            "zero_optimization": "overlap_comm contiguous_gradients reduce_scatter allgather_* round_robin_gradients "
            "memory_efficient_linear *_persistence_threshold module_granularity_threshold "
            "use_all_reduce_for_fetch_params stage3_*"
        },
        _NO_MEANING,
        "the compiler passes choose layout, buckets and overlap",
    ),
    (
        {
            "zero_optimization": "compute_grad_norm load_from_fp32_weights elastic_checkpoint legacy_stage1 "
            "gather_16bit_weights_on_model_save ignore_unused_parameters parameter_alignment override_module_apply "
            "pipeline_loading_checkpoint log_trace_cache_warnings enable_sanity_checks leaf_module",
            "optimizer": "legacy_fusion",
            "": "zero_allow_untested_optimizer managed_gradient_accumulation seq_parallel_communication_data_type "
            "sequence_parallel_size tensor_parallel disable_allgather disable_python_gc activation_checkpointing "
            "autotuning checkpoint compression_training curriculum_learning elasticity hybrid_engine pipeline "
            "progressive_layer_drop sparse_attention sparse_gradients use_data_before_expert_parallelism "
            "vocabulary_size",
        },
        _NO_MEANING,
        "",
    ),
)


def load_config(source: str | os.PathLike | Mapping[str, Any] | Config) -> Config:
    """Read a config from a JSON file or a mapping in DeepSpeed's vocabulary; a ``Config`` comes back as it is.

    Raises:
        ConfigError: naming, for each mistake, the path of the key (``optimizer.params.muon_lr``), its value and the
            remedy: unknown keys (with the nearest known one), DeepSpeed keys that cannot be honoured, values of a
            wrong type or range, settings given twice differently, and files that are missing or are not JSON.

    >>> load_config({"optimizer": {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 1e-3}}}).adamw.lr
    0.001
    """
    if isinstance(source, Config):
        return source
    given = Arguments()
    top = _section(given, "", _read_json(given, source) if isinstance(source, (str, os.PathLike)) else source)
    optimizer = _section(given, "optimizer", top.get("optimizer", {}))
    algorithm = _read_algorithm(given, optimizer.get("type", "Muon"))
    put_params = _put_adamw_params if algorithm == "adamw" else _put_params
    put_params(given, _section(given, "optimizer.params", optimizer.get("params", {})))
    for key, value in _section(given, "zero_optimization", top.get("zero_optimization", {})).items():
        given.put(key, value, f"zero_optimization.{key}")
    for key in ("gradient_clipping", "gradient_accumulation_steps"):
        if key in top:
            _put(given, key, top[key], key)
    _put_precision(given, top)
    return given.config(compile=_read_compile(given, top.get("compile", False)), algorithm=algorithm)


def _read_algorithm(given: Arguments, kind: object) -> str:
    if isinstance(kind, str) and kind.lower() in ALGORITHMS:
        return kind.lower()
    given.mistakes.add(
        config_error("optimizer.type", kind, "is not an optimizer of compile_muon", 'use "Muon" or "AdamW"')
    )
    return Config.algorithm


def _put(given: Arguments, argument: str, value: object, path: str) -> None:
    """``given.put``, but clipping by 0 is none, as in DeepSpeed."""
    off = argument == "gradient_clipping" and value == 0 and not isinstance(value, bool)
    given.put(argument, None if off else value, path)


def _put_params(given: Arguments, params: Mapping[str, Any]) -> None:
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


def _put_adamw_params(given: Arguments, params: Mapping[str, Any]) -> None:
    """optimizer.params of type "AdamW": the shared keys are AdamW's, those of Muon are refused."""
    for key, value in params.items():
        path = f"optimizer.params.{key}"
        argument = f"adamw_{key}" if key in _SHARED else _PARAM_ALIASES.get(key, key)
        if argument in _MUON_ONLY:
            remedy = "use lr, the rate of AdamW here" if key == "muon_lr" else "remove it"
            given.mistakes.add(config_error(path, value, NO_MUON, f'{remedy}, or set optimizer.type to "Muon"'))
        else:
            _put(given, argument, value, path)


def _put_precision(given: Arguments, top: Mapping[str, Any]) -> None:
    """bf16.enabled is param_dtype=bfloat16; fp16.enabled would need loss scaling."""
    fp16, bf16 = (_section(given, key, top.get(key, {})) for key in ("fp16", "bf16"))
    with given.mistakes.collected():
        if check_boolean("fp16.enabled", fp16.get("enabled", False)):
            problem = "needs loss scaling, which compile_muon does not do"
            raise config_error("fp16.enabled", True, problem, 'use "bf16": {"enabled": true}')
    with given.mistakes.collected():
        if check_boolean("bf16.enabled", bf16.get("enabled", False)):
            given.put("param_dtype", torch.bfloat16, "bf16.enabled")
        elif "enabled" in bf16 and given.values.get("param_dtype") is torch.bfloat16:
            path = given.names["param_dtype"]
            raise config_error("bf16.enabled", False, f"contradicts {path} = torch.bfloat16", "keep one of the two")


def _read_compile(given: Arguments, value: object) -> CompileConfig:
    if isinstance(value, bool):
        return CompileConfig(enabled=value)
    if not isinstance(value, Mapping):
        problem = "must be true, false or an object"
        given.mistakes.add(config_error("compile", value, problem, 'use "compile": true'))
        return CompileConfig()
    settings = {"enabled": True, **_section(given, "compile", value)}
    return CompileConfig(**CompileConfig.canonical(settings, given.mistakes, lambda key: f"compile.{key}"))


def _section(given: Arguments, path: str, value: object) -> Mapping[str, Any]:
    """The keys of ``value`` that are known at ``path``; any other key is a mistake, as is what is no object."""
    if not isinstance(value, Mapping):
        example = '{"enabled": true}' if path in ("bf16", "fp16") else "{...}"
        problem = f"must be an object, not {type(value).__name__}"
        given.mistakes.add(config_error(path or "config", value, problem, f"write {example}"))
        return {}
    for key in value:
        if key not in _SECTIONS[path]:
            given.mistakes.add(_unknown_key(path, key, value[key]))
    return {key: entry for key, entry in value.items() if key in _SECTIONS[path]}


def _unknown_key(section: str, key: object, value: object) -> ConfigError:
    path = f"{section}.{key}" if section else str(key)
    for patterns, problem, advice in _FOREIGN:
        if any(fnmatchcase(str(key), pattern) for pattern in patterns.get(section, "").split()):
            return config_error(path, value, problem, f"remove it: {advice}" if advice else "remove it")
    return config_error(path, value, "is not a known key", _nearest_key(section, str(key)))


def _nearest_key(section: str, key: str) -> str:
    """A hint: the same key in another section, else the nearest in this one, else the nearest anywhere."""

    def full(place: str, name: str) -> str:
        return f"{place}.{name}" if place else name

    for place, names in _SECTIONS.items():
        if place != section and key in names and key != "enabled":
            return f"did you mean {full(place, key)}?"
    near = difflib.get_close_matches(key, _SECTIONS[section], n=1)
    if near:
        return f"did you mean {full(section, near[0])}?"
    paths = {name: full(place, name) for place, names in _SECTIONS.items() for name in names}
    near = difflib.get_close_matches(key, paths, n=1, cutoff=0.75)
    if near:
        return f"did you mean {paths[near[0]]}?"
    return f"known here are {', '.join(_SECTIONS[section])}"


def _read_json(given: Arguments, source: str | os.PathLike) -> object:
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
