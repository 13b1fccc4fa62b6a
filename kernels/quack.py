"""Newton-Schulz on the matrix products of quack (Dao-AILab/quack, distributed as ``quack-kernels``), if installed.

quack's symmetric product is written in CuTe: on 9.0 with clusters of two blocks that share their loads, ping-pong
between two groups of consumer warps and an epilogue of its own, none of which Triton 3.6 or 3.7 offers.
gram-newton-schulz runs on the same three functions of ``quack.gemm_interface``.

**The same bits every time.** By default ``gemm`` and ``gemm_add`` time their configurations, 44 on 9.0, at the first
call of a shape: the next run may choose other tiles and so sum in another order, and the waits break the capture of a
CUDA graph. With ``tuned=False`` both take quack's configuration for the architecture (``gemm`` the one that
nvidia-matmul-heuristics computes, if installed); ``gemm_symmetric`` has a single one. A form's first call still
compiles.

**No copies.** Matrices of a shape are normalized into one contiguous batch, and the last product of each tensor is
written into its result, rows or columns first: quack compiles for the dimension that has unit stride, and takes views.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import reference
from .batching import Stack, chunked, wide
from .call_plan import Plan
from .gpu.arena import work_bytes
from .iterations import FORMS

__all__ = ["Products", "Region", "architecture", "fits", "orthogonalize_list", "products", "serves", "why_not"]

_DISTRIBUTION = "quack-kernels"
#: supported versions: the first, and the first that is no longer supported
_VERSIONS = ((0, 4, 1), (0, 7))
#: functions called, and the parameters passed to them by name
_FUNCTIONS = {
    "gemm": {"out", "tuned"},
    "gemm_add": {"C", "out", "beta", "tuned"},
    "gemm_symmetric": {"C", "alpha", "beta"},
}
#: a row's length is a multiple of so many entries: 16 bytes, the unit in which TMA reads and writes
_ROW = 8
_TABLE = Path(__file__).with_name("quack.json")

#: tensors [b, m, n]: one batch, or consecutive parts of a batch
Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class Region:
    """A box of shapes at whose corners quack was timed and took less than the faster of Triton and cuBLAS."""

    method: str  # "standard" or "gram"
    dtypes: tuple[str, ...]  # names of the dtypes timed
    # The least and the most of the shorter side, the longer side, and the matrices of one shape in a call.
    k: tuple[int, int]
    l: tuple[int, int]  # noqa: E741
    matrices: tuple[int, int]
    time: float  # largest ratio of quack's time to the faster other time
    source: str  # device, date, versions and command

    def has(self, shape: tuple[int, int, int], plan: Plan) -> bool:
        """Tell whether the region covers ``shape``, (matrices, k, l), and the method and dtype of ``plan``."""
        bounds = (self.matrices, self.k, self.l)
        inside = all(least <= size <= most for size, (least, most) in zip(shape, bounds, strict=True))
        dtype = str(plan.dtype).removeprefix("torch.")
        return inside and self.time < 1 and self.method == plan.method and dtype in self.dtypes


@cache
def load_regions(path: Path = _TABLE) -> Mapping[str, tuple[Region, ...]]:
    """Load the regions by architecture, for example "sm_90", from a file with the fields of :class:`Region`."""
    entries: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())

    def frozen(entry: dict[str, Any]) -> Region:
        fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in entry.items()}
        return Region(**fields)

    return {name: tuple(map(frozen, regions)) for name, regions in entries.items()}


@dataclass(frozen=True)
class Products:
    """``iterations.Products`` over three functions of ``quack.gemm_interface``."""

    # alpha and beta are passed as Python floats: quack reads any other type from a tensor, or ignores it.

    gemm: Callable[..., Tensor]
    gemm_add: Callable[..., Tensor]
    gemm_symmetric: Callable[..., Tensor]

    def outer(self, x: Parts) -> Parts:
        (whole,) = x
        return (self.gemm_symmetric(whole, whole.mT),)

    def symmetric(self, left: Parts, right: Parts, *, plus: Parts, beta: float, alpha: float = 1.0) -> Parts:
        """``alpha left right + beta plus``, one triangle computed and mirrored."""
        (factor,), (x,), (summand,) = left, right, plus
        return (self.gemm_symmetric(factor, x, C=summand, alpha=float(alpha), beta=float(beta)),)

    def general(
        self, left: Parts, right: Parts, *, plus: Parts | None = None, beta: float = 0.0, out: Parts | None = None
    ) -> Parts:
        """``left right + beta plus``, written into the parts of ``out``, or new."""
        (factor,), (x,) = left, right
        if out is None:
            return (self._general(factor, x, None if plus is None else plus[0], beta, None),)
        counts = [len(result) for result in out]
        summands = [None] * len(out) if plus is None else plus[0].split(counts)
        for part in zip(factor.split(counts), x.split(counts), summands, out, strict=True):
            self._general(*part[:3], beta, part[3])
        return out

    def _general(self, left: Tensor, right: Tensor, plus: Tensor | None, beta: float, out: Tensor | None) -> Tensor:
        if plus is None:
            return self.gemm(left, right, out=out, tuned=False)
        return self.gemm_add(left, right, C=plus, out=out, beta=float(beta), tuned=False)

    def add_to_diagonal(self, x: Parts, a: float) -> None:
        (whole,) = x
        whole.diagonal(dim1=-2, dim2=-1).add_(a)


@cache
def why_not() -> str | None:
    """Return why quack cannot be used here, or None if it can; imports quack if its version is supported."""
    first, end = _VERSIONS
    requirement = f"{_DISTRIBUTION} from {'.'.join(map(str, first))} up to before {'.'.join(map(str, end))}"
    try:
        package = distribution(_DISTRIBUTION)
    except PackageNotFoundError:
        return f"{_DISTRIBUTION} is not installed; pip install it"
    if not first <= tuple(map(int, re.findall(r"\d+", package.version)[:3])) < end:
        return f"{_DISTRIBUTION} {package.version} is installed; install {requirement}"
    spec = find_spec("quack")
    # Another module may answer to the name "quack". An editable install lists no files, so none is compared.
    init = [file for file in package.files or () if file.as_posix() == "quack/__init__.py"]
    origin = spec.origin if spec is not None else None
    if init and (origin is None or Path(origin).resolve() != Path(init[0].locate()).resolve()):
        return f"the module quack is {origin}, not that of {_DISTRIBUTION} {package.version}; rename or remove it"
    try:
        functions = _functions()
    except Exception as error:  # whatever CuTe's DSL raises where it finds no GPU, or not its own libraries
        return (
            f"{_DISTRIBUTION} {package.version} cannot be imported ({type(error).__name__}: {error}); mend its install"
        )
    for name, parameters in _FUNCTIONS.items():
        if name not in functions or not parameters <= set(inspect.signature(functions[name]).parameters):
            calls = f"quack.gemm_interface.{name}({', '.join(sorted(parameters))})"
            return f"{_DISTRIBUTION} {package.version} has no {calls}; install {requirement}"
    return None


def _functions() -> dict[str, Callable[..., Tensor]]:
    module = import_module("quack.gemm_interface")
    return {name: getattr(module, name) for name in _FUNCTIONS if hasattr(module, name)}


@cache
def products() -> Products:
    """Import quack's products, or raise ImportError with the reason and the remedy."""
    if (problem := why_not()) is not None:
        raise ImportError(problem)
    return Products(**_functions())


