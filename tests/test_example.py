"""The tutorial: short enough to read, and it trains."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from compile_muon import Checkpointer, load_config

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "train_gpt.py"
CONFIG = ROOT / "examples" / "config.json"
TINY = ("--layers", "1", "--width", "32", "--context", "32", "--batch", "2", "--sample-bytes", "4")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def run(script: Path, *arguments: str, launcher: Sequence[str] = TORCHRUN, **environment: str) -> str:
    """What a script prints on CPU: under torchrun, or with no launcher as a plain script."""
    given = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120", **environment}
    given.pop("PYTHONSAFEPATH", None)  # torchtitan's example imports one beside it
    command = [sys.executable, *launcher, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=given, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(printed: str) -> dict[int, float]:
    """Step to validation loss, from the lines printed on the way."""
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+) .*validation ([\d.]+)", printed)}


def test_the_script_is_a_page_or_two() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 240
    assert "compile_muon.initialize(" in SCRIPT.read_text()


def test_the_config_is_valid_and_compiles() -> None:
    load_config(CONFIG)
    written = json.loads(CONFIG.read_text())
    assert written["compile"] is True
    assert written["optimizer"]["type"] == "Muon"


@pytest.mark.campaign  # .ci/run trains it with `make train`
def test_two_ranks_train_from_the_command_line(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 200)
    printed = run(SCRIPT, *TINY, "--steps", "3", "--data", str(text), "--out", str(tmp_path / "runs"))
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
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(CONFIG.read_text()), "compile": False}))
    common = (SCRIPT, *TINY, "--config", str(config), "--data", str(text), "--out", str(tmp_path / "runs"))
    first = losses(run(*common, "--steps", "16", launcher=()))
    assert list(first) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert first[16] < first[2] - 0.5

    printed = run(*common, "--steps", "32", launcher=())
    then = losses(printed)
    assert "going on from step 16" in printed
    assert list(then) == [20, 24, 28, 32]  # the first 16 steps are not done again
    assert then[20] < first[16]  # nor forgotten
    assert then[32] < first[16] - 0.5


@pytest.mark.full
def test_too_little_text_is_one_clear_error(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--data", str(tmp_path / "missing"), *TINY]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "too few" in done.stderr
    assert "Traceback" not in done.stderr


#: example -> most lines; arguments of a first run and of one that goes on ({folder}: where both write); a file that is
#: there then; a pattern of the printed lines
EXAMPLES: dict[str, tuple[int, tuple[str, ...], str, str]] = {
    "transformers": (
        75,
        tuple(
            "--use_cpu --report_to=none --per_device_train_batch_size=1 --save_steps=1 --eval_strategy=no "
            f"--max_steps={steps} --output_dir={{folder}}"
            for steps in (1, 2)
        ),
        "checkpoint-2/trainer_state.json",
        "",
    ),
    "accelerate": (
        95,
        tuple(f"--epochs={epochs} --windows=128 --output_dir={{folder}}" for epochs in (1, 2)),
        "weights/model.safetensors",
        r"epoch 0: .*epoch 1: ",
    ),
    "lightning": (
        95,
        tuple(f"--devices=2 --batch=16 --save_every=1 --max_steps={steps} --out={{folder}}" for steps in (1, 2)),
        "epoch=0-step=2.ckpt",
        "Restored all states",
    ),
    "torchtitan": (
        125,
        tuple(
            "--training.seq_len=16 --training.global_batch_size=16 --checkpoint.interval=1 --validator.steps=1 "
            f"--training.steps={steps} --dump_folder={{folder}}"
            for steps in (1, 2)
        ),
        "checkpoint/step-2/.metadata",
        "Training starts at step 2",
    ),
    "long": (
        200,
        ("--steps=20 --context=512 --layers=2 --width=64",),
        "",
        r"difference from one rank (0\.0e\+00|\d\.\de-(0[6-9]|1\d));",  # some processors round both alike
    ),
    "moe": (125, ("--steps=6 --batch=2 --context=32 --log-every=3",), "", "8 of 16 experts a rank.*held out: [0-4]"),
}


@pytest.mark.full
@pytest.mark.parametrize(
    "example",
    [example if example == "long" else pytest.param(example, marks=pytest.mark.campaign) for example in EXAMPLES],
)
def test_an_example_trains_and_goes_on(example: str, tmp_path: Path) -> None:
    """On two ranks, uncompiled, which takes a quarter of the time."""
    most, runs, file, said = EXAMPLES[example]
    if example == "torchtitan":
        pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install compile_muon[torchtitan]")
    script = ROOT / "examples" / f"train_{example}.py"
    assert len(script.read_text().splitlines()) < most
    launcher = () if example == "lightning" else TORCHRUN  # it has one of its own
    lines = [each.format(folder=tmp_path).split() for each in runs]
    printed = "".join(run(script, *line, launcher=launcher, TORCHDYNAMO_DISABLE="1") for line in lines)
    assert re.search(said, printed, re.DOTALL), printed
    assert (tmp_path / file).exists()
