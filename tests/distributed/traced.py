"""What ran, by PyTorch's profiler: an account of collectives and Newton-Schulz that owes nothing to compile_muon's own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Trace", "trace"]

_ITEMSIZE = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "long int": 8}
_KINDS = {
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_reduce_": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class Trace:
    """One rank's account.

    Args:
        sent: bytes it sent by kind of collective (ring or pairwise algorithms).
        elements: elements it put in by kind, with padding.
        shapes: shapes ``(batch, rows, cols)`` it put through Newton-Schulz, one entry per call and input.
    """

    sent: dict[str, float]
    elements: dict[str, int]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def matrices(self) -> int:
        """Matrices it put through Newton-Schulz."""
        return sum(shape[0] for shape in self.shapes)


def _bytes(kind: str, numel: int, size: int, splits: list[int], world: int, rank: int) -> float:
    if kind == "all_to_all":
        assert sum(splits) == numel
        return (numel - splits[rank]) * size
    share = {"all_gather": world - 1, "reduce_scatter": (world - 1) / world, "all_reduce": 2 * (world - 1) / world}
    return numel * size * share[kind]


def _account(events: list[dict[str, Any]], world: int, rank: int) -> Trace:
    sent: dict[str, float] = {}
    elements: dict[str, int] = {}
    shapes: list[tuple[int, ...]] = []
    for event in events:
        arguments = event.get("args", {})
        if event.get("name") == "muon_zero::newton_schulz":
            shapes += [(1, *shape)[-3:] for shape in arguments["Input Dims"][0]]
        kind = _KINDS.get(event.get("name", ""))
        if kind is None:
            continue
        numel = torch.Size(arguments["Input Dims"][0]).numel()
        splits = json.loads(arguments["Concrete Inputs"][2]) if kind == "all_to_all" else []
        size = _ITEMSIZE[arguments["Input type"][0]]
        sent[kind] = sent.get(kind, 0.0) + _bytes(kind, numel, size, splits, world, rank)
        elements[kind] = elements.get(kind, 0) + numel
    return Trace(sent, elements, tuple(shapes))


def trace(function: Callable[[], None], *, world: int, rank: int) -> Trace:
    """Run ``function``, which must compile nothing, and account for it."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return _account(events, world, rank)
