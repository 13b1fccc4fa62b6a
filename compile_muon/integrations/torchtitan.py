"""torchtitan's ``Trainer`` with ZeRO and Muon.

    config = with_muon(llama3_debugmodel(), "config.json")    # a torchtitan Trainer.Config, in a config registry
    config.build().train()

Configs, command line, data, schedules, clipping, checkpoints and logs stay torchtitan's. Replaced are
``ModelSpec.parallelize_fn``, by :func:`parallelize`, and ``Trainer.Config.optimizer``, by :class:`MuonOptimizers`. The
trainer parallelizes a model on the meta device, gives it memory, initializes it, and builds the optimizers last. Only
there the model is sharded and initialized shard by shard, so that no rank ever holds it whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, cast

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config import TORCH_DTYPE_MAP, TrainingConfig
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from compile_muon.config import Config, load_config
from compile_muon.config.checked import Mistakes
from compile_muon.errors import config_error
from compile_muon.initialize import initialize
from compile_muon.integrations.common import WHY, Refusal, Source, Why, contradicting, filled, refuse
from compile_muon.integrations.context_parallel import exchange_heads, refused_attention
from compile_muon.optimizer import MuonZero

_PENDING, _OFF = "_pending_optimizer", "set it to False"
_OF_FSDP = Why(
    "belongs to FSDP",
    'leave it out, and set "compile": {"reshard_after_forward": ...} or "zero_optimization": {"offload_param": "cpu"} '
    "in muon_config",
)
#: torchtitan's name of an optimizer -> our method
_METHODS = {"AdamW": "adamw", "DistMuon": "muon"}


def with_muon(
    config: Trainer.Config, muon_config: Source, param_groups: Sequence[ParamGroupConfig] = ()
) -> Trainer.Config:
    """Return a copy of `config` that trains with ZeRO and Muon: another ``parallelize_fn`` and ``optimizer``.

    ``parallelism.context_parallel_load_balancer`` is off: with some heads of all positions, ranks have equal work.

    Args:
        config: of a decoder model. Later changes by the command line are checked when the model is built.
        muon_config: as ``compile_muon.initialize`` takes it; see :class:`MuonOptimizers`.
        param_groups: torchtitan's groups, see :class:`MuonOptimizers`; groups of ``config.optimizer`` are dropped.
    Raises:
        ConfigError: settings that cannot be honoured, all in one error.
    """
    parallelism = config.parallelism
    if parallelism.context_parallel_load_balancer == "headtail":  # its default
        parallelism = replace(parallelism, context_parallel_load_balancer=None)
    mistakes = Mistakes()
    model_spec, checking = config.model_spec, config.debug.spmd_typechecking
    with mistakes.collected():
        refuse([
            *_refusals(config.training, parallelism, config.compile, config.activation_checkpoint),
            (checking, "debug.spmd_typechecking", True,
             "needs annotations that torchtitan's own parallelize function makes", _OFF),
            _fault_tolerance(getattr(getattr(config, "fault_tolerance", None), "enable", False)),
            (model_spec is None, "model_spec", None, "says which model to train", "set it, e.g. model_registry('8B')"),
        ])  # fmt: skip
    with mistakes.collected():
        _read(muon_config, config.training, None)
    mistakes.raise_all()
    spec = replace(config.model_spec, parallelize_fn=parallelize)
    optimizer = MuonOptimizers.Config(muon_config=muon_config, param_groups=list(param_groups))
    return replace(config, model_spec=spec, parallelism=parallelism, optimizer=optimizer)


# ---------------------------------------------------------------------------------------------------- settings


def _refusals(training: TrainingConfig, parallelism: Any, compile_config: Any, ac_config: Any) -> list[Refusal]:
    """Return refusals of a parallelize function's arguments that would have no or another effect."""
    kinds = ("tensor_parallel", "pipeline_parallel", "expert_parallel", "data_parallel_replicate")
    degrees = {f"parallelism.{kind}_degree": getattr(parallelism, f"{kind}_degree") for kind in kinds}
    reshard, backend = parallelism.fsdp_reshard_after_forward, parallelism.spmd_backend
    balancer = parallelism.context_parallel_load_balancer
    compiled = compile_config.enable and "model" in compile_config.components
    return [
        *((degree > 1, name, degree, "compile_muon shards over data-parallel and context-parallel ranks only",
           'set it to 1; for whole copies on every rank, "zero_optimization": {"stage": 0} in muon_config')
          for name, degree in degrees.items()),
        (balancer is not None and parallelism.context_parallel_degree > 1,
         "parallelism.context_parallel_load_balancer", balancer,
         "deals positions out in another order, which a causal mask does not know", "set it to None"),
        (backend == "full_dtensor", "parallelism.spmd_backend", backend, "makes the inputs DTensors",
         "use 'spmd_types' or 'partial_dtensor'"),
        (reshard != "default", "parallelism.fsdp_reshard_after_forward", reshard, *_OF_FSDP),
        (parallelism.enable_fsdp_symm_mem, "parallelism.enable_fsdp_symm_mem", True, *_OF_FSDP),
        (training.enable_cpu_offload, "training.enable_cpu_offload", True, *_OF_FSDP),
        (not training.disable_cuda_graphs, "training.disable_cuda_graphs", False,
         "replays forward and backward without the Python that accounts for gradients", "set it to True"),
        (compiled, "compile.components", compile_config.components, *WHY["compiles"]),
        (isinstance(ac_config, MemoryBudgetAC.Config), "activation_checkpoint", "memory-budget",
         "needs torchtitan's own compiled blocks", "use selective, full or none"),
    ]  # fmt: skip


