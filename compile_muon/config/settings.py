"""Configuration: frozen dataclasses, checked when built; a setting's default and range stand here and nowhere else.

A setting reaches a dataclass by one of three sources, each with its own name in errors:

* directly, ``ZeroConfig(stage=3)``: ``ZeroConfig.stage``;
* as a ``MuonZero`` keyword argument, :func:`config_from_kwargs`: ``stage``;
* from JSON or a dict in DeepSpeed's vocabulary, :func:`compile_muon.load_config`: ``zero_optimization.stage`` (rules in
  :mod:`compile_muon.config.deepspeed`).

Docstrings of the dataclasses feed docs/reference/configuration.md (``docs/settings.py``).
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from compile_muon.config import accept
from compile_muon.config.checked import Checked, Mistakes, setting
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

C = TypeVar("C", bound=Checked)

ALGORITHMS = ("muon", "adamw")
NO_MUON = "belongs to Muon, while AdamW trains everything here"


SCALES = ("original", "match_rms_adamw", "spectral")
_FLOATS: Any = sys.float_info.max  # float() overflows on larger integers


@accept.takes(lambda: f"{accept.taken(accept.choice, allowed=COEFFICIENTS)}, a triple, or a triple per step")
def _check_coefficients(field: str, value: Any) -> str | tuple:
    """Accept a known name, one triple (a, b, c) for every step, or one triple per step."""
    if isinstance(value, str):
        return accept.choice(field, value, COEFFICIENTS)
    remedy = "use a known name, one triple (a, b, c), or one triple per step"
    accept.of_type(field, value, Sequence, "a name or triples", remedy)
    if len(value) > MAX_STEPS:
        raise config_error(field, value, f"has {len(value)} triples", f"give at most {MAX_STEPS}, one per step")
    is_single = any(isinstance(x, numbers.Real) for x in value)
    triples = []
    for row in [value] if is_single or not value else value:
        if not isinstance(row, Sequence) or len(row) != 3 or not all(map(_is_coefficient, row)):
            raise config_error(field, row, "is no triple of finite numbers, as Newton-Schulz takes", remedy)
        triples.append(tuple(float(x) for x in row))
    return triples[0] if is_single else tuple(triples)


def _is_coefficient(x: object) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool) and -_FLOATS <= x <= _FLOATS


def matches_adamw(adjust_lr: object) -> bool:
    """Return whether updates scaled by `adjust_lr` have the same root mean square whatever their shape, as AdamW's."""
    return adjust_lr == "match_rms_adamw" or (isinstance(adjust_lr, int | float) and not isinstance(adjust_lr, bool))


@accept.takes('"original", "match_rms_adamw", "spectral", or a number above 0')
def _check_scale(field: str, value: object) -> str | float:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return accept.real(field, value, positive=True)
    return accept.choice(field, value, SCALES)


@dataclass(frozen=True)
class NSConfig(Checked):
    """Newton-Schulz orthogonalization.

    Attributes:
        steps: iterations; None for 10 with "deepseek_v4", 4 with "four_steps", one for each triple of a list, else 5.
            Another number is an error for these three; other sets are cut, or repeat their last triple.
        coefficients: one triple (a, b, c) is for every step; :data:`compile_muon.kernels.COEFFICIENTS` gives the
            sources of the named sets. "cans" is an error in bfloat16, where it diverges.
        method: "standard" iterates on the matrix, "gram" on its Gram matrix; "auto" takes the cheaper one where both
            are about equally accurate (docs/reference/kernels.md#accuracy). "gram" where it is unstable in the dtype is
            an error.
        dtype: compute dtype (docs/reference/kernels.md#accuracy); "auto" is float16 on CUDA (float32 for coefficients
            that are unstable in it), else float32. "bfloat16" with ``method`` "standard" has torch.optim.Muon's bits.
        eps: least Frobenius norm that a matrix is divided by, as in torch.optim.Muon: gradients with a smaller norm get
            shorter directions.
        backend: "aten" is cuBLAS on GPUs; "auto" takes what is expected to be fastest
            (docs/reference/kernels.md#what-runs-where). "triton" is an error where it is not installed, and
            in other dtypes than float16 and bfloat16.
        memory_limit: bytes that Newton-Schulz on a GPU may hold beside inputs and results; longer lists of matrices are
            split, down to one. "auto" is what backward has freed, at least 1 GiB.
    """

    steps: int | None = setting(None, accept.integer, none=True, low=1, high=MAX_STEPS)
    coefficients: str | tuple = setting("jordan", _check_coefficients)
    method: str = setting("auto", accept.choice, allowed=FORMS)
    dtype: str = setting("auto", accept.dtype_name, extra=("auto",))
    eps: float = setting(1e-7, accept.real)
    backend: str = setting("auto", accept.choice, allowed=BACKENDS)
    memory_limit: int | str = setting("auto", accept.integer, also="auto", low=0)

    def contradictions(self) -> Iterator[ConfigError]:
        if isinstance(self.coefficients, str):
            chosen = COEFFICIENTS[self.coefficients]
            length = len(chosen.steps) if chosen.fixed_length else None
        else:
            length = len(self.coefficients) if isinstance(self.coefficients[0], tuple) else None
        if length is not None and self.steps not in (None, length):
            remedy = f"set ns_steps={length}, or leave ns_steps out"
            yield self.contradiction("coefficients", f"has {length} triples for {self.steps} steps", remedy)


