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

from compile_muon.config.checks import check_boolean, check_dtype, check_real
from compile_muon.config.settings import (
    ALGORITHMS,
    ARGUMENTS,
    NO_MUON,
    CompileConfig,
    Config,
    MuonConfig,
    NSConfig,
    assemble,
)
from compile_muon.errors import ConfigError, config_error

__all__ = ["read_config"]

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

_NO_OFFLOAD = "remove it: compile_muon does not offload; stage 3 on more ranks lowers the memory of each"
_NO_MEANING = "is a DeepSpeed key without meaning here"

#: DeepSpeed keys that cannot be honoured, first match wins: (section, key patterns, problem, remedy).
_FOREIGN: tuple[tuple[str, str, str, str], ...] = (
    ("zero_optimization", "*offload* zenflow sub_group_size", "asks for DeepSpeed's offload", _NO_OFFLOAD),
    ("compile", "offload_*", "asks for DeepSpeed's offload", _NO_OFFLOAD),
    ("", "aio zero_force_ds_cpu_optimizer", "asks for DeepSpeed's offload", _NO_OFFLOAD),
    (
        "",
        "train_batch_size train_micro_batch_size_per_gpu dataloader_drop_last data_efficiency",
        _NO_MEANING,
        "remove it: the training loop loads the data and chooses the batch size",
    ),
    (
        "",
        """steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level flops_profiler comms_logger
        tensorboard wandb comet csv_monitor""",
        _NO_MEANING,
        "remove it: log from the training loop, or use torch.profiler",
    ),
    (
        "",
        "scheduler",
        "is DeepSpeed's scheduler, which is not built here",
        "remove it: pass the optimizer to a scheduler of torch.optim.lr_scheduler",
    ),
    (
        "",
        "communication_data_type",
        _NO_MEANING,
        "remove it: optimizer.params.reduce_dtype sets the dtype gradients are reduced in",
    ),
    (
        "",
        "torch_autocast data_types bfloat16 amp",
        "is a DeepSpeed precision setting that is not honoured here",
        'remove it: use "bf16": {"enabled": true}, or param_dtype and reduce_dtype in optimizer.params',
    ),
    (
        "fp16",
        """auto_cast loss_scale* initial_scale_power hysteresis consecutive_hysteresis min_loss_scale
        fp16_master_weights_and_grads""",
        "belongs to loss scaling, which compile_muon does not do",
        'remove it: use "bf16": {"enabled": true}',
    ),
    (
        "bf16",
        "check_grad_overflow check_overflow",
        _NO_MEANING,
        "remove it: optimizer.params.nonfinite says what happens on inf or NaN",
    ),
    (
        "bf16",
        "immediate_grad_update bf16_master_weights_and_grads bf16_optimizer_states",
        "is not honoured here",
        "remove it: master weights and optimizer states keep the dtype the model was built in",
    ),
    (
        "",
        "prescale_gradients gradient_predivide_factor gradient_allreduce_op",
        "would change how gradients are averaged, which is not honoured here",
        "remove it: gradients are averaged over the ranks",
    ),
    (
        "compile",
        """deepcompile backend kwargs passes double_buffer symmetric_memory free_activation* sync_* keep_* debug_log
        autoep_non_moe""",
        "belongs to DeepSpeed's DeepCompile, which is not used here",
        'remove it: "compile": true is the whole switch',
    ),
    (
        "optimizer.params",
        "max_grad_norm",
        "is not an optimizer parameter",
        "remove it: use gradient_clipping",
    ),
    (
        "optimizer.params",
        """torch_adam adam_w_mode fp32_optimizer_states bias_correction amsgrad set_grad_none freeze_step fused foreach
        maximize capturable""",
        "chooses another Adam, which is not used here",
        "remove it: parameters without Muon are trained by the AdamW of torch, decoupled and bias-corrected",
    ),
    (
        "optimizer.params",
        "per_head_muon",
        "is not supported: a fused projection is orthogonalized as one matrix",
        "remove it",
    ),
    (
        "zero_optimization",
        "save_muon_momentum_buffer_in_memory",
        _NO_MEANING,
        "remove it: the momentum always stays in memory, sharded",
    ),
    (
        "zero_optimization",
        "zero_quantized_* zero_hpz_partition_size zeropp_* mics_*",
        "asks for a ZeRO++ or MiCS feature that is not honoured here",
        "remove it",
    ),
    (
        "zero_optimization",
        "*max_live_parameters *max_reuse_distance",
        _NO_MEANING,
        'remove it; "compile": {"reshard_after_forward": false} keeps all gathered weights for backward',
    ),
    (
        "zero_optimization",
        """overlap_comm contiguous_gradients reduce_scatter allgather_partitions allgather_sequential *bucket*
        round_robin_gradients memory_efficient_linear *_persistence_threshold
        module_granularity_threshold use_all_reduce_for_fetch_params stage3_*""",
        _NO_MEANING,
        "remove it: the compiler passes choose layout, buckets and overlap",
    ),
    (
        "zero_optimization",
        """compute_grad_norm load_from_fp32_weights elastic_checkpoint gather_16bit_weights_on_model_save
        ignore_unused_parameters legacy_stage1 parameter_alignment pipeline_loading_checkpoint
        override_module_apply log_trace_cache_warnings enable_sanity_checks leaf_module""",
        _NO_MEANING,
        "remove it",
    ),
    (
        "optimizer",
        "legacy_fusion",
        _NO_MEANING,
        "remove it",
    ),
    (
        "",
        """zero_allow_untested_optimizer managed_gradient_accumulation seq_parallel_communication_data_type
        sequence_parallel_size tensor_parallel disable_allgather disable_python_gc activation_checkpointing
        autotuning checkpoint compression_training curriculum_learning elasticity hybrid_engine pipeline
        progressive_layer_drop sparse_attention sparse_gradients use_data_before_expert_parallelism
        vocabulary_size""",
        _NO_MEANING,
        "remove it",
    ),
)


