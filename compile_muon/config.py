"""Configuration: frozen dataclasses, checked when built, and the two vocabularies that lead to them.

A setting reaches a dataclass in one of three ways, and each names it its own way in errors:

* directly, ``ZeroConfig(stage=3)``, named ``ZeroConfig.stage``;
* as a ``MuonZero`` keyword argument, :func:`config_from_kwargs`, named ``stage``;
* from JSON or a dict in DeepSpeed's vocabulary, :meth:`Config.load`, named ``zero_optimization.stage``.

Rules of the DeepSpeed vocabulary (DeepSpeed: ``_muon_param_groups`` in ``runtime/engine.py``):

* ``optimizer.params.lr`` sets the rate of Muon *and* of AdamW; ``muon_lr`` and ``adam_lr`` (or ``adamw_lr``)
  override their half, most specific last. ``MuonZero(lr=...)`` in Python is the Muon rate alone.
* ``weight_decay`` goes to both halves unless ``adamw_weight_decay`` is given. ``betas`` and ``eps`` are AdamW's.
* What is absent takes the default of the dataclasses here, not DeepSpeed's (``zero_optimization.stage`` is 2, not 0).
* ``gradient_clipping: 0`` is off, ``gradient_accumulation_steps: null`` is unknown.
* ``"compile": {...}`` means enabled unless the object says ``"enabled": false``.
* A DeepSpeed key that has no meaning here is an error, even where it is only a hint: a flag that does nothing is
  worse than one that is refused.
"""

from __future__ import annotations

import difflib
import json
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import torch

from compile_muon.errors import ConfigError, config_error

__all__ = [
    "ADJUST_LR",
    "NS_COEFFICIENTS",
    "NS_METHODS",
    "AdamWConfig",
    "CompileConfig",
    "Config",
    "MuonConfig",
    "NSConfig",
    "ZeroConfig",
    "config_from_kwargs",
]

ADJUST_LR = ("original", "match_rms_adamw", "spectral")
NS_METHODS = ("auto", "standard", "gram")
#: Names of the coefficient sets in compile_muon.kernels (FIELD.md gives their sources).
NS_COEFFICIENTS = ("jordan", "you", "polar_express", "cans", "deepseek_v4")
_DEEPSEEK_STEPS = 10  # the set is 8 jordan steps and 2 polishing steps; cut short it would be `jordan` in disguise
_MAX_STEPS = 99  # the bound of torch.optim.Muon

_DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "half": "float16",
    "float": "float32",
    "double": "float64",
}


# ---------------------------------------------------------------------------------------------- checks


