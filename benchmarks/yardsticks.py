"""Yardsticks for times of Newton–Schulz: products, copies and the two elementwise kernels of a Muon step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from orthogonalizers import Case, Check, Missing, Prepare, single, worst_block
from torch import Tensor

from compile_muon.kernels import muon_apply, muon_momentum
from compile_muon.kernels.apply import may_launch
from compile_muon.passes.fingerprint import FORMULA

Make = Callable[[Tensor], tuple[Callable[[], object], Check]]


def cases(on_gpu: bool) -> dict[str, tuple[Case, tuple[str, ...]]]:
    """Return each case with the yardsticks that take turns at it."""
    side, rows = (8192, 2**15) if on_gpu else (256, 2**3)
    return {
        "peak": (single("peak", 1, side, side), ("mm bfloat16", "mm float16")),
        "XXᵀ": (single("XXᵀ", 1, side // 2, side // 2), ("XXᵀ of torch", "XXᵀ of ours")),
        "elementwise": (single("elementwise", 1, rows, 8192), tuple(ELEMENTWISE)),  # on a GPU 1 GiB of float32
    }


@dataclass(frozen=True)
class Yardstick:
    """A function to time beside Newton–Schulz, with its check."""

    make: Make

    def on(self, device: torch.device) -> Prepare:
        """Prepare cases as a contender does; Missing is raised with the first case."""
        return lambda case: self.make(case.matrices(device)[0])


def _mm(dtype: torch.dtype) -> Make:
    def make(x: Tensor) -> tuple[Callable[[], object], Check]:
        p, q = x.to(dtype), x.roll(1, 0).to(dtype)
        return lambda: torch.mm(p, q), _near(p.double() @ q.double(), dtype)

    return make


def _square(of: str) -> Make:
    def make(x: Tensor) -> tuple[Callable[[], object], Check]:
        half = x.bfloat16()
        check = _near(half.double() @ half.double().mT, torch.bfloat16)
        if of == "torch":
            return lambda: half @ half.mT, check
        from compile_muon.kernels.dispatch import triton_kernels

        kernels = triton_kernels()
        products = kernels.products_on(x.device) if kernels and x.is_cuda else None
        if products is None:
            raise Missing("no Triton kernel runs on this device")
        return lambda: products.outer(half[None])[0], check

    return make


def _near(exact: Tensor, dtype: torch.dtype) -> Check:
    """Check that a product is near ``exact``."""
    limit = 4 * torch.finfo(dtype).eps  # a product rounded once is off by half a unit at most; four units are allowed

    def check(result: Tensor) -> str | None:
        worst = worst_block(result, exact)
        return None if worst <= limit else f"error {worst:.2g} in a block, bound {limit:.2g}"

    return check


def _copy(x: Tensor) -> tuple[Callable[[], object], Check]:
    y = torch.empty_like(x)
    return lambda: y.copy_(x), lambda result: None if torch.equal(y, x) else "the copy differs"


def _momentum(x: Tensor) -> tuple[Callable[[], object], Check]:
    momentum = x.roll(1, 0)
    weights = torch.tensor([0.05], device=x.device), torch.tensor([0.95], device=x.device)
    average = 0.05 * x + 0.95 * momentum
    ahead = 0.05 * x + 0.95 * average

    def check(result: tuple[Tensor, Tensor]) -> str | None:
        right = torch.allclose(result[1], average, atol=1e-5) and torch.allclose(result[0].float(), ahead, 0.01, 0.01)
        return None if right else "the momentum differs"

    return lambda: muon_momentum(x, momentum, beta=weights, nesterov=True, out_dtype=torch.bfloat16), check


def _updates(x: Tensor) -> tuple[Callable[[], object], Check]:
    """Make the updates as a compiled step on CUDA does, with norms and sums of rows."""
    if not may_launch([x]):
        raise Missing("no Triton kernel runs on this device")
    from compile_muon.kernels.gpu.momentum import momentum_updates

    momentum, hyper = x.roll(1, 0), torch.tensor([0.05, 0.95], device=x.device)
    ahead = 0.05 * x + 0.95 * (0.05 * x + 0.95 * momentum)
    settings = {"nesterov": True, "dtype": torch.bfloat16, "wide": torch.float32}

    def check(result: Tensor) -> str | None:
        return None if torch.allclose(result.float(), ahead, 0.01, 0.01) else "the momentum differs"

    return lambda: momentum_updates([x], [momentum], [hyper], **settings, **FORMULA).updates[0], check


def _apply(x: Tensor) -> tuple[Callable[[], object], Check]:
    """Write in place, without a check: the result depends on the number of calls so far. tests/kernels checks it."""
    update, lr = x.bfloat16(), torch.tensor(1e-3, device=x.device)
    return lambda: muon_apply([x], [update], lr=lr, weight_decay=0.1, scale=1.0), lambda result: None


# name -> bytes moved for each element
ELEMENTWISE = {
    "copy": 8,
    "muon_momentum": 14,  # two float32 read, one float32 and one bfloat16 written
    "momentum of a list": 10,  # without the new momentum, which step() writes
    "muon_apply": 10,
}
YARDSTICKS = {
    "mm bfloat16": Yardstick(_mm(torch.bfloat16)),
    "mm float16": Yardstick(_mm(torch.float16)),
    "XXᵀ of torch": Yardstick(_square("torch")),
    "XXᵀ of ours": Yardstick(_square("ours")),
    "copy": Yardstick(_copy),
    "muon_momentum": Yardstick(_momentum),
    "momentum of a list": Yardstick(_updates),
    "muon_apply": Yardstick(_apply),
}
