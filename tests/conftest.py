"""The suite sees the package as it is installed, and every test of the default tier is a short one."""

import contextlib
import gc
import importlib.util
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

# `python -m pytest` puts the checkout's root first on the path. There `kernels` is our folder, and a transformers that
# has PyPI's package of that name cannot be imported. Ranks take their path from here.
ROOT = Path(__file__).resolve().parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != ROOT]


def _load(name: str, path: Path) -> Any:
    """A module by its file. (tests/ on the path would stand for a package compile_muon.)"""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


affected = _load("affected", ROOT / "tests" / "affected.py")

# No test measures absolute time: a draw that took a second said that other ranks had the cores. The tests that run on
# a GPU need no hypothesis.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("suite")

_LONGER = ("full", "campaign", "gpu")
#: what a test of the default tier may ask for, ranks and all; it is the same on every machine, as seconds are not
_MOST = {"frames compiled": 60, "graphs lowered": 16, "ranks started": 8}
#: Dynamo's own names for the first two
_OWN = {"frames compiled": "_compile.compile_inner", "graphs lowered": "compile_fx_inner"}
_began = pytest.StashKey[tuple[float, dict[str, int]]]()
#: test files whose full tests are run, None for all
_affected = pytest.StashKey[Collection[str] | None]()


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "seconds of a core from which on a test of the default tier is named as a long one, ranks included"
    parser.addini("cpu_limit", help_text, default="10")
    help_text = "times what a test of the default tier may compile, lower and start, or it fails; 0: it never does"
    parser.addini("limit_work", help_text, default="0")

    help_text = "of the full tier, run what can be affected by changes since this commit, or the one that a file names"
    parser.addoption("--affected-since", metavar="COMMIT", help=help_text)


def pytest_configure(config: pytest.Config) -> None:
    since, worker = config.getoption("--affected-since"), getattr(config, "workerinput", None)
    if worker is not None:  # of pytest-xdist: each selects what the others do
        config.stash[_affected] = worker["affected"]
    elif since is not None and (changed := affected.changed_since(since)) is not None:
        config.stash[_affected] = affected.this_repository(changed).affected(changed)
    else:
        config.stash[_affected] = None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["affected"] = node.config.stash[_affected]


def _place(item: pytest.Item) -> int:
    """Files that take long come first, so that no worker has one left when the others are done: those of whole programs
    at the top, then those that need ranks, which a worker starts once for them all."""
    folders = item.path.relative_to(ROOT).parts[1:-1] if item.path.is_relative_to(ROOT) else ()
    return 0 if not folders else 1 if folders[0] == "distributed" else 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = config.stash[_affected]
    kept, left = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        full = chosen is not None and item.get_closest_marker("full") is not None
        (left if full and item.path.relative_to(ROOT).as_posix() not in chosen else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = sorted(kept, key=_place)


def _cpu_seconds() -> float:
    """Of this process, of the subprocesses that have ended, and of the ranks that tests share."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    harness = sys.modules.get("support.harness")
    ranks = 0.0 if harness is None else harness.cpu_seconds()
    return time.process_time() + children.ru_utime + children.ru_stime + ranks


def _work() -> dict[str, int]:
    """What this process and its ranks have done until now, by the names in :data:`_MOST`."""
    dynamo, harness = sys.modules.get("torch._dynamo.utils"), sys.modules.get("support.harness")
    own = (
        {} if dynamo is None else {name: len(dynamo.compilation_time_metrics.get(of, ())) for name, of in _OWN.items()}
    )
    return {name: own.get(name, 0) + (0 if harness is None else harness.work()[name]) for name in _MOST}


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # half a million objects of imports and tests, which every collection would look at


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[_began] = _cpu_seconds(), _work()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "call":
        seconds, work = item.stash[_began]
        done = {name: number - work[name] for name, number in _work().items()}
        short = not any(item.get_closest_marker(name) for name in _LONGER)
        report.user_properties += [("cpu", _cpu_seconds() - seconds), ("work", done), ("short", short)]
        factor = float(item.config.getini("limit_work"))
        over = [f"{n} {name} (at most {_MOST[name]})" for name, n in done.items() if n > factor * _MOST[name]]
        if short and report.passed and over and factor:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: {', '.join(over)}: have it do less, or mark it full"
    return report


def _skipped(reports: list[pytest.TestReport]) -> Iterator[str]:
    """How many tests were skipped for want of what, and how many because there is nothing to test."""
    reasons = Counter(
        (report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)).removeprefix("Skipped: ")
        for report in reports
    )
    wanting = {
        reason: n
        for reason, n in reasons.items()
        if re.match("needs |no g|could not import|.*not (installed|on PATH)", reason)
    }
    for heading, found in (
        ("skipped for want of something, as is right where it is missing", wanting),
        ("skipped because there is nothing to test", {r: n for r, n in reasons.items() if r not in wanting}),
    ):
        if found:
            yield f"{sum(found.values())} {heading}:"
            yield from (f"{n:6} {reason}" for reason, n in sorted(found.items(), key=lambda item: -item[1]))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    write, config = terminalreporter.write_line, terminalreporter.config
    for line in _skipped(terminalreporter.stats.get("skipped", [])):
        write(line)
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    took = {report.nodeid: told for report in reports if "cpu" in (told := dict(report.user_properties))}
    slowest = sorted(took.items(), key=lambda item: -item[1]["cpu"])
    if (shown := config.getoption("durations")) is not None:
        for name, told in slowest[: shown or None]:
            work = ", ".join(f"{number} {what}" for what, number in told["work"].items() if number)
            write(f"{told['cpu']:8.2f} s of CPU {name}" + (f": {work}" if work else ""))
    limit = float(config.getini("cpu_limit"))
    if long := [(name, told) for name, told in slowest if told["short"] and told["cpu"] > limit]:
        write(f"longer than {limit:g} s of CPU, on this machine and with what ran beside; nothing is wrong with them:")
        for name, told in long:
            write(f"{told['cpu']:8.1f} {name}")
    write(f"{sum(told['cpu'] for told in took.values()):.0f} s of CPU in {len(took)} tests")


@pytest.fixture(scope="session")
def docs_script() -> Callable[[str], Any]:
    """Loads docs/NAME.py."""

    return lambda name: _load(f"docs_{name}", ROOT / "docs" / f"{name}.py")
