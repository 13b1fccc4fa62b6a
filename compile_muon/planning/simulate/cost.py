"""How long the kernels of a graph take on a machine."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from compile_muon.kernels import quack
from compile_muon.kernels.batching import Stack, batch_bytes, chunked
from compile_muon.kernels.call_plan import AUTO_LIMIT, MEMORY_LIMIT
from compile_muon.kernels.dispatch import chosen_form
from compile_muon.kernels.gpu.arena import SMALL, list_bytes, work_bytes
from compile_muon.kernels.gpu.model import Result
from compile_muon.kernels.gpu.model import seconds as launch_seconds
from compile_muon.kernels.gpu.tiles import Table as Tiles
from compile_muon.kernels.iterations import FORMS
from compile_muon.passes.language.spec import encode_dtype
from compile_muon.passes.pipeline import tensor_value
from compile_muon.passes.torch_private import flop_formula
from compile_muon.planning.machine import Machine
from compile_muon.planning.simulate.fusion import function_entries, moved_bytes
from compile_muon.planning.simulate.lists import Launched, Steps
from compile_muon.planning.simulate.lists import launches as launches_of

__all__ = [
    "kernel_kind",
    "kernel_seconds",
    "launches",
    "list_launches",
    "newton_schulz_beside",
    "operations",
    "workspace_bytes",
]

_aten = torch.ops.aten
_NEWTON_SCHULZ = torch.ops.muon_zero.newton_schulz.default
_COPIES = (torch.ops.muon_zero.pack.default, torch.ops.muon_zero.unpack.default)

#: passes over a matrix, in matrices read and written by each: its largest entry, the division by it, norm, division;
#: PyTorch's own operations find the least entry by another
_NORMALIZE = (1, 2, 1, 2)
_HALF = ("float16", "bfloat16")
#: launches for a stack of matrices beside its products: norms, division, copies there and back, the last product
_BESIDE = 5
#: that torch.utils.flop_counter lacks, and the ones whose first arguments and operations are the same
_SAME = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


def operations(node: Node) -> float:
    """Operations of products, convolutions, attention and Newton-Schulz, 2 for a multiply-add; 0 for any other op.

    Args:
        node: a call whose arguments have values in their meta; sizes that only the data say count as when traced.
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    formula = flop_formula(_SAME.get(packet, packet))
    if formula is None:
        return 0.0
    args, kwargs = tree_map_only(Node, lambda source: source.meta["val"], (node.args, node.kwargs))
    return float(formula(*args, **kwargs, out_val=node.meta["val"]))


def kernel_kind(root: Node) -> str:
    """What a kernel does that ends in ``root``: "product", "newton_schulz", "copy" (pack or unpack) or "kernel"."""
    if root.target is _NEWTON_SCHULZ:
        return "newton_schulz"
    if root.target in _COPIES:
        return "copy"
    return "product" if operations(root) else "kernel"


def kernel_seconds(members: list[Node], machine: Machine, moved_in_all: int | None = None) -> float:
    """Of one kernel of :func:`~.fusion.kernels`, or :mod:`.gpu_kernels`, which say what it moves in all.

    Products by :meth:`Machine.product_seconds`, in half precision by cuBLAS's tiles where the machine has some,
    attention by its operations at :meth:`Machine.attention_rate`, convolutions at the rate of their smallest dimension,
    Newton-Schulz by its products; everything else by the bytes it reads and writes.
    """
    root = members[-1]
    if root.target is _NEWTON_SCHULZ:
        return newton_schulz_seconds(root, machine)
    shape = _product(root)
    given = moved_bytes(members) if moved_in_all is None else moved_in_all
    moved = machine.move_seconds(given) + machine.function_seconds * function_entries(members)
    if shape is not None:
        batch, m, n, k, dtype = shape
        if not batch * m * n * k:
            return moved
        if machine.tiles is not None and dtype in _HALF:
            return max(_cublas_seconds(machine.tiles, machine.processors, (batch, m, n, k)), moved)
        return machine.product_seconds(m, n, k, batch=batch, dtype=dtype)
    work = operations(root)
    if not work:
        return moved
    value = tensor_value(root.args[0])
    dtype = encode_dtype(value.dtype)
    if "attention" in str(root.target):
        rate = machine.attention_rate(_smallest(root), _sequence(root), dtype, causal=_causal(root))
    else:
        rate = machine.rate(_smallest(root), dtype)
    return max(machine.product_start(dtype) + work / rate, moved)


