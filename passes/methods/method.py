"""What a method is: a record, in a file of its own, of what a step does to a parameter.

The engine knows no method. It makes the states that a record names, has graphs run ``before`` and ``whole``, and in a
step loops over ``after``, facts and ``finish``; docs/how-to/methods.md writes one from the beginning.
"""

from __future__ import annotations

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
    "After",
    "ElementMethod",
    "MatrixMethod",
    "Method",
    "Piece",
    "Rate",
    "State",
    "averaged",
]


@dataclass(frozen=True)
class Rate:
    """A number that parameter groups hold, and that may change between steps.

    Args:
        name: in the group.
        default: a number, a pair of numbers, or a flag; what type it has a user's value must have.
        below: numbers are at least 0 and less than this.
        positive: 0 is none.
    """

    name: str
    default: Any
    below: float = math.inf
    positive: bool = False


LR = Rate("lr", None)
MOMENTUM = Rate("momentum", None, below=1.0)
#: what decays, and whether only where update and weight agree in sign (arXiv 2510.12402)
DECAY = (Rate("weight_decay", None), Rate("cautious_decay", False))


@dataclass(frozen=True)
class State:
    """A tensor that a method keeps of a parameter beside its momentum: zeros ahead of the first step.

    Args:
        name: in the optimizer's state.
        label: as errors call it.
        each: what it has a number for: "element" or "row" of a matrix, in the dtype of the master weights, or
            "parameter", in fp32.
    """

    name: str
    label: str
    each: str = "element"


@dataclass(frozen=True)
class Method:
    """What all methods have.

    Args:
        name: as users write it.
        source: of the formula.
        rates: what its groups hold, in their order. A default of None is that of the configuration.
        states: beside the momentum.
    """

    name: str
    source: str
    rates: tuple[Rate, ...]
    states: tuple[State, ...] = ()

    def has(self, rate: str) -> bool:
        """Whether its groups hold a rate of this name."""
        return any(own.name == rate for own in self.rates)


@dataclass(frozen=True)
class Piece:
    """This rank's part of ``n`` equal matrices, in fp32 (fp64 where the master weights are).

    Args:
        direction: ``[n, r, c]``, of what :attr:`MatrixMethod.whole` made: r whole rows, or what a tensor-parallel rank
            has of their columns.
        weight: the same of the master weights, before the step.
        grad: the gradient, the same, in its own dtype.
        states: by name, ``[n, r, c]`` or ``[n, r, 1]``, before the step.
        sums: ``[n, r, k]``, what :attr:`MatrixMethod.row_sums` gives, over whole rows.
        rates: of the group.
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


@dataclass(frozen=True)
class After:
    """What :attr:`MatrixMethod.after` makes of a piece.

    Args:
        direction: to move the weight along, like the piece's.
        states: by name, the new ones; what is not named stays.
        facts: ``[n, k]``, sums over the elements of the piece: the engine adds up those of all pieces of a matrix.
    """

    direction: Tensor
    states: Mapping[str, Tensor] = field(default_factory=dict)
    facts: Tensor | None = None


Before = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], bool, torch.dtype], Tensor]
NewtonSchulz = Callable[[list[Tensor]], list[Tensor]]


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
        adjust_lr: the scale where the configuration names none.
        before: ``(grad, momentum, (1 - beta, beta), nesterov, dtype) -> update``, of a shard, traced and pure; beta is
            the group's ``momentum``. None for the moving average, or without this rate the gradient: then no momentum
            is kept, and ``before`` is given an empty one.
        advance: ``(momenta, grads, beta)``: what a step makes of the momenta, in place; None for the moving average.
        whole: ``(matrices, newton_schulz) -> directions`` at the rank that has the matrices whole, ``[rows, cols]`` or
            ``[batch, rows, cols]``, traced and pure; None for Newton-Schulz alone.
        row_sums: ``(direction, weight) -> [n, r, k]``, sums over the columns of a piece, which ``after`` finds summed
            over whole rows.
        after: what a step makes of a direction, by pieces; pure.
        facts: how many facts of a matrix ``after`` gives.
        finish: ``(facts, keep, move, piece) -> (keep, move)``: the factors, each ``[n]``, once facts are those of whole
            matrices, ``[n, k]`` in fp32; ``keep`` and ``move`` are those above.
    """

    adjust_lr: str = "original"
    before: Before | None = None
    advance: Callable[[Sequence[Tensor], Sequence[Tensor], float], None] | None = None
    whole: Callable[[list[Tensor], NewtonSchulz], list[Tensor]] | None = None
    row_sums: Callable[[Tensor, Tensor], Tensor] | None = None
    after: Callable[[Piece], After] | None = None
    facts: int = 0
    finish: Callable[[Tensor, float, float, Piece], tuple[Tensor | float, Tensor | float]] | None = None

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
        step: ``(params, grads, states, group, found_inf)`` in place: shards, states of each by name, the group's rates.
        on_host: the same for contiguous tensors in host memory, in one pass over them; ``found_inf`` is None, and rates
            are no tensors. None for a method that is not computed there.
        withholds: whether it writes nothing by itself on CUDA where ``found_inf`` (fp32, one element) is 1; else the
            engine puts back what was there.
    """

    step: ElementStep = field(kw_only=True)
    on_host: ElementStep | None = None
    withholds: bool = False
