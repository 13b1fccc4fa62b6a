"""Time products, kernels, collectives and offload on the ranks of a process group, as training runs them.

Every core is busy while products and kernels are timed: a rank alone on a machine is faster than one among others.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compile_muon.offload.store import Bucket, FileStore, Slot
from compile_muon.optimizer import MuonZero
from compile_muon.passes.methods.adamw import ADAMW
from compile_muon.planning.machines.fit import Measured, Sample

_c10d = torch.ops._c10d_functional
_DTYPES = ("float32", "bfloat16")
#: m, n and k of a product as multiples of its smallest dimension, and the size of the batch
_SHAPES = ((1, 1, 1, 1), (4, 1, 1, 1), (1, 1, 4, 1), (1, 4, 2, 1), (1, 1, 1, 4))
#: bytes of the operands that take turns: as in a training step, no cache holds them
_COLD = 64 * 2**20
#: bytes from which on a collective on CPUs is mostly copies
_LARGE = 2**20
#: runs in one CUDA graph
_REPLAYED = 20
#: buckets that go to a disk and back, and buffers for those under way
_BUCKETS, _BUFFERS = 8, 4


def _powers(low: int, high: int, step: int = 1) -> tuple[int, ...]:
    return tuple(2**power for power in range(low, high + 1, step))


@dataclass(frozen=True)
class _Plan:
    """Sizes and repetitions of the measurement; the defaults test the measurement itself."""

    sizes: tuple[int, ...] = (32, 64)  # smallest dimensions of products
    sequences: tuple[int, ...] = (32,)  # lengths for attention
    moved: tuple[int, ...] = _powers(12, 18, 4)  # bytes that a kernel moves
    sent: tuple[int, ...] = _powers(12, 18, 4)  # bytes that a rank sends in a collective
    offloaded: int = 2**22  # bytes that go to host memory or a disk and back
    rounds: int = 3  # a sample is their median
    passes: int = 1  # over all collectives, with `rounds` each: interference outlasts a round
    round_seconds: float = 1e-3  # least time of a round
    layers: tuple[int, ...] = (1,)  # of the models that show the host's time; on GPUs the host runs ahead
    stretch_seconds: float = 1e-3  # work ahead of the collective that shows how late ranks come


#: by device
_PLANS = {
    # Half a second a round: in its first moments a GPU runs at clocks that it cannot sustain.
    "cuda": _Plan(
        _powers(6, 13), _powers(9, 13), _powers(14, 30, 4), _powers(12, 28, 4), 2**28, rounds=1, round_seconds=0.5
    ),
    # After a quarter of the stretch ranks come less late, after twice as much no later.
    "cpu": _Plan(
        _powers(4, 9), _powers(5, 10), _powers(12, 26), _powers(10, 24, 2), 2**28, rounds=7, passes=3,
        round_seconds=3e-3, layers=(2, 8), stretch_seconds=8e-3,
    ),
}  # fmt: skip


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class _Clock:
    """Times functions on this rank while the other ranks of `group` run the same."""

    plan: _Plan
    device: str
    group: dist.ProcessGroup
    # ``time.process_time`` counts only the seconds in which cores work for this rank
    timer: Callable[[], float] = time.perf_counter
    runs: int = 0  # of all functions on this rank so far

    def _once(self, run: Callable[[], object], times: int) -> float:
        finish = torch.cuda.synchronize if self.device == "cuda" else lambda: None
        finish()
        start = self.timer()
        for _ in range(times):
            run()
        finish()
        self.runs += times
        return (self.timer() - start) / times

    def rounds(self, run: Callable[[], object], *, replayed: bool = False) -> list[float]:
        """Return the seconds of one run by round, after a warm-up; all ranks of the group run it equally often.

        `replayed`: on GPUs, replay it as a CUDA graph, since a small kernel ends before the next one is launched.
        """
        run()
        several = 1
        if replayed and self.device == "cuda":
            run, several = _replayed(run), _REPLAYED
        longest = torch.tensor([self._once(run, 3)], device=self.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self.group)
        times = max(1, round(self.plan.round_seconds / longest.item()))
        times = times if self.device == "cuda" else min(1000, times)
        return [self._once(run, times) / several for _ in range(self.plan.rounds)]

    def seconds(self, run: Callable[[], object], *, replayed: bool = False) -> float:
        """Return the median of :meth:`rounds`."""
        return statistics.median(self.rounds(run, replayed=replayed))


def _replayed(run: Callable[[], object]) -> Callable[[], object]:
    """Capture :data:`_REPLAYED` runs as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_REPLAYED):
            run()
    return graph.replay


