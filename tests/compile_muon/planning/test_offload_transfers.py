"""Offloaded state beside a simulated step: against what one computes by hand, a recursion, runs and a measurement.

Buckets have pages, of which a way takes one a second.
"""

import pytest
import tiny_gpt
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.fx import Graph, GraphModule

import compile_muon
from compile_muon.config import FrameOptions, config_from_kwargs
from compile_muon.offload import store
from compile_muon.passes import GraphKind
from compile_muon.passes.costs import Link
from compile_muon.planning import capture_step
from compile_muon.simulate import SimulatedGraph, simulate
from compile_muon.simulate.machine import Machine
from compile_muon.simulate.offload_transfers import Move, OffloadTransfers, OnHost

PAGE = 4096
OPEN, LEAVE, CLOSE, COMMIT, COMPUTE = Move


def bucket(pages: int) -> store.Bucket:
    return store.Bucket([store.Slot("", (pages * PAGE,), torch.uint8)])


def waited(script, *, buffers: int = 8, host: float = 1.0, disk: float = 0.0, memory: float = 0.0) -> float:
    """Seconds waited for in a step amid others like it (the mean: they may alternate); ``script`` has moves, and
    seconds of compute between them; ``memory``, ``host`` and ``disk`` are pages/s."""
    moves = [one for one in script if isinstance(one, tuple)]
    transfers = OffloadTransfers(moves, buffers=buffers, host=host * PAGE, disk=disk * PAGE, memory=memory * PAGE)
    found = []
    for _ in range(16):
        now = waits = 0.0
        for one in script:
            ready = now if isinstance(one, (int, float)) else transfers.play(*one, now)
            waits += ready - now
            now = ready + (one if isinstance(one, (int, float)) else 0)
        transfers.next_step(now)
        found.append(waits)
    return sum(found[-12:]) / 12


def used(buckets, last: Move, compute: float = 0.0):
    """Each opened, computed on, and done with."""
    return [one for b in buckets for one in ((OPEN, b), compute, (last, b))]


END = (COMMIT, None)


def test_a_step_that_the_host_computes_is_behind_gradients_and_ahead_of_weights() -> None:
    """Gradients of 2 pages a bucket, 4 seconds of the host, weights of 1 page: those of the second and third leave
    while the host works, so that all but the first gradients and the last weights is the host's."""
    step = (COMPUTE, OnHost(2 * PAGE, PAGE, 8 * PAGE))
    assert waited([3.0, step, END], memory=2.0) == 2 + 4 + 1
    assert waited([3.0, step, step, step, END], memory=2.0) == 2 + 3 * 4 + 1
    assert waited([3.0, step, step, END], memory=8.0) == 2 + 2 + 1 + 1  # the link: two gradients, a step, weights
    assert waited([3.0, step, END]) == 2 + 1  # a machine that knows nothing of the host


@pytest.mark.parametrize(
    ("before", "sizes", "options", "expected"),
    [
        (3.0, [4], {}, 8 - 3),  # it leaves at 0, is there at 4, is back at 8, and is used for 1 second of 3
        (3.0, [4], {"host": 0.0}, 0),  # device and host are the same
        (9.0, [4], {}, 0),
        # Two ways are used at once, and a disk by one at a time.
        (0.0, [2] * 10, {}, pytest.approx(20, abs=2)),  # the first comes while the last goes
        (0.0, [2] * 10, {"host": 0.0, "disk": 1.0}, 2 * 20),
        (15.0, [2] * 10, {"host": 0.0, "disk": 1.0, "buffers": 10}, 2 * 20 - 15),
        # Of a file one second on the disk, under compute; two to the device, and before the step ends two back and one.
        (5.0, [2], {"host": 1.0, "disk": 2.0}, 2 + 2 + 1),
        # A buffer is taken until what was written in it is kept: in and out, one behind the other.
        (0.0, [4, 4], {"buffers": 1}, 16),
        (0.0, [4, 4], {"buffers": 2}, 8),
    ],
)
def test_what_buckets_take_there_and_back_is_waited_for_beyond_what_is_computed(
    before, sizes, options, expected
) -> None:
    assert waited([before, *used([bucket(pages) for pages in sizes], CLOSE), END], **options) == expected


sizes = st.lists(st.integers(1, 5), min_size=1, max_size=8)


