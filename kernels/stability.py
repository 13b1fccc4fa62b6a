"""Restarts of the gram form of Newton-Schulz in half precision, and the schedules that it does not survive.

The gram form iterates on R = XXᵀ and Q alone, and rounding hurts it at both ends of the spectrum.

Small eigenvalues of R move by about ±``perturbation``, so some turn negative, and a negative eigenvalue never comes
back: each step sends r to r(a + br + cr²)², with factors that grow as r falls, while Q picks up a + br + cr² where
exact arithmetic has a. A restart (X ← QX, R ← XXᵀ, Q ← I) makes R positive again. The damage of a segment is the
ratio of Q at r = -perturbation to Q at r = 0; ``choose_restarts`` places restarts by it.

How much damage is tolerated is measured against the error of torch.optim.Muon, the standard form in bfloat16. Damage
counts in units of bfloat16's ``roundoff`` above 1. In bfloat16 up to 128 units keep the gram form's error within 3.2
times Muon's, if ``factors_are_accurate``; at 245, three steps of jordan, deepseek_v4 diverges. In float16 24 units keep
it below Muon's: segments of three jordan steps, 23 units, have at most 0.42 times Muon's error on 16 spectra with k
from 64 to 512, and 0.71 times with the gradient itself rounded to bfloat16. Every set has at least two segments, for
four steps of jordan are 430 units. ``python tests/kernels/test_accuracy.py restarts`` prints the comparison for every
placement, ``... default`` what "auto" takes against Muon's form.

Large singular values move by a relative a·roundoff when Q = aI + Z is rounded, and diverge where a schedule's step
sends them to the edge of what the next one still contracts; ``survives_rounding`` tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Precision:
    """Rounding errors of a dtype, as the gram form meets them."""

    perturbation: float  # of a Gram matrix's eigenvalues
    roundoff: float  # half the spacing of numbers at one
    tolerated: float  # largest ``amplification`` of a segment


# 4e-4: Dao-AILab/gram-newton-schulz; the others follow from the roundoff.
FLOAT16 = Precision(perturbation=4e-4, roundoff=2.0**-11, tolerated=1 + 24 * 2.0**-8)
BFLOAT16 = Precision(perturbation=8 * 4e-4, roundoff=2.0**-8, tolerated=1 + 128 * 2.0**-8)
# Errors of 1000 roundoffs are still 6e-5, and a restart less is worth more.
FLOAT32 = Precision(perturbation=4e-4 / 2**13, roundoff=2.0**-24, tolerated=1 + 1000 * 2.0**-24)


def amplification(triples: Sequence[Triple], perturbation: float) -> float:
    """Return the largest |Q(r) / Q(0)| over the steps of a segment for r = −``perturbation``; infinity above 1e6."""
    r, ratio, worst = -perturbation, 1.0, 1.0
    for a, b, c in triples:
        factor = a + b * r + c * r * r
        ratio *= factor / a if a else float("inf")
        r *= factor * factor
        worst = max(worst, abs(ratio))
        if not worst < 1e6:
            return float("inf")
    return worst


@cache
def choose_restarts(triples: tuple[Triple, ...], precision: Precision = FLOAT16) -> tuple[int, ...] | None:
    """Return the steps after which to restart: as few as keep every segment's ``amplification`` tolerated.

    Among equally few, the placement with the least damage, then the latest: in float16 that of
    Dao-AILab/gram-newton-schulz, after step 3 for jordan, after step 2 for you and polar_express. None where two steps
    exceed the tolerance: a restart after every step is the standard form at a higher price. R and Q are rounded to
    ``precision``.
    """
    n = len(triples)
    if any(amplification(triples[i : i + 2], precision.perturbation) > precision.tolerated for i in range(n)):
        return None
    # best[j] for the first j steps: (number of restarts, worst amplification, restarts).
    best: list[tuple[int, float, tuple[int, ...]]] = [(-1, 1.0, ())]
    for j in range(1, n + 1):
        options = []
        for i in range(j):
            damage = amplification(triples[i:j], precision.perturbation)
            if damage <= precision.tolerated:
                count, worst, placement = best[i]
                options.append((count + 1, max(worst, damage), (*placement, i) if i else ()))
        best.append(min(options, key=lambda option: (option[0], option[1], tuple(-i for i in option[2]))))
    return best[n][2]


def factors_are_accurate(triples: Sequence[Triple], precision: Precision) -> bool:
    """Tell whether rounding aI + Z moves no singular value by more than 2 %; the standard form rounds aX + BX instead.

    Measured in bfloat16: jordan (1.3 %) and you (1.6 %) are within 1.6 times the standard form's error with their
    restarts; polar_express (3.2 %) is at 4.3 times, at 3.9 still with a restart after every step, and diverges on two
    clusters of singular values with restarts after 2 and 4, which ``amplification`` finds harmless.
    """
    return all(abs(a) * precision.roundoff <= 0.02 for a, _, _ in triples)


@cache
def survives_rounding(triples: tuple[Triple, ...], safety: float, precision: Precision) -> bool:
    """Tell whether every singular value in [0, 1/safety] ends below 1.5 though each step rounds it up by a·roundoff.

    Not so for cans, whose first step sends 0.367 and 1 to 1.99 and whose next steps diverge from 1.995 on.
    """
    for i in range(1, 1001):
        s = i / 1000 / safety
        for a, b, c in triples:
            s = abs(s * (a + b * s**2 + c * s**4)) + precision.roundoff * abs(a) * s
            if s > 10:
                return False
        if s > 1.5:
            return False
    return True
