"""Ranks and nodes are killed under torchrun, and the example goes on: benchmarks/reliability/elastic.py does it."""

from __future__ import annotations

import importlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = 60


@pytest.fixture(scope="module")
def elastic() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("reliability.elastic")


@pytest.fixture(scope="module")
def never_killed(elastic: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    job = elastic.Job(tmp_path_factory.mktemp("elastic") / "never killed", steps=STEPS)
    with elastic.one_node(job) as node:
        assert node.wait() == 0, node.printed()
    assert job.newest() == job.steps and job.world() == 2
    return job


@pytest.mark.campaign
def test_what_differs_is_seen(elastic: Any, never_killed: Any, tmp_path: Path) -> None:
    """Else no run below could be wrong."""
    shutil.copytree(never_killed.folder, tmp_path / "copy")
    copy = elastic.Job(tmp_path / "copy", steps=STEPS)
    assert not elastic.differences(never_killed, copy)
    (file, *_) = sorted((copy.checkpoints / f"step-{copy.steps}" / "tensors").glob("*.safetensors"))
    tensors = load_file(file)
    name = next(name for name, value in tensors.items() if value.size)
    tensors[name].view("uint8").flat[0] ^= 1
    save_file(tensors, file)
    assert elastic.differences(never_killed, copy) == [name]
    assert elastic.ended(0, copy, never_killed) == "goes on with other numbers"
    assert elastic.ended(0, never_killed, never_killed, (2, 1)) == "ends with a world of 2"
    assert elastic.ended(None, never_killed, never_killed) == "hangs"


@pytest.mark.full
@pytest.mark.parametrize(
    ("trial", "arguments", "outcome"),
    [
        pytest.param("kill_a_rank", {"moment": "saving"}, "goes on, bit for bit", marks=pytest.mark.campaign),
        ("kill_a_node", {"back": False}, "goes on with 1"),
        pytest.param("kill_a_node", {"back": True}, "goes on, bit for bit", marks=pytest.mark.campaign),
    ],
    ids=["a rank, while saving", "a node does not come back", "a node comes back"],
)
def test_training_goes_on(
    elastic: Any, never_killed: Any, tmp_path: Path, trial: str, arguments: dict[str, Any], outcome: str
) -> None:
    job = elastic.Job(tmp_path / "killed", steps=STEPS)
    attempt: Callable[..., str] = getattr(elastic, trial)
    found = attempt(job, never_killed, random.Random(0), **arguments)
    logs = "\n".join(path.read_text(errors="replace")[-4000:] for path in sorted(job.folder.glob("*.log")))
    assert found == outcome, logs
    assert "going on from step" in logs


@pytest.mark.campaign
def test_training_goes_on_after_22_kills(elastic: Any) -> None:
    outcome = importlib.import_module("reliability.outcome")
    for row in elastic.campaign(outcome.Request(seed=1)):
        assert not row.wrong, row