def architecture(device: torch.device) -> str | None:
    """Name the device's architecture, for example "sm_90"; None for one that quack has no clusters for."""
    if device.type != "cuda":
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" if major in (9, 10) else None


def fits(rows: int, cols: int, given: torch.dtype, dtype: torch.dtype) -> bool:
    """Tell whether quack multiplies ``rows`` × ``cols`` matrices of dtype ``given`` in the compute dtype ``dtype``."""
    half = dtype in (torch.float16, torch.bfloat16)
    # Not float64, which would have to be normalized in float64, and the normalization kernel has only float32.
    return half and given != torch.float64 and rows > 0 and cols > 0 and rows % _ROW == 0 and cols % _ROW == 0


def serves(xs: Sequence[Tensor], plans: Sequence[Plan]) -> list[bool]:
    """Tell for each of ``xs``, [..., m, n] on one device, whether quack orthogonalizes it.

    ``plans``: one plan a tensor, with method "standard" or "gram", all of one backend.
    """
    # Backend "quack" takes all that its kernels can, "auto" the shapes that were measured to be faster (quack.json).
    name = architecture(xs[0].device) if xs and plans[0].backend in ("auto", "quack") else None
    if name is None:
        return [False] * len(xs)
    by_name = plans[0].backend == "quack"
    regions = load_regions().get(name, ())
    if not (by_name or regions) or why_not() is not None:
        return [False] * len(xs)
    counts: dict[tuple[int, int], int] = {}
    for x in xs:
        k, l = sorted(x.shape[-2:])  # noqa: E741
        counts[k, l] = counts.get((k, l), 0) + x.shape[:-2].numel()

    def served(x: Tensor, plan: Plan) -> bool:
        k, l = sorted(x.shape[-2:])  # noqa: E741
        if not x.numel() or not fits(k, l, x.dtype, plan.dtype):
            return False
        return by_name or any(region.has((counts[k, l], k, l), plan) for region in regions)

    return [served(x, plan) for x, plan in zip(xs, plans, strict=True)]