def _fault_tolerance(so: Any) -> Refusal:
    return so, "fault_tolerance.enable", True, "averages gradients of replica groups in hooks of FSDP", _OFF


def _read(source: Source, training: TrainingConfig, steps: int | None) -> Config:
    """Load the configuration, with ``"auto"`` and dtypes filled in from torchtitan's settings.

    `steps`: backwards per step, or None while unknown.
    """
    dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    low = dtype != torch.float32
    bf16_enabled: Any = None
    if not isinstance(source, Config):
        automatic: dict[tuple[str, ...], Any] = {("gradient_accumulation_steps",): steps, ("gradient_clipping",): 0}
        values = filled(source, automatic, defaults={("gradient_accumulation_steps",): steps})
        precision = values.get("bf16") if isinstance(values, dict) else None
        if isinstance(precision, dict) and "enabled" in precision:
            bf16_enabled, precision["enabled"] = precision["enabled"], low
        source = load_config(values)
    zero, sequence = source.zero, source.sequence_parallel.size
    name, value = ("param_dtype", zero.param_dtype) if bf16_enabled is None else ("bf16.enabled", bf16_enabled)
    same = bf16_enabled in (None, "auto", low) and zero.param_dtype in (None, dtype)
    count, clip = zero.gradient_accumulation_steps, zero.gradient_clipping
    size, fits = training.global_batch_size, steps is None or count in (None, steps)
    refuse([
        contradicting(name, value, "training.mixed_precision_param", training.mixed_precision_param, same),
        contradicting("gradient_accumulation_steps", count, "training.global_batch_size", size, fits),
        (sequence > 1, "sequence_parallel.size", sequence, "is for batches that nobody cuts",
         "leave it out, and set parallelism.context_parallel_degree"),
        (clip is not None, "gradient_clipping", clip,
         f"is a second limit beside training.max_norm = {training.max_norm}, by which the trainer clips",
         'leave it out of the config, or write "auto"'),
    ])  # fmt: skip
    if low:
        reduce_dtype = zero.reduce_dtype or TORCH_DTYPE_MAP[training.mixed_precision_reduce]
        zero = replace(zero, param_dtype=dtype, reduce_dtype=reduce_dtype)
    return replace(source, zero=zero)


# ------------------------------------------------------------------------------------------------- parallelize


