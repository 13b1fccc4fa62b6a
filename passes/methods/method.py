"""The types of a method: a record, in a file of its own, of an optimizer's update rule.

The engine knows no method by name. It makes the states that a record names, has graphs run ``before`` on shards and
``whole`` on whole matrices, and in a step calls ``after`` on pieces, sums their facts, and calls ``finish``;
docs/how-to/methods.md writes one from the beginning.

Suffixes of names in methods are shapes: N matrices, the R rows and C columns of a piece, F facts, and 1.
"""

import functools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compile_muon.kernels import muon_momentum


@dataclass(frozen=True)
class Rate:
    """A hyperparameter that parameter groups hold, and that may change between steps."""

    name: str  # key in the group
    default: Any  # a number, a pair of numbers, or a flag; a user's value must have the same type
    below: float = math.inf  # numbers are at least 0 and less than this
    positive: bool = False  # 0 is not allowed
    most: float = math.inf  # numbers are not greater than this
    whole: bool = False  # numbers are integers
    meaning: str = ""  # description in the table of those rates that not all methods have


LR = Rate("lr", None)
MOMENTUM = Rate("momentum", None, below=1.0)
#: counted by the engine: a group holds the number of its past steps, methods see the number of the current one, from 1
STEP = Rate("step", 0, whole=True)
#: decoupled weight decay, and whether it is cautious: only where update and weight agree in sign (arXiv 2510.12402)
DECAY = (
    Rate("weight_decay", None),
    Rate(
        "cautious_decay", False, meaning="whether a weight decays only where the update has its sign (arXiv 2510.12402)"
    ),
)


#: values of State.each for states at the owner of a matrix -> their shape, in names of the matrix's sides
_SIDES = {"rows×rows": ("rows", "rows"), "cols×cols": ("cols", "cols"), "rows×cols": ("rows", "cols")}
_EACH = ("element", "row", "parameter", *_SIDES)


@dataclass(frozen=True)
class State:
    """An optimizer state that a method keeps of a parameter beside its momentum, zeros ahead of the first step.

    ============= ======================= ====================================== ==========================
    each          numbers of a matrix     placement                              written by
    ============= ======================= ====================================== ==========================
    "element"     rows x cols             sharded like the parameter             :attr:`MatrixMethod.after`
    "row"         rows                    sharded like the parameter             ``after``
    "parameter"   1, of element methods   on every rank                          :attr:`ElementMethod.step`
    "rows×rows"   rows x rows             at the owner of the matrix, whole      :attr:`MatrixMethod.whole`
    "cols×cols"   cols x cols             at the owner of the matrix, whole      ``whole``
    "rows×cols"   rows x cols             at the owner of the matrix, whole      ``whole``
    ============= ======================= ====================================== ==========================

    The first two are in the dtype of the master weights, "parameter" in fp32, the others in fp32 (fp64 where the master
    weights are). Element methods have states of "element" and "parameter" only.
    """

    name: str  # in the optimizer's state
    label: str  # in error messages
    each: str = "element"  # the unit that has one number, as in the table
    most: int | None = None  # a square state at an owner is 0 x 0 if its side is longer than this; None for no limit

    def __post_init__(self) -> None:
        if self.each not in _EACH:
            raise ValueError(f"State({self.name!r}).each = {self.each!r}: use one of {', '.join(map(repr, _EACH))}")

    @property
    def at_owner(self) -> bool:
        """True if the state is at the owner of a matrix."""
        return self.each in _SIDES

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the state's shape at the owner of a ``rows x cols`` matrix."""
        first, second = ({"rows": rows, "cols": cols}[side] for side in _SIDES[self.each])
        return (0, 0) if first == second and self.most is not None and first > self.most else (first, second)


@dataclass(frozen=True)
class Method:
    """The part of a record that matrix methods and element methods have in common."""

    name: str  # as users write it
    source: str  # paper or code that the formula comes from
    rates: tuple[Rate, ...]  # keys of the method's groups, in their order; a default of None is the configuration's
    states: tuple[State, ...] = ()  # beside the momentum
    # A CUDA graph reads learning rate, decay and momentum from the device. Those named here stay Python numbers: the
    # graph holds their values, and other values need another graph.
    constants: tuple[str, ...] = field(default=(), kw_only=True)

    def has(self, rate: str) -> bool:
        """Tell whether the method's groups hold a rate of this name."""
        return any(each.name == rate for each in self.rates)


