"""Rehearses training on GPUs without one: PyTorch's CUDA build on a CUDA runtime that computes nothing.

    make rehearse                                            # every case, and the mistakes that must be found
    make rehearse REHEARSE_ARGS="--only 'stage 3 ranks 4'"   # some of them
    make rehearse REHEARSE_ARGS=--write                      # budgets from the measured figures

README.md says which parts are real. The exit status is 1 if a case is over its budget.
"""

from __future__ import annotations

from library import FOLDER, under_it

if __name__ == "__main__":
    under_it()

import argparse
import contextlib
import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from alone import Alone, group_of
from cases import BUDGETS, CASES, LARGE, Case, Figures, beyond, collectives_of, over, sent_bytes, without_checks
from device import Device
from host_adamw import host_adamw
from models import SMALL, batch_of, model_of
from order import unordered
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import compile_muon
from compile_muon.config import load_config, read_options
from compile_muon.planning import capture_step
from compile_muon.simulate.engine import HOST
from compile_muon.simulate.machine import load_machine

ROOT = Path(__file__).resolve().parents[1]
WARM, TIMED = 3, 5


def planned_step(case: Case) -> tuple[int, float]:
    """Return the bytes and the host's milliseconds of a rank's step by the planner."""
    config = load_config({key: value for key, value in case.config().items() if key != "mesh"})
    options = read_options({k: v for k, v in case.more.get("compile", {}).items() if k != "nvtx"})
    captured = capture_step(
        partial(model_of, case.model, case.frames), batch_of(case.model),
        world=case.world, rank=case.rank, config=config, options=replace(options, codegen="inductor"),
        axes=case.more.get("mesh"), backend="nccl",
    )  # fmt: skip
    step = captured.simulated(load_machine("h100"))
    return step.peak.total, 1e3 * sum(event.end - event.start for event in step.events if event.stream == HOST)


def milliseconds(step: Callable[[], None], times: int = TIMED) -> float:
    """Return the least host time of some steps."""
    durations = []
    for _ in range(times):
        began = time.perf_counter()
        step()
        durations.append(1e3 * (time.perf_counter() - began))
    return min(durations)


class Training:
    """The training of one rank with compile_muon."""

    def __init__(self, case: Case, alone: Alone) -> None:
        torch.compiler.reset()
        torch.manual_seed(0)
        self.model, self.optimizer = compile_muon.initialize(model_of(case.model, case.frames), case.config())
        self._case, self._alone, self._batch = case, alone, batch_of(case.model)

    def step(self, mistake: Callable[[Tensor], object] = lambda loss: None) -> None:
        """Run the micro-batches and the update; ``mistake`` is made with the loss before the update."""
        for _ in range(self._case.micro_batches):
            loss = self.model(*self._batch)
            loss.backward()
        mistake(loss)
        with self._alone.noting():
            self.optimizer.step()
        self.optimizer.zero_grad()


