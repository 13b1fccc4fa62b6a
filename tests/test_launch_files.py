"""examples/launch: each file runs as far as it can without its cluster, two addresses of loopback being two nodes."""

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from compile_muon import Checkpointer

ROOT = Path(__file__).resolve().parents[1]
LAUNCH = ROOT / "examples" / "launch"
SCRIPT = ROOT / "examples" / "train_gpt.py"
TINY = ("--layers", "1", "--width", "32", "--context", "32", "--batch", "2", "--sample-bytes", "4", "--save-every", "1")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def arguments(folder: Path, steps: int) -> list[str]:
    (folder / "text.txt").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 200)
    (folder / "config.json").write_text('{"compile": false, "zero_optimization": {"stage": 2}}')
    paths = {"--data": folder / "text.txt", "--config": folder / "config.json", "--out": folder / "runs"}
    return [*TINY, *(str(part) for pair in paths.items() for part in pair), "--steps", str(steps)]


def start(command: Sequence[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """A process in ``folder`` that finds the torchrun of this environment, and of ``folder/bin`` what is there."""
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    settings = {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | settings | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def until(fact: Callable[[], bool], process: subprocess.Popen[str], seconds: float) -> None:
    """Waits for it, as long as the process runs."""
    deadline = time.monotonic() + seconds
    while not fact():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0][-4000:]
        time.sleep(0.05)


def saved(folder: Path) -> list[int]:
    return Checkpointer(folder / "runs" / "checkpoints").steps()


@pytest.mark.parametrize("file", ["torchrun.sh", "slurm.sbatch"])
def test_scripts_are_sound(file: str) -> None:
    subprocess.run(["bash", "-n", str(LAUNCH / file)], check=True)
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, str(LAUNCH / file)], check=True)


@pytest.mark.full
def test_torchrun_is_tried_again_and_stops_when_told(tmp_path: Path) -> None:
    """With a torchrun that fails, and then one that takes its time."""
    (tmp_path / "bin").mkdir()
    stub(
        tmp_path / "bin" / "torchrun",
        'echo x >> tries; [ "$(wc -l < tries)" -eq 1 ] && exit 1; echo "$$" > pid; exec sleep 600',
    )
    process = start([str(LAUNCH / "torchrun.sh")], tmp_path, HOST="nowhere", TRIES="2")
    until(lambda: (tmp_path / "pid").is_file() and (tmp_path / "pid").read_text() != "", process, 60)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "try 1 of 2" in printed
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def stub(path: Path, script: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def slurm(folder: Path, steps: int) -> subprocess.Popen[str]:
    """A job of two nodes, by an srun that starts its command twice and a scontrol that notes what it was asked."""
    (folder / "bin").mkdir(exist_ok=True)
    host = f"127.0.0.1:{free_port()}"
    stub(folder / "bin" / "scontrol", f'echo "$*" >> asked; [ "$1" = show ] && printf "%s\\n" {host} other || true')
    node = '"${command[0]}" --local-addr=127.0.0.%s "${command[@]:1}" &'
    starts = "\n".join(node % number for number in (1, 2))
    stub(
        folder / "bin" / "srun",
        'echo "$$" > srun; [ "$1" = --kill-on-bad-exit=1 ] || exit 2; shift; command=("$@")\n'
        "trap 'kill -TERM $(jobs -p); wait; exit 143' TERM\n"
        f'{starts}\nfor job in $(jobs -p); do wait "$job" || exit 1; done',
    )
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_SUBMIT_DIR": str(folder), "RANKS": "1", "SCRIPT": str(SCRIPT)}
    return start(["bash", str(LAUNCH / "slurm.sbatch"), *arguments(folder, steps)], folder, **job)


@pytest.mark.full
def test_slurm_runs_two_nodes_and_goes_on_after_its_time_limit(tmp_path: Path) -> None:
    first = slurm(tmp_path, 100_000)
    until(lambda: len(saved(tmp_path)) >= 2, first, 240)
    first.send_signal(signal.SIGUSR1)
    until(lambda: "requeue 7" in (tmp_path / "asked").read_text(), first, 240)
    assert first.poll() is None  # it waits for SLURM to end it, which it does with its steps
    os.kill(int((tmp_path / "srun").read_text()), signal.SIGTERM)
    first.communicate(timeout=120)
    assert first.returncode != 0
    done = saved(tmp_path)[-1]
    second = slurm(tmp_path, done + 2)
    printed, _ = second.communicate(timeout=300)
    assert second.returncode == 0, printed
    assert f"going on from step {done}" in printed and "2 (cpu)" in printed
    assert saved(tmp_path)[-1] == done + 2


def test_slurm_directives_stand_before_the_first_command() -> None:
    """SLURM reads no further, and nothing after an option on its line."""
    lines = (LAUNCH / "slurm.sbatch").read_text().splitlines()
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    directives = [number for number, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert directives and directives[-1] < commands[0]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", lines[number]) for number in directives)


def manifests() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    return service, job


def test_kubernetes_manifests_fit_together() -> None:
    service, job = manifests()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    (container,) = pod["containers"]
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and pod["restartPolicy"] == "OnFailure"
    assert f"--nnodes={spec['completions']}" in container["command"] and spec["parallelism"] == spec["completions"]
    assert f"--rdzv-endpoint={name}-0.{pod['subdomain']}:29400" in container["command"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert all(isinstance(value, str) for value in (*container["command"], *container["args"]))
    out = container["args"][container["args"].index("--out") + 1]
    assert any(out.startswith(mount["mountPath"] + "/") for mount in container["volumeMounts"])


def test_kubernetes_manifests_are_valid() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for manifest in manifests():
        validate.validate(manifest, validate.latest_version(), strict=True)
