"""Ranges that profilers show: NVTX in the domain ``muon_zero``, and the same for torch.profiler.

NVTX goes through NVIDIA's ``nvtx`` package, which has domains, categories and payloads; where it is not installed, or
no tool listens, only torch.profiler sees ranges. A stack of open ranges per thread, as NVTX keeps one, lets whoever
opened a range close those that an error left open inside.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from torch.profiler import record_function

from .language.work import Category
from .torch_private import profiler_enabled, unrecorded_op

__all__ = ["COLORS", "DOMAIN", "NEWTON_SCHULZ", "RANGE_POP", "RANGE_PUSH", "nvtx_installed", "ranged"]

DOMAIN = "muon_zero"

#: the category beside those of :class:`Category`
NEWTON_SCHULZ = "newton_schulz"

#: ARGB, by category; "" is for what has none
COLORS = {
    "": 0xFF7F7F7F,
    Category.GATHER.value: 0xFF1F77B4,
    Category.REDUCE.value: 0xFFD62728,
    Category.EXCHANGE.value: 0xFFFF7F0E,
    NEWTON_SCHULZ: 0xFF2CA02C,
    Category.REFRESH.value: 0xFF9467BD,
}


class _Open(threading.local):
    """The ranges of one thread that are open, outermost first; None where torch.profiler does not record."""

    def __init__(self) -> None:
        self.records: list[record_function | None] = []


_open = _Open()


def nvtx_installed() -> bool:
    """Whether NVTX ranges can be made."""
    return find_spec("nvtx") is not None


@functools.cache  # a package that is missing is looked for in every folder
def _domain() -> Any:
    """The domain, which does nothing without a tool; None without the package."""
    try:
        import nvtx
    except ImportError:
        return None
    return nvtx.get_domain(DOMAIN)


def _push(name: str, category: str, payload: int) -> None:
    domain = _domain()
    if domain is not None:
        domain.push_range(domain.get_event_attributes(name, COLORS[category], category or None, payload))
    record = None
    if profiler_enabled():
        record = record_function(f"{DOMAIN} {name}")
        record.__enter__()
    _open.records.append(record)


def _pop() -> None:
    record = _open.records.pop()
    if record is not None:
        record.__exit__(None, None, None)
    domain = _domain()
    if domain is not None:
        domain.pop_range()


@contextlib.contextmanager
def ranged(name: str, category: str = "", payload: int = 0) -> Iterator[None]:
    """A range around a block; ranges that were opened inside and not closed end with it.

    Args:
        name: the same from step to step, or tools keep one for each.
        category: of :data:`COLORS`.
        payload: bytes that this rank sends, or a number of matrices.
    """
    depth = len(_open.records)
    _push(name, category, payload)
    try:
        yield
    finally:
        while len(_open.records) > depth:
            _pop()


#: Inductor drops ``record_function`` nodes, and any side effect without tensors. These claim to write ``xs``, which
#: keeps them ahead of what reads it and behind what makes it.
RANGE_PUSH = unrecorded_op(
    "muon_zero_push", "Tensor(a!)[] xs, str name, str category, int payload", lambda xs, *about: _push(*about)
)
RANGE_POP = unrecorded_op("muon_zero_pop", "Tensor(a!)[] xs", lambda xs: _pop())