def _cublas_seconds(tiles: Tiles, processors: int, result: Result) -> float:
    """By the tiles that cuBLAS has for products, of which it takes what is done first."""
    return min(launch_seconds(tile, tiles.device, (result,), processors, triangle=False) for tile in tiles.cublas)


def _product(node: Node) -> tuple[int, int, int, int, str] | None:
    """``(batch, m, n, k, dtype)`` of a matrix product; None for any other node."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in (_aten.mm, _aten.bmm):
        left, right = node.args[:2]
    elif packet in (_aten.addmm, _aten.baddbmm):
        left, right = node.args[1:3]
    else:
        return None
    a, b = tensor_value(left), tensor_value(right)
    *batch, m, k = (int(size) for size in a.shape)
    return math.prod(batch), m, int(b.shape[-1]), k, encode_dtype(a.dtype)


def _smallest(node: Node) -> int:
    """Smallest dimension of the products that attention or a convolution consists of."""
    sizes: list[int] = []
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor) and value.ndim >= 3:
            if "attention" in str(node.target):
                # The backward also takes the logarithms of its sums, [batch, heads, sequence].
                sizes += value.shape[-2:] if value.ndim >= 4 else ()
            elif "convolution" in str(node.target):
                sizes += value.shape[:2] if source is node.args[-1] else value.shape[1:2]
    return max(1, min((int(size) for size in sizes), default=1))


def _causal(node: Node) -> bool:
    names = [argument.name for argument in node.target._schema.arguments]
    place = names.index("is_causal") if "is_causal" in names else len(node.args)
    return bool(node.kwargs.get("is_causal", node.args[place] if place < len(node.args) else False))


def _sequence(node: Node) -> int:
    """Longest sequence that attention is over, [batch, heads, sequence, width]."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return max(int(v.shape[-2]) for v in values if isinstance(v, torch.Tensor) and v.ndim >= 4)


# ------------------------------------------------------------------------------------------------------ Newton-Schulz


@dataclass
class _Counted:
    """``iterations.Products`` of shapes alone: notes (m, n, k, whether one triangle would do) of each."""

    found: list[tuple[int, int, int, bool]] = field(default_factory=list)

    def outer(self, x: tuple[int, int]) -> tuple[int, int]:
        self.found.append((x[0], x[0], x[1], True))
        return x[0], x[0]

    def symmetric(self, left: tuple[int, int], right: tuple[int, int], **added: object) -> tuple[int, int]:
        self.found.append((left[0], right[1], left[1], True))
        return left[0], right[1]

    def general(self, left: tuple[int, int], right: tuple[int, int], **added: object) -> tuple[int, int]:
        self.found.append((left[0], right[1], left[1], False))
        return left[0], right[1]

    def add_to_diagonal(self, x: tuple[int, int], a: float) -> None:
        """No product."""


def newton_schulz_seconds(node: Node, machine: Machine) -> float:
    """Of a ``muon_zero::newton_schulz`` call: products, normalization, and turning tall matrices back.

    On CPUs each matrix by itself, and products whole. On GPUs all of a shape at once; of symmetric products in half
    precision one triangle, unless the call asks for aten. Where the machine has tiles, what Triton makes goes by
    the launches of its lists.
    """
    if (listed := list_launches(node, machine)) is not None:
        assert machine.tiles is not None
        products = sum(launched.seconds(machine.tiles, machine.processors) for launched in listed)
        return products + sum(map(machine.move_seconds, _beside_products(node, machine)))
    return sum(_shape_seconds(node, machine, count, *shape) for shape, count in _shapes(node).items())


