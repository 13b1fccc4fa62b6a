"""Configuration: frozen dataclasses, checked when built; a setting's default and range stand here and nowhere else.

A setting reaches a dataclass in one of three ways, and each names it its own way in errors:

* directly, ``ZeroConfig(stage=3)``, named ``ZeroConfig.stage``;
* as a ``MuonZero`` keyword argument, :func:`config_from_kwargs`, named ``stage``;
* from JSON or a dict in DeepSpeed's vocabulary, :func:`compile_muon.load_config`, named ``zero_optimization.stage``
  (rules in :mod:`compile_muon.config.deepspeed`).

docs/reference/configuration.md is the same for users.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from compile_muon.config.checked import Checked, Mistakes, setting
from compile_muon.config.checks import (
    check_boolean,
    check_choice,
    check_dtype,
    check_dtype_name,
    check_instance,
    check_integer,
    check_pair,
    check_patterns,
    check_rate,
    check_real,
    unknown_name,
)
from compile_muon.config.compile_options import CompileOptions
from compile_muon.config.elsewhere import OF_OPTIMIZERS
from compile_muon.config.groups import GroupConfig, check_groups, check_method, check_own_rates, check_views
from compile_muon.config.lr_schedule import ScheduleConfig
from compile_muon.config.machine import check_machine
from compile_muon.config.offload import OffloadConfig, check_offload, check_offload_param
from compile_muon.errors import ConfigError, config_error
from compile_muon.kernels.coefficients import COEFFICIENTS, MAX_STEPS
from compile_muon.kernels.dispatch import BACKENDS, FORMS
from compile_muon.passes.methods import ElementMethod, MatrixMethod

__all__ = [
    "ALGORITHMS",
    "ARGUMENTS",
    "NO_MUON",
    "VIEWS",
    "AdamWConfig",
    "CompileConfig",
    "Config",
    "ExpertParallelConfig",
    "Given",
    "MeshConfig",
    "MuonConfig",
    "NSConfig",
    "SequenceParallelConfig",
    "ZeroConfig",
    "config_from_kwargs",
]

ALGORITHMS = ("muon", "adamw")
NO_MUON = "belongs to Muon, while AdamW trains everything here"


_FLOATS: Any = sys.float_info.max  # an integer of hundreds of digits is a finite number, and no float


def _check_coefficients(field: str, value: object) -> str | tuple:
    """A known name, one (a, b, c) for every step, or one such triple per step."""
    if isinstance(value, str):
        return check_choice(field, value, COEFFICIENTS)
    shape = "use a known name, one triple (a, b, c), or one triple per step"
    if not isinstance(value, Sequence) or not value:
        raise config_error(field, value, "is neither a name nor a sequence of coefficients", shape)
    if all(isinstance(x, numbers.Real) and not isinstance(x, bool) for x in value):
        return _triple(field, value, shape)
    if not all(isinstance(row, Sequence) and not isinstance(row, str) for row in value):
        raise config_error(field, value, "mixes numbers with other things", shape)
    if len(value) > MAX_STEPS:
        raise config_error(field, value, f"has {len(value)} triples", f"give at most {MAX_STEPS}, one per step")
    return tuple(_triple(field, row, shape) for row in value)


def _triple(field: str, row: Sequence, shape: str) -> tuple[float, float, float]:
    if len(row) != 3:
        raise config_error(field, row, f"has {len(row)} coefficients where Newton-Schulz takes 3", shape)
    for x in row:
        if isinstance(x, bool) or not isinstance(x, numbers.Real) or not -_FLOATS <= x <= _FLOATS:
            raise config_error(field, row, "holds something that is not a finite number", shape)
    a, b, c = (float(x) for x in row)
    return a, b, c


def _check_limit(field: str, value: object) -> int | str:
    return "auto" if value == "auto" else check_integer(field, value, low=0)


def matches_adamw(adjust_lr: object) -> bool:
    """Whether updates that are scaled so have AdamW's root mean square, or a multiple of it, whatever their shape."""
    return adjust_lr == "match_rms_adamw" or (isinstance(adjust_lr, int | float) and not isinstance(adjust_lr, bool))


def _check_scale(field: str, value: object) -> str | float:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return check_real(field, value, positive=True)
    return check_choice(field, value, ("original", "match_rms_adamw", "spectral"))