class _Given:
    """Keyword arguments collected from several places of one config, each with the path that gave it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.paths: dict[str, str] = {}

    def put(self, argument: str, value: Any, path: str) -> None:
        """Record a setting; a second one must agree with the first."""
        value = _canonical(argument, value, path)
        if argument in self.values:
            known, first = self.values[argument], self.paths[argument]
            if known != value or isinstance(known, bool) != isinstance(value, bool):
                raise config_error(path, value, f"contradicts {first} = {known!r}", "keep one of the two")
            return
        self.values[argument], self.paths[argument] = value, path

    def default(self, argument: str, value: Any, path: str) -> None:
        """Record a setting unless something more specific gave it."""
        if argument not in self.values:
            self.put(argument, value, path)


def _canonical(argument: str, value: Any, path: str) -> Any:
    """One spelling per value, so that two spellings of the same thing do not count as a contradiction."""
    if argument in ("param_dtype", "reduce_dtype"):
        return check_dtype(path, value)
    if argument == "gradient_clipping" and value == 0 and not isinstance(value, bool):
        return None
    return tuple(value) if isinstance(value, list) else value


def read_config(source: str | os.PathLike | Mapping[str, Any]) -> Config:
    """The ``Config`` a JSON file or a mapping describes; :meth:`Config.load` tells what is refused."""
    given = _Given()
    top = _section("", _read_json(source) if isinstance(source, (str, os.PathLike)) else source)
    optimizer = _section("optimizer", top.get("optimizer", {}))
    kind = optimizer.get("type", "Muon")
    algorithm = kind.lower() if isinstance(kind, str) else None
    if algorithm not in ALGORITHMS:
        raise config_error("optimizer.type", kind, "is not an optimizer of compile_muon", 'use "Muon" or "AdamW"')
    put_params = _put_adamw_params if algorithm == "adamw" else _put_params
    put_params(given, _section("optimizer.params", optimizer.get("params", {})))
    for key, value in _section("zero_optimization", top.get("zero_optimization", {})).items():
        given.put(key, value, f"zero_optimization.{key}")
    for key in ("gradient_clipping", "gradient_accumulation_steps"):
        if key in top:
            given.put(key, top[key], key)
    _put_precision(given, top)
    return assemble(given.values, given.paths, compile=_compile_config(top.get("compile", False)), algorithm=algorithm)


def _put_params(given: _Given, params: Mapping[str, Any]) -> None:
    """optimizer.params: specific keys first, then the two that are shared by both halves."""
    for key, value in params.items():
        if key not in _SHARED:
            given.put(_PARAM_ALIASES.get(key, key), value, f"optimizer.params.{key}")
    for key in _SHARED:
        if key in params:
            check_real(f"optimizer.params.{key}", params[key])  # also where both halves override it
            for argument in (key, f"adamw_{key}"):
                given.default(argument, params[key], f"optimizer.params.{key}")


def _put_adamw_params(given: _Given, params: Mapping[str, Any]) -> None:
    """optimizer.params of type "AdamW": the shared keys are AdamW's, those of Muon are refused."""
    for key, value in params.items():
        path = f"optimizer.params.{key}"
        argument = f"adamw_{key}" if key in _SHARED else _PARAM_ALIASES.get(key, key)
        if argument in _MUON_ONLY:
            remedy = "use lr, the rate of AdamW here" if key == "muon_lr" else "remove it"
            raise config_error(path, value, NO_MUON, f'{remedy}, or set optimizer.type to "Muon"')
        given.put(argument, value, path)