@dataclass(frozen=True)
class MuonConfig(Checked):
    """The Muon half of the optimizer.

    Attributes:
        lr: rate of Muon, before ``adjust_lr``.
        momentum: factor of Muon's moving average of gradients.
        nesterov: look one momentum step ahead.
        weight_decay: decoupled decay of Muon's matrices, times ``lr`` before ``adjust_lr``.
        adjust_lr: scale of ``lr`` by shape: "original" √max(1, rows/cols), "match_rms_adamw" 0.2·√max(rows, cols),
            "spectral" √(rows/cols); a number replaces that 0.2, an update's root mean square over ``lr``. None is
            "match_rms_adamw" for AdaMuon, else "original".
        momentum_dtype: dtype of momenta (docs/how-to/offload.md#momenta-in-fewer-bits); None for that of master
            weights. An error where these are in half precision; "8bit" also for slices along columns.
        qk_clip: largest attention logit that MuonClip (docs/how-to/methods.md#muonclip) leaves to a head; None for any.
            The model has to be compiled.
        qk_clip_alpha: queries' power of that scaling; keys take the rest.
        ns: how the direction is orthogonalized.
    """

    lr: float | torch.Tensor = setting(0.02, accept.rate)
    momentum: float = setting(0.95, accept.real, below=1.0)
    nesterov: bool = setting(True, accept.boolean)
    weight_decay: float = setting(0.1, accept.real)
    adjust_lr: str | float | None = setting(None, _check_scale, none=True)
    momentum_dtype: str | None = setting(None, accept.choice, none=True, allowed=("bfloat16", "8bit"))
    qk_clip: float | None = setting(None, accept.real, none=True, positive=True)
    qk_clip_alpha: float = setting(0.5, accept.real, below=1.0)
    ns: NSConfig = setting(NSConfig(), accept.instance, kind=NSConfig)


@dataclass(frozen=True)
class AdamWConfig(Checked):
    """The AdamW half of the optimizer: all parameters but Muon's matrices; fields as in ``torch.optim.AdamW``.

    Attributes:
        lr: rate of AdamW.
        betas: as in torch.optim.AdamW.
        eps: as in torch.optim.AdamW.
        weight_decay: decoupled decay of all but Muon's matrices.
        decay_vectors: whether vectors (norms, biases) decay too, as in torch and DeepSpeed. Parameters with
            ``param._no_weight_decay = True`` never do.
    """

    lr: float | torch.Tensor = setting(3e-4, accept.rate)
    betas: tuple[float, float] = setting((0.9, 0.95), accept.pair)
    eps: float = setting(1e-8, accept.real)
    weight_decay: float = setting(0.1, accept.real)
    decay_vectors: bool = setting(False, accept.boolean)


