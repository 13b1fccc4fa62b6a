"""The gathered copy of a frozen weight that eager code reads: to unfreeze it is to unfreeze the parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["of_frozen"]


class _FrozenCopy(Tensor):
    """A plain tensor but for ``requires_grad``, which is the parameter's: ``model.head.weight.requires_grad = True``.

    Attributes:
        source: the parameter.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    source: nn.Parameter

    @property
    def requires_grad(self) -> bool:
        """Of the parameter."""
        return self.source.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.source.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Set it of the parameter."""
        self.source.requires_grad_(requires_grad)
        return self


def of_frozen(copy: Tensor, param: nn.Parameter) -> Tensor:
    """``copy`` itself, as such a tensor where ``param`` is frozen."""
    if param.requires_grad or type(copy) is not Tensor:
        return copy
    tensor: Any = copy
    tensor.__class__ = _FrozenCopy  # the copy that is watched stays the one that is read
    tensor.source = param
    return tensor
