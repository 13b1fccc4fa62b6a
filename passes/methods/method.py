"""What a method is: a record, in a file of its own, of what a step does to a parameter.

The engine knows no method. It makes the states that a record names, has graphs run ``before`` and ``whole``, and in a
step loops over ``after``, facts and ``finish``; docs/how-to/methods.md writes one from the beginning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from compile_muon.kernels import muon_momentum

__all__ = [
    "DECAY",
    "LR",
    "MOMENTUM",
    "STEP",
    "After",
    "ElementMethod",
    "Made",
    "MatrixMethod",
    "Method",
    "Piece",
    "Rate",
    "Seen",
    "State",
    "averaged",
    "multiply",
]


@dataclass(frozen=True)
class Rate:
    """A number that parameter groups hold, and that may change between steps.

    Args:
        name: in the group.
        default: a number, a pair of numbers, or a flag; what type it has a user's value must have.
        below: numbers are at least 0 and less than this.
        positive: 0 is none.
        most: numbers are at most this.
        whole: numbers are integers.
        meaning: of one that not all methods have, for the table of them.
    """

    name: str
    default: Any
    below: float = math.inf
    positive: bool = False
    most: float = math.inf
    whole: bool = False
    meaning: str = ""


LR = Rate("lr", None)
MOMENTUM = Rate("momentum", None, below=1.0)
#: counted by the engine: a group holds how many steps it has taken; methods see the number of the one under way, from 1
STEP = Rate("step", 0, whole=True)
#: what decays, and whether only where update and weight agree in sign (arXiv 2510.12402)
DECAY = (
    Rate("weight_decay", None),
    Rate(
        "cautious_decay", False, meaning="whether a weight decays only where the update has its sign (arXiv 2510.12402)"
    ),
)


#: kinds of states that are at the owner of a matrix -> their shape, as names of its sides
_SIDES = {"rows×rows": ("rows", "rows"), "cols×cols": ("cols", "cols"), "rows×cols": ("rows", "cols")}
_EACH = ("element", "row", "parameter", *_SIDES)


@dataclass(frozen=True)
class State:
    """A tensor that a method keeps of a parameter beside its momentum: zeros ahead of the first step.

    ============= ======================= ====================================== ==========================
    each          numbers of a matrix     where they are                         who writes them
    ============= ======================= ====================================== ==========================
    "element"     rows x cols             cut as the parameter is                :attr:`MatrixMethod.after`
    "row"         rows                    cut as the parameter is                ``after``
    "parameter"   1, of element methods   on every rank                          :attr:`ElementMethod.step`
    "rows×rows"   rows x rows             at the owner of the matrix, whole      :attr:`MatrixMethod.whole`
    "cols×cols"   cols x cols             at the owner of the matrix, whole      ``whole``
    "rows×cols"   rows x cols             at the owner of the matrix, whole      ``whole``
    ============= ======================= ====================================== ==========================

    The first two are in the dtype of the master weights, "parameter" in fp32, the others in fp32 (fp64 where the master
    weights are). Methods that work element by element have states of each "element" and "parameter".

    Args:
        name: in the optimizer's state.
        label: as errors call it.
        each: what it has a number for.
        most: of a state at an owner, the longest side of which there is one; it is ``0 x 0`` of a longer one. None for
            any.
    Raises:
        ValueError: ``each`` is none of these.
    """

    name: str
    label: str
    each: str = "element"
    most: int | None = None

    def __post_init__(self) -> None:
        if self.each not in _EACH:
            raise ValueError(f"State({self.name!r}).each = {self.each!r}: use one of {', '.join(map(repr, _EACH))}")

    @property
    def at_owner(self) -> bool:
        """Whether it is at the owner of a matrix."""
        return self.each in _SIDES

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Of a state at the owner of a ``rows x cols`` matrix."""
        first, second = ({"rows": rows, "cols": cols}[side] for side in _SIDES[self.each])
        return (0, 0) if first == second and self.most is not None and first > self.most else (first, second)


@dataclass(frozen=True)
class Method:
    """What all methods have.

    Args:
        name: as users write it.
        source: of the formula.
        rates: what its groups hold, in their order. A default of None is that of the configuration.
        states: beside the momentum.
        constants: rates that must be numbers, of those that CUDA graphs have on the device: learning rate, decay and
            momentum. A graph holds them, and other values are another graph.
    """

    name: str
    source: str
    rates: tuple[Rate, ...]
    states: tuple[State, ...] = ()
    constants: tuple[str, ...] = field(default=(), kw_only=True)

    def has(self, rate: str) -> bool:
        """Whether its groups hold a rate of this name."""
        return rate in self._names

    @functools.cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(rate.name for rate in self.rates)


