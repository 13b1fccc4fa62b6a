"""Which rows of a fused projection reach what, by the arithmetic of the module that has it.

The module, or its model, runs with a stand-in for the projection whose output is known, up to the attention: gradients
tell which of its rows reach queries, keys and values. Weights are one number each, so nothing large is computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["halves_meet", "rows_of"]

_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
_LENGTH = 2


class _Reached(Exception):
    """What was looked for; nothing behind it is computed."""

    def __init__(self, *found: Tensor) -> None:
        self.found = found


class _Attention(TorchFunctionMode):
    """Raises queries, keys and values where they meet. Nothing but what the stand-in made requires gradients."""

    def __init__(self) -> None:
        super().__init__()
        self._both: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if func is F.scaled_dot_product_attention and all(x.requires_grad for x in operands[:3]):
            raise _Reached(*operands[:3])
        if getattr(func, "__name__", "") in _PRODUCTS and sum(x.requires_grad for x in operands) > 1:
            if self._both:
                raise _Reached(*self._both, operands[-1])
            self._both = [x for x in operands if x.requires_grad]
        return func(*args, **kwargs)


class _Product(TorchFunctionMode):
    """Raises what the next linear layer is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[0].requires_grad:
            raise _Reached(args[0])
        return func(*args, **(kwargs or {}))


class _StandIn(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        numbers = torch.rand(1, _LENGTH, rows, generator=torch.Generator().manual_seed(0), device="cpu") + 0.5
        self.made = numbers.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        return self.made.view(*x.shape[:-1], -1)


def _copied(module: nn.Module) -> Any:
    """A copy in float32 whose weights take no memory, without hooks."""
    one = torch.ones((), device="cpu")
    memo: dict[int, Any] = {id(x): nn.Parameter(one.expand(x.shape), requires_grad=False) for x in module.parameters()}
    for x in module.buffers():  # tables of rotations lie on the device
        memo[id(x)] = torch.ones(x.shape, dtype=x.dtype, device="cpu") if x.is_meta else x.detach().cpu().clone()
    copied = copy.deepcopy(module, memo).eval()
    for each in copied.modules():
        each._forward_hooks.clear()
        each._forward_pre_hooks.clear()
    config: Any = getattr(copied, "config", None)
    if hasattr(config, "_attn_implementation_internal") and "flash" in str(config._attn_implementation_internal):
        config._attn_implementation_internal = "eager"  # which runs on a CPU, and has the same parts
    return copied


def _reached(
    model: nn.Module, path: str, child: str, rows: int, mode: Callable[[], Any]
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """The stand-in's output, and what ``mode`` raises; None where neither the module nor its model gets there."""
    stand_in = _StandIn(rows)

    def module_alone() -> Iterator[Callable[[], Any]]:
        module = _copied(model.get_submodule(path))
        width = getattr(module, child).weight.shape
        wide = width[0] if width[1] == rows and type(getattr(module, child)).__name__ == "Conv1D" else width[1]
        setattr(module, child, stand_in)
        yield lambda: module(torch.ones(1, _LENGTH, wide, device="cpu"))

    def in_model() -> Iterator[Callable[[], Any]]:
        whole = _copied(model)
        setattr(whole.get_submodule(path), child, stand_in)
        ids = torch.zeros(1, _LENGTH, dtype=torch.long, device="cpu")
        yield lambda: whole(input_ids=ids)
        yield lambda: whole(ids)

    for attempts in (module_alone, in_model):
        try:
            for attempt in attempts():
                try:
                    with torch.enable_grad(), mode():
                        attempt()
                except _Reached as reached:
                    return stand_in.made, reached.found
                except Exception:  # noqa: S112 - whatever modules of others raise where they are called otherwise
                    continue
        except Exception:  # noqa: S112 - nor can all of them be copied
            continue
    return None


def _sources(made: Tensor, found: Tensor) -> set[int]:
    """Rows of the stand-in's output that ``found`` depends on."""
    if not found.requires_grad:
        return set()
    weights = torch.rand(found.shape, generator=torch.Generator().manual_seed(1), device="cpu") + 0.5
    (grad,) = torch.autograd.grad((found * weights).sum(), made, retain_graph=True, allow_unused=True)
    return set() if grad is None else set(grad.abs().sum((0, 1)).nonzero().flatten().tolist())


def rows_of(model: nn.Module, path: str, child: str, rows: int) -> list[set[int]] | None:
    """Rows of the projection ``child`` of the module at ``path`` that reach queries, keys and values.

    Returns:
        None where the module's attention is not reached, by calling it with hidden states or the model with ids.
    """
    reached = _reached(model, path, child, rows, _Attention)
    return None if reached is None else [_sources(reached[0], each) for each in reached[1]]


def halves_meet(model: nn.Module, path: str, child: str, rows: int) -> bool:
    """Whether element i of what the next layer is given comes of rows i and i + rows / 2 (a gated MLP); tried at some.

    Args:
        rows: that ``child`` has.
    """
    reached = _reached(model, path, child, rows, _Product)
    half = rows // 2
    if reached is None or reached[1][0].shape[-1] != half:
        return False
    made, (found,) = reached
    return all(_sources(made, found[..., i : i + 1]) == {i, i + half} for i in {0, half // 2, half - 1})
