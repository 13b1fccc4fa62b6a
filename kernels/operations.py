"""How many floating-point operations Newton–Schulz takes.

For k ≤ l the dims of the matrix. The formulas are polynomials in k and l, so they also take sympy symbols. A symmetric
product takes half the operations where only one triangle of it is computed (`symmetric`). Five steps with one restart,
in units of k³ with α = l/k: standard 20α + 10 and gram 8α + 28 with dense products, equal at α = 1.5; 15α + 5 and
6α + 14 with symmetric ones, equal at α = 1.
"""

from typing import Any

__all__ = ["gram_flops", "standard_flops"]


def standard_flops(k: Any, l: Any, steps: Any, *, symmetric: bool = False) -> Any:  # noqa: E741
    """Per step: A = XXᵀ (2k²l) and A² (2k³), which are symmetric, and BX (2k²l)."""
    if symmetric:
        return steps * (3 * k**2 * l + k**3)
    return steps * (4 * k**2 * l + 2 * k**3)


def gram_flops(k: Any, l: Any, steps: Any, restarts: Any, *, symmetric: bool = False) -> Any:  # noqa: E741
    """Per segment XXᵀ (2k²l), which is symmetric, and QX (2k²l); per step R², QZ, ZR and Z·RZ, all symmetric (8k³).

    A segment's first step needs no QZ, for Q = I, and its last step needs no new R: 6k³ less per segment.
    """
    segments = restarts + 1
    if symmetric:
        return segments * 3 * k**2 * l + (4 * steps - 3 * segments) * k**3
    return segments * 4 * k**2 * l + (4 * steps - 3 * segments) * 2 * k**3