def list_launches(node: Node, machine: Machine) -> list[Launched] | None:
    """The launches of Triton's products for a call; None where something else makes them, or nothing is known."""
    call = _Call(node, machine)
    if machine.tiles is None or not call.symmetric or call.by_shape:
        return None
    groups: dict[str, list[tuple[tuple[int, int, int], int]]] = {}
    for b, k, width, dtype, _ in _tensors(node):
        groups.setdefault(call.form(k, width), []).append(((b, k, width), dtype.itemsize))
    found: list[Launched] = []
    for form, tensors in groups.items():
        how = Steps(form, call.triples, tuple(call.restarts), call.dtype == "float16", call.itemsize, call.limit)
        found += launches_of(tuple(tensors), how)
    return found


def newton_schulz_beside(node: Node, machine: Machine) -> float:
    """How many times as long a call takes while a collective holds multiprocessors."""
    listed = list_launches(node, machine)
    if not listed or machine.tiles is None:
        return machine.processors / (machine.processors - machine.collective_processors)
    alone = sum(launched.seconds(machine.tiles, machine.processors) for launched in listed)
    held = machine.collective_processors
    return max(1.0, sum(each.seconds_when_held(machine.tiles, machine.processors, held) for each in listed) / alone)


def _tensors(node: Node) -> Iterator[tuple[int, int, int, torch.dtype, bool]]:
    """``(matrices, k, l, dtype, whether it is tall)`` of each tensor of a call, none empty."""
    for x in node.args[0]:
        value = tensor_value(x)
        rows, cols = (int(size) for size in value.shape[-2:])
        if value.numel():
            yield value.shape[:-2].numel(), min(rows, cols), max(rows, cols), value.dtype, rows > cols


def _shapes(node: Node) -> Counter[tuple[int, int]]:
    """How many matrices a call has of each shape."""
    counts: Counter[tuple[int, int]] = Counter()
    for b, k, width, _, tall in _tensors(node):
        counts[(width, k) if tall else (k, width)] += b
    return counts


def _beside_products(node: Node, machine: Machine) -> Iterator[int]:
    """Bytes of each kernel of a call of Triton's that is no product: norms, divisions, copies of small matrices."""
    call = _Call(node, machine)
    itemsize = call.itemsize
    copied: dict[tuple[int, int, int, bool], list[tuple[int, int]]] = {}
    for b, k, width, dtype, tall in _tensors(node):
        entries, given = b * k * width, dtype.itemsize
        measured = 4 * b * (width if tall else k) if call.norms else given * entries
        if k * width <= SMALL:
            copied.setdefault((k, width, given, tall), []).append((entries, measured))
        else:
            yield from (measured, (given + itemsize) * entries)
    for (_, _, given, _), sizes in copied.items():
        entries = sum(size for size, _ in sizes)
        measured = sum(size for _, size in sizes)
        if len(sizes) > 1:
            yield from (2 * given * entries, 2 * itemsize * entries)
            if call.norms:
                yield 2 * measured
        yield from (measured, (given + itemsize) * entries)


class _Call:
    """What a ``muon_zero::newton_schulz`` call asks for.

    Attributes:
        symmetric: Triton makes it, or quack: one triangle of symmetric products.
        by_shape: quack makes it: of all matrices of a form those of a shape together.
        limit: bytes that it may hold beside inputs and results.
        norms: whether it is given norms of rows.
    """

    def __init__(self, node: Node, machine: Machine) -> None:
        _, coefficients, self.method, self.dtype, _, _, self.restarts, backend, limit, norms = node.args
        self.limit: int = MEMORY_LIMIT if limit == AUTO_LIMIT else limit
        self.triples = tuple(zip(coefficients[0::3], coefficients[1::3], coefficients[2::3], strict=True))
        self.symmetric = machine.device == "cuda" and self.dtype in _HALF and backend != "aten"
        self.by_shape = self.symmetric and backend == "quack"
        self.itemsize: int = getattr(torch, self.dtype).itemsize
        self.norms = bool(norms)

    def form(self, rows: int, cols: int) -> str:
        """ "standard" or "gram", of matrices of a shape."""
        return chosen_form(self.method, rows, cols, len(self.triples), len(self.restarts), symmetric=self.symmetric)


