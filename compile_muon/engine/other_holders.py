"""Who else holds a parameter: lists and closures that have it as it was before it was sharded, and other optimizers.

What held a parameter when ``MuonZero`` replaced it holds it still: a list that is clipped, an average of weights, an
optimizer, a module that keeps a second reference. Nothing trains that tensor any more, so each such use is refused by
name, or told where it only reads.
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

from compile_muon.errors import UnsupportedModelError, listed, warn_user
from compile_muon.passes.torch_private import being_compiled

__all__ = ["ReplacedParameter", "refuse_replaced", "refuse_shared", "replace", "watched"]

_REMEDY = (
    "take it from model.parameters() anew, after MuonZero; a module reads it as an attribute of the module that has it"
)


class ReplacedParameter(nn.Parameter):
    """A parameter as it was before it was sharded: its values can be read, and no gradient comes to it.

    Attributes:
        replaced: its name, and whom to tell that it was read.
    """

    replaced: tuple[str, set[str]]

    @property
    def grad(self) -> Tensor | None:
        """Of what takes its place.

        Raises:
            UnsupportedModelError: always; who asks would find nothing, and clip or step nothing.
        """
        if being_compiled():
            return None
        raise _stale(self.replaced[0], "its gradient is looked for")

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        raise _stale(self.replaced[0], "a gradient is put on it")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # of a frame, the inputs are looked at
            with _C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if isinstance(first, cls) and name.endswith("_") and not name.endswith("__") and name != "requires_grad_":
            raise _stale(first.replaced[0], f"is written to ({name})")
        with _C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        held = [value for value in tree_leaves((args, kwargs)) if isinstance(value, cls)]
        made = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if any(value is not source for value in made for source in held):
            _tell(held)
        return result


def _tell(held: Sequence[ReplacedParameter]) -> None:
    for param in held:
        name, told = param.replaced
        if not told:  # one of a list tells of all
            told.add(name)
            warn_user(
                f"{name}: is read as it was before MuonZero sharded it, and stays as it is while the model trains; "
                f"{_REMEDY}"
            )


def _stale(name: str, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name}: {what}, as it was before MuonZero sharded it, which nothing trains; {_REMEDY}"
    )


def replace(replaced: Mapping[str, nn.Parameter]) -> None:
    """Have these say so wherever something still holds them.

    Args:
        replaced: by name, parameters in whose place the model has others.
    """
    told: set[str] = set()
    for name, param in replaced.items():
        param.grad = None

        def refuse(_: Tensor, name: str = name) -> None:
            raise _stale(name, "a gradient comes to it")

        if param.requires_grad:
            param.register_hook(refuse)
        if not isinstance(param, DTensor):  # whose class has another layout
            param.__class__ = ReplacedParameter
            param.replaced = name, told  # type: ignore[attr-defined]


def refuse_replaced(inputs: Sequence[Any]) -> None:
    """Raise for a frame that reads a parameter as it was before it was sharded.

    Args:
        inputs: of the frame.
    Raises:
        UnsupportedModelError: naming it.
    """
    for value in inputs:
        if isinstance(value, ReplacedParameter):
            raise _stale(value.replaced[0], "is read by a compiled frame")


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
