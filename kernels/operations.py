"""How many floating-point operations Newton-Schulz takes.

The formulas are polynomials in the dims k ≤ l of the matrix, so they also take sympy symbols. A symmetric product takes
half the operations where only one triangle of it is computed (``symmetric``). Five steps with one restart, in units of
k³ with α = l/k: standard 20α + 10 and gram 8α + 28 with dense products, equal at α = 1.5; 15α + 5 and 6α + 17 with
symmetric ones, equal at α = 4/3. A second restart makes gram 12α + 22 and 9α + 13, equal at the same α.
"""

from typing import Any

__all__ = ["gram_flops", "standard_flops"]


def standard_flops(k: Any, l: Any, steps: Any, *, symmetric: bool = False) -> Any:  # noqa: E741
    """Per step A = XXᵀ (2k²l) and A² (2k³), which are symmetric, and BX (2k²l).

    Args:
        k, l: smaller and larger dim of the matrix, numbers or symbols.
        steps: how many.
        symmetric: symmetric products are computed by one triangle.
    Returns:
        Floating-point operations, 2 for each multiply-add.
    """
    if symmetric:
        return steps * (3 * k**2 * l + k**3)
    return steps * (4 * k**2 * l + 2 * k**3)


def gram_flops(k: Any, l: Any, steps: Any, restarts: Any, *, symmetric: bool = False) -> Any:  # noqa: E741
    """Per segment XXᵀ (2k²l), which is symmetric, and QX (2k²l); per step R², RZ and ZS, symmetric, and ZQ (8k³).

    A segment's first step needs no ZQ, for Q = I, and its last step no S and no new R: 6k³ less per segment.

    Args:
        k, l, steps, symmetric: as for :func:`standard_flops`.
        restarts: how many, one less than there are segments.
    Returns:
        Floating-point operations, 2 for each multiply-add.
    """
    segments = restarts + 1
    if symmetric:
        return segments * 3 * k**2 * l + (5 * steps - 4 * segments) * k**3
    return segments * 4 * k**2 * l + (4 * steps - 3 * segments) * 2 * k**3
