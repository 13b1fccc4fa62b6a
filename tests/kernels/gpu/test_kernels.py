"""Every Triton kernel against its formula: on a GPU, and by test_interpreter.py in Triton's interpreter.

Products of -1, 0 and 1 are exact in every dtype here, so they are compared with torch.equal. (Results stay below 256,
up to which bfloat16 has every integer: the interpreter truncates where a GPU rounds.)
"""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from combinations import DOUBLE, EXACT, HALVES, INTERPRETED, LOADS, SQUARE, halved

pytest.importorskip("triton", reason="Triton is not installed")

from alone import on_aten, orthogonalize  # noqa: E402

from compile_muon.kernels import COEFFICIENTS, Averages, newton_schulz_list, reference  # noqa: E402
from compile_muon.kernels.gpu import apply, momentum, normalize, product, symmetric  # noqa: E402
from compile_muon.kernels.gpu.model import Device  # noqa: E402
from compile_muon.kernels.gpu.newton_schulz import Products, products_on  # noqa: E402
from compile_muon.kernels.gpu.operands import empty_matrices  # noqa: E402
from compile_muon.kernels.gpu.tiles import Table  # noqa: E402
from compile_muon.kernels.momentum import muon_momentum  # noqa: E402
from compile_muon.kernels.newton_schulz import make_plan  # noqa: E402
from compile_muon.passes.fingerprint import (  # noqa: E402
    EXAMINE,
    FINGERPRINT,
    FINGERPRINT_OF_ROWS,
    FORMULA,
    by_aten,
    row_sums,
)

# Largest relative error of one rounding.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8}
# (rows, cols): single tile, multiples, odd, one row, one column more than a tile, taller group than tiles.
SHAPES = [(16, 16), (64, 128), (37, 53), (1, 70), (33, 17), (100, 101)]


@pytest.fixture
def tile(descriptors):
    return replace(DOUBLE, descriptors=descriptors)


def integers(*shape, dtype, device, seed=0):
    """In padded rows as the kernels allocate them, the padding full of NaN: nothing may read it."""
    generator = torch.Generator().manual_seed(seed)
    matrices, rows, cols = shape
    out = empty_matrices(matrices, rows, cols, like=torch.empty(0, device=device), dtype=dtype)
    whole = out._base if out._base is not None else out
    whole.fill_(float("nan"))
    return out.copy_(torch.randint(-1, 2, shape, generator=generator))


def symmetric_integers(matrices, size, dtype, device, seed=0):
    x = integers(matrices, size, size, dtype=dtype, device=device, seed=seed)
    return x.copy_(torch.tril(x) + torch.tril(x, -1).mT)


def poisoned(matrices, rows, cols, dtype, device):
    return empty_matrices(matrices, rows, cols, like=torch.empty(0, device=device), dtype=dtype).fill_(float("nan"))


@halved({"matrices": [1, 3], "shape": SHAPES, "dtype": EXACT, "descriptors": LOADS})
def test_x_times_its_transpose(matrices, shape, dtype, tile, device):
    x = integers(matrices, *shape, dtype=dtype, device=device)
    out = poisoned(matrices, shape[0], shape[0], dtype, device)
    symmetric.symmetric_product(x, None, out, tile).run()
    assert torch.equal(out.double(), (x.double() @ x.double().mT).to(dtype).double())


@halved({"shape": ["double", "square"], "size": [16, 48, 37, 1, 65], "dtype": EXACT, "descriptors": LOADS})
def test_polynomial_of_a_symmetric_matrix(shape, size, dtype, tile, device):
    """cA² + bA + aI, with small coefficients so that it stays exact."""
    tile = replace(SQUARE, descriptors=tile.descriptors) if shape == "square" else tile
    A = symmetric_integers(2, size, dtype, device)
    out = poisoned(2, size, size, dtype, device)
    symmetric.symmetric_product(A, A, out, tile, alpha=2.0, plus=A, beta=-4.0, gamma=3.0).run()
    exact = 2 * (A.double() @ A.double()) - 4 * A.double() + 3 * torch.eye(size, device=device)
    assert torch.equal(out.double(), exact.to(dtype).double())
    assert torch.equal(out, out.mT)


