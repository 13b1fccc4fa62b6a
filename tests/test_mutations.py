"""The list of faults fits the code, and a fault that nobody notices is told. ``make mutate`` tries them all."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture
def mutate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module; tests/ is on no path but for its import."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import mutate

    monkeypatch.undo()
    return mutate


def test_every_fault_can_be_made_and_its_test_is_there(mutate: Any) -> None:
    mutations = mutate.mutations()
    assert not [problem for mutation in mutations for problem in mutation.problems(mutate.ROOT)]
    assert not [name for name, number in Counter(mutation.name for mutation in mutations).items() if number > 1]
    folders = Counter(mutation.file.rsplit("/", 1)[0] for mutation in mutations)
    engine, config = folders["compile_muon/engine"], folders["compile_muon/config"]
    passes = sum(number for folder, number in folders.items() if folder.startswith("passes"))
    assert passes >= 12 and engine >= 10 and config >= 5 and folders["compile_muon/offload"] >= 4


@pytest.mark.full
def test_what_notices_a_fault_is_among_what_it_can_break(mutate: Any) -> None:
    """The graph of imports beside what is known by trying."""
    graph = mutate.this_repository()
    for mutation in mutate.mutations():
        tests = mutate.nearest_first(graph, mutation.file)
        assert mutation.caught_by.partition("::")[0] in tests, mutation.name
    tests = mutate.nearest_first(graph, "passes/lowering/schedule.py")
    assert tests[0].startswith("tests/passes/lowering/") and tests[-1].startswith(("tests/test_", "tests/rehearse/"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"file": "a/gone.py"}, "there is no a/gone.py; update it"),
        ({"before": "b"}, "a/it.py has its `before` 0 times; update it"),
        ({"before": "x"}, "a/it.py has its `before` 2 times; update it"),
        ({"after": "x = 1"}, "changes nothing"),
        ({"after": "x ="}, "invalid syntax"),
        ({"caught_by": "test_it.py::test_gone"}, "there is no test test_it.py::test_gone"),
        ({"caught_by": "gone.py::test_it"}, "there is no test gone.py::test_it"),
        ({}, None),
    ],
)
def test_a_fault_that_does_not_fit_is_named(
    change: dict[str, str], problem: str | None, mutate: Any, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/it.py").write_text("x = 1\nx += 1\n")
    (tmp_path / "test_it.py").write_text("def test_it(): ...")
    fault = mutate.Mutation("it is wrong", "a/it.py", "x = 1", "x = 2", "test_it.py::test_it")
    said = list(replace(fault, **change).problems(tmp_path))
    assert (not said) if problem is None else (len(said) == 1 and problem in said[0]), said


@pytest.mark.parametrize("noticed", [None, "tests/test_mutations.py::test_it"])
@pytest.mark.full
def test_a_fault_that_nobody_notices_fails(
    noticed: str | None, mutate: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Copy:
        def __init__(self, *given: Any) -> None: ...
        def failing(self, tests: Any, *options: str) -> None: ...
        def with_fault(self, mutation: Any) -> Any:
            return pytest.MonkeyPatch.context()

    monkeypatch.setattr(mutate, "Copy", Copy)
    monkeypatch.setattr(mutate, "catching", lambda *given, **options: noticed)
    monkeypatch.setattr(sys, "argv", ["mutate.py", "--only", "passes/costs.py"])
    assert mutate.main() == (noticed is None)
    told = capsys.readouterr().out
    assert (f"caught by {noticed}" if noticed else "SURVIVED") in told


@pytest.mark.full
def test_a_fault_is_noticed_in_a_copy() -> None:
    """From the copy to the test's name; the code here stays as it is."""
    command = [sys.executable, str(FOLDER / "mutate.py"), "--only", "Nesterov's look ahead goes"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "caught by tests/kernels/test_momentum.py::" in done.stdout and "1 of 1 caught" in done.stdout