@dataclass(frozen=True)
class NSConfig(Checked):
    """Newton-Schulz orthogonalization.

    Attributes:
        steps: iterations; None for as many as ``coefficients`` has, which is 10 for "deepseek_v4", 5 for the other
            names and for one triple. Fewer steps cut a longer set, more repeat its last triple; "deepseek_v4" and
            triples per step are taken whole or not at all.
        coefficients: a name out of :data:`compile_muon.kernels.COEFFICIENTS` (which gives their sources), one triple
            (a, b, c), or one triple per step.
        method: "standard" iterates on the matrix, "gram" on its Gram matrix, "auto" lets the cost formulas choose.
        dtype: compute dtype "bfloat16" | "float16" | "float32" | "float64", or "auto". torch dtypes and short names
            ("bf16") are accepted and stored as the canonical name.
        eps: lower bound of the Frobenius norm the matrix is divided by; 0 for directions that do not depend on scale.
        backend: "aten", "triton", "quack", or "auto" for whichever is expected to be fastest.
        memory_limit: bytes that Newton-Schulz on a GPU may hold beside inputs and results; one matrix is always taken.
            "auto" for what backward has held and holds no more, 1 GiB at least.
    """

    steps: int | None = setting(None, check_integer, none=True, low=1, high=MAX_STEPS)
    coefficients: str | tuple = setting("jordan", _check_coefficients)
    method: str = setting("auto", check_choice, allowed=FORMS)
    dtype: str = setting("auto", check_dtype_name, extra=("auto",))
    eps: float = setting(1e-7, check_real)
    backend: str = setting("auto", check_choice, allowed=BACKENDS)
    memory_limit: int | str = setting("auto", _check_limit)

    def contradictions(self) -> Iterator[ConfigError]:
        """A schedule that is only right as a whole, and a number of steps that it does not have."""
        if isinstance(self.coefficients, str):
            chosen = COEFFICIENTS[self.coefficients]
            length, problem = len(chosen.steps) if chosen.fixed_length else None, "is a schedule of {} steps, not {}"
        else:
            triples = isinstance(self.coefficients[0], tuple)
            length, problem = len(self.coefficients) if triples else None, "has {} triples for {} steps"
        if length is not None and self.steps not in (None, length):
            problem, remedy = problem.format(length, self.steps), f"set ns_steps={length}, or leave ns_steps out"
            yield config_error("NSConfig.coefficients", self.coefficients, problem, remedy)


@dataclass(frozen=True)
class MuonConfig(Checked):
    """The Muon half of the optimizer.

    Attributes:
        lr: learning rate before :func:`compile_muon.model.assignment.lr_scale`.
        momentum: EMA factor of gradients.
        nesterov: whether the direction looks one momentum step ahead.
        weight_decay: decoupled, multiplied by the unadjusted lr.
        adjust_lr: "original" | "match_rms_adamw" | "spectral", a number in place of the 0.2 of "match_rms_adamw", or
            None for the method's own: "original" but of AdaMuon.
        momentum_dtype: what momenta are kept in: "bfloat16" (rounded by chance), "8bit", or None for as master weights.
        qk_clip: largest logit of attention that a step leaves as it is (MuonClip), None for any.
        qk_clip_alpha: how much of the scaling is of the queries; the rest is of the keys.
        ns: how the direction is orthogonalized.
    """

    lr: float | torch.Tensor = setting(0.02, check_rate)
    momentum: float = setting(0.95, check_real, below=1.0)
    nesterov: bool = setting(True, check_boolean)
    weight_decay: float = setting(0.1, check_real)
    adjust_lr: str | float | None = setting(None, _check_scale, none=True)
    momentum_dtype: str | None = setting(None, check_choice, none=True, allowed=("bfloat16", "8bit"))
    qk_clip: float | None = setting(None, check_real, none=True, positive=True)
    qk_clip_alpha: float = setting(0.5, check_real, below=1.0)
    ns: NSConfig = setting(NSConfig(), check_instance, kind=NSConfig)

    @property
    def matches_adamw(self) -> bool:
        """Whether updates have the same root mean square whatever the shape, as AdamW's have."""
        return matches_adamw(self.adjust_lr)


@dataclass(frozen=True)
class AdamWConfig(Checked):
    """The half of the optimizer that is no matrices; fields mean what they mean in ``torch.optim.AdamW``.

    Attributes:
        lr, betas, eps, weight_decay: as there.
        decay_vectors: whether norms, biases and other vectors decay, too, as every parameter does in torch and
            DeepSpeed; else they are in a group of their own.
    """

    lr: float | torch.Tensor = setting(3e-4, check_rate)
    betas: tuple[float, float] = setting((0.9, 0.95), check_pair)
    eps: float = setting(1e-8, check_real)
    weight_decay: float = setting(0.1, check_real)
    decay_vectors: bool = setting(False, check_boolean)