def measure(quick: bool, note: Callable[[str], object], disk: Path | None = None) -> Measured:
    """Measure this machine; a collective over the default process group. Rank 0's result counts.

    `quick` takes few and small sizes, to test the measurement itself. `note` is told of each part ahead of it. `disk`
    is a folder on the disk that offload would use, None to leave the disk out; an OffloadError says that it has no room
    or does not exist.
    """
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    plan = _Plan() if quick else _PLANS[device]
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.set_num_threads(1)
    busy = world if device == "cuda" else min(world, cores())
    busy_group = dist.new_group(list(range(busy)))
    own_group = [dist.new_group([number]) for number in range(world)][rank]
    samples: list[Sample] = []
    kernel_seconds = math.nan
    if rank < busy:
        clock = _Clock(plan, device, busy_group)
        note("the least kernel")
        # A tiny product: the least that a call of aten from Inductor's code takes.
        a, out = torch.ones(2, 4, 4, device=device)
        kernel_seconds = clock.seconds(lambda: torch.mm(a, a, out=out), replayed=True)
        parts = {
            "products": _products(clock),
            "kernels that move bytes": _kernels(clock, kernel_seconds),
            "attention": _attention(clock),
            "what offload goes by": _transfers(clock, disk, busy),
        }
        if device == "cpu":
            parts["training steps"] = _steps(_Clock(plan, device, busy_group, timer=time.process_time), own_group)
        for part, timed in parts.items():
            note(part)
            samples += timed
    dist.barrier()
    for count in sorted({min(2, world), world} - {1}):
        group = dist.new_group(list(range(count)))
        note(f"collectives of {count} ranks")
        if rank < count:
            samples += _collectives(_Clock(plan, device, group), count)
        dist.barrier()
    if device == "cuda":
        node, memory = torch.cuda.device_count(), torch.cuda.get_device_properties().total_memory
        return Measured(device, kernel_seconds, 0, node, memory, tuple(samples))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Measured(device, kernel_seconds, cores(), world, memory, tuple(samples))


