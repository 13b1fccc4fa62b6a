"""Seconds of the first step, by part: compile_muon beside plain torch.compile, each in fresh processes in turns.

    python benchmarks/first_step.py                            # on the device there is
    python benchmarks/first_step.py --rehearse --threads 3     # the CUDA path without a GPU, in rehearse/'s environment
    python benchmarks/first_step.py --matrices 400             # tracing alone: equal matrices, and no code is generated
    python benchmarks/first_step.py --json FILE

Caches are empty. A run is a small GPT's first forward, backward and step, without building the model and without
imports of torch and of the example, which imports compile_muon. The least of `--repeats` counts. Seconds of the clock
depend on the machine's other work; CPU seconds of this process hardly do, and count the work that cannot be handed to
worker processes. `again` is the first step of a second process, which finds the caches of the first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BATCH, CONTEXT, VOCABULARY = 4, 256, 256
CHAIN = 16  # sides of the matrices of --matrices

PLAIN, PLAIN_MUON = "torch.compile, AdamW", "torch.compile, torch.optim.Muon and AdamW"
OURS_ADAMW, OURS = "compile_muon, AdamW", "compile_muon, Muon"
#: ratios are relative to the first of those chosen
CONTENDERS = (PLAIN, OURS_ADAMW, PLAIN_MUON, OURS)

#: parts of a first step, in seconds of the clock; the remainder is Python's, and the kernels' own run time
PARTS = ("setup", "Dynamo", "AOTAutograd", "our passes", "Inductor", "its kernels", "our kernels")


class Clock:
    """Seconds of a first step by part, measured by replacing functions of compile_muon in this process."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call

    def watch_ours(self) -> None:
        from compile_muon import backend
        from compile_muon.engine import frame
        from compile_muon.passes import ahead

        for module in (backend, frame):
            module.run_passes = self.timed("our passes", module.run_passes)  # type: ignore[attr-defined]
        ahead.kernels_of = self.timed("our kernels", ahead.kernels_of)
        ahead.wait = self.timed("our kernels", ahead.wait)

    def watch_triton(self) -> None:
        """Time the kernels of compile_muon that Triton compiles, or loads, when they are launched."""
        import triton

        def told(*, src: Any, times: Any, **_: Any) -> None:
            if not str(getattr(src, "name", "")).startswith("triton_"):  # the prefix of Inductor's kernels
                self.seconds["our kernels"] += times.total / 1e6

        triton.knobs.compilation.listener = told

    def read_torch(self) -> None:
        """Read torch's compilation times, each without the times of the functions that it calls."""
        from torch._dynamo.utils import compilation_time_metrics as noted

        def of(name: str) -> float:
            return sum(noted.get(name, ()))

        forward, backward = of("compile_fx.<locals>.fw_compiler_base"), of("compile_fx.<locals>.bw_compiler")
        lowered, kernels = of("compile_fx_inner"), of("PyCodeCache.load_by_key_path")
        self.seconds["Dynamo"] = of("_compile.compile_inner") - of("OutputGraph.call_user_compiler")
        self.seconds["AOTAutograd"] = of("create_aot_dispatcher_function") - forward - of("Partitioner")
        self.seconds["AOTAutograd"] += max(0.0, forward + backward - lowered) if backward else 0.0
        self.seconds["Inductor"] = lowered - kernels
        self.seconds["its kernels"] = kernels


def model_on(device: str, layers: int, width: int, matrices: int) -> Any:
    """Build the example's GPT, or a chain of ``matrices`` equal matrices that returns a loss."""
    import torch

    if matrices:

        class Chain(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = torch.nn.ModuleList(torch.nn.Linear(CHAIN, CHAIN, bias=False) for _ in range(matrices))

            def forward(self, x: Any, _: Any) -> Any:
                for block in self.blocks:
                    x = x + block(x).tanh()
                return x.square().mean()

        return Chain().to(device)
    sys.path.insert(0, str(ROOT / "examples"))
    from train_gpt import GPT

    with torch.device(device):
        return GPT(layers, width, CONTEXT)


def first_step(who: str, layers: int, width: int, rehearsed: bool, matrices: int = 0) -> dict[str, Any]:
    """Time the first step of contender ``who`` in this process, of the GPT or of a chain of ``matrices``."""
    import torch

    if rehearsed:
        from device import Device

        played = Device()
        torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN is the real library, which finds no device
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_on(device, layers, width, matrices)
    batch = tuple(
        torch.randn(BATCH, CHAIN, device=device)
        if matrices
        else torch.randint(VOCABULARY, (BATCH, CONTEXT), device=device)
        for _ in range(2)
    )
    clock, half = Clock(), device == "cuda"
    start, cpu = time.perf_counter(), time.process_time()
    if who in (OURS, OURS_ADAMW):
        import compile_muon

        if rehearsed:
            from alone import Alone

            Alone(played)
        clock.watch_ours()
        optimizer = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.005}}
        if who == OURS_ADAMW:
            optimizer = {"type": "AdamW", "params": {"lr": 0.005}}
        compiled = {"codegen": "eager"} if matrices else True
        stage = {"stage": 3 if matrices else 1}
        config = {"compile": compiled, "optimizer": optimizer, "zero_optimization": stage, "bf16": {"enabled": half}}
        with clock.part("setup"):
            model, ours = compile_muon.initialize(model, config)
        optimizers, precision = [ours], contextlib.nullcontext
    else:
        with clock.part("setup"):
            model.compile(backend="aot_eager" if matrices else "inductor")
            muon = [p for p in model.blocks.parameters() if p.ndim == 2] if who == PLAIN_MUON else []
            rest = [p for p in model.parameters() if all(p is not q for q in muon)]
            optimizers = [torch.optim.AdamW(rest, lr=1e-3)]
            optimizers += [torch.optim.Muon(muon, lr=1e-3)] if muon else []
        precision = lambda: torch.autocast(device, torch.bfloat16, enabled=half)  # noqa: E731
    if half:
        clock.watch_triton()

    def step() -> None:
        with precision():
            loss = model(*batch)
        loss.backward()
        for opt in optimizers:
            opt.step()
            opt.zero_grad()

    step()
    if half:
        torch.cuda.synchronize()
    run = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    clock.read_torch()
    start = time.perf_counter()
    step()
    run |= {"second": time.perf_counter() - start, "parts": clock.seconds, "torch": torch.__version__}
    return run | {"device": torch.cuda.get_device_name() if half and not rehearsed else device}