def _check_clipping(field: str, value: object) -> float:
    if value == 0 and not isinstance(value, bool):
        raise config_error(field, value, "would erase every gradient", "use None")
    return check_real(field, value, positive=True)


@dataclass(frozen=True)
class ZeroConfig(Checked):
    """What is sharded, when Muon's directions are made, and in which dtypes.

    Attributes:
        stage: 0 replicates all, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        update: "auto" makes directions in backward, as speculations: ``step()`` uses one only if ``.grad`` still is the
            gradient it was made from, and after several steps in a row that threw them away no more are made.
            "backward" always makes them, "step" never.
        gradient_accumulation_steps: backwards per step. None when only the loop knows: then as many are expected as
            the last step had.
        gradient_clipping: maximal global gradient norm, or None for no clipping.
        nonfinite: "error" raises on inf or NaN gradients, "skip" skips the step on every rank.
        max_skipped_steps: how many steps in a row ``nonfinite="skip"`` may leave out before NonFiniteError is raised.
        checks: when the host reads what a step's checks found, "in_step", which waits for the device, or "next_step":
            until then the device writes only what they allow, and errors come with the next step. None for "in_step"
            with ``nonfinite="error"``, "next_step" with "skip". A step whose own course depends on what was found
            waits for it either way: ``gradient_clipping`` of directions made in backward, edited gradients, pipelines.
        check_replicas: every how many steps what all ranks hold a copy of (stages 0 to 2: weights, at 0 also optimizer
            state) is compared, or None for never.
        param_dtype: dtype weights are gathered and used in; None keeps the parameter's own.
        reduce_dtype: dtype gradients are reduced in; None keeps the gradient's own.
        master_dtype: dtype of the trained parameters themselves, their gradients and optimizer state; None for float32
            where the model is in half precision, and else what the model is in.
        shard_state_over: of a mesh with replicas, what master weights, gradients and optimizer state are cut over:
            "shard", so that each replica holds all of them (HSDP), or "all" ranks (HFSDP).
        offload: where optimizer state is between steps: "cpu", ``{"device": "nvme", "nvme_path": ...}``, or an
            :class:`OffloadConfig`; None for beside the parameters.
        offload_param: "cpu" for shards of weights in host memory, from which stage 3 gathers; None for on the device.
        communicators: whether weights, gradients and Newton-Schulz travel by communicators of their own: "separate",
            "shared", or "auto": separate on NCCL, which serves one collective of a communicator after another.
    """

    stage: int = setting(2, check_integer, low=0, high=3)
    update: str = setting("auto", check_choice, allowed=("auto", "backward", "step"))
    gradient_accumulation_steps: int | None = setting(1, check_integer, none=True, low=1)
    gradient_clipping: float | None = setting(None, _check_clipping, none=True)
    nonfinite: str = setting("error", check_choice, allowed=("error", "skip"))
    max_skipped_steps: int = setting(100, check_integer, low=1)
    checks: str | None = setting(None, check_choice, none=True, allowed=("in_step", "next_step"))
    check_replicas: int | None = setting(None, check_integer, none=True, low=1)
    param_dtype: torch.dtype | None = setting(None, check_dtype, none=True)
    reduce_dtype: torch.dtype | None = setting(None, check_dtype, none=True)
    master_dtype: torch.dtype | None = setting(None, check_dtype, none=True)
    shard_state_over: str = setting("shard", check_choice, allowed=("shard", "all"))
    communicators: str = setting("auto", check_choice, allowed=("auto", "shared", "separate"))
    offload: OffloadConfig | None = setting(None, check_offload, none=True)
    offload_param: str | None = setting(None, check_offload_param, none=True)

    @property
    def checks_read(self) -> str:
        """``checks``, with the default that ``nonfinite`` gives."""
        return self.checks or ("next_step" if self.nonfinite == "skip" else "in_step")

    @property
    def micro_batches(self) -> int:
        """Backwards per step as far as they are known ahead: one where only the loop knows."""
        return self.gradient_accumulation_steps or 1

    def contradictions(self) -> Iterator[ConfigError]:
        """A comparison of what does not exist."""
        if self.check_replicas is not None and self.stage == 3:
            problem = "compares what ranks hold copies of, and at stage 3 they hold none"
            remedy = "leave it out, or use stage 2"
            yield config_error("ZeroConfig.check_replicas", self.check_replicas, problem, remedy)
        if self.offload_param and self.stage != 3:
            problem = f"is of weights that are gathered for each use, and at stage {self.stage} they are resident"
            yield config_error("ZeroConfig.offload_param", self.offload_param, problem, "use stage 3, or leave it out")
        if self.offload_param and self.shard_state_over == "all":
            problem = 'is of what gathers start from, and shard_state_over = "all" keeps copies of that on the device'
            remedy = 'use shard_state_over = "shard", or leave it out'
            yield config_error("ZeroConfig.offload_param", self.offload_param, problem, remedy)