@dataclass(frozen=True)
class Piece:
    """This rank's part of n matrices of one shape, [n, r, c], in fp32 (fp64 where the master weights are): r rows of
    each matrix, with all c columns, or with tensor parallelism this rank's columns."""

    direction: Tensor  # [n, r, c], of the results of MatrixMethod.whole
    weight: Tensor  # [n, r, c] of the master weights, before the step
    grad: Tensor  # [n, r, c] of the gradient; in ``after`` in the dtype of states
    # In ``after``, by name, before the step: [n, r, c] of a state of each "element", [n, r, 1] of each "row".
    states: Mapping[str, Tensor]
    sums: Tensor | None  # [n, r, k] of MatrixMethod.row_sums, in ``project`` of ``project_sums``, over whole rows
    # Of the group; ``step`` is a 0-dim fp32 tensor. Learning rate, decay and momentum are 0-dim fp64 tensors on the
    # device where a CUDA graph holds the step, else numbers.
    rates: Mapping[str, Any]
    rows: int  # of a whole matrix
    cols: int  # of a whole matrix
    projected: Tensor | None = None  # in ``after``, [n, r, k] of MatrixMethod.project_sums, over whole rows
    scale: float = 1.0  # of the learning rate, by the shape of a matrix


@dataclass(frozen=True)
class After:
    """The result of :attr:`MatrixMethod.after` for a piece."""

    direction: Tensor  # like the piece's: the weight moves along it
    states: Mapping[str, Tensor] = field(default_factory=dict)  # new states by name; the others stay
    # [n, k], sums over the piece's elements (:func:`summed`), which the engine adds up over a matrix's pieces in fp64.
    facts: Tensor | None = None
    keep: Tensor | None = None  # [n, r, 1]: factor of each row of the weight in place of the step's ``keep``


def multiply(tensors: Sequence[Tensor], factor: Any) -> None:
    """Multiply tensors in place by a number, or by a 0-dim tensor of the same value with the same bits."""
    half = [x for x in tensors if x.dtype.itemsize < 4]
    wide = [x for x in tensors if x.dtype.itemsize >= 4]
    for x in half:
        x.copy_(x.float() * factor)  # in half precision a factor of 0.9998 is 1
    if wide:
        torch._foreach_mul_(wide, factor)


@dataclass(frozen=True)
class WholeInputs:
    """The inputs of :attr:`MatrixMethod.whole` beside a matrix, or a stack of matrices."""

    # Of the group, by name, each 0-dim fp32 on the device: all but learning rate and decay, which the commit applies.
    # ``step`` is the number of the current step, from 1.
    rates: Mapping[str, Tensor]
    # At the owner, by name, before the step: [a, b], or [batch, a, b] of a stack.
    states: Mapping[str, Tensor] = field(default_factory=dict)
    phase: Any = None  # of the step: the result of MatrixMethod.phase


@dataclass(frozen=True)
class WholeOutputs:
    """The result of :attr:`MatrixMethod.whole` for a matrix, or for a stack."""

    direction: Tensor  # of the matrix's shape, in any dtype
    states: Mapping[str, Tensor] = field(default_factory=dict)  # new states at the owner, by name; the others stay


Before = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], bool, torch.dtype], Tensor]
NewtonSchulz = Callable[[list[Tensor]], list[Tensor]]


def summed(numbers_NRC: Tensor) -> Tensor:
    """Return the sum over each matrix, N numbers in fp64. Rows are summed first, and their sums in fp64, so that the
    last bit does not depend on which ranks have which rows."""
    return numbers_NRC.sum(-1).sum(-1, dtype=torch.float64)


def averaged(
    grad: Tensor, momentum: Tensor, beta: tuple[Tensor, Tensor], nesterov: bool, out_dtype: torch.dtype
) -> Tensor:
    """Return the moving average of gradients, with Nesterov's look ahead if asked for, as ``torch.optim.Muon`` does."""
    update, _ = muon_momentum(grad, momentum, beta=beta, nesterov=nesterov, out_dtype=out_dtype)
    return update


