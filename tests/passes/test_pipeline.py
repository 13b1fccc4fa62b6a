"""The runner: order, contracts, lint, dumps; and the pipelines as values."""

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

aten = torch.ops.aten


def small_graph():
    graph = Graph()
    graph.output((graph.call_function(aten.relu.default, (graph.placeholder("x"),)),))
    return GraphModule(torch.nn.Module(), graph)


def noop(name, **contract):
    return GraphPass(name, lambda gm, ctx: gm, **contract)


def run(*passes, kind=GraphKind.FORWARD, **kwargs):
    ctx = PassContext(kind, **kwargs)
    return run_passes(small_graph(), passes, ctx), ctx


def behind(name, target, double=False):
    """A pass that puts an operation behind the last one, which it reads once or twice."""

    def rewrite(gm, ctx):
        output = gm.graph.output_node()
        (old,) = output.args[0]
        with gm.graph.inserting_after(old):
            new = gm.graph.call_function(target, (old, old) if double else (old,))
            new.meta = dict(old.meta)  # a pass may copy meta, its maker's name with it
        output.args = ((new,),)
        return gm

    return GraphPass(name, rewrite)


@pytest.mark.parametrize(
    ("passes", "message"),
    [
        ([noop("second", requires=("first",)), noop("first")], r"'second' needs \['first'\] to run before it"),
        ([noop("first", kinds=(GraphKind.JOINT,)), noop("second", requires=("first",))], "needs"),
        ([noop("lower"), noop("verify", requires=("lowre",))], r"'verify' needs \['lowre'\]"),
        ([noop("lower"), noop("late", conflicts=("lower",))], r"'late' must run before \['lower'\]"),
    ],
)
def test_contracts(passes, message):
    with pytest.raises(PassContractError, match=message):
        run(*passes)
    run(noop("first", conflicts=("second",)), noop("second", requires=("first",)))


def test_an_ill_formed_graph_is_refused_and_where_there_are_dumps_its_pass_is_named(tmp_path):
    def break_it(gm, ctx):
        next(iter(gm.graph.find_nodes(op="call_function", target=aten.relu.default))).prepend(gm.graph.output_node())
        return gm

    passes = noop("first"), GraphPass("careless", break_it), noop("last")
    with pytest.raises(PassContractError, match=r"one of the passes \['careless', 'first', 'last'\].*ill-formed graph"):
        run(*passes)
    with pytest.raises(PassContractError, match="^pass 'careless' left an ill-formed graph"):
        run(*passes, options=PassOptions(dump=tmp_path))


def test_the_graph_a_pass_returns_is_the_one_that_goes_on_and_is_recompiled():
    replacement = small_graph()
    gm, ctx = run(GraphPass("swap", lambda gm, ctx: replacement), behind("negate", aten.neg.default))
    assert gm is replacement and torch.equal(gm(torch.ones(2))[0], -torch.ones(2))
    assert set(ctx.timings) == {"swap", "negate"} and all(seconds >= 0 for seconds in ctx.timings.values())


def test_dumps_hold_every_graph_and_what_a_pass_makes_bears_its_name(tmp_path):
    request = BackwardRequest((Purpose.SPECULATE,) * 2, (False, False), (True, True))
    context = {"kind": GraphKind.BACKWARD, "request": request, "frame": "frame7"}
    passes = noop("first"), behind("negate", aten.neg.default), behind("add", aten.add.Tensor, double=True)
    gm, _ = run(*passes, options=PassOptions(dump=tmp_path / "new" / "folder"), **context)
    files = {path.name: path.read_text() for path in (tmp_path / "new" / "folder").iterdir()}
    names = ["00_before", "01_first", "02_negate", "03_add"]
    assert sorted(files) == [f"frame7.backward.speculate_carried.{name}.py" for name in names]
    assert ["aten.neg" in files[name] for name in sorted(files)] == [False, False, True, True]
    makers = {node.name: node.meta.get(PASS_KEY) for node in gm.graph.nodes}
    assert makers == {"x": None, "relu_default": None, "neg_default": "negate", "add_tensor": "add", "output": None}
    marked = [line for line in files[max(files)].splitlines() if "made by" in line]
    assert [line.rpartition("  # ")[2] for line in marked] == ["made by negate", "made by add"]


@pytest.mark.parametrize("kind", GraphKind)
def test_pipelines_keep_their_own_contracts_and_refuse_another_order(kind):
    """The contracts say what the order is for: pairs change places, and the runner objects."""
    passes = [p for p in (JOINT_PASSES if kind is GraphKind.JOINT else LOWERING_PASSES) if kind in p.kinds]
    idle = [noop(p.name, requires=p.requires, conflicts=p.conflicts, kinds=p.kinds) for p in passes]
    run(*idle, kind=kind)
    names = [p.name for p in passes]
    known = {p.name for p in (*JOINT_PASSES, *LOWERING_PASSES)}
    assert all({*p.requires, *p.conflicts} <= known for p in passes)
    assert set(names[names.index("verify") + 1 :] if "verify" in names else ()) <= {"annotate"}, "sends nothing"
    pairs = {("deduplicate", "recompute"), ("deduplicate", "insert_orthogonalize"), ("lower", "verify")}
    pairs |= {("deduplicate", "lower"), ("insert_orthogonalize", "lower"), ("verify", "annotate"), ("schedule", "room")}
    for early, late in pairs & {(a, b) for a in names for b in names}:
        i, j, order = names.index(early), names.index(late), list(idle)
        order[i], order[j] = order[j], order[i]
        with pytest.raises(PassContractError):
            run(*order, kind=kind)