def _check_axis(field: str, value: object) -> int:
    return -1 if value == -1 and not isinstance(value, bool) else check_integer(field, value, low=1)


@dataclass(frozen=True)
class MeshConfig(Checked):
    """How many ranks there are along each axis; -1, of one axis, for the rest.

    Attributes:
        replicate: groups that hold the same weights; gradients are averaged over them too (HSDP).
        shard: ranks that the parameters, or what the stage says, are cut over.
        tensor: ranks that have parts of the same matrices, as ``parallelize_module`` cuts them, and the same data.
    """

    replicate: int = setting(1, _check_axis)
    shard: int = setting(-1, _check_axis)
    tensor: int = setting(1, _check_axis)

    def contradictions(self) -> Iterator[ConfigError]:
        """Only one axis can be the rest."""
        rest = [f.name for f in fields(self) if getattr(self, f.name) == -1]
        if len(rest) > 1:
            problem = f"and {rest[1]} are both the rest"
            yield config_error(f"MeshConfig.{rest[0]}", -1, problem, "give the size of one")


@dataclass(frozen=True)
class ExpertParallelConfig(Checked):
    """Experts of a Transformers model, each on one of several ranks.

    Attributes:
        size: ranks that the experts of a layer are spread over; divides the ranks along ``shard``, and the experts.
        capacity_factor: None to compute every token; else how many times the mean an expert takes of a rank's tokens,
            the most probable ones.
    """

    size: int = setting(1, check_integer, low=1)
    capacity_factor: float | None = setting(None, check_real, none=True, positive=True)


def _check_stacks(field: str, value: object) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str) else value
    if not isinstance(paths, Sequence) or not paths or not all(isinstance(path, str) for path in paths):
        raise config_error(field, value, "is no list of paths", 'write those of ModuleLists, ["model.layers"]')
    return tuple(paths)


@dataclass(frozen=True)
class SequenceParallelConfig(Checked):
    """Positions of a sequence, each on one of several ranks.

    Attributes:
        size: ranks that share a sequence, and have the same batch; divides the ranks along ``shard``, and the heads.
        blocks: paths of the ``ModuleList`` of blocks; None for that of the language model, of Transformers.
        joined: whether positions are joined behind the last block; None: unless the loss is Transformers' causal one.
        attention: "heads" where ranks exchange positions for heads, "ring" where keys and values go around, "both"
            where as many ranks as divide the heads exchange these, and keys and values go around the others.
        inputs: "whole" where every rank is given all positions of the batch, "sharded" where it is given its own part.
        check: whether the first step compares what ranks compute with what each computes by itself.
    """

    size: int = setting(1, check_integer, low=1)
    blocks: tuple[str, ...] | None = setting(None, _check_stacks, none=True)
    joined: bool | None = setting(None, check_boolean, none=True)
    check: bool = setting(True, check_boolean)
    attention: str = setting("heads", check_choice, allowed=("heads", "ring", "both"))
    inputs: str = setting("whole", check_choice, allowed=("whole", "sharded"))

    def contradictions(self) -> Iterator[ConfigError]:
        """Blocks that nothing is cut in."""
        if self.size == 1 and self.blocks is not None:
            problem = "says what to cut, and size is 1"
            yield config_error("SequenceParallelConfig.blocks", self.blocks, problem, "give a size, or leave it out")
        if self.inputs == "sharded" and self.joined:
            problem = "would be all positions, where ranks are given, and have labels of, their own"
            yield config_error("SequenceParallelConfig.joined", True, problem, "leave it out")
        if self.inputs == "sharded" and self.attention != "heads":
            problem = "gives ranks two pieces of a sequence, and loaders cut it into one for each"
            yield config_error("SequenceParallelConfig.attention", self.attention, problem, 'use inputs="whole"')