@dataclass(frozen=True)
class MatrixMethod(Method):
    """A method that makes directions of whole matrices.

    A step is ``W <- keep W + move D`` with ``keep = 1 - lr weight_decay`` and ``move = -lr scale``
    (:func:`compile_muon.engine.commit.lr_scale`), which ``after`` and ``finish`` may change.

    Args:
        adjust_lr: the scale by shape where the configuration names none; None for 1 whatever the configuration says.
        before: ``(grad, momentum, (1 - beta, beta), nesterov, dtype) -> update`` of a shard, traced and pure; beta is
            the group's ``momentum``. None for the moving average. A method without this rate keeps no momentum:
            ``before`` gets an empty tensor, and None stands for the gradient itself.
        orthogonalizes: whether ``whole`` calls ``newton_schulz``. Where it does not, the settings of Newton-Schulz have
            no effect, and gradients and directions travel in float32 at least.
        nesterov: whether the update heeds the setting of this name; False where the formula has no look ahead.
        project: ``piece -> [n, r, c]``, pure: replaces the gradient in ``before`` and in the momentum. The piece has no
            rates, its direction is the gradient, and its states are those of rows. With it directions are made in
            ``step()`` alone.
        project_sums: ``(grad, weight) -> [n, r, k]``, sums over a piece's columns; ``project`` gets them summed over
            whole rows.
        advance: ``(momenta, grads, directions, rates)``: updates the momenta in place in a step; None for the moving
            average. Directions are those of ``whole``, rates as in :class:`Piece`.
        whole: ``(matrices, newton_schulz, inputs) -> directions`` at the rank that has the matrices whole, ``[rows,
            cols]`` or ``[batch, rows, cols]``, traced and pure. ``inputs`` has a :class:`WholeInputs` for each matrix,
            and each direction is a tensor or a :class:`WholeOutputs`. None for Newton-Schulz alone.
        phase: ``rates -> text or number``: chooses one of few graphs, on the host ahead of each step, by plain numbers.
            A choice made on the device, by ``rates`` of :class:`WholeInputs`, would cost both branches.
        joined: ``rates -> bool``, on the host likewise: whether a step takes a parameter with a view as one matrix.
        launched: phases whose steps no CUDA graph captures, because ``whole`` calls a library that waits for the host;
            ``(None,)`` for a method without phases.
        idle: phases whose steps move nothing: weights do not decay either.
        row_sums: ``(direction, weight) -> [n, r, k]``, the same for ``after``.
        after: ``piece -> After``, pure: changes a piece's direction and states in a step.
        facts: number of facts of a matrix in the results of ``after``.
        finish: ``(facts, keep, move, piece) -> (keep, move)``: changes the factors of whole matrices, each ``[n]`` or
            a number. ``facts`` are ``[n, k]`` in the piece's dtype, of whole matrices, None if there are none; ``keep``
            and ``move`` are numbers or 0-dim fp64 tensors.
    """

    adjust_lr: str | None = "original"
    before: Before | None = None
    orthogonalizes: bool = field(default=True, kw_only=True)
    nesterov: bool = field(default=True, kw_only=True)
    project: Callable[[Piece], Tensor] | None = None
    project_sums: Callable[[Tensor, Tensor], Tensor] | None = None
    advance: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Mapping[str, Any]], None] | None = None
    whole: Callable[[list[Tensor], NewtonSchulz, list[WholeInputs]], Sequence[Tensor | WholeOutputs]] | None = None
    phase: Callable[[Mapping[str, Any]], Any] | None = None
    joined: Callable[[Mapping[str, Any]], Any] | None = None
    launched: tuple[Any, ...] = ()
    idle: tuple[Any, ...] = ()
    row_sums: Callable[[Tensor, Tensor], Tensor] | None = None
    after: Callable[[Piece], After] | None = None
    facts: int = 0
    finish: Callable[[Any, Any, Any, Piece], tuple[Any, Any]] | None = None

    def __post_init__(self) -> None:
        if self.owned and (self.whole is None or self.joined is not None):
            raise ValueError(f"{self.name}: states at owners want whole=, which writes them, and no joined=")
        if any(state.each == "parameter" for state in self.states):
            raise ValueError(f"{self.name}: a state of each parameter is for methods that work element by element")

    @functools.cached_property
    def owned(self) -> tuple[State, ...]:
        """States at the owner of a matrix."""
        return tuple(state for state in self.states if state.at_owner)

    @property
    def in_step(self) -> bool:
        """True if ``step()`` alone makes directions: backward knows no phase, and no states but the momentum."""
        return bool(self.owned or self.phase or self.joined or self.project)

    @functools.cached_property
    def graph_rates(self) -> tuple[str, ...]:
        """Names of the rates that graphs take as inputs, beside the momentum."""
        if self.whole is None:
            return (STEP.name,) if self.has(STEP.name) else ()
        common = {MOMENTUM.name, *(rate.name for rate in (LR, *DECAY))}
        return tuple(rate.name for rate in self.rates if rate.name not in common and not isinstance(rate.default, bool))

    @property
    def keeps_momentum(self) -> bool:
        """True if each parameter has a momentum."""
        return self.has(MOMENTUM.name)

    def update(
        self, grad: Tensor, momentum: Tensor, beta: tuple[Tensor, Tensor], nesterov: bool, out_dtype: torch.dtype
    ) -> Tensor:
        """Compute a shard of the matrix that ``whole`` orthogonalizes: see :attr:`before`."""
        if self.before is not None:
            return self.before(grad, momentum, beta, nesterov, out_dtype)
        look_ahead = nesterov and self.nesterov
        return averaged(grad, momentum, beta, look_ahead, out_dtype) if self.keeps_momentum else grad.to(out_dtype)


ElementStep = Callable[
    [list[Tensor], list[Tensor], list[MutableMapping[str, Tensor]], Mapping[str, Any], Tensor | None], None
]


@dataclass(frozen=True)
class ElementMethod(Method):
    """A method for parameters that are not matrices, element by element of a shard."""

    # (params, grads, states, group, found_inf): writes shards and the states of each, by name, in place. Of the group's
    # rates, learning rate and decay are 0-dim fp64 tensors on the device where a CUDA graph holds the step.
    step: ElementStep = field(kw_only=True)
    # The same for contiguous tensors in host memory, in one pass; ``found_inf`` is None, and rates are numbers. None
    # for a method that the host does not compute.
    on_host: ElementStep | None = None
    # On CUDA ``step`` itself writes nothing where ``found_inf`` (fp32, one element) is 1; if False the engine restores
    # the old values.
    withholds: bool = False
