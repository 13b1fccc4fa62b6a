"""Launches for lists of matrices of unequal shapes: on a GPU, and by test_interpreter.py in Triton's interpreter.

Products of -1, 0 and 1 are exact here as in test_kernels.py, and compared with torch.equal.
"""

import weakref
from dataclasses import replace

import pytest
import torch
from combinations import DOUBLE, EXACT, HALVES, INTERPRETED, LOADS, SQUARE, halved

pytest.importorskip("triton", reason="Triton is not installed")

from alone import on_aten, orthogonalize  # noqa: E402
from triton.runtime.interpreter import InterpreterBuilder  # noqa: E402

from compile_muon.kernels import newton_schulz_list, reference  # noqa: E402
from compile_muon.kernels.gpu.arena import Layout, work_bytes  # noqa: E402
from compile_muon.kernels.gpu.grouped import orthogonalize_list  # noqa: E402
from compile_muon.kernels.gpu.grouped_product import grouped_product  # noqa: E402
from compile_muon.kernels.gpu.grouped_symmetric import grouped_symmetric  # noqa: E402
from compile_muon.kernels.gpu.launch import Launch  # noqa: E402
from compile_muon.kernels.gpu.model import Device  # noqa: E402
from compile_muon.kernels.gpu.newton_schulz import Products  # noqa: E402
from compile_muon.kernels.gpu.tiles import Table, load_tables  # noqa: E402
from compile_muon.kernels.newton_schulz import make_plan  # noqa: E402

# Of more than 256 only float16 has every integer here; the interpreter truncates to bfloat16, where a GPU rounds.
ROUNDED = HALVES[:1] if INTERPRETED else HALVES
# (matrices, k, l), poisoned between shapes: odd, one row, a single tile, several matrices, multiples, one column more
# than a tile.
LAYOUTS = [
    Layout(((2, 37, 53), (1, 1, 70), (1, 16, 16), (1, 33, 33))),
    Layout(((1, 64, 96), (3, 32, 64))),
    Layout(((1, 50, 65),)),
    Layout(((2, 5, 6), (1, 5, 20), (1, 5, 40))),  # whose tiles, taken for those of the next shape, would be beyond it
]
HOW = {"tile": [DOUBLE, SQUARE], "descriptors": LOADS}


@pytest.fixture(params=HOW["tile"], ids=["double", "square"])
def tile(request, descriptors):
    return replace(request.param, descriptors=descriptors)


def integers(layout, dtype, device, *, square, seed=0, symmetric=False):
    """An arena that is NaN wherever no matrix is, and zero in the padding of rows."""
    generator = torch.Generator().manual_seed(seed)
    arena = poisoned(layout, dtype, device, square=square)
    for view, whole in zip(arena.views, padded(arena, arena.flat), strict=True):
        whole.zero_()
        x = torch.randint(-1, 2, view.shape, generator=generator)
        view.copy_(torch.tril(x) + torch.tril(x, -1).mT if symmetric else x)
    return arena


def poisoned(layout, dtype, device, *, square):
    arena = layout.new(dtype, device, square=square)
    arena.flat.fill_(float("nan"))
    return arena


def padded(arena, flat):
    """The matrices of each shape with their padding, in ``flat``."""
    return [
        flat.as_strided((*view.shape[:2], view.stride(1)), view.stride(), view.storage_offset()) for view in arena.views
    ]


def check(out, expected):
    """Every matrix is what is expected in float64, its padding is zero, and nothing was written in between."""
    elsewhere = torch.ones_like(out.flat, dtype=torch.bool)
    for covered in padded(out, elsewhere):
        covered.fill_(False)
    assert out.flat[elsewhere].isnan().all()
    for view, whole, exact in zip(out.views, padded(out, out.flat), expected, strict=True):
        assert torch.equal(view.double(), exact.to(view.dtype).double())
        assert torch.equal(whole[..., view.shape[2] :], torch.zeros_like(whole[..., view.shape[2] :]))


def doubles(arena):
    return [view.double() for view in arena.views]