@given(sizes, st.integers(0, 12), st.integers(0, 3), st.integers(1, 5))
def test_reads_are_ahead_as_far_as_buffers_allow(pages, before, compute, buffers) -> None:
    """A read begins behind the one before it, once what had its buffer is done with."""
    asked, read = [float(before)], [0.0]
    for k, size in enumerate(pages):
        free = asked[k - buffers + 1] if k >= buffers else 0.0  # when the one behind that bucket was asked for
        read.append(max(read[-1], free) + size)
        asked.append(max(asked[k], read[-1]) + compute)
    expected = asked[-1] - before - compute * len(pages)
    found = waited([float(before), *used([bucket(n) for n in pages], LEAVE, float(compute)), END], buffers=buffers)
    assert found == pytest.approx(expected)


@given(sizes, st.integers(0, 12), st.integers(1, 4), st.sampled_from([LEAVE, CLOSE]))
@example([2, 2, 5, 3, 1], 9, 3, CLOSE)  # with a buffer more steps wait by turns 0 and 4, with one less 3
def test_a_faster_link_and_more_buffers_never_make_a_step_wait_longer(pages, before, buffers, last) -> None:
    script = [float(before), *used([bucket(n) for n in pages], last, 1.0), END]
    found = waited(script, buffers=buffers)
    assert waited(script, buffers=buffers + 1) <= found + 1e-9
    assert waited(script, buffers=buffers, host=1.5) <= found + 1e-9
    assert waited(script, buffers=buffers, disk=1.0) >= found - 1e-9


def test_a_wait_for_a_bucket_is_exposed_where_it_is() -> None:
    graph, one = Graph(), bucket(3)
    x = graph.placeholder("x")
    x.meta["val"] = torch.zeros(2)
    node = graph.call_function(torch.ops.aten.neg.default, (x,))
    node.meta["val"] = torch.zeros(2)
    end = graph.output((node,))
    moves = {node: ((OPEN, one), (CLOSE, one)), end: ((COMMIT, None),)}
    played = SimulatedGraph(GraphModule(torch.nn.Module(), graph), GraphKind.BACKWARD, moves=moves)
    machine = Machine(
        name="round", device="cpu", memory_bytes=1, memory_bandwidth=8.0, kernel_seconds=0.0,
        rates={"float32": ((1.0, 1.0),)}, links=(Link(None, 1.0, 0.0),),
    )  # fmt: skip
    transfers = OffloadTransfers(
        [move for several in moves.values() for move in several], buffers=2, host=PAGE, disk=0.0
    )
    found = simulate([played], machine, groups={}, ranks=1, codegen="eager", transfers=transfers)
    assert (found.seconds, found.exposed, found.offload_waits) == (3 + 2, {"offload": 3}, {"backward": 3})
    assert found.moved == (one.nbytes, one.nbytes)
    travels = [(e.stream, e.start, e.end) for e in found.events if e.category == "offload"]
    assert travels == [("offload in", 0, 3), ("offload out", 3, 6), ("offload in", 6, 9)]


def watch(patch: pytest.MonkeyPatch, name: str, seen: list[tuple[str, str]]) -> None:
    """Notes of each such call of a file the name of the bucket's first slot."""
    call = getattr(store.FileStore, name)

    def watched(file, bucket, *args, **kwargs):
        seen.append((name, bucket.slots[0].name))
        return call(file, bucket, *args, **kwargs)

    patch.setattr(store.FileStore, name, watched)


#: masters too, with a part of the states resident
PARTLY = {"update": "step", "ratio": 0.8, "masters": True, "param_dtype": torch.bfloat16}


@pytest.mark.parametrize(
    "settings",
    [
        {"update": "step"},
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ({}, {"method": "adamuon", "momentum": False}, PARTLY)
        ),
    ],
)
def test_a_plan_asks_for_what_a_run_asks_for_in_that_order(settings, tmp_path, monkeypatch) -> None:
    settings = {**settings, "offload": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_bytes": 2**16}}
    settings["offload"] |= {name: settings.pop(name) for name in ("momentum", "masters", "ratio") if name in settings}
    model = tiny_gpt.one_layer()
    optimizer = compile_muon.MuonZero(model, gradient_accumulation_steps=1, **settings)
    compiled = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    for _ in range(2):
        seen: list[tuple[str, str]] = []
        with monkeypatch.context() as patch:
            for name in ("open", "close"):
                watch(patch, name, seen)
            compiled(tiny_gpt.TOKENS).backward()
            optimizer.step()
            optimizer.zero_grad()
    config = config_from_kwargs(gradient_accumulation_steps=1, **settings)
    options = FrameOptions(codegen="eager")
    captured = capture_step(tiny_gpt.one_layer, (tiny_gpt.TOKENS,), world=1, config=config, options=options)
    moves = [move for played in captured.graphs for several in played.moves.values() for move in several]
    assert [(move.value, bucket.slots[0].name) for move, bucket in moves if bucket is not None] == seen
    assert seen and sum(move is COMMIT for move, _ in moves) == 1
