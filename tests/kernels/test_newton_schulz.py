"""newton_schulz against its definition in float64, and bit for bit against torch.optim.Muon."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim._muon import _zeropower_via_newtonschulz

from compile_muon.kernels import COEFFICIENTS, newton_schulz, newton_schulz_list, resolve_dtype
from compile_muon.kernels.coefficients import resolve_coefficients
from compile_muon.kernels.dispatch import chosen_form

JORDAN = (3.4445, -4.7750, 2.0315)
SETS = list(COEFFICIENTS)
# Relative Frobenius error on well-conditioned matrices: a few units of roundoff, times the slope of the schedule.
TOLERANCE = {"float64": 1e-10, "float32": 2e-4, "float16": 8e-2, "bfloat16": 1.5e-1}
SHAPES = [(24, 40), (40, 24), (32, 32), (3, 12, 20), (2, 2, 20, 12)]


def matrices(shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def well_conditioned(shape, seed=0):
    """Singular values between 0.5 and 1, so that an error is rounding and not the slope of the schedule at zero."""
    u, s, vh = torch.linalg.svd(matrices(shape, seed), full_matrices=False)
    return u * torch.linspace(1, 0.5, s.shape[-1], dtype=torch.float64) @ vh


def by_definition(x, name, eps=1e-7):
    """The singular values of x / (safety · max(‖x‖, eps)) through the scalar polynomials; no Newton–Schulz at all."""
    chosen = COEFFICIENTS[name]
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    norm = torch.linalg.vector_norm(s, dim=-1, keepdim=True).clamp(min=eps)
    s = s / (norm * chosen.safety)
    for a, b, c in chosen.steps:
        s = s * (a + b * s**2 + c * s**4)
    return u * s.unsqueeze(-2) @ vh


def relative_error(value, exact):
    return ((value.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("method", ["standard", "gram", "auto"])
@pytest.mark.parametrize("name", SETS)
def test_every_set_dtype_and_shape(name, method, dtype):
    if name == "cans" and (dtype == "bfloat16" or (dtype == "float16" and method == "gram")):
        pytest.skip("refused, see test_stability")
    for shape in SHAPES:
        x = well_conditioned(shape)
        out = newton_schulz(x, method=method, coefficients=name, steps=None, dtype=dtype)
        assert out.shape == x.shape
        assert out.is_contiguous()
        steepness = 3 if name == "cans" else 1  # see coefficients: 2 ** -11 next to an edge 0.2 % away
        assert relative_error(out, by_definition(x, name)) < TOLERANCE[dtype] * steepness, shape


VIEWS = {
    "contiguous": lambda m, n, dtype: matrices((m, n), dtype=dtype),
    "transposed": lambda m, n, dtype: matrices((n, m), dtype=dtype).T,
    "sliced": lambda m, n, dtype: matrices((m, 2 * n), dtype=dtype)[:, ::2],
}


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(33, 70), (70, 33), (64, 64), (1, 5), (5, 1), (128, 96)])
def test_bitwise_torch_muon(shape, dtype, view):
    x = VIEWS[view](*shape, dtype)
    if dtype == torch.bfloat16:  # torch divides a bfloat16 argument in place
        theirs = torch.empty_strided(x.shape, x.stride(), dtype=dtype).copy_(x)
    else:
        theirs = x
    before = x.clone()
    ours = newton_schulz(x, method="standard", dtype=torch.bfloat16)
    assert torch.equal(ours, _zeropower_via_newtonschulz(theirs, JORDAN, 5, 1e-7))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("method", ["standard", "gram"])
def test_batch_equals_its_matrices(method, dtype):
    x = matrices((2, 3, 10, 24))
    out = newton_schulz(x, method=method, dtype=dtype)
    for i in range(2):
        for j in range(3):
            assert torch.equal(out[i, j], newton_schulz(x[i, j], method=method, dtype=dtype))


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("eps", [1e-7, 0.0])
def test_zero_gives_zero(method, dtype, eps):
    x = torch.zeros(2, 6, 9)
    x[1] = matrices((6, 9))
    out = newton_schulz(x, method=method, dtype=dtype, eps=eps)
    assert torch.equal(out[0], torch.zeros(6, 9, dtype=out.dtype))
    assert out[1].norm() > 1


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("shape", [(12, 30), (30, 12)])
def test_entries_of_1e30_and_1e_minus_30(shape, dtype, method):
    x = matrices(shape, dtype=torch.float32)
    exact = by_definition(x, "jordan")
    big = newton_schulz(x * 1e30, method=method, dtype=dtype)
    small = newton_schulz(x * 1e-30, method=method, dtype=dtype, eps=0.0)
    assert relative_error(big, exact) < TOLERANCE[dtype] + 1e-5
    assert relative_error(small, exact) < TOLERANCE[dtype] + 1e-5


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_smaller_than_eps_stays_small(dtype):
    x = matrices((12, 30), dtype=torch.float32) * 1e-30
    assert newton_schulz(x, dtype=dtype).abs().max().item() < 1e-15


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("coefficients", ["jordan", "deepseek_v4", (1.5, -0.5, 0.0)], ids=str)
def test_nan_fills_its_matrix_and_no_other(method, dtype, bad, coefficients):
    """``step()`` reads one entry of a direction, whichever of the update's was not finite."""
    settings = {"method": method, "dtype": dtype, "coefficients": coefficients, "steps": None}
    for shape in ((3, 12, 30), (3, 30, 12), (3, 9, 9)):
        x = matrices(shape)
        x[0, 3, 4] = bad
        x[1] = 0
        x[1, 7, 2] = bad
        out = newton_schulz(x, **settings)
        assert out[:2].isnan().all()
        assert torch.equal(out[2], newton_schulz(x[2], **settings))


