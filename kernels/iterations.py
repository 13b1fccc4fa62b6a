"""The two forms of Newton-Schulz, each written once, over whatever computes the matrix products.

Both send X, k × l with k ≤ l, through steps (a, b, c) of X ← (aI + Z) X with Z = bR + cR², R = XXᵀ.

Standard form: R and Z from X at every step. Source: KellerJordan/Muon.

Gram form: X stays as it is for a segment of steps while k × k matrices carry what happens to it. Let Q be the product
of the factors so far, so that Q X is the current X and R = (QX)(QX)ᵀ. A step then is

    Q ← (aI + Z) Q                              = aQ + ZQ
    R ← (aI + Z) R (aI + Z)ᵀ = (aI + Z) R (aI + Z),    as S ← aR + RZ, R ← aS + ZS

and a segment ends with X ← QX. Source: Dao-AILab/gram-newton-schulz, whose Q ← aQ + QZ has the factors in reverse.

**The order matters.** All of these are polynomials of one matrix, so in exact arithmetic every order is the same. In
half precision Z carries rounding errors that commute with nothing. The factor (aI + Z) may be off, X is then multiplied
by another factor, a harmless one, as long as Q and R are multiplied by that same factor on the same sides: R stays
(QX)(QX)ᵀ, whose null space is X's. With Q(aI + Z) or (aI + Z)²R it is not: directions that X has nothing of, which
Q multiplies by a² or a³, get a part of those that it has. For rank 256 in 512 × 1024 and the set polar_express in
float16, one restart, the relative error is 0.41 with (aI + Z)²R and Q(aI + Z), 0.09 with Q(aI + Z) alone, and 0.016 in
this order; the standard form's is 0.012.

S may be computed as if it were symmetric, one triangle mirrored: that changes S by half of RZ - ZR, no more than its
rounding does. Q, whose factors differ by powers of a, may be mirrored only in float16, by steps that keep the error
small all the same: ``coefficients.MIRRORED``.

**Folded**, F = aI + Z is one matrix: X ← FX, Q ← FQ, S ← RF, R ← FS, and no product but that of F has a summand. What
F rounds on its diagonal is another factor again, the same one for Q and R. In float16 errors are 0.97 to 1.02 times
those of products with summands, in the median of nine spectra; in bfloat16 the standard form's are up to 1.37 times.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

from .coefficients import MIRRORED
from .stability import Triple

# an operand of a product: a tensor [..., k, l] of matrices of one shape, or a list's matrices of several
M = TypeVar("M")


class Products(Protocol[M]):
    """The matrix products of a device, each of all k × k or k × l matrices of its operands at once."""

    def outer(self, x: M) -> M:
        """Return ``x xᵀ``, new."""

    def symmetric(
        self, left: M, right: M, *, plus: M | None = None, beta: float = 0.0, alpha: float = 1.0, gamma: float = 0.0
    ) -> M:
        """Return ``alpha left right + beta plus + gamma I``, new, rounded once; γ with a summand alone. Operands are
        symmetric, and up to rounding the result: one triangle may be computed and mirrored."""

    def general(self, left: M, right: M, *, plus: M | None = None, beta: float = 0.0, out: M | None = None) -> M:
        """Return ``left right + beta plus``, in ``out`` where given, else new."""

    def add_to_diagonal(self, x: M, a: float) -> None:
        """Add ``aI`` to ``x``, k × k, in place."""


def standard(
    x: M,
    steps: Sequence[Triple],
    restarts: Sequence[int],
    products: Products[M],
    *,
    out: M | None = None,
    folded: bool = False,
) -> M:
    """Return ``steps`` (a, b, c) of Newton-Schulz as it is defined, in ``out`` or new.

    ``x``: normalized k × l matrices with k ≤ l, unmodified. ``restarts``, for the gram form alone: numbers of steps
    after which a segment begins. ``out`` has any strides and shares no memory with ``x``.
    """
    for i, (a, b, c) in enumerate(steps):
        Z = _factor(products.outer(x), (a, b, c), products, folded=folded)
        step_out = out if i + 1 == len(steps) else None
        x = products.general(Z, x, plus=None if folded else x, beta=0.0 if folded else a, out=step_out)
    return x


def gram(
    x: M,
    steps: Sequence[Triple],
    restarts: Sequence[int],
    products: Products[M],
    *,
    out: M | None = None,
    folded: bool = False,
) -> M:
    """Return the same polynomial, iterated on k × k matrices between restarts; arguments as for :func:`standard`."""
    mirrored = folded and MIRRORED.issuperset(steps)
    for start, stop in pairwise((0, *restarts, len(steps))):
        Q = _segment(products.outer(x), steps[start:stop], products, folded=folded, mirrored=mirrored)
        x = products.general(Q, x, out=out if stop == len(steps) else None)
    return x


def _factor(R: M, step: Triple, products: Products[M], *, folded: bool) -> M:
    """Return Z = bR + cR², or ``folded`` F = aI + Z."""
    a, b, c = step
    return products.symmetric(R, R, plus=R, beta=b, alpha=c, gamma=a if folded else 0.0)


def _segment(R: M, steps: Sequence[Triple], products: Products[M], *, folded: bool, mirrored: bool) -> M:
    """Return Q after these steps, from R = XXᵀ and Q = I; the module's docstring has the order of the factors."""
    Q: M | None = None
    for i, (a, b, c) in enumerate(steps):
        Z, beta = _factor(R, (a, b, c), products, folded=folded), 0.0 if folded else a
        if i + 1 < len(steps):
            S = products.symmetric(R, Z, plus=None if folded else R, beta=beta)
            R = products.symmetric(Z, S, plus=None if folded else S, beta=beta)
        if Q is None:  # Q was I: aI + Z without a product, in Z's own memory
            Q = Z
            if not folded:
                products.add_to_diagonal(Q, a)
        elif mirrored:
            Q = products.symmetric(Z, Q)
        else:
            Q = products.general(Z, Q, plus=None if folded else Q, beta=beta)
    assert Q is not None
    return Q


#: by ``Plan.method``
FORMS = {"standard": standard, "gram": gram}
