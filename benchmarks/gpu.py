"""All tests and measurements that need a GPU, the most important first: each step a command with a log and results.

    make gpu                                     # all of it, results in runs/gpu/
    make gpu PART=lease                          # a part: under ten minutes, results in one archive
    python3 benchmarks/gpu.py --list             # the steps, and the parts that have them
    python3 benchmarks/gpu.py --only products    # one of them
    python benchmarks/gpu.py --rehearse          # without a GPU: whether the steps run to their ends (rehearse/)
    python benchmarks/gpu.py --pack FOLDER       # kernels compiled in a rehearsal, and an NCCL, to carry to a GPU

Needs torch, Triton and a CUDA device, no installation and no network; steps that need another package are skipped if it
is missing. The package is taken from this checkout, laid out under build/ as it would be installed. Steps that time
nothing run side by side. A step that fails or takes too long does not stop the next, but nothing is timed if kernels
are wrong; steps of a part that would not end within its time are dropped, and named. Measured numbers are printed
beside those expected of an H100 or H200, with a mark where they differ. Ends with status 1 if a step failed or took too
long, with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path

from expected import compared
from gpu_steps import PARTS, STEPS, Step
from shared_nccl import make as make_nccl
from shared_nccl import preloaded

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 20  # seconds for a step that is told to stop to write its results
#: the compilers' caches, which parts share
CACHES = ROOT / "build" / "parts" / "caches"
_BAD = ("failed", "timed out")  # results of steps
_PACKED = "caches.tar.xz"
REHEARSED = 15  # time of a rehearsal on two cores, as a multiple of a GPU's
LOG_LINES = 12


@dataclass(frozen=True)
class Outcome:
    """The outcome of a step."""

    name: str
    result: str  # "ok", "failed", "timed out", "skipped" or "dropped"
    reason: str
    seconds: float
    command: str
    log: str
    last_lines: tuple[str, ...]
    compared: tuple[str, ...] = ()  # lines of measured beside expected numbers


class Driver:
    """A driver of steps: runs them, and writes logs and results to `out`.

    `package` and `tuned` are folders with the package, the second with tiles to be tuned; `say` prints a line. Steps
    that may not end before `deadline`, by time.monotonic(), are dropped.
    """

    def __init__(
        self,
        out: Path,
        environment: Mapping[str, str],
        package: Path,
        tuned: Path,
        say: Callable[[str], None] = print,
        deadline: float = math.inf,
    ):
        self._out = out
        self._deadline = deadline
        self._environment = dict(environment)
        self._package = package
        self._tuned = tuned
        self._say = say
        self._running: set[subprocess.Popen[bytes]] = set()
        self._device = ""
        self.outcomes: list[Outcome] = []

    def run(self, steps: Iterable[Step], about: Mapping[str, object]) -> list[Outcome]:
        """Run all steps, neighbours that time nothing side by side; write `about` and the outcomes after each."""
        steps, self._device = list(steps), str(about.get("device", ""))
        numbers = {step.name: number for number, step in enumerate(steps, start=1)}
        writing = threading.Lock()

        def run(step: Step) -> None:
            self._say(f"[{numbers[step.name]}/{len(steps)}] {step.name}: {step.tells} (at most {step.seconds:g} s)")
            outcome = self._run(step)
            with writing:
                self.outcomes.append(outcome)
                self.outcomes.sort(key=lambda outcome: numbers[outcome.name])
                why = f": {outcome.reason}" if outcome.reason else ""
                self._say(f"      {step.name} {outcome.result}{why} ({outcome.seconds:.0f} s)")
                for line in outcome.compared:
                    self._say(f"      {line}")
                report = {**about, "steps": [asdict(outcome) for outcome in self.outcomes]}
                (self._out / "steps.json").write_text(json.dumps(report, indent=1) + "\n")

        for several in _side_by_side(steps):
            with ThreadPoolExecutor(len(several)) as pool:
                futures = [pool.submit(run, step) for step in several]
                try:
                    for future in futures:
                        future.result()
                except KeyboardInterrupt:
                    for process in list(self._running):
                        _ask_to_end(process)
                    raise
        return self.outcomes

    def _run(self, step: Step) -> Outcome:
        """Run one step, unless it is skipped or dropped."""
        # Relative paths, so that results name no folder of the machine that made them.
        folders = {"out": self._out, "tuned": self._tuned, "caches": CACHES}
        places = {name: os.path.relpath(folder, ROOT) for name, folder in folders.items()} | {"name": step.name}
        command = [sys.executable, *(argument.format(**places) for argument in step.command)]
        log = self._out / f"{step.name}.log"
        shown = shlex.join(["python", *command[1:]])
        if reason := self._out_of_place(step):
            return Outcome(step.name, "skipped", reason, 0.0, shown, "", ())
        missing = [module for module in step.needs if importlib.util.find_spec(module) is None]
        if missing:
            return Outcome(step.name, "skipped", f"{', '.join(missing)} is not installed", 0.0, shown, "", ())
        nccl: dict[str, str] = {}
        if step.several:
            variables = preloaded(self._environment, CACHES / "nccl")
            if isinstance(variables, str):
                return Outcome(step.name, "skipped", variables, 0.0, shown, "", ())
            nccl = variables
        if (remaining := self._deadline - time.monotonic()) < step.seconds:
            reason = f"{max(remaining, 0):.0f} s were left, and it may take {step.seconds:g}"
            return Outcome(step.name, "dropped", reason, 0.0, shown, "", ())
        if step.config is not None:
            config = self._out / f"{step.name}.config.json"
            config.write_text(json.dumps(step.config, indent=1) + "\n")
            command += ["--config", str(config)]
        folder = self._tuned if step.tuned else self._package
        path = os.pathsep.join(filter(None, (str(folder), self._environment.get("PYTHONPATH"))))
        environment = self._environment | nccl
        environment |= {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path} | dict(step.environment)
        shutil.rmtree(self._out / step.name, ignore_errors=True)  # else the example would resume its finished run
        start = time.monotonic()
        with open(log, "w") as stream:
            stream.write(f"$ {shown}\n")
            stream.flush()
            status = self._call(command, environment, stream, step.seconds)
        seconds = time.monotonic() - start
        lines = tuple(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        if status is None:
            result, reason = "timed out", f"stopped after {step.seconds:g} s"
        elif status == 0 and "pytest" in step.command and " passed" not in lines[-1]:
            result, reason = "skipped", next((line for line in lines if line.startswith("SKIPPED")), lines[-1])
        else:
            result, reason = ("ok", "") if status == 0 else ("failed", f"status {status}")
        beside = compared(step.expected, self._out / f"{step.name}.json", self._device) if result != "skipped" else []
        return Outcome(step.name, result, reason, seconds, shown, places["out"] + f"/{log.name}", lines, tuple(beside))

    def _out_of_place(self, step: Step) -> str:
        """Return why the results of earlier steps rule this step out; empty if they do not."""
        results = {outcome.name: outcome.result for outcome in self.outcomes}
        if results.get(step.after) in _BAD:
            return f"{step.after} has {results[step.after]}"
        if step.if_failed and results.get(step.if_failed) not in _BAD:
            return f"{step.if_failed} has not failed"
        return ""

    def _call(self, command: Sequence[str], environment: Mapping[str, str], log: object, limit_s: float) -> int | None:
        """Run a command; return its exit status, or None if it was stopped at the limit. Kill all that it started."""
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        self._running.add(process)
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _ask_to_end(process)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return None
        finally:
            self._running.discard(process)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _side_by_side(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """Yield steps in order: neighbours that time nothing together, each other step alone."""
    for timed, neighbours in groupby(steps, lambda step: step.timed):
        group = list(neighbours)
        yield from ([step] for step in group) if timed else [group]


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end; the processes that it has started are its own to end."""
    # pytest reports its results so far on SIGINT.
    process.send_signal(signal.SIGINT if "pytest" in process.args else signal.SIGTERM)


