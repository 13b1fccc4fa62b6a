"""The contenders, cases and error bounds of benchmarks/newton_schulz.py.

To add a contender: write `build(device) -> run`, which may raise Missing, and list it in CONTENDERS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from compile_muon.kernels import newton_schulz, newton_schulz_list, resolve_coefficients
from compile_muon.kernels.operations import gram_flops, standard_flops

STEPS = 5

Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # of tensors [m, n] or [b, m, n], which it may not keep
Build = Callable[[torch.device], Run]


class Missing(Exception):
    """A contender cannot run here; the message says why."""


@dataclass(frozen=True)
class Case:
    """Gaussian matrices that are orthogonalized in one call."""

    name: str
    groups: tuple[tuple[int, int, int], ...]  # (matrices, rows, cols) of each
    separate: bool = False  # every matrix is a tensor of its own, as parameters are; else a group is one tensor
    dtype: torch.dtype = torch.float32
    alone: bool = False  # too large for turns: contenders run one after another

    def matrices(self, device: torch.device) -> list[Tensor]:
        """Draw the matrices, the same at every call."""
        generator = torch.Generator(device).manual_seed(0)
        shapes = []
        for count, rows, cols in self.groups:
            if self.separate:
                shapes += [(rows, cols)] * count
            else:
                shapes.append((count, rows, cols) if count > 1 else (rows, cols))
        return [torch.randn(shape, generator=generator, device=device).to(self.dtype) for shape in shapes]

    def minimal_flops(self, method: str) -> float:
        """Count the operations of `method`, with symmetric products computed once."""
        restarts = len(resolve_coefficients("jordan").gram_restarts(torch.float16))
        total = 0.0
        for count, rows, cols in self.groups:
            k, l = min(rows, cols), max(rows, cols)  # noqa: E741
            if method == "standard":
                total += count * standard_flops(k, l, STEPS, symmetric=True)
            else:
                total += count * gram_flops(k, l, STEPS, restarts, symmetric=True)
        return total


def single(name: str, matrices: int, rows: int, cols: int) -> Case:
    return Case(name, ((matrices, rows, cols),))


SHAPES = {
    case.name: case
    for case in (
        *(single(f"square {k}", 1, k, k) for k in (512, 1024, 2048, 4096, 8192)),
        single("1B key, value", 1, 512, 2048),
        single("1B gate, up", 1, 8192, 2048),
        single("1B down", 1, 2048, 8192),
        single("8B key, value", 1, 1024, 4096),
        single("8B gate, up", 1, 14336, 4096),
        single("8B down", 1, 4096, 14336),
        single("70B key, value", 1, 1024, 8192),
        single("70B gate, up", 1, 28672, 8192),
        single("70B down", 1, 8192, 28672),
        single("experts", 64, 1408, 2048),
    )
}
SMALL_SHAPES = {
    case.name: case
    for case in (
        single("square 64", 1, 64, 64),
        single("wide", 1, 32, 128),
        single("tall", 1, 96, 48),
        single("experts", 3, 24, 40),
    )
}
WHOLE_MODEL = "8B, all matrices"


def whole_model(layers: int, *, shrink: int = 1) -> Case:
    """Make a case of Llama 3 8B's hidden matrices as in a step: bfloat16, one call. `shrink` divides all sizes."""
    width, mlp, heads = 4096 // shrink, 14336 // shrink, 1024 // shrink
    layer = (
        (2, width, width),  # query, output
        (2, heads, width),  # key, value
        (2, mlp, width),  # gate, up
        (1, width, mlp),  # down
    )
    groups = tuple((count * layers, rows, cols) for count, rows, cols in layer)
    return Case(WHOLE_MODEL, groups, separate=True, dtype=torch.bfloat16, alone=True)


Check = Callable[[Any], "str | None"]  # returns the complaint about a call's result, or None
Prepare = Callable[["Case"], tuple[Callable[[], object], Check]]  # returns a case's call, and the check of its result


@dataclass(frozen=True)
class Contender:
    """A contender: an implementation of Newton–Schulz."""

    build: Build
    method: str  # whose minimal operations its rate counts
    dtype: torch.dtype  # whose error bound its results have to meet

    def on(self, device: torch.device) -> Prepare:
        """Build the contender for a device, or raise Missing if it cannot run there."""
        run = self.build(device)

        def prepare(case: Case) -> tuple[Callable[[], object], Check]:
            xs = case.matrices(device)
            oracle = Oracle(case, xs)
            return lambda: run(xs), partial(oracle.complaint, dtype=self.dtype)

        return prepare


