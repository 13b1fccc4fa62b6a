"""DeepSpeed's keys as one table: each is a setting, is refused, or has no effect.

``KEYS`` names the setting of a key, for reading and for writing. A key of ``IGNORED`` changes how fast DeepSpeed
trains or what DeepSpeed prints, and has no effect with any value. A key of ``REFUSED`` would change the result, and is
an error unless its value is off. The names, deprecated ones too, come from DeepSpeed's ``runtime/config.py``,
``runtime/zero/config.py``, ``runtime/precision_config.py`` and ``compile/config.py`` of August 2026.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from compile_muon.config import accept
from compile_muon.config.lr_schedule import SCHEDULES, ScheduleConfig
from compile_muon.config.settings import ARGUMENTS, PARTS, UserSettings
from compile_muon.errors import ConfigError, config_error
from compile_muon.passes.methods import rates_of_methods

_MOST_COMPARED = 20  # unknown keys of a section that get a hint; comparing is slow


def full_name(section: str, key: str) -> str:
    """Return the path of a key, as errors show it."""
    return f"{section}.{key}" if section else key


#: Key -> setting, in the order in which they are read; `convert` writes a setting at its first key. The keys `lr` and
#: `weight_decay` of optimizer.params set both halves where they are read.
KEYS: dict[str, str] = {
    **{name: name for name in PARTS},
    **{f"zero_optimization.{name}": name for name in ("stage", "shard_state_over", "offload_param")},
    "zero_optimization.offload_optimizer": "offload",
    **{name: name for name in ("gradient_accumulation_steps", "gradient_clipping", "machine")},
    "optimizer.groups": "groups",
    "optimizer.params.muon_lr": "lr",
    "optimizer.params.adam_lr": "adamw_lr",
    "optimizer.params.betas": "adamw_betas",
    "optimizer.params.eps": "adamw_eps",
    **{f"optimizer.params.{name}": name for name in ARGUMENTS if name not in ("groups", "rates")},
    **{
        f"optimizer.params.{name}": "rates"
        for name, rate in rates_of_methods().items()
        if rate.default is not None and name not in (*ARGUMENTS, "betas", "eps")
    },
    "compile.deepcompile": "compile.enabled",
    "communication_data_type": "reduce_dtype",
    "sequence_parallel_size": "sequence_parallel.size",
    "zero_optimization.cpu_offload": "offload",
}


def parameters(schedule: type[ScheduleConfig]) -> tuple[str, ...]:
    """Return the keys of ``scheduler.params`` that are read for `schedule`."""
    return (*filter(None, [schedule.rate_key]), *(f.name for f in fields(schedule)))


def _sections() -> dict[str, tuple[str, ...]]:
    read_apart = "optimizer.type optimizer.params scheduler.type scheduler.params bf16.enabled bfloat16.enabled "
    read_apart += "fp16.enabled zero_optimization.save_muon_momentum_buffer_in_memory"
    schedules = [f"scheduler.params.{key}" for kind in SCHEDULES.values() for key in parameters(kind)]
    sections = {"": dict[str, None].fromkeys(("compile", "optimizer", "scheduler", "zero_optimization"))}
    for path in (*KEYS, *read_apart.split(), *schedules):
        section, _, key = path.rpartition(".")
        sections.setdefault(section, {})[key] = None
        sections[""][path.partition(".")[0]] = None
    return {section: tuple(keys) for section, keys in sections.items()}


#: Section -> the keys that are read there.
SECTIONS = _sections()


#: Keys of zero_optimization that DeepSpeed reads with and without the prefix ``stage3_``
_OF_STAGE_3 = (
    "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
    "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold "
    "use_all_reduce_for_fetch_params allgather_sequential"
)
_OF_BF16 = "immediate_grad_update check_grad_overflow check_overflow"
#: Section -> keys that have no effect here.
IGNORED: dict[str, str] = {
    "": "train_batch_size train_micro_batch_size_per_gpu dataloader_drop_last managed_gradient_accumulation "
    "steps_per_print wall_clock_breakdown memory_breakdown dump_state log_level timers "
    "flops_profiler tensorboard wandb comet csv_monitor comms_logger comms_config monitor_config "
    "prescale_gradients gradient_predivide_factor sparse_gradients seq_parallel_communication_data_type "
    "disable_allgather allgather_size disable_python_gc graph_harvesting vocabulary_size "
    "use_data_before_expert_parallelism data_parallel_size pipeline aio zero_allow_untested_optimizer "
    "zero_force_ds_cpu_optimizer activation_checkpointing autotuning checkpoint nebula datastates_ckpt",
    "zero_optimization": "overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size "
    "use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size round_robin_gradients sub_group_size "
    "load_from_fp32_weights elastic_checkpoint legacy_stage1 grad_hooks ignore_unused_parameters "
    "memory_efficient_linear override_module_apply pipeline_loading_checkpoint log_trace_cache_warnings "
    "enable_sanity_checks leaf_module cpu_offload_use_pin_memory mics_hierarchical_params_gather "
    f"stage3_gather_fp16_weights_on_model_save aio {_OF_STAGE_3} stage3_{_OF_STAGE_3.replace(' ', ' stage3_')}",
    "compile": "backend free_activation free_activation_threshold offload_activation_pin_memory double_buffer "
    "symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
    "keep_int_input_tensors keep_all_input_tensors exchange_mb",
    "optimizer": "legacy_fusion",
    # Which Adam computes AdamW's formula; DeepSpeed heeds no `adam_w_mode` for "AdamW" and "Muon".
    "optimizer.params": "torch_adam adam_w_mode adamw_mode set_grad_none fused foreach capturable "
    "fp32_optimizer_states",
    "bf16": _OF_BF16,
    "bfloat16": _OF_BF16,
    # Details of loss scaling, which `fp16.enabled` asks for.
    "fp16": "auto_cast loss_scale loss_scale_window initial_scale_power hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    # Details of `cycle_momentum`, which has to be false.
    "scheduler.params": "cycle_min_mom cycle_max_mom decay_mom_rate",
}


_OFF = (None, False, 0, "", "none")


class Foreign(NamedTuple):
    """A key of DeepSpeed that is not read here."""

    remedy: str = ""  # "" for a key without effect
    off: tuple[object, ...] = _OFF  # values by which a key with a remedy has no effect
    heeded: tuple[str, ...] = ()  # of an object the keys that switch it on in DeepSpeed; () for every key


_UNSPLIT = (*_OFF, 1, -1)  # a size that splits nothing
_SWITCHES = (
    *("enabled", "weight_quantization", "activation_quantization", "sparse_pruning", "row_pruning", "head_pruning"),
    *("channel_pruning", "layer_reduction", "shared_parameters"),
)
_TENSOR_SIZES = ("autotp_size", "tp_size", "tp", "tensor_parallel")
_OFFLOADED = "offload_optimizer and offload_param are what there is"
_MASTERS = 'write "master_dtype": "bfloat16" in optimizer.params, which keeps masters, gradients and state in it'
_CASTS = 'use "bf16": {"enabled": true}, or param_dtype and reduce_dtype in optimizer.params'
_MASTER_DTYPE = "gradients are accumulated in the masters' dtype, master_dtype in optimizer.params"
_MEAN = "gradients are averaged; for their sum multiply the loss by the number of ranks"
_ELASTIC = "the loop chooses batch sizes, and a checkpoint loads on any number of ranks"
_BY_HAND = "do it in the model or in the training loop"
#: Section -> keys in it -> what becomes of them, an error unless they are off.
REFUSED: dict[str, dict[str, Foreign]] = {
    "zero_optimization": {
        "cpu_offload_param cpu_offload_params zenflow": Foreign(_OFFLOADED),
        "zero_hpz_partition_size mics_shard_size": Foreign("shards are split over all ranks", _UNSPLIT),
        "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
        "zeropp_loco_param": Foreign("there is no ZeRO++ here"),
    },
    "compile": {
        "offload_activation offload_opt_states offload_parameters": Foreign(_OFFLOADED),
        "passes": Foreign('"compile": true is the whole switch', (*_OFF, "z1", "z3")),
        "disable": Foreign('write "enabled": false'),
        "kwargs": Foreign("write compile.fullgraph and compile.dynamic", (None,)),
    },
    **dict.fromkeys(("bf16", "bfloat16"), {"bf16_master_weights_and_grads bf16_optimizer_states": Foreign(_MASTERS)}),
    "optimizer.params": {
        "max_grad_norm": Foreign("use gradient_clipping"),
        "bias_correction": Foreign("the AdamW of torch is bias-corrected", (None, True)),
        "amsgrad maximize freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler "
        "local_step_clipper coeff_beta factor_max factor_min factor_threshold max_coeff min_coeff": Foreign(
            "Muon and the AdamW of torch are what there is here"
        ),
    },
    "scheduler.params": {"last_batch_iteration": Foreign("a checkpoint brings the schedule back", (None, -1))},
    "expert_parallel": {"enabled": Foreign('say by "size" how many ranks share experts')},
    "": {
        "torch_autocast amp": Foreign(_CASTS, (*_OFF, "auto"), _SWITCHES),  # "auto": a choice of the Trainer's
        "data_types": Foreign(_MASTER_DTYPE, (*_OFF, "fp32", "float32", "torch.float32")),
        "gradient_allreduce_op": Foreign(_MEAN, (None, "mean")),
        "tensor_parallel": Foreign("all ranks are data-parallel", _UNSPLIT, _TENSOR_SIZES),
        "elasticity": Foreign(_ELASTIC, heeded=_SWITCHES),
        "data_efficiency curriculum_learning progressive_layer_drop eigenvalue compression_training "
        "weight_quantization quantize_training hybrid_engine": Foreign(_BY_HAND, heeded=_SWITCHES),
        "sparse_attention": Foreign(_BY_HAND),
    },
}

#: Path of each DeepSpeed key that is not read here -> what becomes of it.
FOREIGN: dict[str, Foreign] = {
    **{full_name(section, key): Foreign() for section, keys in IGNORED.items() for key in keys.split()},
    **{
        full_name(section, key): foreign
        for section, rows in REFUSED.items()
        for keys, foreign in rows.items()
        for key in keys.split()
    },
}


def is_off(value: object, off: tuple[object, ...] = _OFF, heeded: tuple[str, ...] = ()) -> bool:
    """Return whether `value` is one of `off`, or an object (its `heeded` keys) or list of values that all are off."""
    if isinstance(value, Mapping):
        return all(is_off(value.get(key), off, heeded) for key in heeded or value)
    if isinstance(value, (list, tuple)):
        return all(is_off(each, off) for each in value)
    if value is True:  # True == 1, and a size of 1 may be off
        return any(each is True for each in off)
    return (value.lower() if isinstance(value, str) else value) in off


def _slip(value: object, heeded: tuple[str, ...], path: str) -> ConfigError | None:
    """Return an error about a misspelt key of `heeded` whose value is not off."""
    if not isinstance(value, Mapping) or not heeded:
        return None
    for key, entry in value.items():
        if not isinstance(key, str):
            continue
        nearest_key = None if key in heeded else accept.nearest(key.lower(), heeded, cutoff=0.75)
        if nearest_key is not None and nearest_key not in value and not (isinstance(entry, Mapping) or is_off(entry)):
            problem = "is not a known key, and counts as off"
            return config_error(f"{path}.{key}", entry, problem, f"did you mean {path}.{nearest_key}?")
        if inner := _slip(entry, heeded, f"{path}.{key}"):
            return inner
    return None


def refusal(path: str, value: object) -> ConfigError | None:
    """Return the error about a key of :data:`FOREIGN`, or None where its value has no effect.

    >>> str(refusal("zero_optimization.zenflow", True)).partition(";")[0]
    'zero_optimization.zenflow = True: is a setting of DeepSpeed that is not honoured here'
    >>> refusal("zero_optimization.zenflow", False)
    """
    remedy, off, heeded = FOREIGN[path]
    if slip := _slip(value, heeded, path):
        return slip
    if not remedy or is_off(value, off, heeded):
        return None
    return config_error(path, value, "is a setting of DeepSpeed that is not honoured here", f"remove it: {remedy}")


# --------------------------------------------------------------------------------------------------- reading by it

_EXAMPLES = dict.fromkeys(("bf16", "bfloat16"), '{"enabled": true}') | {"fp16": '{"enabled": false}'}
_EXAMPLES |= {"compile": "true", "zero_optimization": '{"stage": 2}'}
#: Sections where null and false mean that the section is absent.
_MAY_LACK = ("bf16", "bfloat16", "fp16", "scheduler")


def read_keys(user_settings: UserSettings, value: object, section: str = "") -> dict[str, Any]:
    """Return path -> value of all keys that are read; other keys become hints or mistakes of `user_settings`."""
    if section == "compile" and isinstance(value, bool):
        return {"compile.enabled": value}
    if section in _MAY_LACK and (value is None or value is False):
        user_settings.hints.append(section)
        return {}
    if not isinstance(value, Mapping):
        with user_settings.mistakes.collected():
            old = section == "zero_optimization" and isinstance(value, bool)  # DeepSpeed takes true, which is stage 1
            example = f'{{"stage": {value:d}}}' if old else _EXAMPLES.get(section, "{...}")
            accept.mapping(section, value, example)
        return {}
    if section == "scheduler" and value.get("type") not in [*SCHEDULES]:  # keys of a foreign schedule are unknown here
        if value.get("type"):
            return {"scheduler.type": value["type"]}
        user_settings.hints.append(section)
        return {}
    values, unknown = dict[str, Any](), []
    for key, entry in value.items():
        path = full_name(section, accept.key_name(key))
        if key in SECTIONS[section]:
            values |= read_keys(user_settings, entry, path) if path in SECTIONS else {path: entry}
        elif accept.key_name(key).startswith("_"):  # a comment in JSON, which DeepSpeed ignores
            user_settings.hints.append(path)
        elif path not in FOREIGN:
            unknown.append(key)
        elif error := refusal(path, entry):
            user_settings.mistakes.add(error)
        else:
            user_settings.hints.append(path)
    for number, key in enumerate(unknown):
        remedy = _known_keys(section, key if number < _MOST_COMPARED else None)
        path = full_name(section, accept.key_name(key))
        user_settings.mistakes.add(config_error(path, value[key], "is not a known key", remedy))
    if section == "compile" and "compile.deepcompile" not in values:
        values.setdefault("compile.enabled", True)
    return values


def _known_keys(section: str, key: object) -> str:
    """Name the same key in another section, else the nearest in `section` or anywhere, else all keys of `section`."""
    known_keys = f"known here are {', '.join(SECTIONS[section])}"
    if not isinstance(key, str):
        return known_keys
    paths = [*(full_name(place, name) for place, section_keys in SECTIONS.items() for name in section_keys), *FOREIGN]
    names = {path.rpartition(".")[2]: path for path in reversed(paths)}
    if key in names and key != "enabled":
        return f"did you mean {names[key]}?"
    if near := accept.nearest(key, [path.rpartition(".")[2] for path in paths if path.rpartition(".")[0] == section]):
        return f"did you mean {full_name(section, near)}?"
    return f"did you mean {names[near]}?" if (near := accept.nearest(key, names, cutoff=0.75)) else known_keys
