"""The time that the kernels of a graph take on a machine."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_map_only

from compile_muon.kernels.gpu.model import seconds as launch_seconds
from compile_muon.passes.language.spec import encode_dtype
from compile_muon.passes.lowering.aliases import argument
from compile_muon.passes.pipeline import tensor_value
from compile_muon.passes.torch_private import flop_formula
from compile_muon.simulate.fusion import function_entries, moved_bytes
from compile_muon.simulate.machine import Machine
from compile_muon.simulate.newton_schulz import Call

_aten = torch.ops.aten
_NEWTON_SCHULZ = torch.ops.muon_zero.newton_schulz.default
_COPIES = (torch.ops.muon_zero.pack.default, torch.ops.muon_zero.unpack.default)
#: ops that torch.utils.flop_counter lacks -> ops with the same first arguments and operation count
_SAME = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


def operations(node: Node) -> float:
    """Return the operations of a product, convolution, attention or Newton-Schulz node, a multiply-add as 2; 0 for
    other ops.

    Arguments need values in their meta; sizes that depend on data are those of the trace.
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    formula = flop_formula(_SAME.get(packet, packet))
    if formula is None:
        return 0.0
    args, kwargs = tree_map_only(Node, lambda source: source.meta["val"], (node.args, node.kwargs))
    return float(formula(*args, **kwargs, out_val=node.meta["val"]))


def kernel_kind(root: Node) -> str:
    """Return the kind of kernel that ends in `root`: "product", "newton_schulz", "copy" (pack, unpack) or "kernel"."""
    if root.target is _NEWTON_SCHULZ:
        return "newton_schulz"
    if root.target in _COPIES:
        return "copy"
    return "product" if operations(root) else "kernel"


def kernel_seconds(members: list[Node], machine: Machine, moved_in_all: int | None = None) -> float:
    """Return the time of one kernel of :func:`~.fusion.kernels` or :func:`~.fusion.gpu_kernels`.

    `moved_in_all`: bytes that the kernel reads and writes, where the caller knows them. Products take
    :meth:`Machine.product_seconds`, or in half precision the fastest of cuBLAS's tiles where the machine lists them;
    attention :meth:`Machine.attention_rate`; convolutions the rate of their smallest dimension; Newton-Schulz its
    products; all other kernels the time of their bytes.
    """
    root = members[-1]
    if root.target is _NEWTON_SCHULZ:
        return Call(root, machine).seconds()
    shape = _product(root)
    kernel_bytes = moved_bytes(members) if moved_in_all is None else moved_in_all
    moved = machine.move_seconds(kernel_bytes) + machine.function_seconds * function_entries(members)
    if shape is not None:
        batch, m, n, k, dtype = shape
        if not batch * m * n * k:
            return moved
        if machine.tiles is not None and dtype in ("float16", "bfloat16"):
            # cuBLAS is assumed to choose its fastest tile.
            tiles, results = machine.tiles, ((batch, m, n, k),)
            ways = (launch_seconds(t, tiles.device, results, machine.processors, triangle=False) for t in tiles.cublas)
            return max(min(ways), moved)
        return machine.product_seconds(m, n, k, batch=batch, dtype=dtype)
    work = operations(root)
    if not work:
        return moved
    dtype = encode_dtype(tensor_value(root.args[0]).dtype)
    if "attention" in str(root.target):
        sequence = max(int(value.shape[-2]) for value in _attended(root))
        rate = machine.attention_rate(_smallest(root), sequence, dtype, causal=bool(argument(root, "is_causal", False)))
    else:
        rate = machine.rate(_smallest(root), dtype)
    return max(machine.product_start(dtype) + work / rate, moved)


def _product(node: Node) -> tuple[int, int, int, int, str] | None:
    """Return ``(batch, m, n, k, dtype)`` of a matrix product; None for any other node."""
    packet: Any = getattr(node.target, "overloadpacket", None)
    if (first := {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}.get(packet)) is None:
        return None
    a, b = map(tensor_value, node.args[first : first + 2])
    *batch, m, k = (int(size) for size in a.shape)
    return math.prod(batch), m, int(b.shape[-1]), k, encode_dtype(a.dtype)


def _smallest(node: Node) -> int:
    """Return the smallest dimension of the products inside attention or a convolution."""
    sizes: list[int] = []
    if "attention" in str(node.target):
        sizes = [size for value in _attended(node) for size in value.shape[-2:]]
    elif "convolution" in str(node.target):
        for source in node.all_input_nodes:
            value = source.meta.get("val")
            if isinstance(value, torch.Tensor) and value.ndim >= 3:
                sizes += value.shape[:2] if source is node.args[-1] else value.shape[1:2]
    return max(1, min(map(int, sizes), default=1))


def _attended(node: Node) -> list[torch.Tensor]:
    """Return the values that attention reads, [batch, heads, sequence, width]; not the log-sum-exp without width."""
    values = [source.meta.get("val") for source in node.all_input_nodes]
    return [value for value in values if isinstance(value, torch.Tensor) and value.ndim >= 4]
