"""The tutorial: short enough to read, and it trains."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from compile_muon import Checkpointer, load_config

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_gpt.py"
CONFIG = ROOT / "examples" / "config.json"
TINY = ("--layers", "1", "--width", "32", "--context", "32", "--batch", "2", "--sample-bytes", "4")


def train(*arguments: str, ranks: int | None = 2) -> str:
    """Run the example on CPU: under torchrun with `ranks` processes, or with None as a plain script."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120"}
    command = [sys.executable, *launcher, str(SCRIPT), *TINY, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def losses(printed: str) -> dict[int, float]:
    """Step to validation loss, from the lines printed on the way."""
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+) .*validation ([\d.]+)", printed)}


def settings(folder: Path, **changes: object) -> str:
    """A copy of the example's config with some keys replaced."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(CONFIG.read_text()), **changes}))
    return str(path)


@pytest.mark.campaign
def test_one_process_trains_in_bfloat16(tmp_path: Path) -> None:
    """Attention takes one dtype: the rotation's float32 angles must not widen queries and keys."""
    config = settings(tmp_path, compile=False, bf16={"enabled": True})
    train("--steps", "1", "--config", config, "--out", str(tmp_path / "runs"), ranks=None)


def test_the_script_is_a_page_or_two() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 240
    assert "compile_muon.initialize(" in SCRIPT.read_text()


def test_the_config_is_valid_and_compiles() -> None:
    load_config(CONFIG)
    written = json.loads(CONFIG.read_text())
    assert written["compile"] is True
    assert written["optimizer"]["type"] == "Muon"


@pytest.mark.full
def test_two_ranks_train_from_the_command_line(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 200)
    printed = train("--steps", "3", "--data", str(text), "--out", str(tmp_path / "runs"))
    for row in ("ZeRO stage | world size", "3 | 2 (cpu)", "tokens per second", "step time", "peak memory per rank"):
        assert row in printed
    # one block of width 32 has 12 · 32² weights for Muon; the embedding, the head and three norms are AdamW's
    assert f"{12 * 32**2:,} | {2 * 256 * 32 + 3 * 32:,}" in printed
    (sent,) = (line for line in printed.splitlines() if "sent per step and rank" in line)
    assert " 0 bytes" not in sent
    assert (tmp_path / "runs" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert Checkpointer(tmp_path / "runs" / "checkpoints").steps() == [1, 2, 3]


@pytest.mark.full
def test_one_process_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"abcdefgh" * 1000)
    common = ("--config", settings(tmp_path, compile=False), "--data", str(text), "--out", str(tmp_path / "runs"))
    first = losses(train(*common, "--steps", "16", ranks=None))
    assert list(first) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert first[16] < first[2] - 0.5

    printed = train(*common, "--steps", "32", ranks=None)
    then = losses(printed)
    assert "going on from step 16" in printed
    assert list(then) == [20, 24, 28, 32]  # the first 16 steps are not done again
    assert then[20] < first[16]  # nor forgotten
    assert then[32] < first[16] - 0.5