@pytest.mark.skipif(not INTERPRETED, reason="products are counted in the interpreter")
@pytest.mark.parametrize("shape", ["double", "square"])
def test_half_of_the_products_are_never_computed(shape, tile, device, monkeypatch):
    """A kernel that computed the whole square would store the same result."""
    from triton.runtime.interpreter import InterpreterBuilder

    made = []
    dot = InterpreterBuilder.create_dot
    monkeypatch.setattr(InterpreterBuilder, "create_dot", lambda *args: made.append(1) or dot(*args))
    tile = replace(SQUARE, descriptors=tile.descriptors) if shape == "square" else tile
    size, depth, matrices = 150, 40, 2
    x = integers(matrices, size, depth, dtype=torch.float16, device=device)
    symmetric.symmetric_product(x, None, poisoned(matrices, size, size, torch.float16, device), tile).run()
    starts = [(row, col) for row in range(0, size, tile.rows) for col in range(0, size, tile.cols)]
    lower = sum(col < row + tile.rows for row, col in starts)
    assert lower < 0.7 * len(starts)
    assert len(made) == matrices * lower * -(-depth // tile.depth)


@halved({"tall,beta": [(False, 0.0), (True, -2.0)], "shape": SHAPES, "dtype": EXACT, "descriptors": LOADS})
def test_symmetric_times_wide(tall, beta, shape, dtype, tile, device):
    rows, cols = shape
    tile = replace(SQUARE, descriptors=tile.descriptors)
    left = symmetric_integers(2, rows, dtype, device)
    right = integers(2, rows, cols, dtype=dtype, device=device, seed=1)
    before = left.clone(), right.clone()
    out = torch.full((2, cols, rows) if tall else (2, rows, cols), float("nan"), dtype=dtype, device=device)
    target = out.mT if tall else out
    product.product(left, right, target, tile, plus=right if beta else None, beta=beta).run()
    exact = left.double() @ right.double() + beta * right.double()
    assert torch.equal(target.double(), exact.to(dtype).double())
    assert torch.equal(left, before[0]) and torch.equal(right, before[1])


@halved(
    {
        "layout": ["rows", "columns", "strided"],
        "shape": [(1, 1), (5, 300), (33, 129), (70, 40)],
        "dtype": [torch.float32, *HALVES],
    }
)
def test_normalization(layout, shape, dtype, device):
    rows, cols = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, rows, cols, generator=generator)
    x[1] *= 100
    x = x.to(device, dtype)
    if layout == "columns":
        x = x.mT.contiguous().mT
    elif layout == "strided":
        x = torch.stack([x, x + 1], dim=-1)[..., 0]
    expected = x.double() / (1.02 * x.double().flatten(1).norm(dim=1)[:, None, None])
    of_rows = x.float().norm(dim=-1)[:, None]
    for out_dtype, norms in itertools.product(HALVES, (None, of_rows)):
        out = normalize.normalize(x, dtype=out_dtype, eps=1e-7, safety=1.02, norms=norms)
        assert out.shape == x.shape and out.stride(-1) == 1
        error = (out.double() - expected).abs() / expected.abs().clamp(min=2**-14)
        assert error.max() <= ROUNDING[out_dtype] * 1.01  # and the float32 arithmetic before it


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1.0, 1e30, 1e38])
def test_normalization_does_not_overflow(scale, device):
    x = torch.randn(1, 40, 200, generator=torch.Generator().manual_seed(0)).clamp(-3, 3).to(device) * scale
    out = normalize.normalize(x, dtype=torch.float16, eps=0.0, safety=1.0)
    assert abs(out.double().norm().item() - 1) < 2e-3