@dataclass
class _Pending:
    """The trainer's settings for a model on the meta device, kept between :func:`parallelize` and its sharding."""

    training: TrainingConfig
    activation_checkpoint: Any  # torchtitan's built wrapper of blocks, or None
    context: DeviceMesh | None  # the mesh of context parallelism
    buffer_device: torch.device | None = None
    guard: Any = None  # handle of the pre-hook that raises until the model is sharded


def parallelize(
    model: nn.Module,
    *,
    parallel_dims: Any,
    training: TrainingConfig,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """Prepare `model` for :class:`MuonOptimizers`, which shards it; a ``ModelSpec.parallelize_fn`` for the trainer.

    `model`, a decoder, stays on the meta device: until its optimizer is built, its ``to_empty`` and ``init_weights``
    only store their arguments. Gradients are summed over ranks, since torchtitan divides losses by the tokens of all
    ranks. Raises one ConfigError about all settings that cannot be honoured.
    """
    kind, degree = type(model).__name__, parallelism.context_parallel_degree
    head: Any = getattr(model, "lm_head", None)
    decoder, no_pipeline = isinstance(head, nn.Module), parallelism.pipeline_parallel_degree == 1
    attention = refused_attention(model, degree) if decoder and degree > 1 else ()
    refuse([
        *_refusals(training, parallelism, compile_config, ac_config),
        (has_quantization(getattr(model, "config", None) or Module.Config()), "model_spec.model", kind,
         "has quantized layers", "build the model without quantization converters; muon_config has bf16"),
        (no_pipeline and not decoder, "model_spec.model", kind, "has no lm_head, through which its loss goes",
         "train a decoder, or shard the model with compile_muon.initialize in a loop of your own"),
        *[row for row in attention if row[0]][:1],
    ])  # fmt: skip
    ranks = dist.get_world_size()
    if ranks > 1:
        head.register_forward_hook(lambda module, args, output: _SumOfRanks.apply(output, ranks))
    checkpointing = None if ac_config is None else ac_config.build(dump_folder=dump_folder)
    pending = _Pending(training, checkpointing, parallel_dims.get_mesh("cp") if degree > 1 else None)

    def to_empty(*, device: Any, recurse: bool = True) -> nn.Module:
        return model

    def init_weights(*, buffer_device: torch.device | None = None) -> None:
        pending.buffer_device = buffer_device

    def forward(*_: Any) -> None:
        remedy = "use with_muon, or MuonOptimizers.Config of this module"
        raise config_error("optimizer", "another", "has not sharded the model, which is still empty", remedy)

    pending.guard = model.register_forward_pre_hook(forward)
    model.__dict__.update({_PENDING: pending, "to_empty": to_empty, "init_weights": init_weights})
    return model


class _SumOfRanks(torch.autograd.Function):
    """Scales the gradient of the head's output by the ranks, so that the average of all gradients becomes their sum."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.ranks, None


# --------------------------------------------------------------------------------------------------- optimizers


class MuonOptimizers(OptimizersContainer):
    """torchtitan's container around one :class:`compile_muon.MuonZero`, built for a model from :func:`parallelize`.

    Args:
        config: ``muon_config`` is as ``compile_muon.initialize`` takes it; ``gradient_accumulation_steps``,
            ``gradient_clipping`` and ``bf16.enabled``, if absent or ``"auto"``, take torchtitan's own settings.
            ``param_groups`` gives parameters a method and rates of their own, by the first pattern found in a name;
            ``optimizer_name`` is ``"AdamW"``, ``"DistMuon"``, or a method of this library.
        model_parts: a list of one model.
    Raises:
        ConfigError, UnsupportedModelError: ahead of any change.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        muon_config: Annotated[Any, tyro.conf.Suppress] = field(default_factory=dict)
        """What ``compile_muon.initialize`` takes: a path, a mapping in DeepSpeed's vocabulary, or a ``Config``."""

    def __init__(self, config: Config, *, model_parts: list[nn.Module], **others: Any) -> None:
        (model,) = model_parts
        pending: _Pending | None = model.__dict__.get(_PENDING)
        factory, implementation = config.optimizer_factory_kwargs_by_name, config.implementation
        sharded = pending is None and (dist.get_world_size() > 1 or isinstance(next(model.parameters()), DTensor))
        refuse([
            (factory, "optimizer.optimizer_factory_kwargs_by_name", factory, "is torchtitan's own optimizers'",
             "leave it out: muon_config says how matrices are exchanged"),
            (implementation == "fused_opt_states_bf16", "optimizer.implementation", implementation,
             "would keep AdamW's moments in bfloat16", "leave it out"),
            _fault_tolerance("ft_manager" in others),  # of torchtitan's experiments
            (sharded, "model_spec.parallelize_fn", "another function", "has sharded the model already",
             "use with_muon, or set it to parallelize of this module"),
        ])  # fmt: skip
        if pending is None:  # for a seed checkpoint, from which torchtitan loads only weights
            _, optimizer = initialize(model, load_config({}))
        else:
            optimizer = _shard(model, config, pending)
        self.model_parts = model_parts
        self.optimizers = [optimizer]
        self._post_init([param for group in optimizer.param_groups for param in group["params"]])

    @property
    def muon(self) -> MuonZero:
        """The optimizer, for ``metrics()``, ``totals()`` and ``summary()``."""
        return self.optimizers[0]


def _groups(model: nn.Module, given: Sequence[ParamGroupConfig]) -> list[dict[str, Any]] | None:
    """Convert torchtitan's groups to ours; a pattern without a parameter that earlier patterns leave is refused."""
    unmatched, groups = {name: param for name, param in model.named_parameters() if param.requires_grad}, []
    for group in given:
        names = [name for name in unmatched if re.search(group.pattern, name)]
        problem = "is found in the name of no parameter that patterns before it have left"
        remedy = "leave it out, or put it further ahead"
        refuse([(not names, "optimizer.param_groups", group.pattern, problem, remedy)])
        rates = {key: value for key, value in group.optimizer_kwargs.items() if key not in ("fused", "foreach")}
        method = _METHODS.get(group.optimizer_name, group.optimizer_name)
        groups.append(
            {"name": group.pattern, "params": [unmatched.pop(name) for name in names], "method": method, **rates}
        )
    return groups or None


def _shard(model: nn.Module, optimizer_config: MuonOptimizers.Config, pending: _Pending) -> MuonZero:
    """Shard and initialize a model on the meta device, and wrap its blocks for activation checkpointing."""
    training = pending.training
    sharing = 1 if pending.context is None else pending.context.size()
    at_once = training.local_batch_size * dist.get_world_size() // sharing
    config = _read(optimizer_config.muon_config, training, max(training.global_batch_size, at_once) // at_once)
    clip = config.muon.qk_clip
    refuse([
        (pending.context is not None and clip is not None, "qk_clip", clip,
         "notes the logits of all heads, and with parallelism.context_parallel_degree a rank sees some of them",
         "leave one of the two out"),
    ])  # fmt: skip

    def init(module: nn.Module) -> None:
        if isinstance(module, Module):
            module._init_self_parameters()
            module._init_self_buffers(buffer_device=pending.buffer_device)

    _, optimizer = initialize(model, config, groups=_groups(model, optimizer_config.param_groups), init=init)
    for name in (_PENDING, "to_empty", "init_weights"):
        del model.__dict__[name]
    pending.guard.remove()
    if pending.context is not None:
        exchange_heads(model, pending.context)
    if pending.activation_checkpoint is not None:
        pending.activation_checkpoint.apply(model)
    if config.compile.enabled and getattr(model, "_skip_lm_head", False):  # ChunkedLossWrapper calls the head itself
        settings = config.compile
        cast(nn.Module, model.lm_head).compile(
            backend="muon_zero", dynamic=settings.dynamic, options=settings.options()
        )
    return optimizer
