"""The suite sees the package as it is installed, and every test of the default tier is a short one."""

import contextlib
import gc
import resource
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

# `python -m pytest` puts the checkout's root first on the path. There `kernels` is our folder, and a transformers that
# has PyPI's package of that name cannot be imported. Ranks take their path from here.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]

# No test measures absolute time: a draw that took a second said that other ranks had the cores. The tests that run on
# a GPU need no hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")

#: what a core takes for :func:`_slowness` that has nothing else to do
_CORE = 0.055
_LONGER = ("full", "campaign", "gpu")
_began = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "seconds of a core that a test of the default tier may take, fixtures and ranks included"
    parser.addini("cpu_limit", help_text, default="10")


def _cpu_seconds() -> float:
    """Of this process, of the subprocesses that have ended, and of the ranks that tests share."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    harness = sys.modules.get("harness")
    ranks = 0.0 if harness is None else harness.cpu_seconds()
    return time.process_time() + children.ru_utime + children.ru_stime + ranks


def _slowness() -> float:
    """How many times longer this core takes just now, with what runs beside it; never less than 1."""
    taken = []
    for _ in range(5):
        began, total = time.process_time(), 0
        for number in range(1_000_000):
            total += number
        taken.append(time.process_time() - began)
    return max(1.0, min(taken) / _CORE)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # half a million objects of imports and tests, which every collection would look at


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_began] = _cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        took = _cpu_seconds() - item.stash[_began]
        report.user_properties.append(("cpu", took))
        shorter = report.passed and not any(item.get_closest_marker(name) for name in _LONGER)
        limit = float(item.config.getini("cpu_limit"))
        if shorter and took > limit and took > (limit := limit * _slowness()):
            report.outcome = "failed"
            report.longrepr = (
                f"{item.nodeid} took {took:.1f} s of CPU, more than the {limit:.0f} of the default tier: make it "
                "shorter, or mark it full"
            )
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    took = {r.nodeid: seconds for r in reports for name, seconds in r.user_properties if name == "cpu"}
    if terminalreporter.config.getoption("durations") is not None:
        for name, seconds in sorted(took.items(), key=lambda item: -item[1])[
            : terminalreporter.config.getoption("durations") or None
        ]:
            terminalreporter.write_line(f"{seconds:8.2f} s of CPU {name}")
    terminalreporter.write_line(f"{sum(took.values()):.0f} s of CPU in {len(took)} tests")