@dataclass(frozen=True)
class ZeroConfig(Checked):
    """Sharding, dtypes, and when Muon's directions are computed.

    Attributes:
        stage: ZeRO stage: 0 replicates all, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        update: when directions are made; never changes results. "step": in ``step()``. "backward": in the compiled
            backward, as speculations (docs/why/ledger.md), which ``step()`` discards where ``.grad`` has changed since.
            "auto": in backward, until several steps in a row discard them.
        gradient_accumulation_steps: backwards per ``step()``; None expects as many as the last step had. Divide the
            loss in the loop.
        gradient_clipping: largest global gradient norm; None, in a config also 0, for no clipping.
        nonfinite: on an inf or NaN gradient: "error" raises NonFiniteError and names the parameter, "skip" leaves the
            step out on every rank; rank 0 logs the first five skipped steps, and their number at the end.
        max_skipped_steps: steps in a row that "skip" may leave out before NonFiniteError is raised.
        checks: when the host reads what a step's checks found: "in_step", which waits for the device, or "next_step",
            without a wait (docs/reference/host-time.md#no-wait-in-a-step), so that errors come with the next step. None
            is "next_step" where ``nonfinite`` is "skip", else "in_step".
        check_replicas: every how many steps ranks compare their copies of weights, at stage 0 of optimizer state too;
            None for never. A difference is a LedgerError that names parameter and ranks. An error at stage 3.
        param_dtype: dtype weights are gathered and used in; None for each parameter's own.
        reduce_dtype: dtype gradients travel in; None is the one weights are used in.
        master_dtype: dtype of trained parameters, gradients and optimizer state; None is float32 for a model in half
            precision, else the model's. "bfloat16" halves memory and rounds small updates away, with a warning.
        shard_state_over: what masters, gradients and optimizer state are cut over: "shard" (HSDP), or "all", over
            ``replicate`` too, HFSDP (docs/how-to/meshes.md#state-over-all-ranks).
        communicators: whether gathers, reductions and exchanges have "separate" communicators, so that none waits
            behind another, or one that is "shared" and takes less memory; "auto" is "separate" on NCCL.
        offload: where optimizer state is between steps (docs/how-to/offload.md); None for on the device.
        offload_param: "cpu" keeps the shards of weights of stage 3 in host memory (docs/how-to/offload.md#weights);
            None: on the device.
    """

    stage: int = setting(2, accept.integer, low=0, high=3)
    update: str = setting("auto", accept.choice, allowed=("auto", "backward", "step"))
    gradient_accumulation_steps: int | None = setting(1, accept.integer, none=True, low=1)
    gradient_clipping: float | None = setting(None, accept.real, none=True, positive=True)
    nonfinite: str = setting("error", accept.choice, allowed=("error", "skip"))
    max_skipped_steps: int = setting(100, accept.integer, low=1)
    checks: str | None = setting(None, accept.choice, none=True, allowed=("in_step", "next_step"))
    check_replicas: int | None = setting(None, accept.integer, none=True, low=1)
    param_dtype: torch.dtype | None = setting(None, accept.dtype, none=True)
    reduce_dtype: torch.dtype | None = setting(None, accept.dtype, none=True)
    master_dtype: torch.dtype | None = setting(None, accept.dtype, none=True)
    shard_state_over: str = setting("shard", accept.choice, allowed=("shard", "all"))
    communicators: str = setting("auto", accept.choice, allowed=("auto", "shared", "separate"))
    offload: OffloadConfig | None = setting(None, check_offload, none=True)
    offload_param: str | None = setting(None, check_offload_param, none=True)

    @property
    def checks_read(self) -> str:
        """``checks``, where None is resolved by ``nonfinite``."""
        return self.checks or ("next_step" if self.nonfinite == "skip" else "in_step")

    @property
    def micro_batches(self) -> int:
        """Expected backwards per step; 1 where only the loop knows the number."""
        return self.gradient_accumulation_steps or 1

    def contradictions(self) -> Iterator[ConfigError]:
        if self.check_replicas is not None and self.stage == 3:
            problem = "compares what ranks hold copies of, and at stage 3 they hold none"
            yield self.contradiction("check_replicas", problem, "leave it out, or use stage 2")
        if self.offload_param and self.stage != 3:
            problem = f"is of weights that are gathered for each use, and at stage {self.stage} they are resident"
            yield self.contradiction("offload_param", problem, "use stage 3, or leave it out")
        if self.offload_param and self.shard_state_over == "all":
            problem = 'is of what gathers start from, and shard_state_over = "all" keeps copies of that on the device'
            yield self.contradiction("offload_param", problem, 'use shard_state_over = "shard", or leave it out')


