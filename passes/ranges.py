"""Profiler ranges: NVTX in the domain ``muon_zero``, and the same for torch.profiler.

NVTX ranges need NVIDIA's ``nvtx`` package, which has domains, categories and payloads, and a tool that listens; else
only torch.profiler sees ranges. Each thread has a stack of open ranges, as in NVTX, so that the end of a range also
closes those that an error left open inside.
"""

import contextlib
import functools
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from torch.profiler import record_function

from .language.work import Category
from .torch_private import profiler_enabled, unrecorded_op

DOMAIN = "muon_zero"

#: a category of ranges beside :class:`Category`
NEWTON_SCHULZ = "newton_schulz"

#: ARGB by category; "" for ranges without one
COLORS = {
    "": 0xFF7F7F7F,
    Category.GATHER.value: 0xFF1F77B4,
    Category.REDUCE.value: 0xFFD62728,
    Category.EXCHANGE.value: 0xFFFF7F0E,
    NEWTON_SCHULZ: 0xFF2CA02C,
    Category.REFRESH.value: 0xFF9467BD,
}


class _Open(threading.local):
    """The open ranges of one thread, outermost first; None where torch.profiler does not record."""

    def __init__(self) -> None:
        self.records: list[record_function | None] = []


_open = _Open()


def nvtx_installed() -> bool:
    """Whether the ``nvtx`` package is installed."""
    return find_spec("nvtx") is not None


@functools.cache  # a failed import searches the whole path again each time
def _domain() -> Any:
    """Return the NVTX domain, a dummy without a listening tool; None without the package."""
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
    """Open a range around a block; its end also closes ranges left open inside.

    ``name`` has to be the same from step to step, or tools list each step's. ``category`` is a key of :data:`COLORS`,
    ``payload`` the bytes that this rank sends, or a number of matrices.
    """
    depth = len(_open.records)
    _push(name, category, payload)
    try:
        yield
    finally:
        while len(_open.records) > depth:
            _pop()


#: Inductor drops ``record_function`` nodes, and any side effect without tensors. These ops declare a write of ``xs``,
#: which keeps them behind the makers and ahead of the readers of ``xs``.
RANGE_PUSH = unrecorded_op(
    "muon_zero_push", "Tensor(a!)[] xs, str name, str category, int payload", lambda xs, *about: _push(*about)
)
RANGE_POP = unrecorded_op("muon_zero_pop", "Tensor(a!)[] xs", lambda xs: _pop())
