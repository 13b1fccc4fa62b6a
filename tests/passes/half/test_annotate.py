"""NVTX ranges stay where they were put, in eager and generated code."""

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.profiler import profile

from compile_muon.passes import HALF_PASSES, Half, PassContext, PassOptions, run_passes
from compile_muon.passes.layout import Layout
from compile_muon.passes.markers import Orthogonalize
from compile_muon.passes.spec import MuonSpec, ParamSpec
from compile_muon.passes.torch_private import compile_fx_inner, fresh_context


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
        ctx = PassContext(Half.STEP, options=PassOptions(nvtx=nvtx))
        gm = run_passes(GraphModule(torch.nn.Module(), graph), HALF_PASSES, ctx)
        if codegen == "eager":
            return gm
        compiled = compile_fx_inner(gm, inputs, is_inference=True)
    return lambda *args: compiled(list(args))


def run(code):
    with profile() as recorded:
        code(*(torch.randn(6, 8) for _ in range(4)), torch.tensor([0.05, 0.95]))
    return recorded.events()


@pytest.mark.parametrize("codegen", ["eager", "inductor"])
def test_ranges_surround_newton_schulz(codegen):
    events = run(step_graph(True, codegen))
    wanted = ("muon_zero::range_push", "muon_zero::newton_schulz", "muon_zero::range_pop")
    found = sorted((e for e in events if e.name in wanted), key=lambda e: e.time_range.start)
    assert [e.name for e in found] == list(wanted)


def test_no_range_unless_asked():
    events = run(step_graph(False, "eager"))
    assert [e for e in events if "newton_schulz" in e.name]
    assert not [e for e in events if "range_" in e.name]