@dataclass(frozen=True)
class MeshConfig(Checked):
    """Sizes of the mesh axes; one may be -1, for all remaining ranks.

    Attributes:
        replicate: groups of ranks that hold the same shards (HSDP); -1 for as many as there are.
        shard: ranks in each of them, over which the stage cuts; -1 for all the rest.
        tensor: ranks that have parts of the same matrices, as ``parallelize_module`` cut them, and the same batch.
    """

    replicate: int = setting(1, accept.integer, also=-1, low=1)
    shard: int = setting(-1, accept.integer, also=-1, low=1)
    tensor: int = setting(1, accept.integer, also=-1, low=1)

    def contradictions(self) -> Iterator[ConfigError]:
        rest = [f.name for f in fields(self) if getattr(self, f.name) == -1]
        if len(rest) > 1:
            yield self.contradiction(rest[0], f"and {rest[1]} are both the rest", "give the size of one")


@dataclass(frozen=True)
class ExpertParallelConfig(Checked):
    """Expert parallelism: each expert of a Transformers model is on one of several ranks.

    Attributes:
        size: ranks that share the experts of a Transformers mixture (docs/how-to/meshes.md#experts), taken from
            ``shard``; divides it, and the experts.
        capacity_factor: most tokens of a rank that an expert takes, as a multiple of their mean over experts; None
            computes every token.
    """

    size: int = setting(1, accept.integer, low=1)
    capacity_factor: float | None = setting(None, accept.real, none=True, positive=True)


@accept.takes("a path, or a list of them")
def _check_stacks(field: str, value: object) -> tuple[str, ...]:
    paths = [value] if isinstance(value, str) else value
    return accept.strings(field, paths, "paths", 'write those of ModuleLists, ["model.layers"]')


@dataclass(frozen=True)
class SequenceParallelConfig(Checked):
    """Sequence parallelism: each position of a sequence is on one of several ranks.

    Attributes:
        size: ranks that share a sequence (docs/how-to/sequence.md), and have the same batch, taken from ``shard``;
            divides it, and the heads.
        blocks: paths of the ``ModuleList`` of blocks; None for the language model's, of Transformers.
        joined: whether positions are joined behind the last block; None: unless the model computes Transformers' causal
            loss.
        check: whether the first step compares (docs/how-to/sequence.md#a-check-of-the-model) ranks' joint result with
            each rank's own.
        attention: what ranks exchange: positions for "heads", or with more ranks than heads
            (docs/how-to/sequence.md#more-ranks-than-heads) keys and values around a "ring", or "both".
        inputs: "whole" where every rank is given all positions of the batch, "sharded" where loaders cut
            (docs/how-to/sequence.md#loaders-that-cut) sequences themselves.
    """

    size: int = setting(1, accept.integer, low=1)
    blocks: tuple[str, ...] | None = setting(None, _check_stacks, none=True)
    joined: bool | None = setting(None, accept.boolean, none=True)
    check: bool = setting(True, accept.boolean)
    attention: str = setting("heads", accept.choice, allowed=("heads", "ring", "both"))
    inputs: str = setting("whole", accept.choice, allowed=("whole", "sharded"))

    def contradictions(self) -> Iterator[ConfigError]:
        if self.size == 1 and self.blocks is not None:
            yield self.contradiction("blocks", "says what to cut, and size is 1", "give a size, or leave it out")
        if self.inputs == "sharded" and self.joined:
            problem = "would be all positions, where ranks are given, and have labels of, their own"
            yield self.contradiction("joined", problem, "leave it out")
        if self.inputs == "sharded" and self.attention != "heads":
            problem = "gives ranks two pieces of a sequence, and loaders cut it into one for each"
            yield self.contradiction("attention", problem, 'use inputs="whole"')


@dataclass(frozen=True, kw_only=True)
class CompileConfig(CompileOptions):
    """The backend's options, and whether and how ``initialize`` compiles the model in place.

    Attributes:
        enabled: whether to compile at all.
        fullgraph: passed on to torch.compile.
        dynamic: passed on to torch.compile.
    """

    enabled: bool = setting(False, accept.boolean)
    fullgraph: bool = setting(False, accept.boolean)
    dynamic: bool | None = setting(None, accept.boolean, none=True)