def theirs(case: Case) -> float:
    """Return the host's milliseconds of a step with plain torch.compile, FSDP2 and AdamW in the existing group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.compiler.reset()
    model: Any = model_of(case.model)
    sizes = case.more.get("mesh") or {"shard": case.world}
    mesh = init_device_mesh("cuda", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16) if case.dtype == "bf16" else MixedPrecisionPolicy()
    for block in model.blocks:
        block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = batch_of(case.model)

    def step() -> None:
        for k in range(case.micro_batches):
            model.set_requires_gradient_sync(k == case.micro_batches - 1)
            model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM):
        step()
    return milliseconds(step)


#: timed steps of a yardstick, a few milliseconds each
_MANY = 300
#: the case whose step is three CUDA graphs
THREE_GRAPHS = "stage 3, 4 ranks, bf16, checks next_step, compile cuda_graphs: True"


def yardsticks(alone: Alone) -> dict[str, Any]:
    """Return host times of a step by other optimizers on one rank, and by ours in three graphs on one of four."""
    times: dict[str, Any] = {}
    (case,) = (case for case in CASES if case.name == THREE_GRAPHS)
    with group_of(case.world, case.rank), inductor(case):
        training, batch = Training(case, alone), batch_of(SMALL)
        for _ in range(WARM):
            training.step()
        times[f"compile_muon, {case.name}"] = parts_of(partial(training.model, *batch), [training.optimizer])
        del training
    with group_of(1, 0, of_one=True):
        times["gradients of as many DTensors"] = gradients_of_dtensors(sum(1 for _ in model_of(SMALL).parameters()))
    graphs = "torch.compile in CUDA graphs, fused AdamW"
    for name in ("torch.compile, AdamW", "torch.compile, torch.optim.Muon and AdamW", graphs):
        torch.compiler.reset()
        model: Any = model_of(SMALL)
        model.compile(mode="reduce-overhead" if name == graphs else None)
        muon_params = [p for p in model.blocks.parameters() if p.ndim == 2] if "Muon" in name else []
        adamw_params = [p for p in model.parameters() if all(p is not q for q in muon_params)]
        adamw = torch.optim.AdamW(adamw_params, lr=1e-3, fused=name == graphs)
        optimizers = [adamw, *([torch.optim.Muon(muon_params, lr=1e-3)] if muon_params else [])]
        batch = batch_of(SMALL)

        def forward(model: Any = model, batch: Any = batch) -> Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                return model(*batch)

        parts_of(forward, optimizers, WARM)
        times[name] = parts_of(forward, optimizers)
    return times


def parts_of(forward: Callable[[], Tensor], optimizers: Sequence[Any], times: int = _MANY) -> dict[str, float]:
    """Return the least host time of each part of a step, and of the whole step, in milliseconds."""
    least: dict[str, float] = {}
    for _ in range(times):
        start_time = time.perf_counter()
        loss = forward()
        ends = {"forward": time.perf_counter()}
        loss.backward()
        ends["backward"] = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        ends["step"] = time.perf_counter()
        for optimizer in optimizers:
            optimizer.zero_grad()
        ends["zero_grad"] = time.perf_counter()
        starts = [start_time, *ends.values()]
        seconds_of = {name: end - start for (name, end), start in zip(ends.items(), starts, strict=False)}
        seconds_of["together"] = starts[-1] - start_time
        least = {name: min(1e3 * seconds, least.get(name, float("inf"))) for name, seconds in seconds_of.items()}
    return least


def gradients_of_dtensors(count: int) -> float:
    """Return the host's milliseconds for a backward to make ``count`` DTensor gradients and autograd to write them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh, shard = init_device_mesh("cuda", (1,)), torch.empty(8, 8, device="cuda")
    params = [nn.Parameter(DTensor.from_local(shard.clone(), mesh, [Shard(0)], run_check=False)) for _ in range(count)]
    fields, metadata = params[0].__tensor_flatten__()

    class Graph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *params: Tensor) -> Tensor:
            return shard.new_zeros(())

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:
            inner_tensors = [dict(zip(fields, (shard.view(8, 8), mesh), strict=True)) for _ in params]
            return tuple(DTensor.__tensor_unflatten__(inner, metadata, (8, 8), (8, 1)) for inner in inner_tensors)

    def step() -> None:
        Graph.apply(*params).backward()
        for param in params:
            param.grad = None

    return milliseconds(step, _MANY)