def test_too_little_text_is_one_clear_error(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--data", str(tmp_path / "missing"), *TINY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "too few" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.full
def test_the_trainers_example_trains_and_goes_on(tmp_path: Path) -> None:
    """By torchrun, as its first lines say; uncompiled, which takes a quarter of the time."""
    script = ROOT / "examples" / "train_transformers.py"
    assert len(script.read_text().splitlines()) < 75
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    settings = ["--use_cpu", "--report_to=none", "--per_device_train_batch_size=1", "--save_steps=1"]
    settings += ["--eval_strategy=no"]
    for steps, launcher in ((1, ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]), (2, [])):
        command = [sys.executable, *launcher, str(script)]
        command += [*settings, f"--max_steps={steps}", f"--output_dir={tmp_path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / f"checkpoint-{steps}" / "model.safetensors").exists()
    assert (tmp_path / "model.safetensors").exists()
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2


@pytest.mark.campaign
def test_adamw_is_compared_from_the_same_start(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    train("--steps", "2", "--compare", "--config", settings(tmp_path, compile=False), "--out", str(runs), ranks=None)
    found = json.loads((runs / "losses.json").read_text())
    assert found.keys() == {"Muon", "AdamW"}
    assert found["Muon"]["train"][0] == pytest.approx(found["AdamW"]["train"][0], rel=1e-5)  # one of them is compiled
    assert found["Muon"]["val"]["2"] != found["AdamW"]["val"]["2"]
    assert (runs / "loss.png").read_bytes().startswith(b"\x89PNG")
    for config in (CONFIG, SCRIPT.with_name("adamw.json")):
        load_config(config)


@pytest.mark.campaign
def test_accelerates_example_trains_and_goes_on(tmp_path: Path) -> None:
    """On two ranks, then on one; the second run is one epoch longer, and does that one alone."""
    script = ROOT / "examples" / "train_accelerate.py"
    assert len(script.read_text().splitlines()) < 95
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    for epochs, launcher in ((1, ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]), (2, [])):
        command = [sys.executable, *launcher, str(script)]
        command += [f"--epochs={epochs}", "--windows=128", f"--output_dir={tmp_path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        # DeepSpeed, where it is installed, logs to stdout when it is imported: "[2026-11-24 11:03:40,123] [INFO] ..."
        printed = [line for line in done.stdout.splitlines() if not re.match(r"\[[\d-]+ [\d:,]+\] \[[A-Z]+\] ", line)]
        assert [line.split(":")[0] for line in printed] == [f"epoch {epochs - 1}"]
    assert (tmp_path / "weights" / "model.safetensors").exists()
    assert len(list((tmp_path / "train_accelerate").glob("events.out.tfevents.*"))) == 2


@pytest.mark.campaign
def test_lightnings_example_trains_and_goes_on(tmp_path: Path) -> None:
    """By Lightning's own launcher, then on one rank; uncompiled, which takes a fraction of the time."""
    script = ROOT / "examples" / "train_lightning.py"
    assert len(script.read_text().splitlines()) < 95
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    for steps in (1, 2):
        command = [sys.executable, str(script), f"--devices={3 - steps}", "--batch=16", "--save_every=1"]
        command += [f"--max_steps={steps}", f"--out={tmp_path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / f"epoch=0-step={steps}.ckpt").exists()
    assert "Restored all states" in done.stderr


@pytest.mark.campaign
def test_torchtitans_example_trains_and_goes_on(tmp_path: Path) -> None:
    """On two ranks, then on one."""
    pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install compile_muon[torchtitan]")
    script = ROOT / "examples" / "train_torchtitan.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    environment.pop("PYTHONSAFEPATH", None)  # the script imports one beside it
    settings = ["--training.seq_len=16", "--training.global_batch_size=16", "--checkpoint.interval=1"]
    for ranks, steps in ((2, 1), (1, 2)):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc_per_node={ranks}",
            str(script),
        ]
        command += [*settings, "--validator.steps=1", f"--training.steps={steps}", f"--dump_folder={tmp_path}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"Training starts at step {steps}" in done.stdout + done.stderr
        assert (tmp_path / "checkpoint" / f"step-{steps}" / ".metadata").exists()


@pytest.mark.full
def test_the_long_example_learns() -> None:
    script = ROOT / "examples" / "train_long.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    command += ["--steps=20", "--context=512", "--layers=2", "--width=64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = (float(loss) for loss in re.findall(r"step +\d+ +loss ([\d.]+)", done.stdout))
    assert last < first < 5.5
    (difference,) = re.findall(r"difference from one rank ([\d.e+-]+);", done.stdout)
    assert float(difference) < 1e-5


@pytest.mark.campaign
def test_the_mixtures_example_spreads_its_experts() -> None:
    """On two ranks, uncompiled, which takes a fraction of the time."""
    script = ROOT / "examples" / "train_moe.py"
    assert len(script.read_text().splitlines()) < 125
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    command += ["--steps=6", "--batch=2", "--context=32", "--log-every=3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stage 3, world 2" in done.stdout and "8 of 16 experts a rank" in done.stdout
    losses = [float(loss) for loss in re.findall(r"step +\d+ +loss ([\d.]+)", done.stdout)]
    (held_out,) = re.findall(r"held out: ([\d.]+) nats per byte", done.stdout)
    assert len(losses) == 3 and losses[0] > 5
    assert float(held_out) < losses[0] - 0.5