@dataclass(frozen=True)
class Config(Checked):
    """The whole configuration, resolved and immutable.

    Attributes:
        muon: the half of matrices.
        adamw: the half of all else.
        zero: what is sharded, and how a step is made.
        compile: whether and how the model is compiled.
        muon_params: which matrices get Muon: ``["blocks.*.weight"]``, or ``f(name, param)``; None for the rules
            (docs/reference/configuration.md#who-gets-muon). A pattern that matches no trainable matrix is an error.
        algorithm: "muon", or "adamw" to train everything by AdamW on the same sharded engine, as a baseline. What only
            Muon reads must then keep its default.
        mesh: sizes of the axes, None for one axis of all ranks. Not with a ``mesh`` given beside.
        expert_parallel: whether experts of a Transformers model are spread over ranks.
        sequence_parallel: whether ranks share sequences.
        machine: the machine (docs/reference/machines.md) that the cost model decides for, the same on every rank; None
            for "h100" on GPUs, "cpu" on CPUs.
        method: the method (docs/how-to/methods.md) that trains the matrices.
        auxiliary: the method that trains all else.
        rates: rates of methods that have no argument here, for all groups: ``{"beta2": 0.95, "cautious_decay": True}``.
        groups: groups (docs/how-to/methods.md#groups) of parameters with a method or rates of their own: ``{pattern:
            {"method": ..., "lr": ...}}``. Errors: overlapping patterns; a pattern without a trained parameter; a rate
            that the method lacks.
        muon_views: views (docs/how-to/methods.md#views) by pattern, which parts of a parameter are matrices of their
            own: ``{"heads": 8}``. Errors: sizes that do not fit; a pattern that matches no matrix.
        per_head_muon: orthogonalize each head of the model's attention modules by itself; heads that do not divide are
            an error.
        split_fused: the same for fused queries, keys and values, and for fused gates.
        scheduler: how the rates of both halves change from step to step, or None.
    """

    muon: MuonConfig = setting(MuonConfig(), accept.instance, kind=MuonConfig)
    adamw: AdamWConfig = setting(AdamWConfig(), accept.instance, kind=AdamWConfig)
    zero: ZeroConfig = setting(ZeroConfig(), accept.instance, kind=ZeroConfig)
    compile: CompileConfig = setting(CompileConfig(), accept.instance, kind=CompileConfig)
    muon_params: accept.Patterns | None = setting(None, accept.patterns, none=True)
    algorithm: str = setting("muon", accept.choice, allowed=ALGORITHMS)
    mesh: MeshConfig | None = setting(None, accept.instance, kind=MeshConfig, none=True)
    expert_parallel: ExpertParallelConfig = setting(ExpertParallelConfig(), accept.instance, kind=ExpertParallelConfig)
    sequence_parallel: SequenceParallelConfig = setting(
        SequenceParallelConfig(), accept.instance, kind=SequenceParallelConfig
    )
    machine: str | None = setting(None, check_machine, none=True)
    method: str = setting("muon", check_method, kind=MatrixMethod)
    auxiliary: str = setting("adamw", check_method, kind=ElementMethod)
    rates: tuple[tuple[str, Any], ...] = setting((), check_own_rates)
    groups: tuple[GroupConfig, ...] = setting((), check_groups)
    muon_views: tuple[tuple[str, Any], ...] = setting((), check_views)
    per_head_muon: bool = setting(False, accept.boolean)
    split_fused: bool = setting(False, accept.boolean)
    scheduler: ScheduleConfig | None = setting(None, accept.instance, kind=ScheduleConfig, none=True)

    def contradictions(self) -> Iterator[ConfigError]:
        if self.compile.cuda_graphs and self.zero.offload_param:
            problem = "replays a forward that begins ahead of the copies from host memory (offload_param)"
            yield self.compile.contradiction("cuda_graphs", problem, "leave one of them out")
        shared = self.sequence_parallel
        if shared.size > 1 and self.muon.qk_clip is not None and (shared.attention != "heads" or shared.blocks):
            problem = "notes logits where ranks exchange heads of Transformers' attention"
            remedy = 'leave one of the two out, or sequence_parallel.blocks, and use "attention": "heads"'
            yield self.muon.contradiction("qk_clip", problem, remedy)
        if self.algorithm == "muon":
            return
        for name in ("muon", "muon_params", "method"):
            if getattr(self, name) != getattr(Config, name):
                yield self.contradiction(name, NO_MUON, 'leave it out, or set algorithm="muon"')
        if self.zero.update == "backward":
            problem = f"{NO_MUON}, and AdamW updates in step()"
            yield self.zero.contradiction("update", problem, 'use update="auto" or "step"')


# -------------------------------------------------------------------------- settings by name