# --- what makes a result right ----------------------------------------------------------------------------------------

BLOCK = 64
ROUNDOFFS = 32


def bound(dtype: torch.dtype) -> float:
    """Return the largest `worst_block` of a right result: 32 roundoffs, 0.125 in bfloat16 and 0.016 in float16."""
    # Gaussian matrices of 32 to 1024 rows have at most 8 roundoffs with the project's forms on aten, larger matrices
    # fewer; a block that was not computed has a relative error of one.
    return ROUNDOFFS * torch.finfo(dtype).eps / 2


def worst_block(result: Tensor, exact: Tensor) -> float:
    """Return the largest RMS error of a 64 × 64 block of `result`, relative to the RMS of `exact`, [m, n] float64."""
    # The error of a whole matrix would hide a wrong tile: one of 128 × 128 in 8192 × 8192 is 0.016 of its norm.
    squares = (result.double() - exact).square()
    below, beside = -exact.shape[0] % BLOCK, -exact.shape[1] % BLOCK

    def sums(entries: Tensor) -> Tensor:
        padded = F.pad(entries, (0, beside, 0, below))
        return padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).sum((1, 3))

    worst = (sums(squares) / sums(torch.ones_like(squares))).max().sqrt() / exact.square().mean().sqrt()
    return float(worst.nan_to_num(nan=torch.inf))


def asymmetry_of(x: Tensor) -> float:
    """Return the largest difference of a matrix from its transpose, relative to its largest entry."""
    wide = x.double()
    return float((wide - wide.mT).abs().max() / wide.abs().max())


class Oracle:
    """The exact results of a case in float64: all of them, or of an `alone` case each group's first and last."""

    def __init__(self, case: Case, xs: Sequence[Tensor]):
        self._exact: dict[tuple[int, int], Tensor] = {}
        places = []  # by group, (index of the tensor, index within it) of each matrix
        tensor = 0
        for count, _, _ in case.groups:
            if case.separate:
                places.append([(tensor + i, 0) for i in range(count)])
                tensor += count
            else:
                places.append([(tensor, i) for i in range(count)])
                tensor += 1
        for group in places:
            for place in dict.fromkeys((group[0], group[-1])) if case.alone else group:
                # The gram form in float64 takes fewer operations; the forms differ by 1e-12.
                x = _matrix(xs, place).double()
                self._exact[place] = newton_schulz(x, method="gram", dtype=torch.float64)

    def complaint(self, results: Sequence[Tensor], dtype: torch.dtype) -> str | None:
        """Return the complaint about wrong results, or None."""
        worst = max(worst_block(_matrix(results, place), exact) for place, exact in self._exact.items())
        if worst <= bound(dtype):
            return None
        return f"error {worst:.2g} in a block of {BLOCK} × {BLOCK}, bound {bound(dtype):.2g}"


def _matrix(xs: Sequence[Tensor], place: tuple[int, int]) -> Tensor:
    x = xs[place[0]]
    return x if x.ndim == 2 else x[place[1]]


# --- contenders -------------------------------------------------------------------------------------------------------


def _ours(method: str, dtype: torch.dtype) -> Contender:
    return Contender(lambda device: partial(newton_schulz_list, method=method, dtype=dtype), method, dtype)


def _torch_muon(compiled: bool) -> Build:
    """Build torch.optim.Muon's function, called for each matrix by itself as in that optimizer."""

    def build(device: torch.device) -> Run:
        one = _zeropower()
        if compiled:
            # A graph for each matrix: one graph of 224 matrices runs the same kernels and takes minutes to compile.
            one = torch.compile(one, dynamic=False)
        return lambda xs: [one(x) if x.ndim == 2 else torch.stack([one(matrix) for matrix in x]) for x in xs]

    return build


def _zeropower() -> Callable[[Tensor], Tensor]:
    from torch.optim._muon import _zeropower_via_newtonschulz as zeropower

    triple = resolve_coefficients("jordan").steps[0]
    return lambda x: zeropower(x, triple, STEPS, 1e-7)


