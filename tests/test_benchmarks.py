"""The benchmark harnesses run, on sizes that say nothing about speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_train_step_says_what_is_wrong() -> None:
    assert "does not divide a rank's 4 sequences" in run(
        "train_step.py", "--preset", "tiny", "--micro-batches", "3"
    ).stderr  # fmt: skip