@dataclass(frozen=True)
class Piece:
    """This rank's part of ``n`` equal matrices, in fp32 (fp64 where the master weights are).

    Args:
        direction: ``[n, r, c]``, of what :attr:`MatrixMethod.whole` made: r whole rows, or what a tensor-parallel rank
            has of their columns.
        weight: the same of the master weights, before the step.
        grad: the gradient, the same, in its own dtype.
        states: for ``after``, by name, before the step: ``[n, r, c]`` of each element, ``[n, r, 1]`` of each row.
        sums: ``[n, r, k]``, what :attr:`MatrixMethod.row_sums` gives, over whole rows; in ``project``, of
            ``project_sums``.
        projected: in ``after``, ``[n, r, k]``: what :attr:`MatrixMethod.project_sums` gave, over whole rows.
        scale: of the learning rate, by the shape of a matrix.
        rates: of the group; ``step`` is a tensor, 0-dim fp32. Learning rate, decay and momentum are 0-dim fp64 tensors
            on the device where a CUDA graph holds the step, else numbers.
        rows, cols: of a whole matrix.
    """

    direction: Tensor
    weight: Tensor
    grad: Tensor
    states: Mapping[str, Tensor]
    sums: Tensor | None
    rates: Mapping[str, Any]
    rows: int
    cols: int
    projected: Tensor | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class After:
    """What :attr:`MatrixMethod.after` makes of a piece.

    Args:
        direction: to move the weight along, like the piece's.
        states: by name, the new ones; what is not named stays.
        facts: ``[n, k]``, sums over the elements of the piece (:func:`summed`): the engine adds up, in fp64, those of
            all pieces of a matrix.
        keep: ``[n, r, 1]``, what rows of the weight are multiplied by instead of ``keep``; None for that.
    """

    direction: Tensor
    states: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Tensor | None = None
    keep: Tensor | None = None


def multiply(tensors: Sequence[Tensor], factor: Any) -> None:
    """Multiply tensors, in place, by a number or a 0-dim tensor that says the same: with the same bits.

    A half is multiplied in fp32, since 0.9998 in half precision is 1.
    """
    half = [x for x in tensors if x.dtype.itemsize < 4]
    rest = [x for x in tensors if x.dtype.itemsize >= 4]
    for x in half:
        x.copy_(x.float() * factor)
    if rest:
        torch._foreach_mul_(rest, factor)


@dataclass(frozen=True)
class Seen:
    """What :attr:`MatrixMethod.whole` sees beside a matrix, or a stack of them.

    Args:
        rates: of the group, by name, each 0-dim fp32 on the device: all but the learning rate and decay, which the
            commit applies. ``step`` is the number of the step under way, from 1.
        states: at the owner, by name, ``[a, b]``, or ``[batch, a, b]`` of a stack, before the step.
        phase: what :attr:`MatrixMethod.phase` says of the step.
    """

    rates: Mapping[str, Tensor]
    states: Mapping[str, Tensor] = field(default_factory=dict)
    phase: Any = None


@dataclass(frozen=True)
class Made:
    """What :attr:`MatrixMethod.whole` makes of a matrix, or of a stack.

    Args:
        direction: like the matrix, in any dtype.
        states: at the owner, by name, the new ones; what is not named stays.
    """

    direction: Tensor
    states: Mapping[str, Tensor] = field(default_factory=dict)


Before = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], bool, torch.dtype], Tensor]
NewtonSchulz = Callable[[list[Tensor]], list[Tensor]]


def summed(numbers: Tensor) -> Tensor:
    """Sums over matrices ``[n, r, c]``, ``[n]``: over rows as whoever has them does, and of these in fp64, so that the
    ranks that rows are dealt to do not show in the last bit."""
    return numbers.sum(-1).sum(-1, dtype=torch.float64)


def averaged(
    grad: Tensor, momentum: Tensor, beta: tuple[Tensor, Tensor], nesterov: bool, out_dtype: torch.dtype
) -> Tensor:
    """The moving average of gradients, with Nesterov's look ahead: ``torch.optim.Muon``'s."""
    update, _ = muon_momentum(grad, momentum, beta=beta, nesterov=nesterov, out_dtype=out_dtype)
    return update


