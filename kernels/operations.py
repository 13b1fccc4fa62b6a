"""Floating-point operations of Newton-Schulz, 2 for each multiply-add.

The formulas are polynomials in the dims k ≤ l of the matrix, so they also take sympy symbols. ``symmetric`` says that
one triangle of a symmetric product is computed, which takes half the operations. Five steps with one restart, in units
of k³ with α = l/k: standard 20α + 10 and gram 8α + 28 with dense products, equal at α = 1.5; 15α + 5 and 6α + 17 with
symmetric ones, equal at α = 4/3. A second restart makes gram 12α + 22 and 9α + 13, equal at the same α.
"""

from typing import Any


def standard_flops(k: Any, l: Any, steps: Any, *, symmetric: bool = False) -> Any:  # noqa: E741
    """Count the standard form: per step the symmetric A = XXᵀ (2k²l) and A² (2k³), and BX (2k²l)."""
    if symmetric:
        return steps * (3 * k**2 * l + k**3)
    return steps * (4 * k**2 * l + 2 * k**3)


def gram_flops(k: Any, l: Any, steps: Any, restarts: Any, *, symmetric: bool = False) -> Any:  # noqa: E741
    """Count the gram form: per segment the symmetric XXᵀ (2k²l), and QX (2k²l); per step R², RZ, ZS and ZQ (8k³)."""
    segments = restarts + 1
    # The first step of a segment has Q = I and needs no ZQ, the last one no S and no new R: 6k³ less per segment. R²,
    # RZ and ZS are symmetric.
    if symmetric:
        return segments * 3 * k**2 * l + (5 * steps - 4 * segments) * k**3
    return segments * 4 * k**2 * l + (4 * steps - 3 * segments) * 2 * k**3
