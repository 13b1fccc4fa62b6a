"""What a node of a graph computes, by the formulas of ``torch.utils.flop_counter``."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.utils._pytree import tree_map

from .torch_private import flop_formula

__all__ = ["operations"]


def operations(node: Node) -> float:
    """Operations of products, convolutions, attention and Newton-Schulz, 2 for a multiply-add; 0 for any other op.

    Args:
        node: a call whose arguments have values in their meta; sizes that only the data say count as when traced.
    """
    formula = flop_formula(node.target)
    if formula is None:
        return 0.0
    args, kwargs = tree_map(_value, (node.args, node.kwargs))
    return float(formula(*args, **kwargs, out_val=node.meta["val"]))


def _value(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, Node) else argument
