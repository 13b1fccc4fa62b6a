"""The operator in graphs: registration, compilation, counting; and grouping of a list into batches."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from compile_muon import kernels
from compile_muon.kernels import newton_schulz, newton_schulz_list
from compile_muon.kernels.batching import one_batch_per_shape, one_by_one
from compile_muon.kernels.newton_schulz import make_plan
from compile_muon.kernels.operations import gram_flops, standard_flops
from compile_muon.kernels.ops import arguments
from compile_muon.kernels.reference import orthogonalize

OP = torch.ops.muon_zero.newton_schulz.default


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


SAMPLES = {
    "wide": [(6, 9)],
    "tall": [(9, 6)],
    "batch": [(2, 3, 5, 7)],
    "vectors": [(1, 7), (7, 1)],
    "empty": [(0, 4), (3, 0)],
    "several": [(6, 9), (9, 6), (6, 9), (2, 4, 4)],
}


@pytest.mark.parametrize("sample", list(SAMPLES))
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_opcheck(sample, method):
    xs = [randn(*shape) for shape in SAMPLES[sample]]
    xs += [x.mT.contiguous().mT for x in xs]
    torch.library.opcheck(OP, (xs, *arguments(make_plan(method, "you", 5, torch.float16, "cpu", 1e-7))))


@pytest.mark.parametrize(("shape", "dim"), [((3, 4, 6), 0), ((4, 3, 6), 1), ((2, 4, 6, 3), -1)])
def test_vmap_is_one_more_dimension_of_a_stack(shape, dim):
    x, alone = randn(*shape), randn(5, 5, seed=1)
    stack = x.movedim(dim, 0)
    assert torch.equal(torch.vmap(newton_schulz, in_dims=dim)(x), newton_schulz(stack))
    both = torch.vmap(lambda a: tuple(newton_schulz_list([a, alone])), in_dims=dim, out_dims=(0, None))
    mapped, shared = both(x)
    assert torch.equal(mapped, newton_schulz(stack)) and torch.equal(shared, newton_schulz(alone))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_is_bitwise_eager(backend):
    """Opaque: whatever surrounds it, its bits do not change."""

    def f(x, y):
        a, b = newton_schulz_list([x * 2, y.mT], coefficients="you", dtype=torch.bfloat16)
        return a.float() + 1, b.float() * 2, newton_schulz(x, coefficients=[(3, -3.2, 1.2)], steps=3, method="gram")

    x, y = randn(12, 20), randn(12, 20, seed=1)
    compiled = torch.compile(f, backend=backend, fullgraph=True)
    for ours, eager in zip(compiled(x, y), f(x, y), strict=True):
        assert torch.equal(ours, eager)
        assert ours.stride() == eager.stride()


@pytest.mark.parametrize(("dtype", "inside"), [("float16", (False, True)), ("bfloat16", (True, True))])
def test_sums_of_float16_are_float32(dtype, inside, monkeypatch):
    """Ours alone: what others multiply behind it is as they have set it, also behind an error."""
    matmul = torch.backends.cuda.matmul
    seen = []

    def fails(*arguments):
        seen.append((matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction))
        raise ZeroDivisionError

    monkeypatch.setattr(kernels.ops, "orthogonalize", fails)
    with pytest.raises(ZeroDivisionError):
        newton_schulz(randn(6, 9), dtype=dtype)
    assert seen == [inside]
    assert matmul.allow_fp16_reduced_precision_reduction


def test_one_node_in_a_traced_graph():
    graph = make_fx(lambda x, y: newton_schulz_list([x, y]))(randn(4, 6), randn(6, 4))
    # By name: late in a long session the dispatcher has been seen to hand out another object for the same overload.
    ours = [str(n.target) for n in graph.graph.nodes if n.op == "call_function" and "muon_zero" in str(n.target)]
    assert ours == [str(OP)]


def test_no_derivative_is_an_error():
    x = randn(4, 6).requires_grad_()
    with pytest.raises(RuntimeError, match="newton_schulz"):
        newton_schulz(x).sum().backward()


def counted(f):
    with FlopCounterMode(display=False) as counter:
        f()
    return counter.get_total_flops()


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (3, 8, 24)])
@pytest.mark.parametrize("coefficients", ["jordan", "deepseek_v4"])
@pytest.mark.parametrize("method", ["standard", "gram", "auto"])
def test_flop_formula_is_what_the_reference_does(shape, coefficients, method):
    """The op's formula against the products the reference runs, counted by torch."""
    x = randn(*shape)
    plan = make_plan(method, coefficients, None, torch.float32, "cpu", 1e-7)
    concrete = make_plan("gram" if method == "auto" else method, coefficients, None, torch.float32, "cpu", 1e-7)
    products = counted(lambda: [orthogonalize(m, concrete) for m in x.reshape(-1, *shape[-2:])])
    assert counted(lambda: OP([x], *arguments(plan))) == products > 0


def test_operation_counts():
    """In units of k³ for five steps and one restart, as published: 20α + 10 and 8α + 28. And of products by halves."""
    for alpha in (1, 2, 4):
        assert standard_flops(10, 10 * alpha, 5) == (20 * alpha + 10) * 1000
        assert gram_flops(10, 10 * alpha, 5, 1) == (8 * alpha + 28) * 1000
        assert standard_flops(10, 10 * alpha, 5, symmetric=True) == (15 * alpha + 5) * 1000
        assert gram_flops(10, 10 * alpha, 5, 1, symmetric=True) == (6 * alpha + 17) * 1000
        assert gram_flops(10, 10 * alpha, 5, 2) == (12 * alpha + 22) * 1000
        assert gram_flops(10, 10 * alpha, 5, 2, symmetric=True) == (9 * alpha + 13) * 1000


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_one_batch_per_shape_equals_one_by_one(method, dtype):
    shapes = [(8, 20), (20, 8), (3, 8, 20), (8, 20), (0, 4), (5, 5), (2, 0, 20, 8), (2, 2, 5, 5)]
    xs = [randn(*s, seed=i) for i, s in enumerate(shapes)]
    plan = make_plan(method, "you", 5, dtype, "cpu", 1e-7)
    calls = []

    def recording(x, plan):
        calls.append(tuple(x.shape))
        return orthogonalize(x, plan)

    batched = one_batch_per_shape(xs, plan, recording)
    assert calls == [(5, 8, 20), (20, 8), (5, 5, 5)]
    for ours, alone in zip(batched, one_by_one(xs, plan, orthogonalize), strict=True):
        assert ours.shape == alone.shape
        assert ours.stride() == alone.stride()
        torch.testing.assert_close(ours, alone, rtol=1e-4, atol=1e-5)


def test_a_batch_never_mixes_dtypes():
    xs = [randn(4, 6), randn(4, 6).double() * 1e200]
    outs = one_batch_per_shape(xs, make_plan("standard", "jordan", 5, torch.float32, "cpu", 1e-7), orthogonalize)
    assert all(o.isfinite().all() for o in outs)
