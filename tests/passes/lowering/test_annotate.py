"""Ranges stay where they were put, in eager and generated code; NVTX and torch.profiler see the same ones."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.profiler import profile

from compile_muon import ConfigError, MuonZero
from compile_muon.config import CompileConfig
from compile_muon.passes import LOWERING_PASSES, GraphKind, PassContext, PassOptions, Purpose, ranges, run_passes
from compile_muon.passes.collectives import collectives
from compile_muon.passes.language.layout import Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec
from compile_muon.passes.language.work import Category, Work, note_work
from compile_muon.passes.lowering.annotate import ANNOTATE
from compile_muon.passes.markers import Orthogonalize
from compile_muon.passes.ranges import COLORS, DOMAIN, RANGE_POP, RANGE_PUSH, ranged
from compile_muon.passes.torch_private import compile_fx_inner, fresh_context

HERE = Path(__file__).parent


def step_graph(nvtx, codegen):
    """The directions of two matrices, as the optimizer's step asks for them."""
    fake, graph, inputs = FakeTensorMode(), Graph(), []

    def placeholder(name, *shape):
        node = graph.placeholder(name)
        node.meta["val"] = fake.from_tensor(torch.empty(shape), static_shapes=True)
        inputs.append(node.meta["val"])
        return node

    with fresh_context(fake):
        grads, momenta = ([placeholder(f"{name}_{i}", 6, 8) for i in range(2)] for name in ("grad", "momentum"))
        grads, momenta = list(grads), list(momenta)
        hyper = placeholder("hyper", 2)
        muon = MuonSpec(1, 6, 8, True, "standard", (3.4, -4.7, 2.0), 1.0, (), "float32", 1e-7, "local")
        spec = ParamSpec(Layout((6, 8), 2), "float32", "float32", "float32", muon)
        markers = [
            Orthogonalize.insert(graph, grad, momentum, hyper, spec)
            for grad, momentum in zip(grads, momenta, strict=True)
        ]
        graph.output(tuple(marker.node for marker in markers))
        ctx = PassContext(GraphKind.STEP, options=PassOptions(nvtx=nvtx))
        gm = run_passes(GraphModule(torch.nn.Module(), graph), LOWERING_PASSES, ctx)
        if codegen == "eager":
            return gm
        compiled = compile_fx_inner(gm, inputs, is_inference=True)
    return lambda *args: compiled(list(args))


def recorded(body):
    """What torch.profiler sees of `body()`, in order."""
    with profile() as found:
        body()
    return sorted(found.events(), key=lambda event: (event.time_range.start, -event.time_range.end))


def lies_in(inner, outer):
    return outer.time_range.start <= inner.time_range.start and inner.time_range.end <= outer.time_range.end


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_ranges_surround_newton_schulz(codegen):
    code = step_graph(True, codegen)
    inputs = *(torch.randn(6, 8) for _ in range(4)), torch.tensor([0.05, 0.95])
    events = recorded(lambda: code(*inputs))
    (newton_schulz,) = [event for event in events if event.name == "muon_zero::newton_schulz"]
    (found,) = [event for event in events if event.name == "muon_zero frame.step newton_schulz 0"]
    assert lies_in(newton_schulz, found)
    assert not [event for event in events if "_record_function" in event.name]  # it would lie across the range


def graphs(uneven):
    """Every graph of a training step at stage 3, as `lowered(passes, **options)`."""
    captured = uneven(0, 2, stage=3)
    for kind, request in ((GraphKind.FORWARD, Purpose.REDUCE), (GraphKind.BACKWARD, Purpose.SPECULATE)):
        yield lambda passes, kind=kind, request=request, **options: captured.lowered(kind, request, passes, **options)


def test_off_adds_no_node(uneven, node_targets):
    without = tuple(graph_pass for graph_pass in LOWERING_PASSES if graph_pass is not ANNOTATE)
    for lowered in graphs(uneven):
        assert node_targets(lowered(LOWERING_PASSES, nvtx=False)[0]) == node_targets(lowered(without)[0])


