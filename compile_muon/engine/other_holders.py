"""Other holders of a parameter: references from before sharding, and other optimizers.

A list that is clipped, an average of weights, an optimizer or a module may still hold the parameter that ``MuonZero``
replaced. That tensor trains no longer: its memory is freed, and each use is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch import _C, Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from compile_muon.errors import UnsupportedModelError, listed
from compile_muon.passes.torch_private import being_compiled

_REMEDY = (
    "take it from model.parameters() anew, after MuonZero; a module reads it as an attribute of the module that has it"
)


#: allowed reads of a stale parameter: no values, only attributes that optimizers and hooks read of all they hold
_HARMLESS = frozenset(
    getattr(Tensor, name).__get__ for name in ("requires_grad", "device", "dtype", "layout", "is_leaf", "is_sparse")
)


class StaleParameter(nn.Parameter):
    """A parameter from before sharding, without its memory; any use raises with its name, ``stale``."""

    stale: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Dynamo inspects the inputs of a frame it compiles; :func:`refuse_stale` refuses them at run time.
        if func in _HARMLESS or torch.compiler.is_compiling() or being_compiled():
            with _C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        stale = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, cls))
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)  # of a property's function
        raise _stale(stale.stale, f"is asked for ({getattr(owner, '__name__', name)})")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StaleParameter({self.stale})"


def _stale(name: str, what: str) -> UnsupportedModelError:
    """Return the error for a use (``what``) of a stale parameter."""
    return UnsupportedModelError(
        f"{name}: {what}, as it was before MuonZero sharded it, which nothing trains; {_REMEDY}"
    )


def make_stale(replaced: Mapping[str, nn.Parameter]) -> None:
    """Free the ``replaced`` parameters (by name), and make every later use of them raise."""
    for name, param in replaced.items():
        param.grad = None

        def refuse(_: Tensor, name: str = name) -> None:
            raise _stale(name, "a gradient comes to it")

        if param.requires_grad:
            param.register_hook(refuse)
        if not isinstance(param, DTensor):  # __class__ assignment needs equal object layouts
            param.data = param.data.new_empty(0)
            param.__class__ = StaleParameter
            param.stale = name  # type: ignore[attr-defined]


def refuse_stale(inputs: Sequence[Any]) -> None:
    """Raise UnsupportedModelError if a frame's inputs include a parameter from before sharding."""
    for value in inputs:
        if isinstance(value, StaleParameter):
            raise _stale(value.stale, "is read by a compiled frame")


# -------------------------------------------------------------------------------------------------- other optimizers


def refuse_shared(ours: Optimizer) -> None:
    """Refuse other optimizers' steps on parameters of ``ours`` while it lives: they would apply gradients twice."""
    watched().add(ours)


@cache
def watched() -> WeakSet[Optimizer]:
    """Return the living optimizers whose parameters no other may step. PyTorch's one hook for all stays registered:
    removed by a garbage collection, or on another thread, it would change a dictionary that PyTorch iterates over."""
    optimizers: WeakSet[Optimizer] = WeakSet()

    def before_step(other: Optimizer, args: Any, kwargs: Any) -> None:
        if not (others := [ours for ours in tuple(optimizers) if ours is not other]):
            return
        stepped = {id(param) for group in other.param_groups for param in group["params"] if param.requires_grad}
        for ours in others:
            _check_apart(other, ours, stepped)

    register_optimizer_step_pre_hook(before_step)
    return optimizers


def _check_apart(other: Optimizer, ours: Optimizer, stepped: set[int]) -> None:
    """Raise if ``ours`` trains one of the parameters ``stepped`` (by ``id``), which ``other`` steps."""
    names = [
        name
        for group in ours.param_groups
        for param, name in zip(group["params"], group["param_names"], strict=True)
        if id(param) in stepped
    ]
    if names and not _wraps(other, ours):
        raise UnsupportedModelError(
            f"{listed(names)}: {type(other).__name__} steps what MuonZero trains, so that each gradient would be "
            "applied twice; leave the other optimizer out: MuonZero trains matrices by Muon and all else by AdamW "
            "(adamw_lr, groups), or give it parameters of another model"
        )


def _wraps(other: Optimizer, ours: Optimizer) -> bool:
    """Return whether ``other`` delegates its step to ``ours``: a wrapper, or a container of optimizers."""
    groups = {id(group) for group in ours.param_groups}
    if any(id(group) in groups for group in other.param_groups):
        return True
    return any(value is ours for value in tree_leaves(list(vars(other).values())))