def measure(case: Case, device: Device, alone: Alone) -> Figures:
    """Train some steps, and return the figures of one."""
    planned, planned_ms = planned_step(case)
    gc.collect()  # the planned model, which may fill half of the GPU
    with group_of(case.world, case.rank), inductor(case):
        training = Training(case, alone)
        for _ in range(WARM):
            training.step()
        host_ms = milliseconds(training.step)
        torch.cuda.reset_peak_memory_stats()
        bytes_before = training.optimizer.traffic.bytes_sent
        device.clear()
        training.step()
        waits, ops = dict(device.waits), device.ops()
        counted, replayed = (
            training.optimizer.traffic.bytes_sent - bytes_before,
            sum(op.name == "graph launch" for op in ops),
        )
        peak = torch.cuda.memory_stats()["reserved_bytes.all.peak" if replayed else "requested_bytes.all.peak"]
        races = races_of(training, device, alone)
        del training
        theirs_ms = theirs(case) if case.world > 1 and case.model == SMALL else 0.0
    if case.world == 1:
        with group_of(1, 0, of_one=True):
            theirs_ms = theirs(case)
    kinds = [op.kind for op in ops]
    return Figures(
        waits=waits, unordered=races, kernels=sum(kinds.count(kind) for kind in ("kernel", "triton", "gemm")),
        copies=kinds.count("copy") + kinds.count("memset"), collectives=collectives_of(ops),
        sent=sent_bytes(without_checks(ops)), counted=counted, peak=peak, planned=planned, host_ms=host_ms,
        planned_ms=planned_ms, theirs_ms=theirs_ms, replayed=replayed,
    )  # fmt: skip


def races_of(training: Training, device: Device, alone: Alone) -> tuple[str, ...]:
    """Return the unordered accesses of one step, in words."""
    device.clear()
    with alone.touches_noted():
        training.step()
    pairs = [(a, b) for a, b in unordered(device.ops())]
    lines = [f"unordered: {a.name} on stream {a.stream} and {b.name} on stream {b.stream}" for a, b in pairs]
    return tuple(dict.fromkeys(lines))


@contextlib.contextmanager
def inductor(case: Case) -> Iterator[None]:
    import torch._inductor.config as settings

    with settings.patch(dict(case.inductor)):
        yield


# --- mistakes that must be found --------------------------------------------------------------------------------------


def mistakes(device: Device, alone: Alone) -> dict[str, bool]:
    """Return mistakes by name, and whether they were found."""
    case = Case(3, 4)
    with group_of(case.world, case.rank):
        training = Training(case, alone)
        for _ in range(WARM):
            training.step()
        with device.without_waits(0):
            detected = {"waits of the main stream do nothing": bool(races_of(training, device, alone))}
        training.step()
        device.clear()
        training.step(Tensor.item)
        detected["loss.item() in the step"] = sum(device.waits.values()) > 1
    detected["a buffer freed while another stream reads it"] = freed_too_early(device, alone)
    detected["a tensor map of memory that is not aligned"] = bool(misaligned_map(device))
    return detected


