"""The numbers that a step of `make gpu` is expected to measure, and the readers that find them in the step's JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Reader = Callable[[Any], float | None]


@dataclass(frozen=True)
class Expected:
    """A number that a step measures."""

    what: str  # description
    read: Reader  # finds the number in the step's JSON; None if it was not measured
    spans: Mapping[str, tuple[float, float]]  # part of a device's name -> least and most that are expected
    unit: str

    def line(self, found: Any, device: str) -> str:
        """Describe the number, with "!" in front if it is not as expected; of other devices nothing is expected.

        >>> about = Expected("a list", lambda found: found["ms"], {"H100": (14, 17)}, "ms")
        >>> about.line({"ms": 15.31}, "NVIDIA H100 80GB HBM3")
        '  a list: 15.3 ms (expected: 14 to 17)'
        >>> about.line({"ms": 21.0}, "NVIDIA H100 80GB HBM3")
        '! a list: 21 ms (expected: 14 to 17)'
        >>> about.line({"ms": 21.0}, "NVIDIA L4")
        '  a list: 21 ms'
        """
        try:
            value = self.read(found)
        except (KeyError, IndexError, TypeError, statistics.StatisticsError):
            value = None
        if value is None:
            return f"! {self.what}: not measured"
        text = f"{self.what}: {value:.3g} {self.unit}".rstrip()
        span = next((span for name, span in self.spans.items() if name in device), None)
        if span is None:
            return f"  {text}"
        mark = " " if span[0] <= value <= span[1] else "!"
        return f"{mark} {text} (expected: {span[0]:g} to {span[1]:g})"


def compared(expected: Iterable[Expected], file: Path, device: str) -> list[str]:
    """Describe each number in a line; without the file none was measured."""
    try:
        results = json.loads(file.read_text())
    except (OSError, ValueError):
        results = None
    return [number.line(results, device) for number in expected]


def _samples(found: Any, contender: str) -> Iterator[Any]:
    return (run for run in found["samples"] if run["contender"] == contender and not run["error"])


def step_ms(contender: str) -> Reader:
    """Read the median milliseconds of a step of `train_step.py`."""
    return lambda found: 1e3 * statistics.median(s for run in _samples(found, contender) for s in run["step_s"])


def price(one: str, other: str) -> Reader:
    """Read the median over rounds of one contender's step relative to another's."""

    def read(found: Any) -> float:
        both = ([s for run in _samples(found, name) for s in run["step_s"]] for name in (one, other))
        return statistics.median(a / b for a, b in zip(*both, strict=True))

    return read


def peak_gb(contender: str) -> Reader:
    return lambda found: max(run["peak_bytes"] for run in _samples(found, contender)) / 1e9


def list_ms(case: str, method: str, way: str) -> Reader:
    """Read the milliseconds of a list in `lists.py`."""
    return lambda found: _row(found, case=case, method=method, way=way)["ms"]


def sustained_tflops(found: Any) -> float:
    return statistics.median(row["sustained_tflops"] for row in found["rows"])


def held_times(what: str, held: int) -> Reader:
    """Read the slowdown with ``held`` multiprocessors in `contention.py`."""
    return lambda found: _row(found, what=what, held=held)["times"]


def speed_up(product: str, size: int) -> Reader:
    """Read the speed of a product over torch's in `products.py`."""
    return lambda found: _row(found, product=product, size=size)["speed_up"]


def _row(found: Any, **where: object) -> Any:
    return next((row for row in found["rows"] if all(row[key] == value for key, value in where.items())), None)
