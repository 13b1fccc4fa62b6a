"""DeepSpeed's keys that nothing here reads: hints, which are noted, and requests, which are refused.

A hint changes how fast DeepSpeed trains, or what it prints, not what it trains: it is accepted with any value. A
request asks for something that is not here (offload, loss scaling, another optimizer) or that would change the result;
it is refused, unless its value says that it is off. The names are those of DeepSpeed's ``runtime/config.py``,
``runtime/zero/config.py``, ``runtime/precision_config.py`` and ``compile/config.py`` of August 2026, deprecated ones
among them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from compile_muon.config.checks import nearest
from compile_muon.errors import ConfigError, config_error

__all__ = ["FOREIGN", "full_name", "off_by", "refusal"]


def _off(value: object) -> bool:
    """false, null, 0, "none" and what is empty."""
    return not value or (isinstance(value, str) and value.lower() == "none")


def _float32_or_off(value: object) -> bool:
    return _off(value) or value in ("fp32", "float32", "torch.float32")


def off_by(key: str, *also: object) -> Callable[[object], bool]:
    """Of an object, what it says under the key that DeepSpeed heeds; values that ask for nothing there, too."""
    return lambda value: _off(value.get(key)) or value.get(key) in also if isinstance(value, Mapping) else _off(value)


#: An object that does not say ``"enabled": true``.
_switched_off = off_by("enabled")


def _nothing_enabled(value: object) -> bool:
    """An object that says ``"enabled": true`` at no depth."""
    if not isinstance(value, Mapping):
        return _off(value)
    inner = (_nothing_enabled(v) for v in value.values() if isinstance(v, Mapping))
    return _off(value.get("enabled")) and all(inner)


_ENABLED = ("enabled",)
_SIZES = ("autotp_size", "tp_size", "tp", "tensor_parallel")


def _one_rank(value: object) -> bool:
    """A size of at most 1, of which there is nothing to split."""
    if isinstance(value, Mapping):
        return all(_one_rank(value.get(key)) for key in _SIZES)
    return _off(value) or (isinstance(value, (int, float)) and value is not True and value <= 1)


def _either(*allowed: object) -> Callable[[object], bool]:
    return lambda value: value is None or value in allowed


class _Request(NamedTuple):
    """Keys by section, what is wrong with them, what to do instead, and which of their values ask for nothing.

    Where these are objects, ``heeds`` are the keys that say so: one that looks like them is a slip.
    """

    keys: Mapping[str, str]
    problem: str
    advice: str
    off: Callable[[object], bool] = _off
    heeds: tuple[str, ...] = ()


def _both(names: str) -> str:
    """DeepSpeed takes these with ``stage3_`` in front and without."""
    return f"{names} " + " ".join(f"stage3_{name}" for name in names.split())


_OF_BF16 = "immediate_grad_update check_grad_overflow check_overflow"
_HINTS: dict[str, str] = {
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
    "stage3_gather_fp16_weights_on_model_save aio "
    + _both(
        "prefetch_bucket_size param_persistence_threshold model_persistence_threshold max_live_parameters "
        "max_reuse_distance gather_16bit_weights_on_model_save module_granularity_threshold "
        "use_all_reduce_for_fetch_params allgather_sequential"
    ),
    "compile": "backend free_activation free_activation_threshold offload_activation_pin_memory double_buffer "
    "symmetric_memory debug_log sync_before_reduce sync_after_reduce sync_before_allgather sync_after_allgather "
    "keep_int_input_tensors keep_all_input_tensors",
    "optimizer": "legacy_fusion",
    # Which Adam computes AdamW's formula; under the types that are taken here DeepSpeed heeds no `adam_w_mode`.
    "optimizer.params": "torch_adam adam_w_mode adamw_mode set_grad_none fused foreach capturable "
    "fp32_optimizer_states",
    "bf16": _OF_BF16,
    "bfloat16": _OF_BF16,
    # Of loss scaling; `fp16.enabled` is what asks for it.
    "fp16": "auto_cast loss_scale loss_scale_window initial_scale_power hysteresis consecutive_hysteresis "
    "min_loss_scale fp16_master_weights_and_grads",
    "expert_parallel": "",
    # Of `cycle_momentum`, which has to be false.
    "scheduler.params": "cycle_min_mom cycle_max_mom decay_mom_rate",
}

_OFFLOAD = "asks for DeepSpeed's offload of more than optimizer state and weights"
_NO_OFFLOAD = "offload_optimizer and offload_param are what there is"

_REQUESTS: tuple[_Request, ...] = (
    _Request(
        {
            "zero_optimization": "cpu_offload_param cpu_offload_params zenflow",
            "compile": "offload_activation offload_opt_states offload_parameters",
        },
        _OFFLOAD,
        _NO_OFFLOAD,
    ),
    _Request(
        {"scheduler.params": "last_batch_iteration"},
        "would begin a schedule in its middle",
        "a checkpoint brings back where the schedule was",
        _either(-1),
    ),
    _Request(
        {"": "torch_autocast amp"},
        "is a DeepSpeed precision setting that is not honoured here",
        'use "bf16": {"enabled": true}, or param_dtype and reduce_dtype in optimizer.params',
        off_by("enabled", "auto"),  # which leaves it to the Trainer of Transformers
        _ENABLED,
    ),
    _Request(
        {"": "data_types"},
        "is a DeepSpeed precision setting that is not honoured here",
        "gradients are accumulated in the masters' dtype, master_dtype in optimizer.params",
        lambda value: _off(value) or (isinstance(value, Mapping) and all(map(_float32_or_off, value.values()))),
    ),
    _Request(
        dict.fromkeys(("bf16", "bfloat16"), "bf16_master_weights_and_grads bf16_optimizer_states"),
        "is not honoured here",
        'write "master_dtype": "bfloat16" in optimizer.params, which keeps masters, gradients and state in it',
    ),
    _Request(
        {"": "gradient_allreduce_op"},
        "would change how gradients are averaged, which is not honoured here",
        "gradients are averaged over the ranks; for their sum multiply the loss by the number of ranks",
        _either("mean"),
    ),
    _Request(
        {"compile": "passes"},
        "splits sequences or matrices over ranks, which is not done here",
        '"compile": true is the whole switch',
        lambda value: _off(value) or (isinstance(value, (list, tuple)) and all(name in ("z1", "z3") for name in value)),
    ),
    _Request({"compile": "disable"}, "is an old switch of DeepSpeed", 'write "enabled": false'),
    _Request(
        {"compile": "kwargs"},
        "holds arguments of torch.compile, which have keys of their own here",
        "write compile.fullgraph and compile.dynamic",
    ),
    _Request({"optimizer.params": "max_grad_norm"}, "is not an optimizer parameter", "use gradient_clipping"),
    _Request(
        {"optimizer.params": "bias_correction"},
        "chooses another Adam, which is not used here",
        "parameters without Muon are trained by the AdamW of torch, decoupled and bias-corrected",
        _either(True),
    ),
    _Request(
        {"optimizer.params": "amsgrad maximize"},
        "chooses another Adam, which is not used here",
        "parameters without Muon are trained by the AdamW of torch",
    ),
    _Request(
        {
            "optimizer.params": "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler "
            "local_step_scaler local_step_clipper coeff_beta factor_max factor_min factor_threshold max_coeff min_coeff"
        },
        "belongs to another optimizer of DeepSpeed",
        "Muon and the AdamW of torch are what there is here",
    ),
    _Request(
        {
            "zero_optimization": "zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients "
            "zeropp_loco_param"
        },
        "asks for a ZeRO++ feature that is not honoured here",
        "",
    ),
    _Request(
        {"zero_optimization": "zero_hpz_partition_size mics_shard_size"},
        "asks for a ZeRO++ or MiCS feature that is not honoured here",
        "shards are split over all ranks",
        _one_rank,
    ),
    _Request(
        {"": "tensor_parallel"},
        "splits matrices over ranks, which is not done here",
        "all ranks are data-parallel",
        _one_rank,
        _SIZES,
    ),
    _Request({"": "hybrid_engine"}, "asks for a DeepSpeed feature that is not here", "", _switched_off, _ENABLED),
    _Request({"expert_parallel": "enabled"}, "is DeepSpeed's switch", 'say by "size" how many ranks share experts'),
    _Request(
        {"": "elasticity"},
        "lets DeepSpeed choose the batch sizes and the accumulation",
        "the training loop chooses them; a checkpoint loads on any number of ranks",
        _switched_off,
        _ENABLED,
    ),
    _Request(
        {"": "data_efficiency curriculum_learning progressive_layer_drop eigenvalue"},
        "changes what DeepSpeed trains on, and is not read here",
        "do it in the model or in the training loop",
        _switched_off,
        _ENABLED,
    ),
    _Request(
        {"": "compression_training weight_quantization quantize_training"},
        "changes the model DeepSpeed trains, and is not read here",
        "change the model before it is sharded",
        _nothing_enabled,
        _ENABLED,
    ),
    _Request(
        {"": "sparse_attention"},
        "changes the model DeepSpeed trains, and is not read here",
        "change the model before it is sharded",
    ),
)

_REFUSALS = {
    (section, key): request for request in _REQUESTS for section, keys in request.keys.items() for key in keys.split()
}


def _slip(value: object, heeds: tuple[str, ...]) -> tuple[str, ...] | None:
    """Path of a key that is nearly one of these and asks for something, and behind it that one."""
    if not isinstance(value, Mapping) or not heeds:
        return None
    for key, entry in value.items():
        meant = nearest(key.lower(), heeds, cutoff=0.75) if isinstance(key, str) and key not in heeds else None
        if meant is not None and meant not in value and not (isinstance(entry, Mapping) or _off(entry)):
            return key, meant
        if isinstance(key, str) and (inner := _slip(entry, heeds)):
            return key, *inner
    return None


#: Section -> DeepSpeed's keys there that nothing here reads.
FOREIGN: dict[str, tuple[str, ...]] = {
    place: (*keys.split(), *(key for section, key in _REFUSALS if section == place)) for place, keys in _HINTS.items()
}


def full_name(section: str, key: str) -> str:
    """The path of a key, as errors give it."""
    return f"{section}.{key}" if section else key


def refusal(section: str, key: str, value: object) -> ConfigError | None:
    """The error about a key of :data:`FOREIGN`, or None where it has no effect here.

    >>> str(refusal("zero_optimization", "zenflow", True)).partition(";")[0]
    "zero_optimization.zenflow = True: asks for DeepSpeed's offload of more than optimizer state and weights"
    >>> refusal("zero_optimization", "zenflow", False)
    """
    request = _REFUSALS.get((section, key))
    path = full_name(section, key)
    if request is not None and (slip := _slip(value, request.heeds)):
        *inner, said, meant = slip
        place = ".".join((path, *inner))
        problem, remedy = "is not a known key, and counts as off", f"did you mean {place}.{meant}?"
        return config_error(f"{place}.{said}", True, problem, remedy)
    if request is None or request.off(value):
        return None
    return config_error(path, value, request.problem, f"remove it: {request.advice}" if request.advice else "remove it")
