"""The runner: order, contracts, lint, dumps; and the pipelines as values."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph, GraphModule

from compile_muon.passes import (
    JOINT_PASSES,
    LOWERING_PASSES,
    BackwardRequest,
    GraphKind,
    GraphPass,
    PassContext,
    PassOptions,
    Purpose,
    run_passes,
)
from compile_muon.passes.errors import PassContractError
from compile_muon.passes.pipeline import PASS_KEY


def small_graph():
    graph = Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.relu.default, (x,))
    graph.output((y,))
    return GraphModule(torch.nn.Module(), graph)


def noop(name, **contract):
    return GraphPass(name, lambda gm, ctx: gm, **contract)


def run(*passes, kind=GraphKind.FORWARD, **kwargs):
    ctx = PassContext(kind, **kwargs)
    return run_passes(small_graph(), passes, ctx), ctx


def test_requires():
    with pytest.raises(PassContractError, match=r"'second' needs \['first'\] to run before it"):
        run(noop("second", requires=("first",)), noop("first"))
    run(noop("first"), noop("second", requires=("first",)))


def test_a_pass_that_was_left_out_of_this_half_does_not_count():
    first = noop("first", kinds=(GraphKind.JOINT,))
    with pytest.raises(PassContractError, match="needs"):
        run(first, noop("second", requires=("first",)), kind=GraphKind.FORWARD)


def test_an_unknown_requirement_is_named():
    with pytest.raises(PassContractError, match=r"'verify' needs \['lowre'\]"):
        run(noop("lower"), noop("verify", requires=("lowre",)))


def test_conflicts():
    with pytest.raises(PassContractError, match=r"'deduplicate' must run before \['lower'\]"):
        run(noop("lower"), noop("deduplicate", conflicts=("lower",)))
    run(noop("deduplicate", conflicts=("lower",)), noop("lower"))


def test_an_ill_formed_graph_is_refused_and_where_there_are_dumps_its_pass_is_named(tmp_path):
    def break_it(gm, ctx):
        relu = next(iter(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)))
        relu.prepend(gm.graph.output_node())
        return gm

    passes = noop("first"), GraphPass("careless", break_it), noop("last")
    with pytest.raises(PassContractError, match=r"one of the passes \['careless', 'first', 'last'\].*ill-formed graph"):
        run(*passes)
    with pytest.raises(PassContractError, match="^pass 'careless' left an ill-formed graph"):
        run(*passes, options=PassOptions(dump=tmp_path))


def test_the_graph_a_pass_returns_is_the_one_that_goes_on():
    replacement = small_graph()
    seen = []

    def look(gm, ctx):
        seen.append(gm)
        return gm

    result, ctx = run(GraphPass("swap", lambda gm, ctx: replacement), GraphPass("look", look))
    assert result is replacement
    assert seen == [replacement]
    assert set(ctx.timings) == {"swap", "look"}
    assert all(seconds >= 0 for seconds in ctx.timings.values())


def test_edits_are_recompiled():
    def negate(gm, ctx):
        (relu,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        relu.target = torch.ops.aten.neg.default
        return gm

    gm, _ = run(GraphPass("negate", negate))
    assert torch.equal(gm(torch.ones(2))[0], -torch.ones(2))


def test_dump_holds_every_graph_before_and_after(tmp_path):
    def negate(gm, ctx):
        (relu,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        relu.target = torch.ops.aten.neg.default
        return gm

    run(
        noop("first"),
        GraphPass("negate", negate),
        kind=GraphKind.BACKWARD,
        request=BackwardRequest((Purpose.SPECULATE,) * 2, (False, False), (True, True)),
        frame="frame7",
        options=PassOptions(dump=tmp_path / "new" / "folder"),
    )
    files = {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()}
    title = "frame7.backward.speculate_carried"
    assert sorted(files) == [f"{title}.00_before.py", f"{title}.01_first.py", f"{title}.02_negate.py"]
    assert "aten.relu" in files[f"{title}.01_first.py"]
    assert "aten.neg" in files[f"{title}.02_negate.py"]
    assert "aten.neg" not in files[f"{title}.00_before.py"]


def test_what_a_pass_makes_bears_its_name(tmp_path):
    """In the graph and in the dumps; what was there before it does not."""

    def negate(gm, ctx):
        (relu,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
        with gm.graph.inserting_after(relu):
            new = gm.graph.call_function(torch.ops.aten.neg.default, (relu,))
        gm.graph.output_node().args = ((new,),)
        return gm

    def double(gm, ctx):
        (old,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
        with gm.graph.inserting_after(old):
            new = gm.graph.call_function(torch.ops.aten.add.Tensor, (old, old))
            new.meta = dict(old.meta)  # a pass may copy meta, its maker's name with it
        gm.graph.output_node().args = ((new,),)
        return gm

    passes = (noop("idle"), GraphPass("negate", negate), GraphPass("double", double))
    gm, _ = run(*passes, options=PassOptions(dump=tmp_path))
    made = {node.name: node.meta.get(PASS_KEY) for node in gm.graph.nodes}
    assert made == {"x": None, "relu_default": None, "neg_default": "negate", "add_tensor": "double", "output": None}
    lines = (tmp_path / "frame.forward.03_double.py").read_text().splitlines()
    marked = {line.split()[0].rstrip(":"): line for line in lines if "made by" in line}
    assert marked["neg_default"].endswith("  # made by negate")
    assert marked["add_tensor"].endswith("  # made by double")
    assert set(marked) == {"neg_default", "add_tensor"}


def test_pipelines_are_printable_and_keep_their_own_contracts():
    for kind in GraphKind:
        passes = JOINT_PASSES if kind is GraphKind.JOINT else LOWERING_PASSES
        done = []
        for graph_pass in (p for p in passes if kind in p.kinds):
            assert set(graph_pass.requires) <= set(done), graph_pass.name
            assert not set(graph_pass.conflicts) & set(done), graph_pass.name
            done.append(graph_pass.name)
    everything = (*JOINT_PASSES, *LOWERING_PASSES)
    known = {p.name for p in everything}
    assert all(set(p.requires) | set(p.conflicts) <= known for p in everything)
    names = [p.name for p in LOWERING_PASSES]
    # What follows the verifier may only add what sends and computes nothing.
    assert set(names[names.index("verify") + 1 :]) <= {"annotate"}


def test_pipelines_refuse_another_order():
    """The contracts say what the order is for: each pass moved in front of its neighbour, and the runner objects."""
    seen = set()
    for kind, passes in (
        (GraphKind.JOINT, JOINT_PASSES),
        (GraphKind.FORWARD, LOWERING_PASSES),
        (GraphKind.BACKWARD, LOWERING_PASSES),
    ):
        used = [p for p in passes if kind in p.kinds]
        pairs = {("recompute", "deduplicate"), ("insert_orthogonalize", "deduplicate"), ("verify", "lower")}
        pairs |= {("lower", "deduplicate"), ("lower", "insert_orthogonalize"), ("annotate", "verify")}
        names = [p.name for p in used]
        for late, early in pairs & {(a, b) for a in names for b in names}:
            order = [GraphPass(p.name, lambda gm, ctx: gm, p.requires, p.conflicts, p.kinds) for p in used]
            i, j = names.index(early), names.index(late)
            order[i], order[j] = order[j], order[i]
            with pytest.raises(PassContractError):
                run(*order, kind=kind)
            seen.add((late, early))
    assert seen == pairs
