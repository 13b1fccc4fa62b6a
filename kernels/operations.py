"""How many floating-point operations Newton–Schulz takes, with dense matrix products.

For k ≤ l the dims of the matrix. The formulas are polynomials in k and l, so they also take sympy symbols. Five steps
with one restart, in units of k³ with α = l/k: standard 20α + 10, gram 8α + 28, equal at α = 1.5.
"""

from typing import Any

__all__ = ["gram_flops", "standard_flops"]


def standard_flops(k: Any, l: Any, steps: Any) -> Any:  # noqa: E741
    """Per step: A = XXᵀ (2k²l), A² (2k³), BX (2k²l)."""
    return steps * (4 * k**2 * l + 2 * k**3)


def gram_flops(k: Any, l: Any, steps: Any, restarts: Any) -> Any:  # noqa: E741
    """Per segment XXᵀ and QX (4k²l); per step R², QZ, ZR and Z·RZ (8k³).

    A segment's first step needs no QZ, for Q = I, and its last step needs no new R: 6k³ less per segment.
    """
    segments = restarts + 1
    return segments * 4 * k**2 * l + (4 * steps - 3 * segments) * 2 * k**3