def test_where_one_entry_may_overflow_alone():
    """What diverges need not do so everywhere, and a step that multiplies by a number spreads nothing."""
    half, single = torch.float16, torch.float32
    assert all(COEFFICIENTS[name].is_all_or_nothing(single) for name in SETS)
    assert not COEFFICIENTS["cans"].is_all_or_nothing(half)
    for coefficients in ((3.4445, -4.7750, 5.0), (1.0, 0.0, 0.0)):
        assert not resolve_coefficients(coefficients).is_all_or_nothing(single)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (0, 3, 4), (2, 0, 4), (2, 3, 0)])
@pytest.mark.parametrize("method", ["standard", "gram", "auto"])
def test_empty(shape, method):
    out = newton_schulz(torch.zeros(shape), method=method, dtype="float16")
    assert out.shape == shape
    assert out.dtype == torch.float16


@settings(max_examples=40)
@given(m=st.integers(1, 24), n=st.integers(1, 24), seed=st.integers(0, 10**6), name=st.sampled_from(SETS))
def test_properties_in_float64(m, n, seed, name):
    """Transposition commutes, sign is odd, scale does not matter, and it is the definition."""
    x = matrices((m, n), seed)

    def f(y):
        return newton_schulz(y, coefficients=name, steps=None, dtype="float64", eps=0.0)

    out = f(x)
    torch.testing.assert_close(f(x.T), out.T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(f(-x), -out, rtol=0, atol=0)
    torch.testing.assert_close(f(x * 1e5), out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, by_definition(x, name), rtol=1e-5, atol=1e-5)


def test_list_keeps_order_and_equals_single_calls():
    xs = [matrices(s, seed=i) for i, s in enumerate([(8, 20), (20, 8), (3, 8, 20), (8, 20), (0, 4), (5, 5)])]
    before = [x.clone() for x in xs]
    for out, x, b in zip(newton_schulz_list(xs, dtype="float32"), xs, before, strict=True):
        assert torch.equal(out, newton_schulz(x, dtype="float32"))
        assert torch.equal(x, b)


def test_auto_dtype():
    assert resolve_dtype("auto", "cpu") == torch.float32
    assert resolve_dtype("auto", torch.device("cuda", 0)) == torch.float16
    for method in ("auto", "standard", "gram"):
        assert resolve_dtype("auto", "cuda", COEFFICIENTS["jordan"], method) == torch.float16
        assert resolve_dtype("auto", "cuda", COEFFICIENTS["cans"], method) == torch.float32
    assert resolve_dtype("auto", "cpu", COEFFICIENTS["jordan"], "gram") == torch.float32
    assert resolve_dtype("float16", "cpu") == resolve_dtype(torch.float16, "cuda") == torch.float16


@pytest.mark.parametrize("restarts", [(), (2,), (1, 3), (2, 4)])
def test_where_gram_is_cheaper_does_not_depend_on_restarts(restarts):
    for cols, symmetric, method in (
        (150, False, "standard"),
        (151, False, "gram"),
        (133, True, "standard"),
        (134, True, "gram"),
    ):
        assert chosen_form("auto", 100, cols, 5, len(restarts), symmetric=symmetric) == method
    assert chosen_form("auto", 100, 133, 5, len(restarts), symmetric=True) == "standard"
    assert chosen_form("auto", 300, 400, 5, len(restarts), symmetric=True) == "gram"  # as many operations
    assert chosen_form("auto", 200, 300, 5, len(restarts)) == "standard"


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (torch.zeros(3), {}, r"shape \(3,\)"),
        (torch.zeros(3, 3, dtype=torch.int64), {}, "torch.int64"),
        (torch.zeros(3, 3, dtype=torch.complex64), {}, "torch.complex64"),
        (torch.zeros(3, 3), {"method": "grams"}, "method='grams'"),
        (torch.zeros(3, 3), {"dtype": "int8"}, "dtype='int8'"),
        (torch.zeros(3, 3), {"dtype": torch.int8}, "dtype=torch.int8"),
        (torch.zeros(3, 3), {"eps": -1.0}, "eps=-1.0"),
        (torch.zeros(3, 3), {"eps": float("nan")}, "eps=nan"),
        (torch.zeros(3, 3), {"coefficients": "jordon"}, "did you mean 'jordan'"),
        (torch.zeros(3, 3), {"steps": 0}, "steps=0"),
    ],
)
def test_bad_input_names_the_value(x, options, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz(x, **options)


def test_one_device_a_list():
    with pytest.raises(ValueError, match="cpu and meta"):
        newton_schulz_list([torch.zeros(3, 3), torch.zeros(3, 3, device="meta")])
