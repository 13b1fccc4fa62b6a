"""Everything that only a GPU can tell, in the order that teaches most: each step a command, its log and results kept.

    make gpu                                     # all of it, results in runs/gpu/
    python3 benchmarks/gpu.py --list             # the steps
    python3 benchmarks/gpu.py --only products    # one of them
    python benchmarks/gpu.py --rehearse          # without a GPU: whether the steps run to their ends (rehearse/)

Needs torch, Triton and a CUDA device, no installation and no network: what other packages are missing costs the steps
that need them. The package is taken from this checkout, laid out under build/ as it would be installed. Steps that time
nothing run side by side. One that fails or takes too long does not keep the next from running. Ends with status 1 if
one did, with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE_S = 60  # for a step that is told to stop to write what it has
LOG_LINES = 12

ONE_RANK = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
TWO_RANKS = (*ONE_RANK[:-1], "--nproc_per_node=2")
EXAMPLE = ("examples/train_gpt.py", "--steps", "30", "--width", "512", "--sample-bytes", "50")
# Also what the suite leaves to campaigns: a GPU takes no time for it.
PYTEST = ("-m", "pytest", "-q", "-rs", "-m", "", "-o", "cpu_limit=600", "tests/kernels/gpu")
# What compiles ahead or is interpreted needs no GPU. Side by side, tests wait for the compiler and not for each other.
ON_GPU = tuple(f"--ignore=tests/kernels/gpu/{name}" for name in ("test_ahead.py", "test_interpreter.py"))
WORKERS = str(max(2, min(8, (os.cpu_count() or 1) // 2)))
PARALLEL = ("-n", WORKERS) if importlib.util.find_spec("xdist") else ()
FILE_BY_FILE = (*PARALLEL, "--dist", "loadfile") if PARALLEL else ()  # each starts its ranks once
#: of tests/distributed: those that train where they are told to
TRAINED = ("training", "meshes", "methods", "offload", "sequence", "models", "checkpointing")


@dataclass(frozen=True)
class Step:
    """One command of this interpreter, run in the checkout's root.

    Args:
        name: of the step, of its log and of its results.
        minutes: that it may take.
        tells: what is known afterwards.
        command: arguments of Python. {out} is the folder of the results, {tuned} that of a copy of the package.
        needs: modules beside torch and Triton.
        environment: added to the driver's.
        config: for the example: written to {out}/NAME.config.json, which is handed to it.
        tuned: run with the copy of the package whose tiles the step "tune" has written.
        timed: nothing else may run beside it.
        numbers: what the device computes is compared, so that there is nothing to rehearse.
    """

    name: str
    minutes: float
    tells: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] | None = None
    tuned: bool = False
    timed: bool = False
    numbers: bool = False


def _train(stage: int, how: str = "compiled", launcher: tuple[str, ...] = ONE_RANK) -> Step:
    compiled = {"eager": False, "graphs": {"cuda_graphs": True}}.get(how, True)
    return Step(
        f"train-{stage}-{how}",
        5,
        f"the example trains at stage {stage} in bfloat16: {how}",
        (*launcher, *EXAMPLE, "--out", "{out}/{name}"),
        needs=("rich", "matplotlib"),
        environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        config={
            "compile": compiled,
            "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.005}},
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
        },
    )


_SHAPES = ("square 1024", "square 2048", "square 4096", "square 8192", "8B gate, up", "8B key, value", "experts")
_ALL_SHAPES = (*_SHAPES, "8B, all matrices")


def _newton_schulz(name: str, tells: str, shapes: Sequence[str], *, tuned: bool = False) -> Step:
    command = ("benchmarks/newton_schulz.py", "--shapes", *shapes, "--repeats", "3", "--json", "{out}/{name}.json")
    return Step(name, 10, tells, command, needs=("rich",), tuned=tuned, timed=True)


def _one_billion(name: str, tells: str, contenders: Sequence[str], *more: str) -> Step:
    command = ("benchmarks/train_step.py", "--preset", "1b", "--device", "cuda", "--dtype", "bfloat16", "--ranks", "1")
    command += ("--stages", "0", "--repeats", "1", "--timeout", "300", "--contenders", *contenders, *more)
    return Step(name, 12, tells, (*command, "--json", "{out}/{name}.json"), needs=("rich", "matplotlib"), timed=True)


STEPS = (
    Step("products", 3, "the kernels launch, are right, and win from some size on",
         ("benchmarks/products.py", "--json", "{out}/{name}.json"), timed=True),
    Step("tests", 8, "everything else about the kernels",
         (*PYTEST, *ON_GPU, *PARALLEL, "-k", "not sanitizer and not 32_bit"),
         needs=("pytest", "rich"), numbers=True),
    Step("training", 8, "several ranks on this GPU train as one does on the host: stages, methods, meshes, offload",
         ("-m", "pytest", "-q", "-rs", "-m", "not full and not campaign", "-o", "cpu_limit=600", *FILE_BY_FILE,
          "tests/passes/exchange/test_partial_attention.py",
          *(f"tests/distributed/test_{name}.py" for name in TRAINED)),
         needs=("pytest", "rich", "transformers"),
         environment={"COMPILE_MUON_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}, numbers=True),
    _train(0),
    _train(0, "eager"),
    _train(3),
    _train(3, "eager"),
    _train(3, "graphs"),
    _train(3, "two-ranks", TWO_RANKS),
    _newton_schulz("newton-schulz", "percent of peak, where cuBLAS and other libraries are faster", _ALL_SHAPES),
    # Two side by side take some 55 GB.
    _one_billion("muon-1b", "tokens per second with Muon, and of plain torch with its", ("ours-muon", "plain-muon")),
    _one_billion("adamw-1b", "the same with AdamW: the price of Muon", ("ours-adamw", "plain-adamw")),
    _one_billion("memory-1b", "peak memory of Muon", ("ours-muon", "plain-muon"), "--memory", "--steps", "1"),
    Step("tune", 10, "tiles and thresholds as measured, in tiles.json; the checkout keeps its own",
         ("benchmarks/tune_tiles.py", "--minutes", "8", "--write", "{tuned}/compile_muon/kernels/gpu/tiles.json",
          "--json", "{out}/tiles.json"), needs=("rich",), tuned=True, timed=True),
    _newton_schulz("newton-schulz-tuned", "what the tuned tiles are worth", _SHAPES, tuned=True),
    Step("profile", 5, "NVTX ranges are pushed; the kernels of a step",
         ("benchmarks/profile_step.py", "--json", "{out}/{name}.json", "--trace", "{out}/{name}.trace.json"),
         timed=True),
    # The caching allocator hides what is out of bounds within its blocks.
    Step("sanitizer", 15, "no access out of bounds", (*PYTEST, "-k", "sanitizer"),
         needs=("pytest", "rich"), environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, numbers=True),
    Step("offsets", 5, "batches beyond 2³¹ elements", (*PYTEST, "-k", "32_bit"),
         needs=("pytest", "rich"), numbers=True),
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What came of a step: `result` is "ok", "failed", "timed out" or "skipped"."""

    name: str
    result: str
    reason: str
    seconds: float
    command: str
    log: str
    last_lines: tuple[str, ...]