def freed_too_early(device: Device, alone: Alone) -> bool:
    side = torch.cuda.Stream()
    target = torch.empty(1 << 20, device="cuda")
    device.clear()
    with alone.touches_noted(), alone.noting():
        buffer = torch.zeros(1 << 20, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            target.copy_(buffer)
        del buffer  # the mistake: no record_stream
        torch.zeros(1 << 20, device="cuda")
    return any(unordered(device.ops()))


def misaligned_map(device: Device) -> int:
    """Return the driver's status for a tensor map, as Triton asks for, over a misaligned address."""
    x = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
    sizes, strides = (ctypes.c_uint64 * 2)(64, 64), (ctypes.c_uint64 * 1)(128)
    box, steps = (ctypes.c_uint32 * 2)(32, 32), (ctypes.c_uint32 * 2)(1, 1)
    room = (ctypes.c_char * 128)()
    bfloat16, address = 9, ctypes.c_void_p(x.data_ptr() + 2)
    return device.lib.cuTensorMapEncodeTiled(room, bfloat16, 2, address, sizes, strides, box, steps, 0, 0, 0, 0)


# --- the program ------------------------------------------------------------------------------------------------------


def rehearsed(name: str) -> Any:
    """Return the figures of a case, or the results of "mistakes", "host" or "yardsticks". Each runs in a process of its
    own, whose device memory is unwritten."""
    out = FOLDER / "figures.json"
    out.unlink(missing_ok=True)
    run = subprocess.run([sys.executable, __file__, "--one", name, "--json", str(out)], capture_output=True, text=True)
    if not out.exists():
        return f"ended with status {run.returncode}: " + "".join(run.stderr.splitlines(keepends=True)[-12:])
    return json.loads(out.read_text())


def one(name: str) -> Any:
    """Compute the result of :func:`rehearsed`, in that process."""
    device = Device()
    alone = Alone(device)
    if name == "mistakes":
        return mistakes(device, alone)
    if name == "yardsticks":
        return yardsticks(alone)
    if name == "host":
        return host_adamw(lambda case: Training(case, alone))
    (case,) = (case for case in CASES + LARGE if case.name == name)
    return measure(case, device, alone).to_json()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name has this; --list shows them")
    parser.add_argument(
        "--large", action="store_true", help="models of 1 and 8 B within memory budgets, hours of a core"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--write", action="store_true", help="write what is measured into budgets.json")
    parser.add_argument("--json", type=Path, help="all figures")
    parser.add_argument("--yardsticks", action="store_true", help="host time of others on one rank")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        options.json.write_text(json.dumps(one(options.one)))
        return 0
    if options.yardsticks:
        print(json.dumps(rehearsed("yardsticks"), indent=1))
        return 0
    cases = [case for case in (LARGE if options.large else CASES) if options.only in case.name]
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    budgets = json.loads(BUDGETS.read_text())
    console, problems, figures = Console(width=150), {}, {}
    table = Table(
        "one steady step", "waits", "unordered", "kernels", "copies", "NCCL calls", "MB sent", "peak MiB (plan)",
        "host ms (planned, plain)",
    )  # fmt: skip
    for case in cases:
        console.print(f"{case.name} ...", end=" ", highlight=False)
        result = rehearsed(case.name)
        if isinstance(result, str):
            problems[case.name] = [result]
            console.print(result, highlight=False)
            continue
        row = figures[case.name] = Figures(**result)
        if options.write and not options.large:
            ratio = round(row.ratio, 2)
            budgets["cases"][case.name] = {
                "kernels": row.kernels, "copies": row.copies, "of_plan": round(row.of_plan, 3), "ratio": ratio,
            }  # fmt: skip
        budget = budgets["cases"].get(case.name)
        if options.large:
            problems[case.name] = beyond(row, case.more["compile"]["memory"])
        else:
            limits = budgets["limits"]
            problems[case.name] = over(row, budget, limits, case.waits) if budget else ["has no budget: --write"]
        console.print("; ".join(problems[case.name]) or "within its budget", highlight=False)
        table.add_row(
            case.name, str(sum(row.waits.values())), str(len(row.unordered)), str(row.kernels),
            str(row.copies), str(sum(row.collectives.values())), f"{row.sent / 1e6:.2f}",
            f"{row.peak / 2**20:.0f} ({row.planned / 2**20:.0f})",
            f"{row.host_ms:.1f} ({row.planned_ms:.1f}, {row.theirs_ms:.1f})",
        )  # fmt: skip
    console.print(table)
    if not (options.only or options.large):
        outcomes = rehearsed("mistakes")
        for mistake, detected in outcomes.items() if isinstance(outcomes, dict) else [(outcomes, False)]:
            console.print(f"{'found' if detected else 'NOT FOUND'}: {mistake}", highlight=False)
            problems[mistake] = [] if detected else ["was made on purpose and not found"]
        checks = rehearsed("host")
        for numbers, equal in checks.items() if isinstance(checks, dict) else [(checks, False)]:
            console.print(f"{'holds' if equal else 'DOES NOT HOLD'}: {numbers}", highlight=False)
            problems[numbers] = [] if equal else ["numbers differ"]
        if subprocess.run([sys.executable, str(Path(__file__).with_name("ranks.py"))]).returncode:
            problems["several ranks"] = ["see above"]
    if options.json:
        options.json.write_text(json.dumps({name: row.to_json() for name, row in figures.items()}, indent=1) + "\n")
    if options.write:
        BUDGETS.write_text(json.dumps(budgets, indent=1) + "\n")
    return int(any(problems.values()))


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # NCCL's threads wait for ranks that are not there