def _shape_seconds(node: Node, machine: Machine, count: int, rows: int, cols: int) -> float:
    call = _Call(node, machine)
    times, batch = (count, 1) if machine.device == "cpu" else (1, count)
    k, l = sorted((rows, cols))  # noqa: E741
    products = _Counted()
    FORMS[call.form(rows, cols)]((k, l), call.triples, call.restarts, products)
    seconds = 0.0
    for m, n, inner, symmetric in products.found:
        n = -(-n // 2) if symmetric and call.symmetric else n
        seconds += machine.product_seconds(m, n, inner, batch=batch, dtype=call.dtype)
    size = batch * k * l * call.itemsize
    moves = [*_NORMALIZE, *([] if call.symmetric else [1]), *([2] if rows > cols else [])]
    return times * (seconds + sum(machine.move_seconds(count * size) for count in moves))


def launches(node: Node, machine: Machine) -> int:
    """Kernels that the host starts for a call; 1 but for ``muon_zero::newton_schulz`` on GPUs.

    There of all matrices of a form in half precision each product is one launch, but for the last, which writes each
    result; else, and by quack, of all matrices of a shape.
    """
    if node.target is not _NEWTON_SCHULZ or machine.device == "cpu":
        return 1
    if (listed := list_launches(node, machine)) is not None:
        return len(listed) + sum(1 for _ in _beside_products(node, machine))
    call = _Call(node, machine)
    products: dict[Any, int] = {}
    shapes = _shapes(node)
    for shape in shapes:
        form = call.form(*shape)
        together = call.symmetric and not call.by_shape
        products[form if together else shape] = (5 if form == "gram" else 3) * len(call.triples)
    return sum(products.values()) + (_BESIDE if call.symmetric else 2 * _BESIDE) * len(shapes)


def workspace_bytes(node: Node, machine: Machine) -> int:
    """What a ``muon_zero::newton_schulz`` call holds beside inputs and results.

    On CPUs of one matrix X once more, and two of k x k. On GPUs of a chunk of matrices, as ``compile_muon.kernels``
    makes them: by Triton of all matrices of a form together, by quack and aten of one shape.
    """
    call = _Call(node, machine)
    if machine.device == "cpu":
        return max(((k * width + 2 * k**2) * call.itemsize for _, k, width, _, _ in _tensors(node)), default=0)
    groups: dict[Any, list[Stack]] = {}
    for b, k, width, dtype, _ in _tensors(node):
        how = (call.form(k, width), len(call.triples), len(call.restarts))
        key: tuple[object, ...]
        if call.by_shape and quack.fits(k, width, dtype, getattr(torch, call.dtype)):
            key, each = (k, width), work_bytes(k, width, *how, call.itemsize)
        elif call.symmetric and not call.by_shape:
            key, each = how, list_bytes(k, width, *how, dtype.itemsize, call.itemsize)
        else:
            key, each = (k, width, dtype), batch_bytes(k, width, dtype.itemsize, call.itemsize)
        groups.setdefault(key, []).append(Stack(b, each))
    return max((_largest_chunk(stacks, call.limit) for stacks in groups.values()), default=0)


def _largest_chunk(stacks: Sequence[Stack], limit: int) -> int:
    chunks = chunked(stacks, limit)
    return max(sum((p.stop - p.start) * stacks[i].bytes_each for i, p in chunk) for chunk in chunks)