def _real(field: str, value: object, *, positive: bool = False, below: float = math.inf) -> float:
    """A finite float in [0, below), or in (0, below) when ``positive``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        if value == "auto":
            raise config_error(field, value, "is filled in by the Hugging Face Trainer, not here", "write the number")
        raise config_error(field, value, f"must be a number, not {type(value).__name__}", "write a plain number")
    number = float(value)
    if not math.isfinite(number):
        raise config_error(field, value, "is not finite", "give a finite number")
    if number < 0 or (positive and number == 0) or number >= below:
        interval = f"{'(' if positive else '['}0, {below:g})"
        raise config_error(field, value, f"lies outside {interval}", f"choose a number in {interval}")
    return number


def _pair(field: str, value: object) -> tuple[float, float]:
    """Two floats in [0, 1)."""
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise config_error(field, value, "must be a pair", "use two numbers in [0, 1)")
    try:
        first, second = (_real(field, number, below=1.0) for number in value)
    except ConfigError as error:
        raise config_error(field, value, f"holds {error.shown}, which {error.problem}", error.remedy) from None
    return first, second


def _integer(field: str, value: object, low: int, high: int | None = None) -> int:
    span = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise config_error(field, value, f"must be an integer, not {type(value).__name__}", f"use {span}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise config_error(field, value, "is out of range", f"use {span}")
    return number


def _boolean(field: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise config_error(field, value, f"must be true or false, not {type(value).__name__}", "use a boolean")
    return value


def _choice(field: str, value: object, allowed: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise config_error(field, value, "is not a known choice", f"{hint}use one of {', '.join(map(repr, allowed))}")
    return value


def _instance(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise config_error(field, value, f"must be a {kind.__name__}", f"build it with {kind.__name__}(...)")


def _dtype_name(field: str, value: object, extra: Sequence[str] = ()) -> str:
    """Canonical name ("bfloat16") of a torch.dtype or of one of its usual names."""
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    if isinstance(name, str):
        name = _DTYPE_ALIASES.get(name.removeprefix("torch."), name.removeprefix("torch."))
    allowed = (*extra, *_DTYPES)
    if not isinstance(name, str) or name not in allowed:
        raise config_error(field, value, "is not a supported dtype", f"use one of {', '.join(allowed)}")
    return name


def _dtype(field: str, value: object) -> torch.dtype | None:
    return None if value is None else _DTYPES[_dtype_name(field, value)]


def _coefficients(field: str, value: object, steps: int) -> str | tuple:
    """A known name, one (a, b, c) for every step, or one such triple per step."""
    if isinstance(value, str):
        _choice(field, value, NS_COEFFICIENTS)
        if value == "deepseek_v4" and steps != _DEEPSEEK_STEPS:
            raise config_error(
                field, value, f"is a schedule of {_DEEPSEEK_STEPS} steps, not {steps}", "set ns_steps=10"
            )
        return value
    shape = "use a known name, one triple (a, b, c), or one triple per step"
    if not isinstance(value, Sequence) or not value:
        raise config_error(field, value, "is neither a name nor a sequence of coefficients", shape)
    if all(isinstance(x, numbers.Real) and not isinstance(x, bool) for x in value):
        return _triple(field, value, shape)
    if not all(isinstance(row, Sequence) and not isinstance(row, str) for row in value):
        raise config_error(field, value, "mixes numbers with other things", shape)
    if len(value) != steps:
        raise config_error(field, value, f"has {len(value)} triples for {steps} steps", f"set ns_steps={len(value)}")
    return tuple(_triple(field, row, shape) for row in value)


def _triple(field: str, row: Sequence, shape: str) -> tuple[float, float, float]:
    if len(row) != 3:
        raise config_error(field, row, f"has {len(row)} coefficients where Newton-Schulz takes 3", shape)
    for x in row:
        if isinstance(x, bool) or not isinstance(x, numbers.Real) or not math.isfinite(x):
            raise config_error(field, row, "holds something that is not a finite number", shape)
    a, b, c = (float(x) for x in row)
    return a, b, c


def _patterns(field: str, value: object) -> Callable[[str, torch.nn.Parameter], Any] | tuple[str, ...] | None:
    if value is None or callable(value):
        return value
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise config_error(
            field, value, "must be a predicate f(name, param) or a list of name patterns", 'write ["pattern", ...]'
        )
    if not value:
        raise config_error(field, value, "selects nothing", "leave it out to let compile_muon choose")
    for pattern in value:
        if not isinstance(pattern, str) or not pattern:
            raise config_error(field, value, f"holds {pattern!r}, which is not a name pattern", "use non-empty strings")
    return tuple(value)


def _set(config: object, **checked: object) -> None:
    """Store normalized values in a frozen dataclass, inside its ``__post_init__`` only."""
    for name, value in checked.items():
        object.__setattr__(config, name, value)


# ------------------------------------------------------------------------------------------ dataclasses


@dataclass(frozen=True)
class NSConfig:
    """Newton-Schulz orthogonalization.

    Attributes:
        steps: iterations, 1 to 99.
        coefficients: a name out of ``NS_COEFFICIENTS``, one triple (a, b, c), or one triple per step.
        method: "standard" iterates on the matrix, "gram" on its Gram matrix, "auto" lets the cost formulas choose.
        dtype: compute dtype "bfloat16" | "float16" | "float32" | "float64", or "auto". torch dtypes and short names
            ("bf16") are accepted and stored as the canonical name.
        eps: lower bound of the Frobenius norm the matrix is divided by, > 0.

    Raises:
        ConfigError: naming the field, for anything else.
    """

    steps: int = 5
    coefficients: str | tuple = "jordan"
    method: str = "auto"
    dtype: str = "auto"
    eps: float = 1e-7

    def __post_init__(self) -> None:
        steps = _integer("NSConfig.steps", self.steps, 1, _MAX_STEPS)
        _set(
            self,
            steps=steps,
            coefficients=_coefficients("NSConfig.coefficients", self.coefficients, steps),
            method=_choice("NSConfig.method", self.method, NS_METHODS),
            dtype=_dtype_name("NSConfig.dtype", self.dtype, extra=("auto",)),
            eps=_real("NSConfig.eps", self.eps, positive=True),
        )


@dataclass(frozen=True)
class MuonConfig:
    """The Muon half of the optimizer.

    Attributes:
        lr: learning rate before :func:`compile_muon.assignment.lr_scale`.
        momentum: EMA factor in [0, 1).
        nesterov: whether the direction looks one momentum step ahead.
        weight_decay: decoupled, multiplied by the unadjusted lr.
        adjust_lr: "original" | "match_rms_adamw" | "spectral".
        ns: how the direction is orthogonalized.
    """

    lr: float = 0.02
    momentum: float = 0.95
    nesterov: bool = True
    weight_decay: float = 0.1
    adjust_lr: str = "original"
    ns: NSConfig = NSConfig()

    def __post_init__(self) -> None:
        _instance("MuonConfig.ns", self.ns, NSConfig)
        _set(
            self,
            lr=_real("MuonConfig.lr", self.lr),
            momentum=_real("MuonConfig.momentum", self.momentum, below=1.0),
            nesterov=_boolean("MuonConfig.nesterov", self.nesterov),
            weight_decay=_real("MuonConfig.weight_decay", self.weight_decay),
            adjust_lr=_choice("MuonConfig.adjust_lr", self.adjust_lr, ADJUST_LR),
        )


@dataclass(frozen=True)
class AdamWConfig:
    """The AdamW half of the optimizer; fields mean what they mean in ``torch.optim.AdamW``."""

    lr: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        _set(
            self,
            lr=_real("AdamWConfig.lr", self.lr),
            betas=_pair("AdamWConfig.betas", self.betas),
            eps=_real("AdamWConfig.eps", self.eps),
            weight_decay=_real("AdamWConfig.weight_decay", self.weight_decay),
        )


@dataclass(frozen=True)
class ZeroConfig:
    """What is sharded, when the update runs, and in which dtypes.

    Attributes:
        stage: 0 replicates all, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        update: "backward" updates inside backward, "step" in the step graph, "auto" chooses.
        exchange: how gradients are gathered for Newton-Schulz: "auto" | "replicate" | "owner".
        gradient_accumulation_steps: micro-batches per step, or None when only the loop knows.
        gradient_clipping: maximal global gradient norm, or None for no clipping.
        nonfinite: "error" raises on inf or NaN gradients, "skip" skips the step on every rank.
        param_dtype: dtype weights are gathered and used in; None keeps the parameter's own.
        reduce_dtype: dtype gradients are reduced in; None keeps the gradient's own.

    Raises:
        ConfigError: naming the field; also for ``update="backward"`` beside a setting that needs a barrier.
    """

    stage: int = 2
    update: str = "auto"
    exchange: str = "auto"
    gradient_accumulation_steps: int | None = 1
    gradient_clipping: float | None = None
    nonfinite: str = "error"
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        accumulation, clipping = self.gradient_accumulation_steps, self.gradient_clipping
        if accumulation is not None:
            accumulation = _integer("ZeroConfig.gradient_accumulation_steps", accumulation, 1)
        if clipping is not None:
            if clipping == 0 and not isinstance(clipping, bool):
                raise config_error("ZeroConfig.gradient_clipping", clipping, "would erase every gradient", "use None")
            clipping = _real("ZeroConfig.gradient_clipping", clipping, positive=True)
        _set(
            self,
            stage=_integer("ZeroConfig.stage", self.stage, 0, 3),
            update=_choice("ZeroConfig.update", self.update, ("auto", "backward", "step")),
            exchange=_choice("ZeroConfig.exchange", self.exchange, ("auto", "replicate", "owner")),
            gradient_accumulation_steps=accumulation,
            gradient_clipping=clipping,
            nonfinite=_choice("ZeroConfig.nonfinite", self.nonfinite, ("error", "skip")),
            param_dtype=_dtype("ZeroConfig.param_dtype", self.param_dtype),
            reduce_dtype=_dtype("ZeroConfig.reduce_dtype", self.reduce_dtype),
        )
        if self.update == "backward" and self.barriers():
            raise config_error(
                "ZeroConfig.update",
                self.update,
                f"contradicts {' and '.join(self.barriers())}, which must see all gradients before any update",
                'use update="auto" or "step", or drop the other setting',
            )

    def barriers(self) -> tuple[str, ...]:
        """The settings that need every gradient before the first update, as "name=value"; empty if none does.

        >>> ZeroConfig(gradient_clipping=1.0).barriers()
        ('gradient_clipping=1.0',)
        """
        found = []
        if self.gradient_clipping is not None:
            found.append(f"gradient_clipping={self.gradient_clipping}")
        if self.gradient_accumulation_steps is None:
            found.append("gradient_accumulation_steps=None")
        if self.nonfinite == "skip":
            found.append('nonfinite="skip"')
        return tuple(found)


@dataclass(frozen=True)
class CompileConfig:
    """Whether and how ``initialize`` compiles the model in place.

    Attributes:
        enabled: compile at all.
        codegen: "inductor", or "eager" to run the rewritten graphs without Inductor.
        dump: folder that receives every graph before and after each pass.
        nvtx: annotate collectives and NS with NVTX ranges.
        fullgraph, dynamic: passed to ``torch.compile`` as they are.
    """

    enabled: bool = False
    codegen: str = "inductor"
    dump: str | None = None
    nvtx: bool = False
    fullgraph: bool = False
    dynamic: bool | None = None

    def __post_init__(self) -> None:
        dump = self.dump
        if dump is not None:
            if not isinstance(dump, (str, os.PathLike)) or not os.fspath(dump):
                raise config_error("CompileConfig.dump", dump, "is not a folder", "give a path, or None")
            dump = os.fspath(dump)
        if self.dynamic is not None:
            _boolean("CompileConfig.dynamic", self.dynamic)
        _set(
            self,
            enabled=_boolean("CompileConfig.enabled", self.enabled),
            codegen=_choice("CompileConfig.codegen", self.codegen, ("inductor", "eager")),
            dump=dump,
            nvtx=_boolean("CompileConfig.nvtx", self.nvtx),
            fullgraph=_boolean("CompileConfig.fullgraph", self.fullgraph),
        )

    def options(self) -> dict[str, Any]:
        """Options for the backend, ``torch.compile(..., backend="muon_zero", options=...)``: what is not default.

        >>> CompileConfig(enabled=True, codegen="eager").options()
        {'codegen': 'eager'}
        """
        default = {f.name: f.default for f in fields(self) if f.name in ("codegen", "dump", "nvtx")}
        return {name: getattr(self, name) for name in default if getattr(self, name) != default[name]}


@dataclass(frozen=True)
class Config:
    """Everything compile_muon can be told, resolved and immutable.

    Attributes:
        muon_params: which parameters get Muon; a predicate ``f(name, param)``, a tuple of fnmatch patterns, or None
            for the rules of :mod:`compile_muon.assignment`.
    """

    muon: MuonConfig = MuonConfig()
    adamw: AdamWConfig = AdamWConfig()
    zero: ZeroConfig = ZeroConfig()
    compile: CompileConfig = CompileConfig()
    muon_params: Callable[[str, torch.nn.Parameter], Any] | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        _instance("Config.muon", self.muon, MuonConfig)
        _instance("Config.adamw", self.adamw, AdamWConfig)
        _instance("Config.zero", self.zero, ZeroConfig)
        _instance("Config.compile", self.compile, CompileConfig)
        _set(self, muon_params=_patterns("Config.muon_params", self.muon_params))

    @staticmethod
    def load(source: str | os.PathLike | Mapping[str, Any] | Config) -> Config:
        """Read a config from a JSON file or a mapping in DeepSpeed's vocabulary; a ``Config`` comes back as it is.

        Raises:
            ConfigError: naming the path of the key (``optimizer.params.muon_lr``), its value and the remedy, for
                unknown keys (with the nearest known one), DeepSpeed keys that cannot be honoured, values of a wrong
                type or range, settings given twice differently, and files that are missing or are not JSON.

        >>> Config.load({"optimizer": {"type": "Muon", "params": {"lr": 0.01, "adam_lr": 1e-3}}}).adamw.lr
        0.001
        """
        if isinstance(source, Config):
            return source
        return _from_mapping(_read_json(source) if isinstance(source, (str, os.PathLike)) else source)


# -------------------------------------------------------------------------- MuonZero's keyword arguments

#: MuonZero keyword argument -> (dataclass, field): the one table both vocabularies go through.
_ARGUMENTS: dict[str, tuple[type, str]] = {
    "lr": (MuonConfig, "lr"),
    "momentum": (MuonConfig, "momentum"),
    "nesterov": (MuonConfig, "nesterov"),
    "weight_decay": (MuonConfig, "weight_decay"),
    "adamw_lr": (AdamWConfig, "lr"),
    "adamw_betas": (AdamWConfig, "betas"),
    "adamw_eps": (AdamWConfig, "eps"),
    "adamw_weight_decay": (AdamWConfig, "weight_decay"),
    "adjust_lr": (MuonConfig, "adjust_lr"),
    "ns_steps": (NSConfig, "steps"),
    "ns_coefficients": (NSConfig, "coefficients"),
    "ns_method": (NSConfig, "method"),
    "ns_dtype": (NSConfig, "dtype"),
    **{f.name: (ZeroConfig, f.name) for f in fields(ZeroConfig)},
    "muon_params": (Config, "muon_params"),
}


def config_from_kwargs(**kwargs: Any) -> Config:
    """The ``Config`` of ``MuonZero(model, **kwargs)``; what is not given keeps its default.

    Raises:
        ConfigError: naming the keyword argument, also for unknown ones (with the nearest known one).

    >>> config_from_kwargs(lr=0.01, ns_steps=6, stage=3).muon.ns.steps
    6
    """
    for name, value in kwargs.items():
        if name not in _ARGUMENTS:
            near = difflib.get_close_matches(name, _ARGUMENTS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(_ARGUMENTS)}"
            raise config_error(name, value, "is not an argument of MuonZero", hint)
    return _assemble(kwargs, {name: name for name in kwargs}, CompileConfig())


def _assemble(values: Mapping[str, Any], paths: Mapping[str, str], compile_config: CompileConfig) -> Config:
    """Build the dataclasses from keyword arguments; ``paths`` says under which name the user gave each."""
    grouped: dict[type, dict[str, Any]] = {}
    for argument, value in values.items():
        owner, field = _ARGUMENTS[argument]
        grouped.setdefault(owner, {})[field] = value
    names = {f"{owner.__name__}.{field}": paths.get(a, a) for a, (owner, field) in _ARGUMENTS.items()}
    try:
        return Config(
            muon=MuonConfig(**grouped.get(MuonConfig, {}), ns=NSConfig(**grouped.get(NSConfig, {}))),
            adamw=AdamWConfig(**grouped.get(AdamWConfig, {})),
            zero=ZeroConfig(**grouped.get(ZeroConfig, {})),
            compile=compile_config,
            **grouped.get(Config, {}),
        )
    except ConfigError as error:
        raise error.renamed(names.get(error.field, error.field)) from None


# ------------------------------------------------------------------------------- DeepSpeed's vocabulary

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
_SECTIONS: dict[str, tuple[str, ...]] = {
    "": _TOP,
    "compile": tuple(f.name for f in fields(CompileConfig)),
    "optimizer": ("type", "params"),
    "zero_optimization": ("stage",),
    "optimizer.params": (*_PARAM_ALIASES, *_ARGUMENTS),
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
        "torch_adam adam_w_mode fp32_optimizer_states",
        "chooses a DeepSpeed Adam, which is not used here",
        "remove it: parameters without Muon are trained by AdamW with decoupled decay",
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
        """overlap_comm contiguous_gradients reduce_scatter allgather_partitions allgather_sequential *bucket*
        round_robin_gradients memory_efficient_linear *_persistence_threshold max_live_parameters
        max_reuse_distance module_granularity_threshold use_all_reduce_for_fetch_params stage3_*""",
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
        return _dtype(path, value)
    if argument == "gradient_clipping" and value == 0 and not isinstance(value, bool):
        return None
    return tuple(value) if isinstance(value, list) else value


def _from_mapping(source: object) -> Config:
    given = _Given()
    top = _section("", source)
    optimizer = _section("optimizer", top.get("optimizer", {}))
    kind = optimizer.get("type", "Muon")
    if not isinstance(kind, str) or kind.lower() != "muon":
        raise config_error("optimizer.type", kind, "is not an optimizer of compile_muon", 'use "Muon"')
    _put_params(given, _section("optimizer.params", optimizer.get("params", {})))
    for key, value in _section("zero_optimization", top.get("zero_optimization", {})).items():
        given.put(key, value, f"zero_optimization.{key}")
    for key in ("gradient_clipping", "gradient_accumulation_steps"):
        if key in top:
            given.put(key, top[key], key)
    _put_precision(given, top)
    return _assemble(given.values, given.paths, _compile_config(top.get("compile", False)))


def _put_params(given: _Given, params: Mapping[str, Any]) -> None:
    """optimizer.params: specific keys first, then the two that are shared by both halves."""
    shared = ("lr", "weight_decay")
    for key, value in params.items():
        if key not in shared:
            given.put(_PARAM_ALIASES.get(key, key), value, f"optimizer.params.{key}")
    for key in shared:
        if key in params:
            _real(f"optimizer.params.{key}", params[key])  # also where both halves override it
            for argument in (key, f"adamw_{key}"):
                given.default(argument, params[key], f"optimizer.params.{key}")


def _put_precision(given: _Given, top: Mapping[str, Any]) -> None:
    """bf16.enabled is param_dtype=bfloat16; fp16.enabled would need loss scaling."""
    fp16, bf16 = (_section(key, top.get(key, {})) for key in ("fp16", "bf16"))
    if _boolean("fp16.enabled", fp16.get("enabled", False)):
        raise config_error(
            "fp16.enabled", True, "needs loss scaling, which compile_muon does not do", 'use "bf16": {"enabled": true}'
        )
    if "enabled" not in bf16:
        return
    if _boolean("bf16.enabled", bf16["enabled"]):
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
