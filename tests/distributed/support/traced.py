"""What ran, by PyTorch's profiler: an account of collectives and Newton-Schulz independent of compile_muon's own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
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
#: torch.distributed's own functions, and what functional collectives call: with the result ahead of the input
_DIRECT = {"c10d::_allgather_base_": "all_gather", "c10d::alltoall_base_": "all_to_all"}


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


def _bytes(kind: str, numel: int, size: int, kept: int, world: int) -> float:
    if kind == "all_to_all":
        return (numel - kept) * size
    share = {"all_gather": world - 1, "reduce_scatter": (world - 1) / world, "all_reduce": 2 * (world - 1) / world}
    return numel * size * share[kind]


def _direct(events: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and arguments of collectives that no functional one called."""
    calls = [event for event in events if event.get("name") in _KINDS]
    for event in events:
        kind = _DIRECT.get(event.get("name", ""))
        inside = any(
            call["tid"] == event["tid"] and call["ts"] <= event["ts"] <= call["ts"] + call["dur"] for call in calls
        )
        if kind is not None and not inside:
            yield kind, event["args"]


def _kept(arguments: dict[str, Any], numel: int, shapes: list[tuple[int, ...]], world: int, rank: int) -> int:
    """Elements that an all-to-all sends to its own rank."""
    text = arguments["Concrete Inputs"][2]
    if not text:  # the profiler drops lists of more than 30; with even shards it is its rows of what it owns
        return sum(torch.Size(shape).numel() for shape in shapes) // world
    splits = json.loads(text)
    assert sum(splits) == numel
    return splits[rank]


def _reductions(events: list[dict[str, Any]], world: int) -> set[int]:
    """Indices of the all-to-alls that are half of a reduce-scatter: what all ranks sent is summed behind them."""
    found: set[int] = set()
    for event in events:
        if event.get("name") != "aten::sum":
            continue
        dims = event["args"]["Input Dims"][0]
        if len(dims) != 2 or dims[0] != world:
            continue
        for index, start in enumerate(events):
            if start.get("name") == "_c10d_functional::all_to_all_single" and index not in found:
                size = torch.Size(start["args"]["Input Dims"][0]).numel()
                if size == dims[0] * dims[1] and start["ts"] < event["ts"]:
                    found.add(index)
                    break
    return found


def _account(events: list[dict[str, Any]], world: int, rank: int) -> Trace:
    sent: dict[str, float] = {}
    elements: dict[str, int] = {}
    newton_schulz = [event["args"] for event in events if event.get("name") == "muon_zero::newton_schulz"]
    shapes = [(1, *shape)[-3:] for arguments in newton_schulz for shape in arguments["Input Dims"][0]]
    reductions = _reductions(events, world)

    def add(kind: str, numel: int, kept: int, dtype: str) -> None:
        sent[kind] = sent.get(kind, 0.0) + _bytes(kind, numel, _ITEMSIZE[dtype], kept, world)
        elements[kind] = elements.get(kind, 0) + numel

    for index, event in enumerate(events):
        arguments = event.get("args", {})
        kind = "reduce_scatter" if index in reductions else _KINDS.get(event.get("name", ""))
        if kind is None:
            continue
        numel = torch.Size(arguments["Input Dims"][0]).numel()
        kept = _kept(arguments, numel, shapes, world, rank) if kind == "all_to_all" else 0
        add(kind, numel, kept, arguments["Input type"][0])
    for kind, arguments in _direct(events):  # equal splits
        numel = torch.Size(arguments["Input Dims"][1]).numel()
        add(kind, numel, numel // world, arguments["Input type"][1])
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
