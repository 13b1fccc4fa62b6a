"""Configuration: frozen dataclasses, checked when built.

A setting reaches a dataclass in one of three ways, and each names it its own way in errors:

* directly, ``ZeroConfig(stage=3)``, named ``ZeroConfig.stage``;
* as a ``MuonZero`` keyword argument, :func:`config_from_kwargs`, named ``stage``;
* from JSON or a dict in DeepSpeed's vocabulary, :meth:`Config.load`, named ``zero_optimization.stage``
  (rules in :mod:`compile_muon.config.deepspeed`).

docs/configuration.md is the same for users.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from compile_muon.config.checks import (
    check_boolean,
    check_choice,
    check_dtype,
    check_dtype_name,
    check_folder,
    check_instance,
    check_integer,
    check_pair,
    check_patterns,
    check_real,
)
from compile_muon.config.compile_options import CODEGENS
from compile_muon.errors import ConfigError, config_error

__all__ = [
    "ADJUST_LR",
    "ALGORITHMS",
    "ARGUMENTS",
    "NO_MUON",
    "NS_COEFFICIENTS",
    "NS_METHODS",
    "AdamWConfig",
    "CompileConfig",
    "Config",
    "MuonConfig",
    "NSConfig",
    "ZeroConfig",
    "assemble",
    "config_from_kwargs",
]

ALGORITHMS = ("muon", "adamw")
ADJUST_LR = ("original", "match_rms_adamw", "spectral")
NS_METHODS = ("auto", "standard", "gram")
#: Names of the coefficient sets in compile_muon.kernels (FIELD.md gives their sources).
NS_COEFFICIENTS = ("jordan", "you", "polar_express", "cans", "deepseek_v4")
_DEEPSEEK_STEPS = 10  # the set is 8 jordan steps and 2 polishing steps; cut short it would be `jordan` in disguise
_MAX_STEPS = 99  # the bound of torch.optim.Muon
NO_MUON = "belongs to Muon, while AdamW trains everything here"


def _coefficients(field: str, value: object, steps: int | None) -> str | tuple:
    """A known name, one (a, b, c) for every step, or one such triple per step."""
    if isinstance(value, str):
        check_choice(field, value, NS_COEFFICIENTS)
        if value == "deepseek_v4" and steps not in (None, _DEEPSEEK_STEPS):
            raise config_error(
                field,
                value,
                f"is a schedule of {_DEEPSEEK_STEPS} steps, not {steps}",
                f"set ns_steps={_DEEPSEEK_STEPS}, or leave ns_steps out",
            )
        return value
    shape = "use a known name, one triple (a, b, c), or one triple per step"
    if not isinstance(value, Sequence) or not value:
        raise config_error(field, value, "is neither a name nor a sequence of coefficients", shape)
    if all(isinstance(x, numbers.Real) and not isinstance(x, bool) for x in value):
        return _triple(field, value, shape)
    if not all(isinstance(row, Sequence) and not isinstance(row, str) for row in value):
        raise config_error(field, value, "mixes numbers with other things", shape)
    if len(value) > _MAX_STEPS:
        raise config_error(field, value, f"has {len(value)} triples", f"give at most {_MAX_STEPS}, one per step")
    if steps not in (None, len(value)):
        remedy = f"set ns_steps={len(value)}, or leave ns_steps out"
        raise config_error(field, value, f"has {len(value)} triples for {steps} steps", remedy)
    return tuple(_triple(field, row, shape) for row in value)


def _triple(field: str, row: Sequence, shape: str) -> tuple[float, float, float]:
    if len(row) != 3:
        raise config_error(field, row, f"has {len(row)} coefficients where Newton-Schulz takes 3", shape)
    for x in row:
        if isinstance(x, bool) or not isinstance(x, numbers.Real) or not math.isfinite(x):
            raise config_error(field, row, "holds something that is not a finite number", shape)
    a, b, c = (float(x) for x in row)
    return a, b, c


def _set(config: object, **checked: object) -> None:
    """Store normalized values in a frozen dataclass, inside its ``__post_init__`` only."""
    for name, value in checked.items():
        object.__setattr__(config, name, value)


@dataclass(frozen=True)
class NSConfig:
    """Newton-Schulz orthogonalization.

    Attributes:
        steps: iterations, 1 to 99; None for as many as ``coefficients`` has, which is 10 for "deepseek_v4", 5 for the
            other names and for one triple. Fewer steps cut a longer set, more repeat its last triple; "deepseek_v4"
            and triples per step are taken whole or not at all.
        coefficients: a name out of ``NS_COEFFICIENTS``, one triple (a, b, c), or one triple per step.
        method: "standard" iterates on the matrix, "gram" on its Gram matrix, "auto" lets the cost formulas choose.
        dtype: compute dtype "bfloat16" | "float16" | "float32" | "float64", or "auto". torch dtypes and short names
            ("bf16") are accepted and stored as the canonical name.
        eps: lower bound of the Frobenius norm the matrix is divided by, > 0.

    Raises:
        ConfigError: naming the field, for anything else.
    """

    steps: int | None = None
    coefficients: str | tuple = "jordan"
    method: str = "auto"
    dtype: str = "auto"
    eps: float = 1e-7

    def __post_init__(self) -> None:
        steps = None if self.steps is None else check_integer("NSConfig.steps", self.steps, 1, _MAX_STEPS)
        _set(
            self,
            steps=steps,
            coefficients=_coefficients("NSConfig.coefficients", self.coefficients, steps),
            method=check_choice("NSConfig.method", self.method, NS_METHODS),
            dtype=check_dtype_name("NSConfig.dtype", self.dtype, extra=("auto",)),
            eps=check_real("NSConfig.eps", self.eps, positive=True),
        )


@dataclass(frozen=True)
class MuonConfig:
    """The Muon half of the optimizer.

    Attributes:
        lr: learning rate before :func:`compile_muon.model.assignment.lr_scale`.
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
        check_instance("MuonConfig.ns", self.ns, NSConfig)
        _set(
            self,
            lr=check_real("MuonConfig.lr", self.lr),
            momentum=check_real("MuonConfig.momentum", self.momentum, below=1.0),
            nesterov=check_boolean("MuonConfig.nesterov", self.nesterov),
            weight_decay=check_real("MuonConfig.weight_decay", self.weight_decay),
            adjust_lr=check_choice("MuonConfig.adjust_lr", self.adjust_lr, ADJUST_LR),
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
            lr=check_real("AdamWConfig.lr", self.lr),
            betas=check_pair("AdamWConfig.betas", self.betas),
            eps=check_real("AdamWConfig.eps", self.eps),
            weight_decay=check_real("AdamWConfig.weight_decay", self.weight_decay),
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
        nonfinite: "error" raises on inf or NaN gradients, "skip" skips the step on every rank. Neither needs a
            barrier: what backward computes is a transaction that ``step()`` commits, or drops.
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
            accumulation = check_integer("ZeroConfig.gradient_accumulation_steps", accumulation, 1)
        if clipping is not None:
            if clipping == 0 and not isinstance(clipping, bool):
                raise config_error("ZeroConfig.gradient_clipping", clipping, "would erase every gradient", "use None")
            clipping = check_real("ZeroConfig.gradient_clipping", clipping, positive=True)
        _set(
            self,
            stage=check_integer("ZeroConfig.stage", self.stage, 0, 3),
            update=check_choice("ZeroConfig.update", self.update, ("auto", "backward", "step")),
            exchange=check_choice("ZeroConfig.exchange", self.exchange, ("auto", "replicate", "owner")),
            gradient_accumulation_steps=accumulation,
            gradient_clipping=clipping,
            nonfinite=check_choice("ZeroConfig.nonfinite", self.nonfinite, ("error", "skip")),
            param_dtype=check_dtype("ZeroConfig.param_dtype", self.param_dtype),
            reduce_dtype=check_dtype("ZeroConfig.reduce_dtype", self.reduce_dtype),
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

        Clipping scales a gradient by the norm of all of them, and an unknown boundary shows only in ``step()``.
        ``nonfinite="skip"`` is none: a direction made in backward changes neither weights nor momentum before
        ``step()`` commits it.

        >>> ZeroConfig(gradient_clipping=1.0).barriers()
        ('gradient_clipping=1.0',)
        """
        found = []
        if self.gradient_clipping is not None:
            found.append(f"gradient_clipping={self.gradient_clipping}")
        if self.gradient_accumulation_steps is None:
            found.append("gradient_accumulation_steps=None")
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
        reshard_after_forward: at stage 3, drop gathered weights after forward and gather again for backward. False
            gathers once per forward and needs memory for all weights; as FSDP2's argument of that name.
    """

    enabled: bool = False
    codegen: str = "inductor"
    dump: str | None = None
    nvtx: bool = False
    fullgraph: bool = False
    dynamic: bool | None = None
    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        if self.dynamic is not None:
            check_boolean("CompileConfig.dynamic", self.dynamic)
        _set(
            self,
            enabled=check_boolean("CompileConfig.enabled", self.enabled),
            codegen=check_choice("CompileConfig.codegen", self.codegen, CODEGENS),
            dump=check_folder("CompileConfig.dump", self.dump),
            nvtx=check_boolean("CompileConfig.nvtx", self.nvtx),
            reshard_after_forward=check_boolean("CompileConfig.reshard_after_forward", self.reshard_after_forward),
            fullgraph=check_boolean("CompileConfig.fullgraph", self.fullgraph),
        )

    def options(self) -> dict[str, Any]:
        """Options for the backend, ``torch.compile(..., backend="muon_zero", options=...)``: what is not default.

        >>> CompileConfig(enabled=True, codegen="eager").options()
        {'codegen': 'eager'}
        """
        passed_on = ("codegen", "dump", "nvtx", "reshard_after_forward")
        default = {f.name: f.default for f in fields(self) if f.name in passed_on}
        return {name: getattr(self, name) for name in default if getattr(self, name) != default[name]}


@dataclass(frozen=True)
class Config:
    """Everything compile_muon can be told, resolved and immutable.

    Attributes:
        muon_params: which parameters get Muon; a predicate ``f(name, param)``, a tuple of fnmatch patterns, or None
            for the rules of :mod:`compile_muon.model.assignment`.
        algorithm: "muon", or "adamw" to train everything by AdamW on the same sharded engine, as a baseline. What only
            Muon reads must then keep its default.

    Raises:
        ConfigError: naming the field; also for a Muon setting beside ``algorithm="adamw"``.
    """

    muon: MuonConfig = MuonConfig()
    adamw: AdamWConfig = AdamWConfig()
    zero: ZeroConfig = ZeroConfig()
    compile: CompileConfig = CompileConfig()
    muon_params: Callable[[str, torch.nn.Parameter], Any] | tuple[str, ...] | None = None
    algorithm: str = "muon"

    def __post_init__(self) -> None:
        check_instance("Config.muon", self.muon, MuonConfig)
        check_instance("Config.adamw", self.adamw, AdamWConfig)
        check_instance("Config.zero", self.zero, ZeroConfig)
        check_instance("Config.compile", self.compile, CompileConfig)
        _set(
            self,
            muon_params=check_patterns("Config.muon_params", self.muon_params),
            algorithm=check_choice("Config.algorithm", self.algorithm, ALGORITHMS),
        )
        if self.algorithm == "adamw":
            self._refuse_muon_settings()

    def _refuse_muon_settings(self) -> None:
        """A setting nothing reads would be worse than an error; only values that differ from the default show here."""
        for field, value, default in (
            ("Config.muon", self.muon, MuonConfig()),
            ("Config.muon_params", self.muon_params, None),
            ("ZeroConfig.exchange", self.zero.exchange, "auto"),
        ):
            if value != default:
                raise config_error(field, value, NO_MUON, 'leave it out, or set algorithm="muon"')
        if self.zero.update == "backward":
            raise config_error(
                "ZeroConfig.update",
                self.zero.update,
                f"{NO_MUON}, and AdamW updates in step()",
                'use update="auto" or "step"',
            )

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
        from compile_muon.config.deepspeed import read_config  # it builds the classes of this module

        return read_config(source)


# -------------------------------------------------------------------------- MuonZero's keyword arguments

#: MuonZero keyword argument -> (dataclass, field): the one table Python and JSON settings go through.
ARGUMENTS: dict[str, tuple[type, str]] = {
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

    Without ``ns_steps`` (or with None) Newton-Schulz takes as many steps as ``ns_coefficients`` has.

    Raises:
        ConfigError: naming the keyword argument, also for unknown ones (with the nearest known one).

    >>> config_from_kwargs(lr=0.01, ns_steps=6, stage=3).muon.ns.steps
    6
    """
    for name, value in kwargs.items():
        if name not in ARGUMENTS:
            near = difflib.get_close_matches(name, ARGUMENTS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(ARGUMENTS)}"
            raise config_error(name, value, "is not an argument of MuonZero", hint)
    return assemble(kwargs, {name: name for name in kwargs})


def assemble(values: Mapping[str, Any], paths: Mapping[str, str], **rest: Any) -> Config:
    """Build the dataclasses from keyword arguments; ``paths`` says under which name the user gave each.

    ``rest`` are fields of ``Config`` that are no arguments of ``MuonZero``.
    """
    grouped: dict[type, dict[str, Any]] = {}
    for argument, value in values.items():
        owner, field = ARGUMENTS[argument]
        grouped.setdefault(owner, {})[field] = value
    names = {f"{owner.__name__}.{field}": paths.get(a, a) for a, (owner, field) in ARGUMENTS.items()}
    try:
        return Config(
            muon=MuonConfig(**grouped.get(MuonConfig, {}), ns=NSConfig(**grouped.get(NSConfig, {}))),
            adamw=AdamWConfig(**grouped.get(AdamWConfig, {})),
            zero=ZeroConfig(**grouped.get(ZeroConfig, {})),
            **grouped.get(Config, {}),
            **rest,
        )
    except ConfigError as error:
        raise error.renamed(names.get(error.field, error.field)) from None