def _cublas(device: torch.device) -> Run:
    """Build our standard form on aten: every product one addmm or baddbmm, all matrices of a shape at once."""
    from compile_muon.kernels.batching import one_batch_per_shape
    from compile_muon.kernels.newton_schulz import make_plan
    from compile_muon.kernels.reference import orthogonalize

    plan = make_plan("standard", "jordan", STEPS, torch.bfloat16, device, 1e-7)
    return lambda xs: one_batch_per_shape(xs, plan, orthogonalize)


def _gram_newton_schulz(device: torch.device) -> Run:
    """Build the gram-newton-schulz package with its kernels, jordan's coefficients and our restarts."""
    if device.type != "cuda":
        raise Missing("it has kernels for GPUs only")
    try:
        from gram_newton_schulz import GramNewtonSchulz
    except ImportError as error:
        raise Missing(f"it is not installed ({error})") from None
    import inspect

    jordan = resolve_coefficients("jordan")
    settings = {
        "ns_coefficients": [list(triple) for triple in jordan.steps],
        "gram_newton_schulz_reset_iterations": list(jordan.gram_restarts(torch.float16)),
    }
    if "compile_kwargs" in inspect.signature(GramNewtonSchulz.__init__).parameters:
        settings["compile_kwargs"] = None
    instance = GramNewtonSchulz(**settings)
    # The package compiles itself with mode "reduce-overhead", at the method or the instance depending on the release.
    # Its CUDA graphs can be neither captured nor turned off from outside, so its plain method is compiled here.
    method = uncompiled(GramNewtonSchulz.__call__)
    compiled = torch.compile(partial(method, instance), fullgraph=True, dynamic=False)

    def run(xs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Stack tensors of a shape, as the package's optimizer does."""
        results: dict[int, Tensor] = {}
        for shape in dict.fromkeys(x.shape for x in xs):
            places = [i for i, x in enumerate(xs) if x.shape == shape]
            if len(places) == 1:
                # A copy, because the package divides a float32 input by its norm in place.
                results[places[0]] = compiled(xs[places[0]].clone())
            else:
                results.update(zip(places, compiled(torch.stack([xs[i] for i in places])), strict=True))
        return [results[i] for i in range(len(xs))]

    return run


def uncompiled(function: Callable) -> Callable:
    """Return the function that torch.compile's decorator wraps, or the function itself if it is not decorated."""
    # Private attribute of torch's compiled functions.
    return getattr(function, "_torchdynamo_orig_callable", function)


def _torch_grouped(device: torch.device) -> Run:
    """Build torch's grouped symmetric kernels, which Inductor takes for Muon's function under foreach_map."""
    import torch._inductor.lowering  # noqa: F401, it registers Inductor's operators

    # Proposed in pytorch/pytorch#194181. torch 2.13 lacks it; there foreach_map compiles pointwise functions only.
    if not hasattr(torch.ops.inductor, "grouped_muon"):
        raise Missing(f"torch {torch.__version__} has no operator inductor::grouped_muon")
    from torch._higher_order_ops.foreach_map import foreach_map

    one = _zeropower()

    def run(xs: Sequence[Tensor]) -> Sequence[Tensor]:
        matrices = [matrix for x in xs for matrix in (x.unbind() if x.ndim == 3 else (x,))]
        results = iter(grouped(matrices))
        return [torch.stack([next(results) for _ in x]) if x.ndim == 3 else next(results) for x in xs]

    grouped = torch.compile(lambda matrices: foreach_map(one, matrices), dynamic=False)
    return run


YARDSTICK = "torch.optim.Muon compiled"
CONTENDERS = {
    "ours, standard bf16": _ours("standard", torch.bfloat16),
    "ours, standard fp16": _ours("standard", torch.float16),
    "ours, gram fp16": _ours("gram", torch.float16),
    "torch.optim.Muon eager": Contender(_torch_muon(False), "standard", torch.bfloat16),
    YARDSTICK: Contender(_torch_muon(True), "standard", torch.bfloat16),
    "cuBLAS, batched": Contender(_cublas, "standard", torch.bfloat16),
    "gram-newton-schulz": Contender(_gram_newton_schulz, "gram", torch.float16),
    "torch grouped": Contender(_torch_grouped, "standard", torch.bfloat16),
}