# Deeper than a loop's stages, and several tiles each way; some matrices end within a tile.
DEEP = [Layout(((1, 200, 264), (1, 77, 91)))] if INTERPRETED else [
    Layout(((2, 640, 1096), (1, 1030, 1111), (3, 77, 91))),
    Layout(((1, 384, 512),)),
    Layout(((2, 2048, 2048), (1, 1536, 4096))),
]  # fmt: skip


def shipped(kind):
    """Every tile of the tables, to be compared where its architecture is; in the interpreter those of one table."""
    tiles = [(name, tile) for name, table in load_tables().items() for tile in getattr(table, kind)]
    ids = [f"{name}-{tile.rows}x{tile.cols}x{tile.depth}" for name, tile in tiles]
    return pytest.mark.parametrize("architecture, tile", tiles, ids=ids)


def skip_unless_here(architecture, device):
    major, minor = (9, 0) if device.type == "cpu" else torch.cuda.get_device_capability()
    if architecture != f"sm_{major}{minor}":
        pytest.skip(f"tiles of {architecture}")


@pytest.mark.parametrize("processors", [5, 132])
@pytest.mark.parametrize("dtype", ROUNDED)
@shipped("symmetric")
def test_shipped_tiles_of_symmetric_results(architecture, tile, dtype, processors, device):
    skip_unless_here(architecture, device)
    for layout in DEEP:
        wide = integers(layout, dtype, device, square=False)
        left, plus = (integers(layout, dtype, device, square=True, seed=i, symmetric=True) for i in (1, 2))
        out = poisoned(layout, dtype, device, square=True)
        grouped_symmetric(wide, wide, out, tile.in_list, processors).run()
        check(out, [x @ x.mT for x in doubles(wide)])
        out = poisoned(layout, dtype, device, square=True)
        numbers = {"alpha": 2.0, "beta": -4.0, "gamma": 3.0}
        grouped_symmetric(left, left, out, tile.in_list, processors, plus=plus, **numbers).run()
        shift = [3 * torch.eye(a.shape[-1], dtype=torch.float64, device=device) for a in doubles(left)]
        check(out, [2 * a @ a - 4 * p + i for a, p, i in zip(doubles(left), doubles(plus), shift, strict=True)])
        out = poisoned(layout, dtype, device, square=True)
        grouped_symmetric(left, left, out, tile.in_list, processors).run()
        check(out, [a @ a for a in doubles(left)])


@pytest.mark.parametrize("processors", [5, 132])
@pytest.mark.parametrize("beta", [0.0, 3.0])
@pytest.mark.parametrize("dtype", ROUNDED)
@shipped("product")
def test_shipped_tiles_of_products(architecture, tile, dtype, beta, processors, device):
    skip_unless_here(architecture, device)
    for layout in DEEP:
        left = integers(layout, dtype, device, square=True, seed=1, symmetric=True)
        for square in (False, True):
            right = integers(layout, dtype, device, square=square, seed=2)
            out = poisoned(layout, dtype, device, square=square)
            plus = right if beta else None
            grouped_product(left, right, out, tile.in_list, processors, plus=plus, beta=beta).run()
            check(out, [a @ r + beta * r for a, r in zip(doubles(left), doubles(right), strict=True)])


@halved({"processors": [1, 3], "layout": LAYOUTS, "dtype": EXACT, **HOW})
def test_x_times_its_transpose(processors, layout, dtype, tile, device):
    x = integers(layout, dtype, device, square=False)
    before = x.flat.clone()
    out = poisoned(layout, dtype, device, square=True)
    launch = grouped_symmetric(x, x, out, tile, processors)
    assert launch.programs == processors or len(layout.shapes) == 1
    launch.run()
    check(out, [v @ v.mT for v in doubles(x)])
    assert torch.equal(x.flat.nan_to_num(7), before.nan_to_num(7))


