"""Momenta that move toward their gradients, as a value that the writes of a step take."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Averages"]


@dataclass(frozen=True)
class Averages:
    """Momenta to move toward gradients: ``momentum.lerp_(grad, weight)`` of each.

    Args:
        momenta: one tensor for each parameter, changed.
        grads: likewise, of the same shapes.
        weight: 1 − the momentum factor.
    """

    momenta: Sequence[Tensor]
    grads: Sequence[Tensor]
    weight: float

    def of(self, chosen: Iterable[int]) -> "Averages":
        """Those of some parameters, by number."""
        chosen = list(chosen)
        return Averages([self.momenta[i] for i in chosen], [self.grads[i] for i in chosen], self.weight)