def in_process(who: str, options: argparse.Namespace, caches: str) -> dict[str, Any]:
    """Run :func:`first_step` in a new process with these caches; add the CPU seconds of its children."""
    environment = dict(os.environ)
    if options.rehearse:
        sys.path.insert(0, str(ROOT / "rehearse"))
        import library

        environment |= library.environment() | {"PYTHONPATH": str(ROOT / "rehearse")}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    environment |= {"TORCHINDUCTOR_COMPILE_THREADS": str(options.threads)}
    environment.setdefault("OMP_NUM_THREADS", "1")
    path = Path(caches) / "found.json"
    command = [sys.executable, __file__, "--one", who, "--json", str(path), "--layers", str(options.layers)]
    command += ["--width", str(options.width), "--matrices", str(options.matrices), *["--rehearse"] * options.rehearse]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(path.read_text()) | {"all_cpu": used}


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run every contender in turns, and compare the least CPU seconds of each."""
    runs_of: dict[str, list[dict[str, Any]]] = {who: [] for who in options.contenders}
    again: dict[str, list[dict[str, Any]]] = {who: [] for who in options.contenders}
    for _ in range(options.repeats):
        for who in options.contenders:
            with tempfile.TemporaryDirectory() as caches:
                runs_of[who].append(in_process(who, options, caches))
                if options.again:
                    again[who].append(in_process(who, options, caches))
                print(f"{who}: {runs_of[who][-1]['seconds']:.1f} s, {runs_of[who][-1]['cpu']:.1f} s of CPU", flush=True)
    yardstick = options.contenders[0]
    least = {who: min(runs, key=lambda run: run["cpu"]) for who, runs in runs_of.items()}
    for who, run in least.items():
        if again[who]:
            run["again"] = {key: min(r[key] for r in again[who]) for key in ("seconds", "cpu")}
        run["ratio"] = min(r["seconds"] for r in runs_of[who]) / min(r["seconds"] for r in runs_of[yardstick])
        run["cpu_ratio"] = run["cpu"] / least[yardstick]["cpu"]
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "threads": options.threads}
    if options.matrices:
        model = {"matrices": options.matrices, "width": CHAIN, "batch": BATCH}
    else:
        model = {"layers": options.layers, "width": options.width, "batch": BATCH, "context": CONTEXT}
    return {"rehearsed": options.rehearse, "machine": machine, "model": model, "contenders": least}


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("first step", "seconds", "CPU s", "ratio", "CPU ratio", "all CPU s", "again", *PARTS)
    for who, run in report["contenders"].items():
        ratios = [f"{run[key]:.2f}" for key in ("ratio", "cpu_ratio")]
        seconds, cpu, every = (f"{run[key]:.1f}" for key in ("seconds", "cpu", "all_cpu"))
        again = f"{run['again']['seconds']:.1f}" if "again" in run else ""
        table.add_row(who, seconds, cpu, *ratios, every, again, *(f"{run['parts'][part]:.1f}" for part in PARTS))
    Console(width=170).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="no GPU: on rehearse/'s, which computes nothing")
    parser.add_argument("--threads", type=int, default=min(32, os.cpu_count() or 1), help="Inductor's workers; 1: none")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512, help="256 is train_step.py's preset small")
    parser.add_argument("--matrices", type=int, default=0, metavar="N", help="of a chain in place of the GPT")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="also in a second process, with the caches of the first")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.one:
        run = first_step(options.one, options.layers, options.width, options.rehearse, options.matrices)
        options.json.write_text(json.dumps(run))
        return 0
    report = compare(options)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    show(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