class Driver:
    """Runs steps one after another.

    Args:
        out: where logs and results go.
        environment: of the steps.
        package, tuned: folders that hold the package, as it is and with tiles to be tuned.
        say: takes a line for the reader.
    """

    def __init__(
        self, out: Path, environment: Mapping[str, str], package: Path, tuned: Path, say: Callable[[str], None] = print
    ):
        self._out = out
        self._environment = dict(environment)
        self._package = package
        self._tuned = tuned
        self._say = say
        self._running: set[subprocess.Popen[bytes]] = set()
        self.outcomes: list[Outcome] = []

    def run(self, steps: Iterable[Step], about: Mapping[str, object]) -> list[Outcome]:
        """All steps, neighbours that time nothing side by side; `about` and the outcomes are written after each.

        Raises:
            KeyboardInterrupt: no more are to be run; those that were running are stopped.
        """
        steps = list(steps)
        numbers = {step.name: number for number, step in enumerate(steps, start=1)}
        writing = threading.Lock()

        def run(step: Step) -> None:
            self._say(f"[{numbers[step.name]}/{len(steps)}] {step.name}: {step.tells} (at most {step.minutes:g} min)")
            outcome = self._run(step)
            with writing:
                self.outcomes.append(outcome)
                self.outcomes.sort(key=lambda outcome: numbers[outcome.name])
                why = f": {outcome.reason}" if outcome.reason else ""
                self._say(f"      {step.name} {outcome.result}{why} ({outcome.seconds:.0f} s)")
                report = {**about, "steps": [asdict(outcome) for outcome in self.outcomes]}
                (self._out / "steps.json").write_text(json.dumps(report, indent=1) + "\n")

        for several in _side_by_side(steps):
            with ThreadPoolExecutor(len(several)) as pool:
                started = [pool.submit(run, step) for step in several]
                try:
                    for future in started:
                        future.result()
                except KeyboardInterrupt:
                    for process in list(self._running):
                        _ask_to_end(process)
                    raise
        return self.outcomes

    def _run(self, step: Step) -> Outcome:
        # Relative where they can be: results name no folder of the machine that made them.
        places = {"out": os.path.relpath(self._out, ROOT), "tuned": os.path.relpath(self._tuned, ROOT)}
        places["name"] = step.name
        command = [sys.executable, *(argument.format(**places) for argument in step.command)]
        log = self._out / f"{step.name}.log"
        shown = shlex.join(["python", *command[1:]])
        missing = [module for module in step.needs if importlib.util.find_spec(module) is None]
        if missing:
            return Outcome(step.name, "skipped", f"{', '.join(missing)} is not installed", 0.0, shown, "", ())
        if step.config is not None:
            config = self._out / f"{step.name}.config.json"
            config.write_text(json.dumps(step.config, indent=1) + "\n")
            command += ["--config", str(config)]
        folder = self._tuned if step.tuned else self._package
        path = os.pathsep.join(filter(None, (str(folder), self._environment.get("PYTHONPATH"))))
        environment = self._environment | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": path} | dict(step.environment)
        shutil.rmtree(self._out / step.name, ignore_errors=True)  # else the example goes on from its end
        started = time.monotonic()
        with open(log, "w") as stream:
            stream.write(f"$ {shown}\n")
            stream.flush()
            status = self._call(command, environment, stream, 60 * step.minutes)
        seconds = time.monotonic() - started
        lines = tuple(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
        if status is None:
            result, reason = "timed out", f"stopped after {step.minutes:g} min"
        elif status == 0 and "pytest" in step.command and " passed" not in lines[-1]:
            result, reason = "skipped", next((line for line in lines if line.startswith("SKIPPED")), lines[-1])
        else:
            result, reason = ("ok", "") if status == 0 else ("failed", f"status {status}")
        return Outcome(step.name, result, reason, seconds, shown, places["out"] + f"/{log.name}", lines)

    def _call(self, command: Sequence[str], environment: Mapping[str, str], log: object, limit_s: float) -> int | None:
        """The exit status; None for a command that was stopped at the limit. Nothing that it started is left."""
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
    """In their order: neighbours that time nothing together, each other step alone."""
    for timed, neighbours in groupby(steps, lambda step: step.timed):
        several = list(neighbours)
        yield from ([step] for step in several) if timed else [several]


def _ask_to_end(process: subprocess.Popen[bytes]) -> None:
    """It alone: what it has started is for it to end."""
    # pytest says what it has seen when it is interrupted.
    process.send_signal(signal.SIGINT if "pytest" in process.args else signal.SIGTERM)


# What pip would write: torch finds a backend by its name in there.
_INSTALLED = {
    "METADATA": "Metadata-Version: 2.1\nName: compile_muon\nVersion: 0\n",
    "entry_points.txt": "[torch_dynamo_backends]\nmuon_zero = compile_muon.backend:muon_zero\n",
}


def lay_out(folder: Path, *, copy_kernels: bool = False) -> Path:
    """The package under `folder` as it would be installed: links into the checkout, the kernels a copy if asked for."""
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


# Run in a process of its own: this one takes no memory on the device.
_PROBE = """
import json, torch
about = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": torch.cuda.device_count()}
if torch.cuda.is_available():
    about |= {"device": torch.cuda.get_device_name(), "capability": torch.cuda.get_device_capability()}
import triton
print(json.dumps(about | {"triton": triton.__version__}))
"""


def _rehearsed() -> dict[str, str]:
    """Of programs that have a device which computes nothing, and numbers that are made up."""
    sys.path.insert(0, str(ROOT / "rehearse"))
    import library

    return library.environment() | {"PYTHONPATH": str(ROOT / "rehearse" / "programs")}


def probe(environment: Mapping[str, str]) -> dict | str:
    """What the results depend on: versions, device, driver and clocks; or why nothing can run."""
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, env=environment)
    if done.returncode:
        return f"{sys.executable} cannot import torch and Triton: {done.stderr.strip().splitlines()[-1]}"
    about = json.loads(done.stdout.splitlines()[-1])
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
    parser.add_argument("--out", type=Path, help="where logs and results go; default: runs/gpu, or runs/rehearsed")
    parser.add_argument("--rehearse", action="store_true", help="no GPU, and one step after the other")
    options = parser.parse_args(argv)
    known = [step.name for step in STEPS]
    for name in options.only or ():
        if name not in known:
            parser.error(f"--only {name!r} is unknown; expected some of: {', '.join(known)}")
    steps = [step for step in STEPS if not options.only or step.name in options.only]
    if options.list:
        for step in steps:
            print(f"{step.name:20} {step.minutes:4g} min  {step.tells}")
        return 0
    environment = dict(os.environ)
    if options.rehearse:
        # Bytes that are sampled are numbers too.
        steps = [
            replace(step, timed=True, command=step.command + ("--sample-bytes", "0") * step.command.count(EXAMPLE[0]))
            for step in steps
            if not step.numbers
        ]
        environment |= _rehearsed()
    about = probe(environment)
    if isinstance(about, str):
        print(f"make gpu: {about}", file=sys.stderr)
        return 2
    out = (ROOT / (options.out or ("runs/rehearsed" if options.rehearse else "runs/gpu"))).resolve()
    out.mkdir(parents=True, exist_ok=True)
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    package, tuned = lay_out(ROOT / "build" / "gpu"), lay_out(ROOT / "build" / "gpu_tuned", copy_kernels=True)
    driver = Driver(out, environment, package, tuned, lambda text: print(text, flush=True))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        driver.run(steps, about)
    return summarize(driver.outcomes, len(steps), out)


def summarize(outcomes: Sequence[Outcome], planned: int, out: Path) -> int:
    """Say what failed and where its log is; the exit status, also 1 where not all of `planned` steps had their turn."""
    bad = [outcome for outcome in outcomes if outcome.result in ("failed", "timed out")]
    skipped = [outcome for outcome in outcomes if outcome.result == "skipped"]
    fine = len(outcomes) - len(bad) - len(skipped)
    print(f"\n{fine} of {planned} steps are ok; results: {os.path.relpath(out, ROOT)}")
    for outcome in skipped:
        print(f"skipped: {outcome.name}: {outcome.reason}")
    for outcome in bad:
        print(f"{outcome.result}: {outcome.name} ({outcome.reason}); log: {outcome.log}")
        print("".join(f"    {line}\n" for line in outcome.last_lines), end="")
    if len(outcomes) < planned:
        print(f"interrupted: {planned - len(outcomes)} steps were not finished")
    return 1 if bad or len(outcomes) < planned else 0


if __name__ == "__main__":
    sys.exit(main())
