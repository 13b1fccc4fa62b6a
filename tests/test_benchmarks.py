"""The benchmark harnesses run, on sizes that say nothing about speed."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def test_newton_schulz(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = run("newton_schulz.py", "--device", "cpu", "--repeats", "1", "--seconds", "0.001", "--json", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(output.read_text())
    assert not result["failed"]
    contenders = {row["contender"] for row in result["rows"]}
    assert {"ours, standard bf16", "ours, gram fp16", "torch.optim.Muon compiled", "cuBLAS, batched"} <= contenders
    assert len(result["rows"]) == 4 * len(contenders)
    for row in result["rows"]:
        assert row["seconds"] > 0 and row["tflops"] > 0
    assert {"muon_momentum", "muon_apply"} <= {verdict["text"].split(":")[0] for verdict in result["verdicts"]}
    assert output.with_suffix(".png").stat().st_size > 1000


def test_newton_schulz_says_what_is_wrong() -> None:
    unknown = run("newton_schulz.py", "--device", "cpu", "--shapes", "nonsense")
    assert unknown.returncode == 2 and "'nonsense' is unknown; expected some of: square 64" in unknown.stderr
    assert "torch sees no CUDA device" in run("newton_schulz.py").stderr


def test_train_step(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    choice = ["--preset", "tiny", "--contenders", "ours-muon", "compute-only", "--stages", "3", "--micro-batches", "2"]
    once = ["--steps", "1", "--warmup", "1", "--repeats", "1"]
    done = run("train_step.py", *choice, *once, "--json", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["contender"]: row for row in json.loads(output.read_text())["rows"]}
    assert set(rows) == {"ours-muon", "compute-only"}
    ours = rows["ours-muon"]
    assert ours["step_s"] > 0 and ours["compile_cold_s"] > 0 and ours["peak_bytes"] is None
    assert ours["bytes_per_step"] >= ours["counted_bytes_per_step"] > 0
    assert output.with_suffix(".png").stat().st_size > 1000


def test_ratios_are_taken_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that slows down threefold between two heats and within one leaves them as they are."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    report = importlib.import_module("report")
    speeds = {(1, 0): [1.0, 3.0, 1.0], (1, 1): [3.0, 3.0, 9.0], (3, 0): [1.0, 1.0, 1.0]}
    unit = {"ours-muon": 1.0, "ours-adamw": 0.8, "deepspeed-muon": 1.25, "compute-only": 0.5}
    records = [
        {"contender": name, "stage": -1 if name == "compute-only" else heat, "heat": heat, "repeat": repeat}
        | {"error": None, "first_step_s": 9.0, "losses": [2.0], "note": "", "peak_bytes": None}
        | {"socket_bytes_per_step": None, "counted_bytes_per_step": None}
        | {"step_s": [unit[name] * x for x in host], "cpu_s": [unit[name] * x for x in host]}
        for (heat, repeat), host in speeds.items()
        for name in unit
        if heat == 1 or name != "deepspeed-muon"
    ]
    # it fell out of the second heat at stage 1: that heat's rounds do not count for it
    records = [r | {"error": "ended"} if (r["contender"], r["repeat"]) == ("ours-adamw", 1) else r for r in records]
    verdicts = {
        verdict.text.split(" (")[0]: verdict.met for verdict in report.judge(report.summarize(records, 1), records)
    }
    assert verdicts == {
        "ours-muon / deepspeed-muon, stage 3: not measured": None,
        "ours-muon / deepspeed-muon, stage 1: 0.800": True,
        "ours-muon / ours-adamw, stage 1: 1.250": False,
        "ours-muon / ours-adamw, stage 3: 1.250": False,
        "the Muon contenders' last losses agree: within 0.00%": True,
    }
    assert (
        "ours-muon stage 3: +0.500 s over bare forward and backward, which is 0.500 of its step"
        in report.over_compute(records)
    )


def test_a_contender_that_fails_is_out_and_named(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    choice = ["--preset", "tiny", "--contenders", "ours-muon", "--stages", "1", "--repeats", "2", "--timeout", "1"]
    done = run("train_step.py", *choice, "--json", str(output))
    assert done.returncode == 1
    failures = [r["error"] for r in json.loads(output.read_text())["samples"]]
    assert len(failures) == 1, "what failed once is not tried again"
    assert re.search(r"no answer to 'step' within 1 s|rank \d ended with status", failures[0])
    assert "ours-muon stage 1 failed" in done.stdout


def test_train_step_says_what_is_wrong() -> None:
    assert "does not divide a rank's 4 sequences" in run(
        "train_step.py", "--preset", "tiny", "--micro-batches", "3"
    ).stderr  # fmt: skip
