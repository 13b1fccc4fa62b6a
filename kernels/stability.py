"""Where the gram form of Newton–Schulz has to restart in half precision, and which schedules it does not survive.

The gram form iterates on R = XXᵀ and Q alone, and rounding hurts it at both ends of the spectrum.

Small eigenvalues of R move by about ±`perturbation`, so some turn negative, and a negative eigenvalue never comes
back: each step sends r to r(a + br + cr²)², with factors that grow as r falls, while Q picks up a + br + cr² where
exact arithmetic has a. A restart (X ← QX, R ← XXᵀ, Q ← I) makes R positive again. The damage of a segment is the
ratio of Q at r = −perturbation to Q at r = 0; `choose_restarts` places restarts by it.

Large singular values move by a relative a·roundoff when Q = aI + Z is rounded. A schedule whose steps send them to the
edge of what the next step still contracts is thrown over it; `survives_rounding` tells.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

__all__ = ["BFLOAT16", "FLOAT16", "Precision", "Triple", "amplification", "choose_restarts", "survives_rounding"]

Triple = tuple[float, float, float]

# jordan in float16: ratio 1.09 over three steps, where the error is that of the standard form; 2.7 over four, where it
# is up to fifty times as large.
TOLERATED = 1.5


@dataclass(frozen=True)
class Precision:
    """`perturbation`: error of a Gram matrix's eigenvalues. `roundoff`: half the spacing of numbers at one."""

    perturbation: float
    roundoff: float


FLOAT16 = Precision(perturbation=4e-4, roundoff=2.0**-11)  # 4e-4: Dao-AILab/gram-newton-schulz
BFLOAT16 = Precision(perturbation=8 * 4e-4, roundoff=2.0**-8)


def amplification(triples: Sequence[Triple], perturbation: float) -> float:
    """Largest |Q(r) / Q(0)| over the steps of a segment for r = −`perturbation`; infinite where that exceeds 1e6."""
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
    """The numbers of steps after which to restart: as few as keep each segment's `amplification` below `TOLERATED`.

    Among equally few, the placement with the least damage, then the latest. Gives what Dao-AILab/gram-newton-schulz
    published for float16: after step 3 for jordan, after step 2 for you and polar_express.
    None where two steps already exceed it: restarting after every step is the standard form at a higher price.
    """
    n = len(triples)
    if any(amplification(triples[i : i + 2], precision.perturbation) > TOLERATED for i in range(n)):
        return None
    # best[j], for the first j steps: number of restarts, worst amplification, placement.
    best: list[tuple[int, float, tuple[int, ...]]] = [(-1, 1.0, ())]
    for j in range(1, n + 1):
        options = []
        for i in range(j):
            damage = amplification(triples[i:j], precision.perturbation)
            if damage <= TOLERATED:
                count, worst, placement = best[i]
                options.append((count + 1, max(worst, damage), (*placement, i) if i else ()))
        best.append(min(options, key=lambda option: (option[0], option[1], tuple(-i for i in option[2]))))
    return best[n][2]


@cache
def survives_rounding(triples: tuple[Triple, ...], safety: float, precision: Precision) -> bool:
    """Whether every singular value in [0, 1/safety] ends below 1.5 though each step rounds it up by a·roundoff.

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