@halved({"layout": LAYOUTS, "dtype": EXACT, **HOW})
def test_polynomial_of_symmetric_matrices(layout, dtype, tile, device):
    A = integers(layout, dtype, device, square=True, symmetric=True)
    out = poisoned(layout, dtype, device, square=True)
    grouped_symmetric(A, A, out, tile, 2, alpha=2.0, plus=A, beta=-4.0, gamma=3.0).run()
    check(out, [2 * (v @ v) - 4 * v + 3 * torch.eye(v.shape[-1], device=device) for v in doubles(A)])
    assert all(torch.equal(view, view.mT) for view in out.views)


@halved({"ranks": [1, 2], **HOW})
def test_beside_other_ranks_programs_come_in_waves(ranks, tile, device, monkeypatch):
    """Each tile is made once, by programs none of which counts on another; and no bit is another."""
    layout = LAYOUTS[0]
    x, A = (integers(layout, EXACT[0], device, square=square) for square in (False, True))
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: ranks)
    out, product = (poisoned(layout, EXACT[0], device, square=square) for square in (True, False))
    launches = grouped_symmetric(x, x, out, tile, 2), grouped_product(A, x, product, tile, 2)
    for launch in launches:
        assert launch.programs > 4 if ranks > 1 else launch.programs == 2
        dots = []
        with monkeypatch.context() as patch:
            if INTERPRETED:
                dot = InterpreterBuilder.create_dot
                patch.setattr(
                    InterpreterBuilder, "create_dot", lambda *args, to=dots, dot=dot: to.append(1) or dot(*args)
                )
            launch.run()
    shapes = layout.shapes
    tiles = [b * -(-k // tile.rows) * -(-l // tile.cols) * -(-k // tile.depth) for b, k, l in shapes]  # noqa: E741
    assert len(dots) == (sum(tiles) if INTERPRETED else 0)  # of the last launch
    check(out, [v @ v.mT for v in doubles(x)])
    check(product, [a @ v for a, v in zip(doubles(A), doubles(x), strict=True)])


def of_the_lower_squares(x, side):
    """What lies below the diagonal squares, mirrored; those as they are."""
    squares = torch.arange(x.shape[-1], device=x.device) // side
    return torch.where(squares[:, None] >= squares[None, :], x, x.mT)


def test_only_the_lower_squares_count(tile, device):
    """Two operands that do not commute: the squares above the diagonal are mirror images, not products."""
    layout = Layout(((1, 75, 80), (2, 40, 41)))
    x, y, plus = (integers(layout, torch.float16, device, square=True, seed=seed) for seed in (0, 1, 2))
    out = poisoned(layout, torch.float16, device, square=True)
    grouped_symmetric(x, y, out, tile, 2, plus=plus, beta=1.0).run()
    products = [a @ b + p for a, b, p in zip(doubles(x), doubles(y), doubles(plus), strict=True)]
    assert not torch.equal(products[0], products[0].mT)
    check(out, [of_the_lower_squares(product, tile.rows) for product in products])


@halved({"square,beta": [(False, 0.0), (False, -2.0), (True, -2.0)], "layout": LAYOUTS, "dtype": EXACT, **HOW})
def test_general_product(square, beta, layout, dtype, tile, device):
    """Of k × k matrices that are not symmetric, so that neither order nor transposition may be another."""
    left = integers(layout, dtype, device, square=True)
    right = integers(layout, dtype, device, square=square, seed=1)
    out = poisoned(layout, dtype, device, square=square)
    grouped_product(left, right, out, tile, 2, plus=right if beta else None, beta=beta).run()
    check(out, [a @ b + beta * b for a, b in zip(doubles(left), doubles(right), strict=True)])


# Wide, tall, square, a stack, one row, a repeated shape and its transpose, two batch dimensions.
SHAPES = [(20, 36), (40, 19), (24, 24), (2, 12, 25), (1, 35), (20, 36), (36, 20), (2, 1, 25, 12)]


def matrices(device, shapes=SHAPES):
    xs = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    xs[0] = xs[0].half()
    xs[1] = torch.stack([xs[1], xs[1]], -1)[..., 0]
    return [x.to(device) for x in xs]


@pytest.fixture
def products(descriptors):
    # The interpreter multiplies by numpy, where a tile of half the width has other bits than one of two squares.
    tiles = (SQUARE if INTERPRETED else DOUBLE, SQUARE)
    symmetric, general = (replace(tile, descriptors=descriptors) for tile in tiles)
    return Products(Table("tests", True, Device(), (symmetric,), (general,), ()), processors=3)


def plan_of(method, device, name="jordan", dtype=torch.float16, steps=None):
    return make_plan(method, name, steps, dtype, device, 1e-7)


def check_error(x, ours, plan):
    """Against the same polynomial in float64, beside the error of aten in the same dtype."""
    x = x.reshape(-1, *x.shape[-2:])
    exact = reference.orthogonalize(x.double(), replace(plan, dtype=torch.float64, method="standard"))
    theirs = on_aten(x, plan)
    error, bar = ((y.double() - exact).norm() / exact.norm() for y in (ours.view(x.shape), theirs))
    assert error <= 1.5 * bar, (x.shape, error, bar)


@halved({"name,method": [("polar_express", "standard"), ("jordan", "gram")], "descriptors": LOADS})
def test_a_list_is_each_of_its_tensors_by_itself(name, method, products, device):
    """Bitwise, with one tile to choose from; and near the same polynomial in float64, where aten is."""
    xs = matrices(device)
    before = [x.clone() for x in xs]
    plan = plan_of(method, device, name)
    results = orthogonalize_list(xs, plan, products)
    for x, ours in zip(xs, results, strict=True):
        alone = orthogonalize(x.flatten(0, -3) if x.ndim > 2 else x, plan, products).view(x.shape)
        assert torch.equal(ours, alone) and ours.is_contiguous() and ours.dtype == plan.dtype
        check_error(x, ours, plan)
    of_rows = [x.float().norm(dim=-1) for x in xs]
    for x, ours in zip(xs, orthogonalize_list(xs, plan, products, of_rows), strict=True):
        check_error(x, ours, plan)
    doubled = orthogonalize_list(xs, plan, products, [2 * norm for norm in of_rows])
    assert not any(map(torch.equal, doubled, results)), "they are what is divided by"
    assert all(torch.equal(x, was) for x, was in zip(xs, before, strict=True))
    assert len({result.untyped_storage().data_ptr() for result in results}) == len(xs)


@halved({"method": ["gram", "standard"], "descriptors": LOADS})
def test_chunks_and_processors_change_no_bit(method, products, device):
    xs, plan = matrices(device, SHAPES[:4]), plan_of(method, device, "you")
    results = orthogonalize_list(xs, plan, products)
    for processors, limit in ((1, 2**30), (100, 2**30), (3, 0), (3, 16_000)):
        again = orthogonalize_list(xs, replace(plan, memory_limit=limit), replace(products, processors=processors))
        assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True)), (processors, limit)