def _turns(clock: _Clock, make_operands: Callable[[], list[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Cycle through sets of operands: on CPUs more of them than the cache of a core holds."""
    first = make_operands()
    operand_bytes = sum(x.nbytes for x in first)
    count = min(64, max(1, _COLD // max(1, operand_bytes))) if clock.device == "cpu" else 1
    return itertools.cycle([first, *(make_operands() for _ in range(count - 1))])


def _multiply(clock: _Clock, shapes: Sequence[tuple[int, ...]], dtype: str = "float32") -> Callable[[], object]:
    """Return a product, batched for three dimensions; `shapes` are those of its operands and its result."""
    multiply = torch.mm if len(shapes[0]) == 2 else torch.bmm
    kind = getattr(torch, dtype)
    sets = _turns(clock, lambda: [torch.randn(shape, device=clock.device).to(kind) for shape in shapes])

    def run() -> None:
        a, b, out = next(sets)
        multiply(a, b, out=out)

    return run


def _products(clock: _Clock) -> Iterator[Sample]:
    for dtype, size, (*times, batch) in itertools.product(_DTYPES, clock.plan.sizes, _SHAPES):
        m, n, k = (time * size for time in times)
        lead = (batch,) if batch > 1 else ()
        multiply = _multiply(clock, [(*lead, m, k), (*lead, k, n), (*lead, m, n)], dtype)
        seconds = clock.seconds(multiply, replayed=True)
        parameters = {"m": m, "n": n, "k": k, "batch": batch, "dtype": dtype}
        yield Sample("products", seconds, 2.0 * batch * m * n * k, parameters)


def _kernels(clock: _Clock, kernel_seconds: float) -> Iterator[Sample]:
    """Time Inductor's kernels, results allocated as in a graph: moves, and the most functions that one may have."""
    move = torch.compile(lambda x, y: x * 0.5 + y, dynamic=True)
    functions = torch.compile(lambda x: torch.erf(x) * torch.exp(x) + torch.tanh(x), dynamic=True)

    def moving(size: int) -> Callable[[], object]:
        sets = _turns(clock, lambda: list(torch.ones(2, size, device=clock.device)))
        return lambda: move(*next(sets))

    def taking(entries: int) -> Callable[[], object]:
        x = torch.randn(entries, device=clock.device)
        return lambda: functions(x)

    for make, sizes in ((moving, [nbytes // 12 for nbytes in clock.plan.moved]), (taking, [2**16])):
        # Subtract the time of entering the compiled graph, taken at a size that computes next to nothing.
        entering = clock.seconds(make(8), replayed=True) - kernel_seconds
        for size in sizes:
            seconds = max(clock.seconds(make(size), replayed=True) - entering, kernel_seconds)
            moved = Sample("kernels", seconds, 12 * size)
            yield moved if make is moving else Sample("functions", seconds, 3 * size, {"entries": size})


def _attention(clock: _Clock) -> Iterator[Sample]:
    """Time attention as models call it: queries, keys and values are views of one product."""
    for dtype, sequence, width in itertools.product(_DTYPES, clock.plan.sequences, (32, 64)):
        heads = max(1, 2**14 // sequence)
        x = torch.randn(1, sequence, 3, heads, width, device=clock.device).to(getattr(torch, dtype))
        parts = x.permute(2, 0, 3, 1, 4).unbind(0)
        gradient = torch.randn_like(parts[0])

        def run(parts=parts, gradient=gradient):  # type: ignore[no-untyped-def]
            # New leaves in each run: autograd cannot capture tensors that were made on another stream.
            q, k, v = (part.detach().requires_grad_() for part in parts)
            attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(attended, (q, k, v), gradient)

        # As torch.utils.flop_counter: two products forward and five backward, over all pairs of positions.
        operations = 7 * 2.0 * heads * sequence**2 * width
        parameters = {"sequence": sequence, "width": width, "dtype": dtype}
        yield Sample("attention", clock.seconds(run, replayed=True), operations, parameters)


def _steps(clock: _Clock, alone: dist.ProcessGroup) -> Iterator[Sample]:
    """Time steps of each rank by itself, then of all busy ranks together, in seconds of ``clock.timer``."""
    for layers, group in itertools.product(clock.plan.layers, (alone, clock.group)):
        if group is alone or group.size() > 1:
            step, parameters, collectives = _training(layers, group)
            yield Sample("steps", clock.seconds(step), parameters, {"ranks": group.size(), "collectives": collectives})


def _training(layers: int, group: dist.ProcessGroup) -> tuple[Callable[[], None], int, int]:
    """Return a compiled step of `layers` linear layers, their number of parameters, and the collectives of a step.

    Ranks of `group` train at stage 3, a single rank at stage 0.
    """
    sharded = group.size() > 1
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
    # Layers so small that the host takes all the time.
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    optimizer = MuonZero(model, stage=3 if sharded else 0, gradient_accumulation_steps=1, mesh=mesh)
    compiled = torch.compile(model, backend="muon_zero")
    batch = torch.randn(4, 32)

    def step() -> None:
        compiled(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    first = sum(count for _, count in optimizer.traffic.collectives)
    step()
    sent = sum(count for _, count in optimizer.traffic.collectives) - first
    # The all-reduce of the step checks is not in `traffic`.
    return step, len(list(model.parameters())), sent + sharded


def _collectives(clock: _Clock, count: int) -> Iterator[Sample]:
    kinds = _kinds(clock.device, count, clock.group.group_name)
    rounds: dict[tuple[str, int], list[float]] = defaultdict(list)
    at_work: dict[tuple[str, int], float] = {}
    for _ in range(clock.plan.passes):
        for (kind, start), sent_bytes in itertools.product(kinds.items(), clock.plan.sent):
            # A rank sends a part to each other rank, in float32; an all-reduce sends it twice.
            bytes_each = 4 * (count - 1) * (2 if kind == "all_reduce" else 1)
            part = max(1, sent_bytes // bytes_each)
            nbytes = part * bytes_each
            x = torch.ones(part if kind == "all_gather" else part * count, device=clock.device)
            runs, began = clock.runs, time.process_time()
            rounds[kind, nbytes] += clock.rounds(partial(start, x))
            at_work[kind, nbytes] = (time.process_time() - began) / (clock.runs - runs)
    for (kind, nbytes), seconds in rounds.items():
        yield Sample("collectives", statistics.median(seconds), nbytes, {"kind": kind, "ranks": count})
        if clock.device == "cpu" and nbytes >= _LARGE:
            yield Sample("copies", at_work[kind, nbytes], nbytes)
    if clock.device == "cpu":
        yield _late(clock, kinds["all_to_all"], count)


def _late(clock: _Clock, exchange: Callable[[torch.Tensor], object], count: int) -> Sample:
    """Time how late ranks come: work with a collective behind each stretch of it, against one at the end."""
    plan, x = clock.plan, torch.ones(count)
    multiply = _multiply(clock, [(256, 256)] * 3)
    product_seconds = torch.tensor([clock.seconds(multiply) * min(1.0, cores() / count)])
    dist.all_reduce(product_seconds, dist.ReduceOp.MAX, group=clock.group)
    products = max(1, round(plan.stretch_seconds / product_seconds.item()))

    def seconds(stretches: int, products: int) -> float:
        exchange(x)
        start = time.perf_counter()
        for _ in range(stretches):
            for _ in range(products):
                multiply()
            exchange(x)
        return time.perf_counter() - start

    waits = 10
    late_seconds = [
        (seconds(1 + waits, products) - seconds(1, (1 + waits) * products)) / waits
        for _ in range(plan.passes * plan.rounds)
    ]
    # Noise may exceed it: a fitted time stays positive.
    return Sample("late ranks", max(1e-6, statistics.median(late_seconds)), 0.0, {"ranks": count})


def _kinds(device: str, count: int, group: str) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a function for each kind of collective, first the one from which :mod:`.fit` takes the link.

    Over Gloo an all-gather is an all-to-all of copies (docs/why/decisions.md), so it is not measured, and a
    reduce-scatter is an all-to-all and a sum.
    """

    wait = _c10d.wait_tensor

    def exchange(x: torch.Tensor) -> torch.Tensor:
        splits = [x.numel() // count] * count
        return wait(_c10d.all_to_all_single(x, splits, splits, group))

    by_all = {"all_to_all": exchange, "all_reduce": lambda x: wait(_c10d.all_reduce(x, "sum", group))}
    if device == "cpu":
        return by_all | {"reduce_scatter": lambda x: exchange(x).view(count, -1).sum(0)}
    return {
        "all_gather": lambda x: wait(_c10d.all_gather_into_tensor(x, count, group)),
        "reduce_scatter": lambda x: wait(_c10d.reduce_scatter_tensor(x, "sum", count, group)),
        **by_all,
    }


def _transfers(clock: _Clock, disk: Path | None, ranks: int) -> Iterator[Sample]:
    """Time offload in both ways at once, as in a step: the next bucket comes while the last one goes."""
    nbytes = clock.plan.offloaded
    # On CPUs both ways to the host are what kernels do. A disk serves both directions together.
    ways = [("host_bandwidth", _host_link, nbytes), ("host_memory_bandwidth", _host_adamw, nbytes)]
    ways = ways if clock.device == "cuda" else []
    if disk is not None:
        ways.append(("disk_bandwidth", partial(_disk, folder=disk), 2 * nbytes))
    for way, copying, served in ways:
        yield Sample("offload", clock.seconds(copying(nbytes)), served, {"way": way, "ranks": ranks})


def _host_link(nbytes: int) -> Callable[[], object]:
    on_device = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda")
    on_host = torch.empty(2, nbytes, dtype=torch.uint8, pin_memory=True)
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def run() -> None:
        current = torch.cuda.current_stream()
        for stream, target, source in zip(streams, (on_device[0], on_host[1]), (on_host[0], on_device[1]), strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            current.wait_stream(stream)

    return run


def _host_adamw(nbytes: int) -> Callable[[], object]:
    """Return AdamW as ``adamw_on="cpu"`` runs it: of 28 bytes an element it reads 16 and writes 12."""
    numel = nbytes // 28
    params, grads, first, second = (torch.full((numel,), 1e-2) for _ in range(4))
    states: list[MutableMapping[str, torch.Tensor]] = [{"step": torch.ones(()), "exp_avg": first, "exp_avg_sq": second}]
    rates = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    assert ADAMW.on_host is not None
    return partial(ADAMW.on_host, [params], [grads], states, rates, None)


def _disk(nbytes: int, folder: Path) -> Callable[[], object]:
    """Return reads and writes through offload's store, which bypass the page cache where the file system allows it."""
    buckets = [Bucket((Slot(f"bucket {i}", (nbytes // _BUCKETS,), torch.uint8),)) for i in range(_BUCKETS)]
    store = FileStore(folder, buckets, buffers=_BUFFERS)

    def run() -> None:
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            store.open(bucket)
            if following is not None:
                store.start(following)
            store.close(bucket)
        store.finish()
        store.commit(buckets)

    return run