@dataclass(frozen=True, kw_only=True)
class CompileConfig(CompileOptions):
    """Whether and how ``initialize`` compiles the model in place; beside the options of the backend there are these.

    Attributes:
        enabled: compile at all.
        fullgraph, dynamic: passed to ``torch.compile`` as they are.
    """

    enabled: bool = setting(False, check_boolean)
    fullgraph: bool = setting(False, check_boolean)
    dynamic: bool | None = setting(None, check_boolean, none=True)


@dataclass(frozen=True)
class Config(Checked):
    """Everything compile_muon can be told, resolved and immutable.

    Attributes:
        muon_params: which parameters get Muon; a predicate ``f(name, param)``, a tuple of fnmatch patterns, or None
            for the rules of :mod:`compile_muon.model.assignment`.
        algorithm: "muon", or "adamw" to train everything by AdamW on the same sharded engine, as a baseline. What only
            Muon reads must then keep its default.
        mesh: sizes of the axes, None for one axis of all ranks. Not with a ``mesh`` given beside.
        expert_parallel: whether experts of a Transformers model are spread over ranks.
        machine: name or file of the machine that the cost model decides for, the same on every rank; None for "h100" on
            GPUs and "cpu" on CPUs.
        method, auxiliary: names out of :data:`compile_muon.passes.methods.METHODS`: what trains the matrices ("muon",
            "normuon", "soap", ...), and what all else ("adamw", "lion").
        rates: of methods, by name, where they are no fields of ``muon`` and ``adamw``: ``{"beta2": 0.95}``.
        groups: parameters with a method or rates of their own: ``{pattern: {"method": ..., "lr": ...}}``, or a list of
            mappings with ``params`` (patterns, a predicate, or parameters as ``torch.optim`` takes them; all trained
            ones must then be in one).
        muon_views: what of a parameter is a matrix by itself, by pattern: ``{"heads": 8}``, ``{"split": [8, 2, 2]}`` of
            its rows, with ``"dim": 1`` of its columns; ``param.muon_view`` says the same.
        per_head_muon: so for each head of the attention modules that are known by their names.
        split_fused: so for fused queries, keys and values, and for fused gates.
        scheduler: how the rates of both halves change from step to step, or None.
    """

    muon: MuonConfig = setting(MuonConfig(), check_instance, kind=MuonConfig)
    adamw: AdamWConfig = setting(AdamWConfig(), check_instance, kind=AdamWConfig)
    zero: ZeroConfig = setting(ZeroConfig(), check_instance, kind=ZeroConfig)
    compile: CompileConfig = setting(CompileConfig(), check_instance, kind=CompileConfig)
    muon_params: Callable[[str, torch.nn.Parameter], Any] | tuple[str, ...] | None = setting(
        None, check_patterns, none=True
    )
    algorithm: str = setting("muon", check_choice, allowed=ALGORITHMS)
    mesh: MeshConfig | None = setting(None, check_instance, kind=MeshConfig, none=True)
    expert_parallel: ExpertParallelConfig = setting(ExpertParallelConfig(), check_instance, kind=ExpertParallelConfig)
    sequence_parallel: SequenceParallelConfig = setting(
        SequenceParallelConfig(), check_instance, kind=SequenceParallelConfig
    )
    machine: str | None = setting(None, check_machine, none=True)
    method: str = setting("muon", check_method, kind=MatrixMethod)
    auxiliary: str = setting("adamw", check_method, kind=ElementMethod)
    rates: tuple[tuple[str, Any], ...] = setting((), check_own_rates)
    groups: tuple[GroupConfig, ...] = setting((), check_groups)
    muon_views: tuple[tuple[str, Any], ...] = setting((), check_views)
    per_head_muon: bool = setting(False, check_boolean)
    split_fused: bool = setting(False, check_boolean)
    scheduler: ScheduleConfig | None = setting(None, check_instance, kind=ScheduleConfig, none=True)

    def contradictions(self) -> Iterator[ConfigError]:
        """Settings that nothing would read, or that exclude each other."""
        if self.compile.cuda_graphs and self.zero.offload_param:
            problem = "replays a forward that begins ahead of the copies from host memory (offload_param)"
            yield config_error("compile.cuda_graphs", True, problem, "leave one of them out")
        shared = self.sequence_parallel
        if shared.size > 1 and self.muon.qk_clip is not None and (shared.attention != "heads" or shared.blocks):
            problem = "notes logits where ranks exchange heads of Transformers' attention"
            remedy = 'leave one of the two out, or sequence_parallel.blocks, and use "attention": "heads"'
            yield config_error("MuonConfig.qk_clip", self.muon.qk_clip, problem, remedy)
        if self.algorithm == "muon":
            return
        for name in ("muon", "muon_params", "method"):
            if (value := getattr(self, name)) != getattr(Config, name):
                yield config_error(f"Config.{name}", value, NO_MUON, 'leave it out, or set algorithm="muon"')
        if self.zero.update == "backward":
            problem = f"{NO_MUON}, and AdamW updates in step()"
            yield config_error("ZeroConfig.update", self.zero.update, problem, 'use update="auto" or "step"')


