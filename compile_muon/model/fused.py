"""Rows of a fused projection that reach queries, keys and values, found by running the module that has it.

The module, or its model, runs up to the attention with a stand-in for the projection whose output is known: gradients
tell which of its rows reach queries, keys and values. Other weights are one number each, expanded to their shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
_LENGTH = 2  # tokens of the sequence that the module is run on


class _Reached(Exception):
    """Ends the run with the tensors that were looked for; nothing behind them is computed."""

    def __init__(self, *found: Tensor) -> None:
        self.found = found


class _Attention(TorchFunctionMode):
    """Raises queries, keys and values where they meet; only tensors made from the stand-in require gradients."""

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
    """Raises the input of the next linear layer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[0].requires_grad:
            raise _Reached(args[0])
        return func(*args, **(kwargs or {}))


class _StandIn(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        output = torch.rand(1, _LENGTH, rows, generator=torch.Generator().manual_seed(0), device="cpu") + 0.5
        self.made = output.requires_grad_()

    def forward(self, x: Tensor) -> Tensor:
        return self.made.view(*x.shape[:-1], -1)


def copy_without_hooks(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy for a trial run: in evaluation mode, without hooks, with the tensors of ``memo``, by id."""
    copied = copy.deepcopy(module, memo).eval()
    for inner in copied.modules():
        inner._forward_hooks.clear()
        inner._forward_pre_hooks.clear()
    return copied


def _copied(module: nn.Module) -> Any:
    """Return a copy of a module in float32, without hooks, whose weights take no memory."""
    scalar = torch.ones((), device="cpu")
    memo: dict[int, Any] = {
        id(x): nn.Parameter(scalar.expand(x.shape), requires_grad=False) for x in module.parameters()
    }
    for x in module.buffers():  # rotary tables may be on the GPU, and the copy runs on the CPU
        memo[id(x)] = torch.ones(x.shape, dtype=x.dtype, device="cpu") if x.is_meta else x.detach().cpu().clone()
    copied = copy_without_hooks(module, memo)
    config: Any = getattr(copied, "config", None)
    if hasattr(config, "_attn_implementation_internal") and "flash" in str(config._attn_implementation_internal):
        config._attn_implementation_internal = "eager"  # flash attention has no CPU kernel; the parts are the same
    return copied


def _reached(
    model: nn.Module, path: str, child: str, rows: int, mode: Callable[[], Any]
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Return the stand-in's output and the tensors ``mode`` raises; None if neither module nor model gets there."""
    stand_in = _StandIn(rows)

    def module_alone() -> Iterator[Callable[[], Any]]:
        module = _copied(model.get_submodule(path))
        shape = getattr(module, child).weight.shape
        in_features = shape[0] if shape[1] == rows and type(getattr(module, child)).__name__ == "Conv1D" else shape[1]
        setattr(module, child, stand_in)
        yield lambda: module(torch.ones(1, _LENGTH, in_features, device="cpu"))

    def in_model() -> Iterator[Callable[[], Any]]:
        model_copy = _copied(model)
        setattr(model_copy.get_submodule(path), child, stand_in)
        ids = torch.zeros(1, _LENGTH, dtype=torch.long, device="cpu")
        yield lambda: model_copy(input_ids=ids)
        yield lambda: model_copy(ids)

    for attempts in (module_alone, in_model):
        try:
            for attempt in attempts():
                try:
                    with torch.enable_grad(), mode():
                        attempt()
                except _Reached as reached:
                    return stand_in.made, reached.found
                except Exception:  # noqa: S112 - a user's module may raise anything when called with other arguments than it expects
                    continue
        except Exception:  # noqa: S112 - some modules cannot be copied
            continue
    return None


def _sources(output: Tensor, value: Tensor) -> set[int]:
    """Return the rows of the stand-in's ``output`` that ``value`` depends on."""
    if not value.requires_grad:
        return set()
    weights = torch.rand(value.shape, generator=torch.Generator().manual_seed(1), device="cpu") + 0.5
    (grad,) = torch.autograd.grad((value * weights).sum(), output, retain_graph=True, allow_unused=True)
    return set() if grad is None else set(grad.abs().sum((0, 1)).nonzero().flatten().tolist())


def rows_of(model: nn.Module, path: str, child: str, rows: int) -> list[set[int]] | None:
    """Return the rows of projection ``child`` of the module at ``path`` that reach queries, keys and values. None where
    neither the module on hidden states nor the model on ids reaches attention. ``child`` has ``rows`` rows."""
    reached = _reached(model, path, child, rows, _Attention)
    return None if reached is None else [_sources(reached[0], tensor) for tensor in reached[1]]


def halves_meet(model: nn.Module, path: str, child: str, rows: int) -> bool:
    """Return whether element i of the next layer's input depends on rows i and i + rows / 2 alone (a gated MLP)."""
    reached = _reached(model, path, child, rows, _Product)
    half = rows // 2
    if reached is None or reached[1][0].shape[-1] != half:
        return False
    output, (layer_input,) = reached
    # Samples: the first, the middle and the last element.
    return all(_sources(output, layer_input[..., i : i + 1]) == {i, i + half} for i in {0, half // 2, half - 1})