def test_a_cubic_iteration(products, device):
    """(1.5, -0.5, 0): bA + cA² without a product."""
    xs = matrices(device, [(12, 20), (9, 9)])
    plan = make_plan("standard", (1.5, -0.5, 0.0), 3, torch.float16, device, 1e-7)
    for x, ours in zip(xs, orthogonalize_list(xs, plan, products), strict=True):
        exact = reference.orthogonalize(x.double(), replace(plan, dtype=torch.float64))
        assert (ours.double() - exact).norm() / exact.norm() < 5e-3


def test_a_matrix_that_is_not_finite_spoils_no_other(products, device):
    xs = matrices(device, [(20, 37), (33, 50), (2, 20, 37), (5, 9)])
    plan = plan_of("standard", device, steps=2)
    fine = orthogonalize_list(xs, plan, products)
    xs[1][3, 4] = float("inf")
    xs[2][0, 3, 4] = float("nan")
    results = orthogonalize_list(xs, plan, products)
    assert results[1].isnan().all() and results[2][0].isnan().all()
    for ours, expected in ((results[0], fine[0]), (results[2][1], fine[2][1]), (results[3], fine[3])):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(("method", "per_call"), [("standard", 14), ("gram", None)])
def test_launches_do_not_grow_with_the_shapes(method, per_call, products, device, monkeypatch):
    """Two of normalization and the last product for each tensor; the products between them once for all."""
    started = []
    monkeypatch.setattr(Launch, "run", lambda self: started.append(self.kernel.__name__))
    counts = []
    for shapes in (SHAPES[:2], SHAPES):
        started.clear()
        orthogonalize_list(matrices(device, shapes), plan_of(method, device), products)
        assert started.count("product_kernel") == started.count("divide_kernel") == len(shapes)
        counts.append(sum(name.startswith("grouped") for name in started))
        assert len(started) == counts[-1] + 3 * len(shapes)
    assert counts[0] == counts[1] and per_call in (None, counts[0])