def orthogonalize_list(xs: Sequence[Tensor], plan: Plan, products: Products) -> list[Tensor]:
    """Orthogonalize every matrix of a list, those of a shape in one batch, tall ones transposed.

    ``xs``: [..., m, n], none empty, of shapes and dtypes that :func:`fits`, any strides, on one device, unmodified.
    Results are new contiguous tensors of the inputs' shapes in ``plan.dtype`` that share no memory.
    """
    results = [torch.empty(x.shape, dtype=plan.dtype, device=x.device) for x in xs]
    pairs = [(wide(x), wide(result)) for x, result in zip(xs, results, strict=True)]
    pairs_of_shape: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
    for x, out in pairs:
        pairs_of_shape.setdefault((x.shape[1], x.shape[2]), []).append((x, out))
    for (k, l), same_shape in pairs_of_shape.items():  # noqa: E741
        bytes_each = work_bytes(k, l, plan.method, len(plan.steps), len(plan.restarts), plan.dtype.itemsize)
        for chunk in chunked([Stack(len(x), bytes_each) for x, _ in same_shape], plan.memory_limit):
            parts = [(same_shape[i][0][piece], same_shape[i][1][piece]) for i, piece in chunk]
            outputs = tuple(result for _, result in parts)
            # No name holds the normalized matrices: their memory is free again after the first step.
            FORMS[plan.method](_normalized(parts, plan), plan.steps, plan.restarts, products, out=outputs)
    return results


def _normalized(parts: Sequence[tuple[Tensor, Tensor]], plan: Plan) -> Parts:
    """Normalize the inputs of ``parts``, pairs of (input, result), into one contiguous batch."""
    first, out = parts[0]
    batch = torch.empty(sum(len(x) for x, _ in parts), *first.shape[1:], dtype=plan.dtype, device=out.device)
    for (x, _), slot in zip(parts, batch.split([len(x) for x, _ in parts]), strict=True):
        if x.is_cuda:
            import_module(".gpu.normalize", __package__).normalize(
                x, dtype=plan.dtype, eps=plan.eps, safety=plan.safety, out=slot
            )
        else:
            slot.copy_(reference.normalize(x, dtype=plan.dtype, eps=plan.eps, safety=plan.safety))
    return (batch,)