def test_normalization_of_zeros_and_of_less_than_eps(device):
    x = torch.zeros(2, 3, 5, device=device)
    x[1] = 1e-9
    out = normalize.normalize(x, dtype=torch.float16, eps=1e-7, safety=1.0)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    torch.testing.assert_close(out[1], torch.full_like(out[1], 1e-2), rtol=1e-3, atol=0)
    assert torch.equal(normalize.normalize(x[:1], dtype=torch.float16, eps=0.0, safety=1.0)[0], out[0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_normalization_spreads_what_is_not_finite_within_its_matrix(bad, device):
    x = torch.ones(3, 40, 300, device=device)
    x[1, 17, 200] = bad
    for norms in (None, x.norm(dim=-1)[:, None]):
        out = normalize.normalize(x, dtype=torch.bfloat16, eps=1e-7, safety=1.0, norms=norms)
        assert out[1].isnan().all() and out[0].isfinite().all() and out[2].isfinite().all()


@pytest.fixture
def products(tile):
    tile = replace(SQUARE, descriptors=tile.descriptors)
    return Products(Table("tests", True, Device(), (tile,), (tile,), ()), processors=1)


def matrix(*shape, device, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("name", ["jordan", "polar_express"])
def test_error_is_that_of_the_reference(name, method, dtype, products, device):
    """Against the same polynomial in float64, beside the error of aten in the same dtype."""
    if method == "gram" and not COEFFICIENTS[name].gram_is_stable(dtype):
        pytest.skip("refused by newton_schulz: unstable")
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter truncates to bfloat16: a bias that no GPU has")
    for shape in [(40, 72), (70, 33), (2, 24, 50)]:
        x = matrix(*shape, device=device)
        plan = make_plan(method, name, None, dtype, device, 1e-7)
        exact_plan = replace(plan, dtype=torch.float64, method="standard")
        exact = reference.orthogonalize(x.double(), exact_plan)
        ours = orthogonalize(x, plan, products)
        theirs = on_aten(x, plan)
        assert ours.shape == x.shape and ours.is_contiguous() and ours.dtype == dtype
        error, bar = ((y.double() - exact).norm() / exact.norm() for y in (ours, theirs))
        # Other summation orders, other roundings of the same size: within half again of aten's error.
        assert error <= 1.5 * bar + 1e-4, (shape, error, bar)


@halved({"backend": ["aot_eager", "inductor"], "method": ["standard", "gram"]})
def test_op_under_compile(backend, method, device):
    """The dispatcher's choice, through the opaque op: the interpreter takes every size, a GPU leaves this to cuBLAS."""

    def f(x, y):
        first, second = newton_schulz_list([x * 2, y], dtype="float16", method=method)
        return first.float() + 1, second.mT

    x, y = matrix(20, 30, device=device), matrix(2, 17, 12, device=device)
    for ours, eager in zip(torch.compile(f, backend=backend, fullgraph=True)(x, y), f(x, y), strict=True):
        assert torch.equal(ours, eager) and ours.stride() == eager.stride()
    if INTERPRETED:
        plan = make_plan(method, "jordan", 5, torch.float16, device, 1e-7)
        assert torch.equal(f(x, y)[0], orthogonalize(x * 2, plan, products_on(device)).float() + 1)


def _within(*dtypes):
    """One rounding to each dtype, after a few float32 operations on numbers up to 8."""
    bound = sum(ROUNDING[dtype] for dtype in (*dtypes, torch.float32)) * 1.01
    return {"rtol": bound, "atol": 16 * 2**-24}


@halved(
    {
        "rate_on": ["host", "device", "all on device"],
        "dtypes": [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)],
        "count": [1, 3, 8, 11],
    }
)
def test_apply(rate_on, dtypes, count, device):
    params = [matrix(7 * i + 1, 31 + 300 * (i % 2), device=device, seed=i).to(dtypes[0]) for i in range(count)]
    params.insert(1, torch.empty(0, 4, dtype=dtypes[0], device=device))
    updates = [matrix(*p.shape, device=device, seed=100 + i).to(dtypes[1]) for i, p in enumerate(params)]
    scales = [0.5 + i for i in range(len(params))]
    versions = [p._version for p in params]
    lr = 0.02 if rate_on == "host" else torch.tensor(0.02, device=device)
    expected = [
        p.double() * (1 - 0.02 * 0.1) - 0.02 * scale * u.double()
        for p, u, scale in zip(params, updates, scales, strict=True)
    ]
    momenta, grads = (
        [matrix(*p.shape, device=device, seed=seed + i).to(dtypes[0]) for i, p in enumerate(params)]
        for seed in (200, 300)
    )
    expected += [m.double() + 0.05 * (g.double() - m.double()) for m, g in zip(momenta, grads, strict=True)]
    averages = Averages(momenta, grads, 0.05) if count != 3 else None
    settings = {"lr": lr, "weight_decay": 0.1, "scales": scales, "averages": averages}
    if rate_on == "all on device":
        rates = torch.tensor([0.02, 0.1, 0.05], dtype=torch.float64, device=device)
        averages = averages and Averages(momenta, grads, rates[2])
        settings |= {"lr": rates[0], "weight_decay": rates[1], "averages": averages}
    given = [x.clone() for x in (*params, *momenta)]
    apply.apply_updates(params, updates, **settings, found_inf=torch.ones((), device=device))
    assert all(map(torch.equal, (*params, *momenta), given))
    apply.apply_updates(params, updates, **settings, found_inf=torch.zeros((), device=device) if count != 1 else None)
    written = params if averages is None else [*params, *momenta]
    for x, e in zip(written, expected, strict=False):
        torch.testing.assert_close(x.double(), e, **_within(dtypes[0]))
    assert all(p._version > before for p, before in zip(params, versions, strict=True))


def test_fingerprints_are_those_of_aten(device):
    """Rows of many entries and of few, a part of one, nothing; kinds of integers; more tensors than a launch takes."""
    xs = [matrix(n, 257, device=device, seed=n) for n in range(1, 9)]
    xs += [xs[0][0, :n].to(dtype) for n in (0, 1, 3, 255) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    xs += [torch.arange(2057, device=device).to(torch.uint8), matrix(300, 130, device=device, seed=0).bfloat16()]
    xs += [
        xs[-1].view(-1)[1:],
        xs[0].expand(20, 257).contiguous().view(4, 5, 257),
        matrix(1, 9000, device=device, seed=1),
        # Four integers at once: several parts of a row and of a tile, negative ones and the least.
        *(matrix(19, 1296, device=device, seed=n).to(dtype) for n, dtype in enumerate((torch.float32, torch.bfloat16))),
        torch.full((3, 80), -(2**31), dtype=torch.int32, device=device),
    ]
    expected = torch.cat([by_aten([x.cpu()]) for x in xs])
    assert torch.equal(FINGERPRINT(xs).cpu(), expected)
    assert len(set(expected.tolist())) == len(xs) - 2  # of nothing there are three
    assert torch.equal(FINGERPRINT_OF_ROWS([row_sums(x) for x in xs]).cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_are_summed_beside_fingerprints(device, dtype):
    """Whole rows, a part of one, a part of a word, nothing, inf and NaN; more tensors than a launch takes."""
    xs = [matrix(n, 257, device=device, seed=n).to(dtype) for n in (1, 2, 3, 40)]
    xs.append(matrix(19, 1296, device=device, seed=9).to(dtype))  # four at once
    xs += [xs[0][0, :n] for n in (0, 1, 3, 255)] + [matrix(3, 5, device=device, seed=n).to(dtype) for n in range(9)]
    spoiled = [xs[3].clone(), xs[3].clone()]
    spoiled[0][7, 9], spoiled[1][39, 256] = float("inf"), float("nan")
    found, squares = EXAMINE([*xs, *spoiled])
    assert torch.equal(found.cpu(), torch.cat([by_aten([x.cpu()]) for x in (*xs, *spoiled)]))
    expected = torch.stack([x.double().square().sum() for x in xs])
    torch.testing.assert_close(squares[:-2].double(), expected, rtol=2e-6, atol=0)
    assert squares[-2:].isinf().tolist() == [True, False] and squares[-2:].isnan().tolist() == [False, True]


@pytest.mark.parametrize(("nesterov", "adds"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize(
    ("given", "wide", "kept", "made"),
    [
        (torch.float16, torch.float32, torch.float32, torch.float16),
        (torch.float32, torch.float32, torch.float32, torch.float32),
        (torch.float16, torch.float16, torch.float16, torch.float16),
    ],
)
def test_momenta_of_a_list(device, given, wide, kept, made, nesterov, adds):
    """Rows of one tile and of several, a part of one, a stack, what is not aligned, more than a launch takes; rates of
    two groups, one beyond where lerp changes its beginning."""
    shapes = [(5, 64), (3, 7, 600), (16, 512), (1, 1030), (4, 65), (2, 96), (9, 128), (33, 64), (70, 80)]
    grads = [matrix(math.prod(s[:-1]), s[-1], device=device, seed=i).view(s).to(given) for i, s in enumerate(shapes)]
    grads.append(torch.cat([grads[0].view(-1), grads[0].view(-1)])[1 : 1 + 3 * 64].view(3, 64))
    momenta = [
        matrix(x.numel() // x.shape[-1], x.shape[-1], device=device, seed=50).view(x.shape).to(kept) for x in grads
    ]
    rates = [torch.tensor(pair, device=device) for pair in ((0.05, 0.95), (0.6, 0.4))]
    hypers = [rates[i % 2] for i in range(len(grads))]
    how = {"nesterov": nesterov, "dtype": made, "wide": wide}
    carried = [0.5 * torch.ones_like(x).to(wide) for x in grads] if adds else []
    found = momentum.momentum_updates(grads, momenta, hypers, carried, **how, **FORMULA)
    for i, (grad, old, hyper) in enumerate(zip(grads, momenta, hypers, strict=True)):
        full = grad.to(wide)
        total = full + carried[i] if adds else full
        expected, _ = muon_momentum(total, old, beta=(hyper[0], hyper[1]), nesterov=nesterov, out_dtype=made)
        torch.testing.assert_close(
            found.updates[i], expected, rtol=2 * torch.finfo(made).eps, atol=torch.finfo(made).eps
        )
        assert torch.equal(found.wide[i], full) and (found.wide[i] is grad) is (given is wide)
        assert torch.equal(found.sums[i], row_sums(total))
        norms = torch.linalg.vector_norm(found.updates[i].double(), dim=-1).view(-1)
        torch.testing.assert_close(found.norms[i].double(), norms, rtol=1e-6, atol=0)
    again = momentum.momentum_updates(grads, momenta, hypers, carried, **how, **FORMULA)
    for one, other in zip((*found.updates, *found.norms), (*again.updates, *again.norms), strict=True):
        assert torch.equal(one, other)