def test_small_tensors_of_one_shape_are_one(products, device, monkeypatch):
    """Also tall ones, and stacks; with other shapes, and with none."""
    plan = plan_of("standard", device, steps=2)
    wide, tall = [(20, 36), (2, 20, 36), (20, 36)], [(36, 20), (36, 20)]
    for shapes, stacks in (([*wide, (24, 24), *tall], 3), (wide, 1), (tall, 1)):
        xs = matrices(device, [(5, 5), (5, 6), *shapes])[2:]
        results = orthogonalize_list(xs, plan, products)
        for x, ours in zip(xs, results, strict=True):
            assert torch.equal(ours, orthogonalize(x, plan, products)) and ours.is_contiguous()
        assert len({result.untyped_storage().data_ptr() for result in results}) == len(xs)
        started = []
        with monkeypatch.context() as patch:
            patch.setattr(Launch, "run", lambda self, to=started: to.append(self.kernel.__name__))
            orthogonalize_list(xs, plan, products)
            assert started.count("divide_kernel") == stacks
            assert ("grouped_product_kernel" in started) == (stacks > 1)
            started.clear()
            patch.setattr("compile_muon.kernels.gpu.grouped.SMALL", 20 * 36 - 1)
            orthogonalize_list(xs, plan, products)
            assert started.count("divide_kernel") == len(xs)


@pytest.mark.parametrize("method", ["standard", "gram"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_arenas_take_no_more_than_was_counted(steps, method, products, device, monkeypatch):
    alive, peak = 0, 0

    def freed(size):
        nonlocal alive
        alive -= size

    def new(layout, *arguments, **options):
        nonlocal alive, peak
        arena = made(layout, *arguments, **options)
        alive += arena.flat.nbytes
        peak = max(peak, alive)
        weakref.finalize(arena.flat, freed, arena.flat.nbytes)
        return arena

    made = Layout.new
    monkeypatch.setattr(Layout, "new", new)
    monkeypatch.setattr(Launch, "run", lambda self: None)
    for shapes in ([(64, 512), (2, 128, 256)], [(64, 64), (64, 64)]):
        plan = make_plan(method, "jordan", steps, torch.float16, device, 1e-7)
        orthogonalize_list(matrices(device, shapes), plan, products)
        each = [(1, *shape) if len(shape) == 2 else shape for shape in shapes]
        counted = sum(b * work_bytes(k, l, method, steps, len(plan.restarts), 2) for b, k, l in each)  # noqa: E741
        assert alive == 0 and counted * (0.5 if steps > 1 else 0.3) < peak <= counted, (peak, counted)
        peak = 0


def test_lists_through_the_public_function(device):
    """Any mixture, an empty tensor and float64 among it, in either form and with the form left to the shapes."""
    xs = [*matrices(device), torch.empty(0, 5, device=device), torch.empty(2, 0, 7, device=device)]
    xs.append(torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(device))
    for method in ("standard", "gram", "auto"):
        results = newton_schulz_list(xs, method=method, coefficients="you", dtype="float16")
        for x, ours in zip(xs, results, strict=True):
            assert ours.shape == x.shape and ours.dtype == torch.float16
            if x.numel():
                exact = newton_schulz_list([x.double()], method="standard", coefficients="you", dtype="float64")[0]
                assert (ours.double() - exact).norm() / exact.norm() < 6e-3
        again = newton_schulz_list(xs, method=method, coefficients="you", dtype="float16")
        assert all(torch.equal(a, b) for a, b in zip(results, again, strict=True))