def annotated(trace, note=lambda gm: None):
    """The backward of two linear layers at stage 3, with ranges; to be called inside of a world."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))
    MuonZero(model, stage=3, ns_dtype="float32")
    captured = trace(model, torch.ones(3, 8))
    gm, ctx = captured.lowered(
        GraphKind.BACKWARD, Purpose.SPECULATE, tuple(p for p in LOWERING_PASSES if p is not ANNOTATE)
    )
    note(gm)
    ctx.options = PassOptions(nvtx=True)
    return ANNOTATE.rewrite(gm, ctx)


def pushed(gm):
    """Name (without the graph's), category and payload of each range of a graph."""
    title = r"^frame\.backward\.\w+ "
    pushes = [node.args[1:] for node in gm.graph.nodes if node.target is RANGE_PUSH]
    return [(re.sub(title, "", name), category, payload) for name, category, payload in pushes]


def test_what_a_bucket_is_for_names_it(world, trace):
    """What is noted wins over the kind of collective; a bucket with several says which."""

    def note(gm):
        for node, kind in collectives(gm):
            note_work(node, Work(Category.REFRESH, 3) if kind == "reduce_scatter" else Work(Category.EXCHANGE, 7))

    with world(1, 4):
        found = pushed(annotated(trace, note=note))
    names = [name for name, _, _ in found if "refresh" in name or "exchange" in name]
    count = sum("exchange" in name and "launch" in name for name in names)
    assert count > 1
    for number in range(1, count + 1):
        for what in ("launch", "wait"):
            assert names.count(f"exchange 7 ({number} of {count}) {what}") == 1
    assert {category for name, category, _ in found if name.startswith("refresh 3")} == {"refresh"}


def test_a_range_stands_next_to_its_nodes(world, trace):
    with world(0, 4):
        gm = annotated(trace)
    surrounded, tokens = Counter(), set()
    nodes = list(gm.graph.nodes)
    for start, node in enumerate(nodes):
        if node.target is RANGE_PUSH:
            end = next(i for i in range(start, len(nodes)) if nodes[i].target is RANGE_POP)
            inside = nodes[start + 1 : end]
            assert RANGE_PUSH not in [inner.target for inner in inside]
            # What holds it there in generated code.
            assert set(node.args[0]) & set(inside[0].all_input_nodes)
            assert set(nodes[end].args[0]) & set(inside)
            tokens |= {node.args[0][0], nodes[end].args[0][0]}
            names = tuple(str(inner.target).split(".")[1] for inner in inside if "getitem" not in str(inner.target))
            surrounded[node.args[2], node.args[1].split()[-1], names] += 1
    assert len(tokens) == 1  # all ranges write it: that keeps their order
    kinds = {(category, *ops) for category, _, ops in surrounded}
    assert {("gather", "pack", "all_gather_into_tensor"), ("reduce", "pack", "reduce_scatter_tensor")} < kinds
    assert ("newton_schulz", "newton_schulz") in kinds
    assert all(ops[-1] == "wait_tensor" for _, what, ops in surrounded if what == "wait")


# --- what tools see ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """One range of a log; `parents` are the names of those around it, outermost first."""

    domain: str
    category: str
    payload: int
    name: str
    parents: tuple[str, ...]


class Seen:
    """What one rank of ranges_program.py left: ranges by case from NVTX, and what torch.profiler saw."""

    def __init__(self, log, result):
        self.results = json.loads(result.read_text())
        self.ranges, case, open_ranges = {}, None, []
        for line in log.read_text().splitlines():
            kind, domain, category, payload, name = line.split("\t")
            if kind == "mark":
                assert not open_ranges, f"open at the end of {case!r}: {open_ranges}"
                case = name
                assert case not in self.ranges or not case
                self.ranges.setdefault(case, [])
            elif kind == "push":
                found = Range(domain, category, int(payload), name, tuple(outer.name for outer in open_ranges))
                open_ranges.append(found)
                if case:
                    self.ranges[case].append(found)
            else:
                assert open_ranges.pop().domain == domain
        assert not open_ranges

    def annotations(self, case):
        """(name, start, end) of ranges and of ops, each in order."""
        events = sorted(self.results[case]["events"], key=lambda event: (event[1], -event[2]))
        ours = [event for event in events if event[0].startswith(f"{DOMAIN} ")]
        return ours, [event for event in events if event not in ours]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """`seen[world][rank]` of real processes with a tool attached."""
    if find_spec("nvtx") is None:
        pytest.skip("the package nvtx is not installed")
    if shutil.which("gcc") is None:
        pytest.skip("no gcc to build the tool that NVTX loads")
    folder = tmp_path_factory.mktemp("nvtx")
    library = folder / "nvtx_log.so"
    build = ["gcc", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(HERE / "nvtx_log.c")]
    subprocess.run(build, check=True)
    running = {}
    for world, rank in ((1, 0), (2, 0), (2, 1)):
        paths = folder / f"store{world}", folder / f"{world}_{rank}.json"
        environment = os.environ | {
            "NVTX_INJECTION64_PATH": str(library),
            "NVTX_LOG": str(folder / f"{world}_{rank}.log"),
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        command = [sys.executable, str(HERE / "ranges_program.py"), str(rank), str(world), *map(str, paths)]
        output = (folder / f"{world}_{rank}.txt").open("w")
        running[world, rank] = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        for (world, rank), process in running.items():
            code = process.wait(timeout=600)
            assert code == 0, (folder / f"{world}_{rank}.txt").read_text()
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return {
        world: [Seen(folder / f"{world}_{rank}.log", folder / f"{world}_{rank}.json") for rank in range(world)]
        for world in (1, 2)
    }


CASES = [(1, "eager"), (1, "inductor"), (2, "eager"), (2, "inductor"), (2, "refresh")]


def plain(name):
    """Without the number of the frame."""
    return re.sub(r"^frame\d+", "frame", name)


def kind(name):
    """The category that a name says; "" for frames and parts of a step."""
    return next((word for word in plain(name).split() if word in COLORS), "")


@pytest.mark.full
@pytest.mark.parametrize(("world", "case"), CASES)
def test_domain_and_categories(seen, world, case):
    for rank in seen[world]:
        ranges = rank.ranges[case]
        assert {found.domain for found in ranges} == {"muon_zero"}
        assert [found.category for found in ranges] == [kind(found.name) for found in ranges]


@pytest.mark.full
def test_every_category_is_seen(seen):
    ranges = [found for world in seen.values() for rank in world for case in rank.ranges.values() for found in case]
    assert {found.category for found in ranges} == {
        "", "gather", "reduce", "exchange", "newton_schulz", "refresh",
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize(("world", "case"), CASES)
def test_payloads_are_what_the_optimizer_counts(seen, world, case):
    for rank in seen[world]:
        ranges = rank.ranges[case]
        launched = [r for r in ranges if r.name.endswith(" launch")]
        assert sum(found.payload for found in launched) == rank.results[case]["sent"]
        assert (rank.results[case]["sent"] > 0) == (world > 1)
        made = [found.payload for found in ranges if found.category == "newton_schulz"]
        assert sum(made) == rank.results[case]["matrices"]
    assert sum(rank.results[case]["matrices"] for rank in seen[world]) == 2
    assert [found.payload for found in ranges if found.name == "step"] == [2]


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2])
def test_generated_code_keeps_the_order(seen, world):
    """The eager code runs the graph node by node: what the passes put in."""
    for rank in seen[world]:
        eager, inductor = (
            [(plain(r.name), [plain(outer) for outer in r.parents], r.payload) for r in rank.ranges[case]]
            for case in ("eager", "inductor")
        )
        assert eager == inductor
        assert len(eager) > 6


@pytest.mark.full
@pytest.mark.parametrize("case", ["eager", "inductor", "refresh"])
def test_each_launch_comes_before_its_wait(seen, case):
    for rank in seen[2]:
        names = [found.name for found in rank.ranges[case]]
        launches = [name.removesuffix(" launch") for name in names if name.endswith(" launch")]
        assert len(set(launches)) == len(launches) > 2
        for name in launches:
            # What a step starts to gather, the forward of the next one waits for.
            ahead = names.index(f"{name} launch") < names.index(f"{name} wait")
            assert ahead != name.startswith("refresh")
        assert len(launches) == sum(name.endswith(" wait") and name != "step wait" for name in names)


@pytest.mark.full
@pytest.mark.parametrize(("world", "case"), CASES)
def test_nesting(seen, world, case):
    for rank in seen[world]:
        for found in rank.ranges[case]:
            frame = re.match(r"frame\d+\.(forward|backward)", found.name)
            if frame is not None:
                outer = () if found.name == frame[0] else (frame[0],)
            elif re.match(r"refresh \d+ wait", found.name):
                outer = (next(r.name for r in rank.ranges[case] if r.name.endswith(".forward")),)
            elif found.name == "step":
                outer = ()
            else:
                outer = ("step", "step directions") if re.match(r"step\d+\.step ", found.name) else ("step",)
            assert found.parents == outer
    parts = [found.name for found in rank.ranges[case] if found.parents == ("step",)]
    assert parts[-1] == ("refresh 0 launch" if case == "refresh" else "step commit adamw")
    assert set(parts) >= {"step wait", "step commit muon", "step commit adamw"}


@pytest.mark.full
@pytest.mark.parametrize(("world", "case"), CASES)
def test_the_profiler_sees_the_same(seen, world, case):
    for rank in seen[world]:
        ours, _ = rank.annotations(case)
        assert [name for name, _, _ in ours] == [f"muon_zero {found.name}" for found in rank.ranges[case]]


@pytest.mark.full
@pytest.mark.parametrize(("world", "case"), CASES)
def test_what_a_range_names_happens_inside_it(seen, world, case):
    for rank in seen[world]:
        ours, ops = rank.annotations(case)
        inside = {
            name: [op.split("::")[-1] for op, first, last in ops if start <= first and last <= end]
            for name, start, end in ours
        }
        for name, found in inside.items():
            if re.match(r"muon_zero refresh \d+ ", name):  # by torch.distributed itself
                assert found == (["pack"] if name.endswith(" launch") else [])
            elif name.endswith(" launch"):
                assert len(found) == 2 - (found[0] != "pack") and found[-1] not in ("pack", "wait_tensor"), name
            elif name.endswith(" wait") and name != "muon_zero step wait":
                assert found == ["wait_tensor"]
            elif " newton_schulz " in name:
                assert found == ["newton_schulz"]
        assert [name for name in inside if " newton_schulz " in name]


@pytest.mark.full
@pytest.mark.parametrize(("world", "case"), CASES)
def test_a_refused_step_closes_its_ranges(seen, world, case):
    """The log says at every mark that none is open."""
    for rank in seen[world]:
        names = [found.name for found in rank.ranges[f"{case} refused"]]
        assert names[-1] == "step wait" and "step" in names


@pytest.mark.full
def test_ranges_that_an_error_left_open_are_closed(seen):
    for rank in (*seen[1], *seen[2]):
        assert [(found.name, found.category, found.payload, found.parents) for found in rank.ranges["left open"]] == [
            ("outer", "", 0, ()),
            ("inner", "reduce", 7, ("outer",)),
            ("after", "", 0, ()),
        ]


@pytest.mark.full
def test_off_means_no_range(seen):
    for case in ("off", "off refused"):
        assert seen[1][0].ranges[case] == []
        assert not [name for name, _, _ in seen[1][0].annotations("off")[0]]


# --- the package nvtx -------------------------------------------------------------------------------------------------


@pytest.fixture
def no_nvtx(monkeypatch):
    """As if the package were not installed."""
    monkeypatch.setitem(sys.modules, "nvtx", None)
    ranges._domain.cache_clear()
    yield
    ranges._domain.cache_clear()


def test_without_the_package_the_profiler_still_sees_ranges(no_nvtx, monkeypatch):
    monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
    assert CompileConfig(nvtx=True).nvtx

    def body():
        with ranged("here"):
            torch.ones(1)

    assert "muon_zero here" in [event.name for event in recorded(body)]


def test_without_the_package_a_tool_that_listens_is_an_error(no_nvtx, monkeypatch):
    monkeypatch.setenv("NVTX_INJECTION64_PATH", "/opt/tool.so")
    assert not CompileConfig(nvtx=False).nvtx
    with pytest.raises(
        ConfigError, match=r"nvtx = True: .* is not installed; pip install '.\[profile\]' in compile_muon's checkout"
    ):
        CompileConfig(nvtx=True)