@dataclass(frozen=True)
class MatrixMethod(Method):
    """A method whose directions are made of whole matrices.

    Without ``after`` a step is ``W <- keep W + move D`` with ``keep = 1 - lr weight_decay`` and ``move = -lr scale``
    (:func:`compile_muon.model.assignment.lr_scale`), and the momentum is its moving average.

    Args:
        adjust_lr: the scale where the configuration names none; None for 1 whatever it says.
        before: ``(grad, momentum, (1 - beta, beta), nesterov, dtype) -> update``, of a shard, traced and pure; beta is
            the group's ``momentum``. None for the moving average, or without this rate the gradient: then no momentum
            is kept, and ``before`` is given an empty one.
        orthogonalizes: whether ``whole`` calls ``newton_schulz``; False where no setting of it has an effect, and
            gradients and directions travel in fp32 at least.
        nesterov: whether ``before`` heeds the setting of this name; False where the formula has no look ahead.
        project: ``piece -> [n, r, c]``, what stands for the gradient in ``before`` and in the momentum, of a piece that
            has no rates, whose direction is the gradient, and whose states are those of rows; pure. Directions are made
            in ``step()`` alone then. Of a weight that is a rounded copy it sees the copy, which gradients are of.
        project_sums: ``(grad, weight) -> [n, r, k]``, sums over the columns of a piece, which ``project`` finds summed
            over whole rows.
        advance: ``(momenta, grads, directions, rates)``: what a step makes of the momenta, in place; None for the
            moving average. Directions are those of ``whole``, rates as in :class:`Piece`.
        whole: ``(matrices, newton_schulz, seen) -> directions`` at the rank that has the matrices whole, ``[rows,
            cols]`` or ``[batch, rows, cols]``, traced and pure; ``seen`` has a :class:`Seen` for each, and each
            direction is a tensor or a :class:`Made`. None for Newton-Schulz alone.
        phase: ``rates -> text or number``: which graph a step takes, of a few; asked on the host ahead of each step,
            with plain numbers. A choice that ``rates`` of :class:`Seen` make on the device costs both branches.
        joined: ``rates -> bool``, likewise: whether a step sees each parameter as one matrix, whatever its view.
        launched: phases whose steps no CUDA graph holds, because ``whole`` asks a library that waits for the host; None
            among them is that of a method without phases.
        idle: phases whose steps move nothing: weights do not decay either.
        row_sums: ``(direction, weight) -> [n, r, k]``, sums over the columns of a piece, which ``after`` finds summed
            over whole rows.
        after: what a step makes of a direction, by pieces; pure.
        facts: how many facts of a matrix ``after`` gives.
        finish: ``(facts, keep, move, piece) -> (keep, move)``: the factors, each ``[n]``, once facts are those of whole
            matrices, ``[n, k]`` in fp32 (None without); ``keep`` and ``move`` are those above,
            numbers or 0-dim fp64 tensors.
    """

    adjust_lr: str | None = "original"
    before: Before | None = None
    orthogonalizes: bool = field(default=True, kw_only=True)
    nesterov: bool = field(default=True, kw_only=True)
    project: Callable[[Piece], Tensor] | None = None
    project_sums: Callable[[Tensor, Tensor], Tensor] | None = None
    advance: Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor], Mapping[str, Any]], None] | None = None
    whole: Callable[[list[Tensor], NewtonSchulz, list[Seen]], Sequence[Tensor | Made]] | None = None
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
        """Whether directions are made by ``step()`` alone: backward has no phase and no states but the momentum."""
        return bool(self.owned or self.phase or self.joined or self.project)

    @functools.cached_property
    def given(self) -> tuple[str, ...]:
        """Rates that are given to graphs, beside the momentum."""
        if self.whole is None:
            return (STEP.name,) if self.has(STEP.name) else ()
        own = {MOMENTUM.name, *(rate.name for rate in (LR, *DECAY))}
        return tuple(rate.name for rate in self.rates if rate.name not in own and not isinstance(rate.default, bool))

    @property
    def keeps_momentum(self) -> bool:
        """Whether there is a momentum of each parameter."""
        return self.has(MOMENTUM.name)

    def update(
        self, grad: Tensor, momentum: Tensor, beta: tuple[Tensor, Tensor], nesterov: bool, out_dtype: torch.dtype
    ) -> Tensor:
        """What is orthogonalized, of a shard: see :attr:`before`."""
        if self.before is not None:
            return self.before(grad, momentum, beta, nesterov, out_dtype)
        return averaged(grad, momentum, beta, nesterov, out_dtype) if self.keeps_momentum else grad.to(out_dtype)


ElementStep = Callable[
    [list[Tensor], list[Tensor], list[MutableMapping[str, Tensor]], Mapping[str, Any], Tensor | None], None
]


@dataclass(frozen=True)
class ElementMethod(Method):
    """A method for everything that is no matrix, element by element of a shard.

    Args:
        step: ``(params, grads, states, group, found_inf)`` in place: shards, states of each by name, the group's rates,
            of which learning rate and decay are 0-dim fp64 tensors on the device where a CUDA graph holds the step.
        on_host: the same for contiguous tensors in host memory, in one pass over them; ``found_inf`` is None, and rates
            are no tensors. None for a method that is not computed there.
        withholds: whether it writes nothing by itself on CUDA where ``found_inf`` (fp32, one element) is 1; else the
            engine puts back what was there.
    """

    step: ElementStep = field(kw_only=True)
    on_host: ElementStep | None = None
    withholds: bool = False