# The files that pip would write: torch finds a backend by its entry point.
_INSTALLED = {
    "METADATA": "Metadata-Version: 2.1\nName: compile_muon\nVersion: 0\n",
    "entry_points.txt": "[torch_dynamo_backends]\nmuon_zero = compile_muon.backend:muon_zero\n",
}


def lay_out(folder: Path, *, copy_kernels: bool = False) -> Path:
    """Lay out the package under `folder` as installed, by links into the checkout, or of the kernels by a copy."""
    shutil.rmtree(folder, ignore_errors=True)
    package = folder / "compile_muon"
    package.mkdir(parents=True)
    facts = folder / "compile_muon-0.dist-info"
    facts.mkdir()
    for name, text in _INSTALLED.items():
        (facts / name).write_text(text)
    for source in [*(ROOT / "compile_muon").iterdir(), ROOT / "passes", ROOT / "kernels"]:
        if source.name == "__pycache__":
            continue
        if copy_kernels and source.name == "kernels":
            shutil.copytree(source, package / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (package / source.name).symlink_to(source, target_is_directory=source.is_dir())
    return folder


# Runs in a process of its own, so that this one takes no memory on the device.
_PROBE = """
import json, torch
about = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": torch.cuda.device_count()}
if torch.cuda.is_available():
    about |= {"device": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
import triton
print(json.dumps(about | {"triton": triton.__version__}))
"""


def _rehearsed(card: str) -> dict[str, str]:
    """Return the environment of a rehearsal, whose device computes nothing and whose numbers are made up."""
    sys.path.insert(0, str(ROOT / "rehearse"))
    import library

    # In the cache of a GPU's steps, because Triton's kernels serve every card of the architecture.
    of_card = {"REHEARSE_CARD": card, "TRITON_CACHE_DIR": str(CACHES / "triton")}
    return library.environment() | of_card | {"PYTHONPATH": str(ROOT / "rehearse" / "programs")}


def _for_rehearsal(step: Step) -> Step:
    """Return a step that runs alone, with time for a few cores."""
    return replace(step, timed=True, seconds=REHEARSED * step.seconds, command=step.command + step.rehearsed)


def pack(folder: Path) -> None:
    """Put the compilers' caches and an NCCL library into `folder`, some 30 MB, and print how to use them."""
    make_nccl(folder, {90})
    with tarfile.open(folder / _PACKED, "w:xz") as packed:
        for name in ("triton", "inductor"):
            if (CACHES / name).is_dir():
                packed.add(CACHES / name, arcname=name)
    print(f"bring {folder} beside the checkout, and there: make gpu PART=lease GPU_ARGS='--packed {folder}'")


def unpack(folder: Path) -> dict[str, str]:
    """Unpack the folder of :func:`pack`, and return the environment that finds its library."""
    with tarfile.open(folder / _PACKED) as packed:
        packed.extractall(CACHES, filter="data")
    return {"NCCL_LIBRARY": str((folder / "libnccl.so.2.xz").resolve())}


def probe(environment: Mapping[str, str]) -> dict | str:
    """Return the versions, device, driver and clocks that results depend on; or why no step can run."""
    process = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, env=environment)
    if process.returncode:
        return f"{sys.executable} cannot import torch and Triton: {process.stderr.strip().splitlines()[-1]}"
    about = json.loads(process.stdout.splitlines()[-1])
    if "device" not in about:
        return f"torch {about['torch']} sees no CUDA device; nothing here says anything without one"
    about["date"] = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    fields = "driver_version,clocks.current.sm,clocks.max.sm,clocks.max.memory,power.limit"
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        about["nvidia-smi"] = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.strip()
    return about


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--list", action="store_true", help="show the steps, run none")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these steps")
    parser.add_argument("--part", choices=PARTS, help="the steps of a part, in its order and within its time")
    parser.add_argument("--out", type=Path, help="where logs and results go; default: runs/gpu, or runs/rehearsed")
    parser.add_argument("--rehearse", action="store_true", help="no GPU, and one step after the other")
    parser.add_argument("--card", default="NVIDIA H200", help="that a rehearsal compiles for; default: %(default)s")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="put what a rehearsal compiled and NCCL into it")
    parser.add_argument("--packed", type=Path, metavar="FOLDER", help="such a folder, to begin with")
    options = parser.parse_args(argv)
    step_names = [step.name for step in STEPS]
    for name in options.only or ():
        if name not in step_names:
            parser.error(f"--only {name!r} is unknown; expected some of: {', '.join(step_names)}")
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    if options.part is not None:
        order = PARTS[options.part].steps
        steps = sorted((step for step in steps if step.name in order), key=lambda step: order.index(step.name))
    if options.list:
        for step in steps:
            print(f"{step.name:20} {step.seconds:4g} s  {step.tells}")
        for name, part in PARTS.items():
            print(f"part {name} ({part.seconds} s): {part.tells}: {', '.join(part.steps)}")
        return 0
    if options.pack:
        pack(options.pack)
        return 0
    start = time.monotonic()
    environment = dict(os.environ)
    if options.packed:
        environment |= unpack(options.packed)
    if options.rehearse:
        steps = [_for_rehearsal(step) for step in steps if not step.numbers]
        environment |= _rehearsed(options.card)
    about = probe(environment)
    if isinstance(about, str):
        print(f"make gpu: {about}", file=sys.stderr)
        return 2
    results = (ROOT / (options.out or ("runs/rehearsed" if options.rehearse else "runs/gpu"))).resolve()
    out = results if options.part is None else ROOT / "build" / "parts" / options.part
    deadline = math.inf if options.part is None or options.rehearse else start + PARTS[options.part].seconds
    for folder in (results, out, CACHES):
        folder.mkdir(parents=True, exist_ok=True)
    environment = {"TRITON_CACHE_DIR": str(CACHES / "triton")} | environment
    about["rehearsed"] = options.rehearse
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    package, tuned = lay_out(ROOT / "build" / "gpu"), lay_out(ROOT / "build" / "gpu_tuned", copy_kernels=True)
    driver = Driver(out, environment, package, tuned, lambda text: print(text, flush=True), deadline)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        driver.run(steps, about)
    if options.part is None:
        return summarize(driver.outcomes, len(steps), out)
    archive = results / f"{options.part}.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(out, arcname=archive.name.partition(".")[0])
    status = summarize(driver.outcomes, len(steps), archive)
    print(f"part {options.part} took {time.monotonic() - start:.0f} s")
    return status


def summarize(outcomes: Sequence[Outcome], planned: int, out: Path) -> int:
    """Print the failures with their logs; return the exit status, which is 1 also if not all `planned` steps ran."""
    bad = [outcome for outcome in outcomes if outcome.result in _BAD]
    left_out = [outcome for outcome in outcomes if outcome.result in ("skipped", "dropped")]
    fine = len(outcomes) - len(bad) - len(left_out)
    print(f"\n{fine} of {planned} steps are ok; results: {os.path.relpath(out, ROOT)}")
    for outcome in outcomes:
        for line in outcome.compared:
            print(f"{line[:2]}{outcome.name}: {line[2:]}")
    for outcome in left_out:
        print(f"{outcome.result}: {outcome.name}: {outcome.reason}")
    for outcome in bad:
        print(f"{outcome.result}: {outcome.name} ({outcome.reason}); log: {outcome.log}")
        print("".join(f"    {line}\n" for line in outcome.last_lines), end="")
    if len(outcomes) < planned:
        print(f"interrupted: {planned - len(outcomes)} steps were not finished")
    return 1 if bad or len(outcomes) < planned else 0


if __name__ == "__main__":
    sys.exit(main())