def _put_precision(given: _Given, top: Mapping[str, Any]) -> None:
    """bf16.enabled is param_dtype=bfloat16; fp16.enabled would need loss scaling."""
    fp16, bf16 = (_section(key, top.get(key, {})) for key in ("fp16", "bf16"))
    if check_boolean("fp16.enabled", fp16.get("enabled", False)):
        raise config_error(
            "fp16.enabled", True, "needs loss scaling, which compile_muon does not do", 'use "bf16": {"enabled": true}'
        )
    if "enabled" not in bf16:
        return
    if check_boolean("bf16.enabled", bf16["enabled"]):
        given.put("param_dtype", torch.bfloat16, "bf16.enabled")
    elif given.values.get("param_dtype") is torch.bfloat16:
        path = given.paths["param_dtype"]
        raise config_error("bf16.enabled", False, f"contradicts {path} = torch.bfloat16", "keep one of the two")


def _compile_config(value: object) -> CompileConfig:
    if isinstance(value, bool):
        return CompileConfig(enabled=value)
    if not isinstance(value, Mapping):
        raise config_error("compile", value, "must be true, false or an object", 'use "compile": true')
    settings = {"enabled": True, **_section("compile", value)}
    try:
        return CompileConfig(**settings)
    except ConfigError as error:
        raise error.renamed(error.field.replace("CompileConfig", "compile")) from None


def _section(path: str, value: object) -> Mapping[str, Any]:
    """``value`` as an object whose keys are all known at ``path``."""
    if not isinstance(value, Mapping):
        example = '{"enabled": true}' if path in ("bf16", "fp16") else "{...}"
        name = path or "config"
        raise config_error(name, value, f"must be an object, not {type(value).__name__}", f"write {example}")
    for key, entry in value.items():
        if key not in _SECTIONS[path]:
            raise _unknown_key(path, key, entry)
    return value


def _unknown_key(section: str, key: object, value: object) -> ConfigError:
    path = f"{section}.{key}" if section else str(key)
    for place, patterns, problem, remedy in _FOREIGN:
        if place == section and any(fnmatchcase(str(key), pattern) for pattern in patterns.split()):
            return config_error(path, value, problem, remedy)
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


def _read_json(source: str | os.PathLike) -> object:
    path = os.fspath(source)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise config_error(key, value, f"is given twice in {path}", "keep one of the two")
            found[key] = value
        return found

    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file, object_pairs_hook=unique)
    except OSError as error:
        raise config_error("config", path, f"cannot be read ({error.strerror})", "give a JSON file or a dict") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise config_error("config", path, f"is not JSON ({error})", "fix the file at that place") from None