# -------------------------------------------------------------------------- MuonZero's keyword arguments

VIEWS = ("muon_views", "per_head_muon", "split_fused")
#: MuonZero keyword argument -> (dataclass, field): the one table Python and JSON settings go through.
ARGUMENTS: dict[str, tuple[type[Checked], str]] = {
    prefix + f.name: (owner, f.name)
    for owner, prefix in ((MuonConfig, ""), (AdamWConfig, "adamw_"), (NSConfig, "ns_"), (ZeroConfig, ""))
    for f in fields(owner)
    if (owner, f.name) != (MuonConfig, "ns")
} | {name: (Config, name) for name in ("muon_params", "machine", "method", "auxiliary", "rates", "groups", *VIEWS)}

#: and those that no config can say
_OBJECTS = ("mesh", "norm_group", "weights", "init", "extensions")

C = TypeVar("C", bound=Checked)


class Given:
    """Arguments of ``MuonZero`` as one source gives them, each under the name it has there.

    Attributes:
        values: argument -> canonical value, of those that were right.
        names: argument -> the name the user knows it by.
        mistakes: what was wrong so far.
        hints: paths of a config's keys that have no effect here.
        remarks: other warnings.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.mistakes = Mistakes()
        self.hints: list[str] = []
        self.remarks: list[str] = []

    def put(self, argument: str, value: object, name: str) -> None:
        """Check a setting and keep it; a second value for one argument must agree with the first."""
        owner, field = ARGUMENTS[argument]
        with self.mistakes.collected():
            canonical = owner.checked(field, value, name)
            known = self.values.setdefault(argument, canonical)
            first = self.names.setdefault(argument, name)
            if known != canonical:
                raise config_error(name, canonical, f"contradicts {first} = {known!r}", "keep one of the two")

    def best(self, **rest: Any) -> Config:
        """The ``Config`` of what was put, without what contradicts the rest of it, which is one more mistake.

        Args:
            rest: fields of it that are no arguments of ``MuonZero``.
        """
        paths = {f"{owner.__name__}.{field}": argument for argument, (owner, field) in ARGUMENTS.items()}
        while True:
            try:
                muon = self._build(MuonConfig, ns=self._build(NSConfig))
                adamw, zero = self._build(AdamWConfig), self._build(ZeroConfig)
                return self._build(Config, muon=muon, adamw=adamw, zero=zero, **rest)
            except ConfigError as error:
                before = len(self.values)
                for each in error.errors:
                    argument = paths.get(each.field, each.field)
                    self.mistakes.add(each.renamed(self.names.get(argument, argument)))
                    self.values.pop(argument, None)
                if len(self.values) == before:  # it lies in `rest`
                    return Config()

    def _build(self, kind: type[C], **rest: Any) -> C:
        own = {field: argument for argument, (owner, field) in ARGUMENTS.items() if owner is kind}
        return kind(**{f: self.values[a] for f, a in own.items() if a in self.values}, **rest)


def config_from_kwargs(**kwargs: Any) -> Config:
    """The ``Config`` of ``MuonZero(model, **kwargs)``; what is not given keeps its default.

    Raises:
        ConfigError: naming every argument that is wrong, unknown ones among them (with the nearest known one).

    >>> config_from_kwargs(lr=0.01, ns_steps=6, stage=3).muon.ns.steps
    6
    """
    given = Given()
    for name, value in kwargs.items():
        if name in ARGUMENTS:
            given.put(name, value, name)
        else:
            problem = "is not an argument of MuonZero"
            if name in OF_OPTIMIZERS:
                given.mistakes.add(config_error(name, value, problem, OF_OPTIMIZERS[name]))
            else:
                given.mistakes.add(unknown_name(name, value, name, ARGUMENTS, problem, _OBJECTS))
    config = given.best()
    given.mistakes.raise_all()
    return config