VIEWS = ("muon_views", "per_head_muon", "split_fused")
#: MuonZero keyword argument -> (dataclass, field)
ARGUMENTS: dict[str, tuple[type[Checked], str]] = {
    prefix + f.name: (owner, f.name)
    for owner, prefix in ((MuonConfig, ""), (AdamWConfig, "adamw_"), (NSConfig, "ns_"), (ZeroConfig, ""))
    for f in fields(owner)
    if (owner, f.name) != (MuonConfig, "ns")
} | {name: (Config, name) for name in ("muon_params", "machine", "method", "auxiliary", "rates", "groups", *VIEWS)}
#: ``section.field`` -> (dataclass, field), of sections that only a config has: ``compile.enabled``
PARTS: dict[str, tuple[type[Checked], str]] = {
    f"{section}.{f.name}": (owner, f.name)
    for section, owner in (
        ("compile", CompileConfig),
        ("mesh", MeshConfig),
        ("expert_parallel", ExpertParallelConfig),
        ("sequence_parallel", SequenceParallelConfig),
    )
    for f in fields(owner)
}
#: setting -> (dataclass, field), for Python and JSON
SETTINGS = ARGUMENTS | PARTS

#: arguments of MuonZero that no config has
_OBJECTS = ("mesh", "norm_group", "weights", "init", "extensions")


class UserSettings:
    """The settings of one source, keyword arguments or a config, with everything to report about them."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}  # setting -> canonical value, of valid settings
        self.names: dict[str, str] = {}  # setting -> its name in the source
        self.mistakes = Mistakes()
        self.hints: list[str] = []  # paths of a config's keys that have no effect here
        self.remarks: list[str] = []  # texts of warnings
        self.source: Mapping[str, Any] = {}  # a config's keys and values as the user wrote them

    def put(self, setting: str, value: object, name: str) -> None:
        """Check and store a setting; a second value for the same setting must equal the first."""
        owner, field = SETTINGS[setting]
        with self.mistakes.collected():
            canonical = owner.checked(field, value, name)
            self.names.setdefault(setting, name)
            if self.values.setdefault(setting, canonical) != canonical:
                raise self.contradiction(setting, canonical, name)

    def contradiction(self, setting: str, value: object, name: str) -> ConfigError:
        """Return the error about a second value for a stored setting."""
        problem = f"contradicts {self.names[setting]} = {self.values[setting]!r}"
        return config_error(name, value, problem, "keep one of the two")

    def best(self, *, mesh: bool = False, **rest: Any) -> Config:
        """Build the ``Config`` of all stored settings; drop each setting that contradicts others, as a mistake.

        `mesh`: whether the source has a mesh section. `rest`: fields of ``Config`` that are not in ``SETTINGS``.
        """
        settings = {f"{owner.__name__}.{field}": setting for setting, (owner, field) in SETTINGS.items()}
        while True:
            try:
                if mesh:
                    rest["mesh"] = self._build(MeshConfig)
                return self._build(Config, **rest)
            except ConfigError as error:
                count_before = len(self.values)
                for field_error in error.errors:
                    setting = settings.get(field_error.field, field_error.field)
                    self.mistakes.add(field_error.renamed(self.names.get(setting, setting)))
                    self.values.pop(setting, None)
                if len(self.values) == count_before:  # no setting to drop: the contradiction is in `rest`
                    return Config()

    def _build(self, kind: type[C], **rest: Any) -> C:
        parts = {f.name: self._build(type(f.default)) for f in fields(kind) if isinstance(f.default, Checked)}
        kind_values = {
            field: self.values[s] for s, (owner, field) in SETTINGS.items() if owner is kind and s in self.values
        }
        return kind(**parts, **kind_values, **rest)


def config_from_kwargs(**kwargs: Any) -> Config:
    """Build the ``Config`` of ``MuonZero(model, **kwargs)``.

    Raises a ConfigError that names every invalid argument, and for an unknown one the nearest known name.

    >>> config_from_kwargs(lr=0.01, ns_steps=6, stage=3).muon.ns.steps
    6
    """
    user_settings = UserSettings()
    for name, value in kwargs.items():
        with user_settings.mistakes.collected():
            accept.known(name, value, name, ARGUMENTS, "an argument of MuonZero", _OBJECTS, OF_OPTIMIZERS)
            user_settings.put(name, value, name)
    config = user_settings.best()
    user_settings.mistakes.raise_all()
    return config
