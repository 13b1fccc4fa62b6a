"""What a node of a graph computes, by the formulas of ``torch.utils.flop_counter``."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_map

from compile_muon.passes.torch_private import flop_formula

__all__ = ["operations"]

_aten = torch.ops.aten
#: that the registry lacks, and the ones whose first arguments and operations are the same
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
    args, kwargs = tree_map(_value, (node.args, node.kwargs))
    return float(formula(*args, **kwargs, out_val=node.meta["val"]))


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument
