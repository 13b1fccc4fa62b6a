"""Who else holds a parameter: lists and closures that have it as it was before it was sharded, and other optimizers.

What held a parameter when ``MuonZero`` replaced it holds it still: a list that is clipped, an average of weights, an
optimizer, a module that keeps a second reference. Nothing trains that tensor any more: its memory is freed, and each
use is refused by name.
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

__all__ = ["StaleParameter", "make_stale", "refuse_shared", "refuse_stale", "watched"]

_REMEDY = (
    "take it from model.parameters() anew, after MuonZero; a module reads it as an attribute of the module that has it"
)


#: what may be asked of a stale parameter: nothing of its values, and what optimizers and hooks ask of all they hold
_HARMLESS = frozenset(
    getattr(Tensor, name).__get__ for name in ("requires_grad", "device", "dtype", "layout", "is_leaf", "is_sparse")
)


class StaleParameter(nn.Parameter):
    """A parameter as it was before it was sharded, without its memory: whatever is asked of it is an error by name.

    Attributes:
        stale: its name.
    """

    stale: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Of a frame that is compiled, Dynamo looks at the inputs.
        if func in _HARMLESS or torch.compiler.is_compiling() or being_compiled():
            with _C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        held = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, cls))
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)  # of a property's function
        raise _stale(held.stale, f"is asked for ({getattr(owner, '__name__', name)})")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StaleParameter({self.stale})"


def _stale(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name}: {what}, as it was before MuonZero sharded it, which nothing trains; {_REMEDY}"
    )


def make_stale(replaced: Mapping[str, nn.Parameter]) -> None:
    """Free these, and have them say so wherever something still holds them.

    Args:
        replaced: by name, parameters in whose place the model has others.
    """
    for name, param in replaced.items():
        param.grad = None

        def refuse(_: Tensor, name: str = name) -> None:
            raise _stale(name, "a gradient comes to it")

        if param.requires_grad:
            param.register_hook(refuse)
        if not isinstance(param, DTensor):  # whose class has another layout
            param.data = param.data.new_empty(0)
            param.__class__ = StaleParameter
            param.stale = name  # type: ignore[attr-defined]


def refuse_stale(inputs: Sequence[Any]) -> None:
    """Raise for a frame that reads a parameter as it was before it was sharded.

    Args:
        inputs: of the frame.
    Raises:
        UnsupportedModelError: naming it.
    """
    for value in inputs:
        if isinstance(value, StaleParameter):
            raise _stale(value.stale, "is read by a compiled frame")


# -------------------------------------------------------------------------------------------------- other optimizers


def refuse_shared(ours: Optimizer) -> None:
    """Refuse the steps of every other optimizer that has a parameter of ``ours``, for as long as that lives.

    The gradient would be applied twice.
    """
    watched().add(ours)


@cache
def watched() -> WeakSet[Optimizer]:
    """The optimizers whose parameters no other may step, those that live.

    PyTorch is given one hook for all of them and keeps it: hooks that come and go, with a garbage collection or on
    another thread, would do so while it runs through them.
    """
    found: WeakSet[Optimizer] = WeakSet()

    def before_step(other: Optimizer, args: Any, kwargs: Any) -> None:
        if not (others := [own for own in tuple(found) if own is not other]):
            return
        held = {id(param) for group in other.param_groups for param in group["params"] if param.requires_grad}
        for own in others:
            _check_apart(other, own, held)

    register_optimizer_step_pre_hook(before_step)
    return found


def _check_apart(other: Optimizer, own: Optimizer, held: set[int]) -> None:
    """Raise if ``own`` trains one of the parameters ``held``, by ``id``, that ``other`` steps."""
    names = [
        name
        for group in own.param_groups
        for param, name in zip(group["params"], group["param_names"], strict=True)
        if id(param) in held
    ]
    if names and not _wraps(other, own):
        raise UnsupportedModelError(
            f"{listed(names)}: {type(other).__name__} steps what MuonZero trains, so that each gradient would be "
            "applied twice; leave the other optimizer out: MuonZero trains matrices by Muon and all else by AdamW "
            "(adamw_lr, groups), or give it parameters of another model"
        )


def _wraps(other: Optimizer, own: Optimizer) -> bool:
    """Whether ``other`` hands its step on to ``own``: a wrapper, or a container of optimizers."""
    groups = {id(group) for group in own.param_groups}
    if any(id(group) in groups for group in other.param_groups):
        return True
    return any(value is own for value in tree_leaves(list(vars(other).values())))
