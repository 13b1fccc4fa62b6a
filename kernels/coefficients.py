"""Coefficient sets of the quintic Newton-Schulz step X ← aX + (bA + cA²)X, A = XXᵀ.

Sources:

jordan         KellerJordan/Muon
you            YouJiacheng, as in Dao-AILab/gram-newton-schulz
polar_express  arXiv 2505.16932, as in modded-nanogpt, which divides X by 1.02 ‖X‖ so that rounding cannot push a
               singular value above one
cans           NVIDIA Emerging-Optimizers, with the same 1.02
four_steps     Polar Express's algorithm 1 (cushion 0.024) for four steps from ℓ = 0.0025, all but the last for values
               1.01 times as large. Singular values in [0.0025, 1] end in [0.69, 1.27]; five steps of jordan take
               [0.0015, 1] to [0.68, 1.20].
deepseek_v4    eight steps of jordan, and two that contract towards one

cans lacks the 1.02 in its source. Without it a matrix of rank one diverges in half precision (largest singular value
700 in float16, 4e23 in bfloat16): the first step sends 1 to 1.99, and the next ones diverge above 1.995. The first step
sends 0.367 to 1.99 too, where no factor helps: with seven singular values near 0.367 of the norm the largest ends at
2e8 in bfloat16, where cans is therefore refused, and at up to 9.7 in float16. Prefer float32, where it ends at 1.12.
"""

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from .stability import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Precision,
    Triple,
    choose_restarts,
    factors_are_accurate,
    survives_rounding,
)

MAX_STEPS = 99  # torch.optim.Muon's limit
DEFAULT_STEPS = 5  # of one bare triple, which has no length of its own

_JORDAN: Triple = (3.4445, -4.7750, 2.0315)
_CONTRACTING: Triple = (2.0, -1.5, 0.5)
#: Steps for which Q ← FQ may be one triangle, mirrored, in float16. Measured against the standard form in bfloat16
#: (tests/kernels/test_accuracy.py): jordan's error is at most 0.42 of it, as with a whole Q, and deepseek_v4's 0.94.
#: A mirrored Q of you and polar_express has 5 to 9 times the error of a whole one, 0.70 and 1.34.
MIRRORED = frozenset({_JORDAN, _CONTRACTING})


@dataclass(frozen=True)
class CoefficientSet:
    """A resolved schedule of Newton-Schulz steps."""

    name: str  # in error messages
    steps: tuple[Triple, ...]  # (a, b, c) of each step
    safety: float = 1.0  # multiplies the Frobenius norm that X is divided by
    fixed_length: bool = False  # the schedule is only meaningful as a whole

    def gram_restarts(self, dtype: torch.dtype) -> tuple[int, ...]:
        """Return the numbers of steps after which the gram form restarts; all of them where no fewer are safe."""
        # float64 restarts where float32 does: it needs restarts less often, but not never.
        chosen = choose_restarts(self.steps, _HALF.get(dtype, FLOAT32))
        return tuple(range(1, len(self.steps))) if chosen is None else chosen

    def survives(self, dtype: torch.dtype) -> bool:
        """Tell whether rounding to ``dtype`` keeps all singular values where the schedule contracts, in either form."""
        precision = _HALF.get(dtype)
        return precision is None or survives_rounding(self.steps, self.safety, precision)

    def is_all_or_nothing(self, dtype: torch.dtype) -> bool:
        """Tell whether either all entries of a result in ``dtype`` are finite, or none is."""
        # A non-finite entry makes all of its matrix NaN: through the norm; or, where torch.optim.Muon's normalization
        # turns an inf into one NaN among zeros, through the first XXᵀ that a step multiplies by b or c. Finite entries
        # stay finite if no singular value leaves the range that the schedule contracts; else single ones may overflow.
        bounded = survives_rounding(self.steps, self.safety, _HALF.get(dtype, FLOAT32))
        return bounded and any(b or c for _, b, c in self.steps)

    def gram_is_stable(self, dtype: torch.dtype) -> bool:
        """Tell whether no rounding in ``dtype`` makes the gram form diverge, as far as is known (see ``stability``)."""
        precision = _HALF.get(dtype)
        return precision is None or (choose_restarts(self.steps, precision) is not None and self.survives(dtype))

    def gram_is_accurate(self, dtype: torch.dtype) -> bool:
        """Tell whether the gram form's error in ``dtype`` is small enough for method "auto" (see ``stability``)."""
        precision = _HALF.get(dtype)
        return self.gram_is_stable(dtype) and (precision is None or factors_are_accurate(self.steps, precision))


