"""The matrix products of quack (Dao-AILab/quack, ``quack-kernels``) for Newton-Schulz, where that is installed.

Its symmetric product is written in CuTe: on 9.0 with clusters of two blocks that share their loads, ping-pong between
two groups of consumer warps and an epilogue of its own, none of which Triton 3.6 or 3.7 offers. What gram-newton-schulz
runs on are the same three functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

from torch import Tensor

from .reference import Aten

__all__ = ["Products", "installed", "products"]


@dataclass(frozen=True)
class Products(Aten):
    """``iterations.Products`` over three functions of ``quack.gemm_interface``."""

    gemm: Callable[..., Tensor]
    gemm_add: Callable[..., Tensor]
    gemm_symmetric: Callable[..., Tensor]

    def outer(self, x: Tensor) -> Tensor:
        """``x xᵀ``."""
        return self.gemm_symmetric(x, x.mT)

    def symmetric(self, left: Tensor, right: Tensor, *, plus: Tensor, beta: float, alpha: float = 1.0) -> Tensor:
        """``alpha left right + beta plus``, one triangle mirrored."""
        return self.gemm_symmetric(left, right, C=plus, alpha=alpha, beta=beta)

    def general(
        self, left: Tensor, right: Tensor, *, plus: Tensor | None = None, beta: float = 0.0, out: Tensor | None = None
    ) -> Tensor:
        """``left right + beta plus``."""
        if plus is None:
            return self.gemm(left, right, out=out)
        return self.gemm_add(left, right, C=plus, out=out, beta=beta)


def installed() -> bool:
    """Whether quack can be imported; it is not."""
    return find_spec("quack") is not None


@cache
def products() -> Products:
    """Imports quack.

    Raises:
        ImportError: it is not there, or not in a version with these functions.
    """
    from quack.gemm_interface import gemm, gemm_add, gemm_symmetric  # type: ignore[import-not-found]

    return Products(gemm, gemm_add, gemm_symmetric)
