"""The reliability campaign runs, and what it finds wrong is said. ``benchmarks/faults.py`` runs all of it."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def reliability(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of benchmarks/reliability/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return lambda name: importlib.import_module(f"reliability.{name}")


def faults(*arguments: str) -> subprocess.CompletedProcess[str]:
    """It forks, which a process with threads (this one) must not."""
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "faults.py"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


@pytest.mark.full
def test_kills_damage_and_resharding(tmp_path: Path) -> None:
    output = tmp_path / "faults.json"
    done = faults("kills", "damage", "resharding", "--quick", "--runs", "6", "--json", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert {name: campaign["wrong"] for name, campaign in found.items()} == {"kills": 0, "damage": 0, "resharding": 0}
    kills, damage, resharding = (found[name]["rows"] for name in ("kills", "damage", "resharding"))
    assert sum(row["tried"] for row in kills) == 6
    # Every training that was killed was started again, and came to its end.
    for row in kills:
        ended = row["outcomes"]["trainings ended bit for bit as never killed"]
        assert ended == row["details"]["trainings"] > 0
    assert sum(row["tried"] for row in damage) == 6
    assert [row["tried"] for row in resharding] == [6] * 6
    assert all(row["again"].startswith(f"python benchmarks/faults.py {row['campaign']} ") for row in kills + damage)


@pytest.mark.campaign
def test_a_run_without_a_fault_is_right(tmp_path: Path) -> None:
    output = tmp_path / "faults.json"
    faults("ranks", "--only", "nothing", "--stages", "3", "--json", str(output))
    (row,) = json.loads(output.read_text())["ranks"]["rows"]
    assert row["outcomes"] == {"right": 1}


def test_what_an_error_names(reliability: Callable[[str], Any]) -> None:
    ranks, faults_of = reliability("ranks"), reliability("rank_faults")
    for message, rank, step in (
        ("rank 1 was last seen in step 3, backward of frame 2 (blocks.1)", True, True),
        ("ranks [1] built a model with other parameter names than rank 0", True, False),
        ("ranks 0, 2 wait in step 4", False, True),
        ("[127.0.0.1]:39842 closed the connection of rank 12 in step 30", False, False),
    ):
        assert (ranks.names_rank(message), ranks.names_step(message, late=False)) == (rank, step), message
    # A fault of a step may show in the next: counted from 1, two more than the fault's, counted from 0.
    assert not ranks.names_step("rank 1 waits in step 5", late=False)
    assert ranks.names_step("rank 1 waits in step 5", late=True)

    def outcome(fault: str, *survivors: dict[str, Any], error: float | None = None) -> str:
        base = {"ended": "raised", "step": 3, "message": "rank 1, step 3"}
        return ranks.classified(faults_of.FAULTS[fault], [base | s for s in survivors], error)["outcome"]

    assert outcome("no step", {}, {}) == "named"
    assert outcome("no step", {}, {"message": "Connection closed by peer"}) == "unnamed"
    assert outcome("no step", {"step": 4}, {}) == "named, late"
    assert outcome("no step", {"ended": "hung"}, {}) == "hung"
    assert outcome("no step", {"ended": "ended with -6"}, {}) == "aborted, named"
    assert outcome("no step", {"ended": "ended with -6"}, {"message": "Connection closed by peer"}) == "aborted"
    assert outcome("no step", {"ended": "ended with -6"}, {"ended": "ended with -6"}) == "aborted"
    assert outcome("no step", {"ended": "ended with 0"}, {}) == "aborted"
    assert outcome("no step", {"ended": "completed"}, {}) == "WRONG"
    assert outcome("no step", error=1e-2) == "WRONG" and outcome("no step", error=1e-7) == "right"
    assert outcome("slow, in time", {}, {}) == "refused"
    assert outcome("made with another stage", {"step": 0, "message": "rank 1 has stage = 0"}) == "named"


def test_a_soak_that_grows(reliability: Callable[[str], Any]) -> None:
    soak = reliability("soak")
    flat = {"Python threads": 2, "OS threads": 8, "open files": 18, "checkpoints": 2, "objects": 1000}
    samples = [{"step": step, "resident KiB": 5000 + step % 100, **flat} for step in range(0, 2000, 50)]
    assert soak.grown(samples) == []
    assert soak.grown([s | {"resident KiB": 5000 + s["step"]} for s in samples]) == [
        "resident memory: 1.00 KiB per step"
    ]
    for what, at_end in (("OS threads", 9), ("open files", 19), ("objects", 1100)):
        (problem,) = soak.grown([*samples, samples[-1] | {"step": 2000, what: at_end}])
        assert problem.startswith(what)