_HALF: Mapping[torch.dtype, Precision] = {torch.float16: FLOAT16, torch.bfloat16: BFLOAT16}

COEFFICIENTS: Mapping[str, CoefficientSet] = MappingProxyType(
    {
        s.name: s
        for s in (
            CoefficientSet("jordan", (_JORDAN,) * 5),
            CoefficientSet(
                "you",
                (
                    (4.0848, -6.8946, 2.9270),
                    (3.9505, -6.3029, 2.6377),
                    (3.7418, -5.5913, 2.3037),
                    (2.8769, -3.1427, 1.2046),
                    (2.8366, -3.0525, 1.2012),
                ),
            ),
            CoefficientSet(
                "polar_express",
                (
                    (8.156554524902461, -22.48329292557795, 15.878769915207462),
                    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
                ),
                safety=1.02,
            ),
            CoefficientSet(
                "cans",
                (
                    (8.4703, -25.1081, 18.6293),
                    (4.1828, -3.1087, 0.5806),
                    (3.9619, -2.9541, 0.5630),
                    (3.2866, -2.4647, 0.5074),
                    (2.2737, -1.6447, 0.4162),
                ),
                safety=1.02,
            ),
            CoefficientSet(
                "four_steps",
                (
                    (8.1551, -22.7650, 16.3630),
                    (3.9901, -2.8429, 0.5215),
                    (3.5873, -2.6325, 0.5095),
                    (2.6421, -1.9614, 0.4509),
                ),
                safety=1.02,
                fixed_length=True,
            ),
            CoefficientSet("deepseek_v4", (_JORDAN,) * 8 + (_CONTRACTING,) * 2, fixed_length=True),
        )
    }
)

CoefficientsLike = str | CoefficientSet | Sequence[float] | Sequence[Sequence[float]]


def resolve_coefficients(coefficients: CoefficientsLike, steps: int | None = None) -> CoefficientSet:
    """Return the schedule for ``coefficients`` with exactly ``steps`` steps.

    Args:
        coefficients: a name in ``COEFFICIENTS``, one triple (a, b, c), a sequence of triples, or a ``CoefficientSet``.
        steps: None for the schedule's own length (five for one triple). Of a longer schedule the first steps are
            taken, of a shorter one the last triple is repeated, unless the schedule is of fixed length.
    Raises:
        ValueError: an unknown name, malformed or non-finite triples, a step count outside 1..99, or one that a
            schedule of fixed length does not have.
        TypeError: ``steps`` is not an int.
    """
    preset = _named(coefficients) if isinstance(coefficients, str) else coefficients
    if not isinstance(preset, CoefficientSet):
        preset = CoefficientSet("custom", _triples(preset))
    if steps is None:
        return preset
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps={steps!r}: expected an int or None (the schedule's own length)")
    if not 1 <= steps <= MAX_STEPS:
        raise ValueError(f"steps={steps}: expected 1 to {MAX_STEPS} Newton-Schulz steps")
    length = len(preset.steps)
    if preset.fixed_length and steps != length:
        raise ValueError(
            f"steps={steps}: {preset.name!r} is one schedule of {length} steps; pass steps={length}, or steps=None for "
            "the schedule's own length"
        )
    extended = preset.steps[:steps] + preset.steps[-1:] * (steps - length)
    return replace(preset, steps=extended)


def _named(name: str) -> CoefficientSet:
    if name in COEFFICIENTS:
        return COEFFICIENTS[name]
    names = list(COEFFICIENTS)
    nearest = difflib.get_close_matches(name.lower(), names, n=2, cutoff=0.4)
    hint = f"did you mean {' or '.join(map(repr, nearest))}? " if nearest else ""
    raise ValueError(
        f"coefficients={name!r} is unknown: {hint}the sets are {', '.join(names)}; or pass one (a, b, c) or several"
    )


def _triples(values: Sequence[float] | Sequence[Sequence[float]]) -> tuple[Triple, ...]:
    try:
        rows = [tuple(float(v) for v in row) for row in values]  # type: ignore[union-attr]
    except TypeError:
        try:
            rows = [tuple(float(v) for v in values)] * DEFAULT_STEPS  # type: ignore[arg-type]
        except TypeError:
            rows = []
    if not rows or len(rows) > MAX_STEPS or any(len(row) != 3 or not all(map(math.isfinite, row)) for row in rows):
        raise ValueError(
            f"coefficients={values!r}: expected one (a, b, c) of finite numbers, or 1 to {MAX_STEPS} such triples"
        )
    return tuple((row[0], row[1], row[2]) for row in rows)
