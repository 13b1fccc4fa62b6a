"""The tail of a model whose positions stay cut: the modules between its last block and its head.

GPT-2 views the hidden states behind its last norm in the shape of the ids: with a part of the positions that makes
other rows, or an error. Positions are joined in front of such a tail, and cut again behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from compile_muon.errors import config_error
from compile_muon.model.fused import copy_without_hooks
from compile_muon.passes.torch_private import without_numbers
from compile_muon.sequence.batch import FIELD, Running

#: shape of the trial batch: with an odd number of rows, a view in another length cannot fit
_ROWS, _LENGTH = 3, 4


def takes_parts(model: nn.Module, path: str) -> bool:
    """Return whether the tail turns hidden states of half the positions into logits of half the positions.

    `model` has a causal loss, `path` leads to its ``ModuleList`` of blocks. The trial runs a copy on fake tensors. True
    if the copy does not run at all: :func:`behind_tail` checks the shapes of real batches.
    """
    mode = without_numbers()
    try:
        trial = _copied(model, path, mode)
        with mode:
            whole = _logits(trial)
    except Exception:  # foreign code may raise anything on fake tensors
        return True
    blocks: Any = trial.get_submodule(path)
    blocks[-1].register_forward_hook(_first_half)
    try:
        with mode:
            part = _logits(trial)
    except Exception:
        return False
    return part.shape == (_ROWS, _LENGTH // 2, *whole.shape[2:])


def _copied(model: nn.Module, path: str, mode: AbstractContextManager[Any]) -> nn.Module:
    """Return a copy of `model` on fake tensors, with one block and without hooks."""

    def emptied(x: Tensor) -> Tensor:
        # Experts' grouped products accept fake tensors in this dtype only.
        empty = torch.empty(x.shape, dtype=torch.bfloat16 if x.is_floating_point() else x.dtype, device="cpu")
        return nn.Parameter(empty, requires_grad=False) if isinstance(x, nn.Parameter) else empty

    with mode:
        memo: dict[int, Any] = {id(x): emptied(x) for x in (*model.parameters(), *model.buffers())}
    trial = copy_without_hooks(model, memo)
    owner, _, name = path.rpartition(".")
    blocks: Any = trial.get_submodule(path)
    trial.get_submodule(owner)._modules[name] = blocks[:1]
    return trial


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    ids = torch.zeros(_ROWS, _LENGTH, dtype=torch.long, device="cpu")
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _first_half(block: nn.Module, args: Any, output: Any) -> Any:
    part = output if isinstance(output, Tensor) else output[0]
    half = part[:, : _LENGTH // 2]
    return half if isinstance(output, Tensor) else type(output)((half, *output[1:]))


def behind_tail(running: Running) -> Callable[..., Any]:
    """Return a forward hook of the blocks' owner that cuts its output, where positions are joined for its tail. The
    hook raises a ConfigError if the output has other rows or positions than that of the last block."""
    place = running.place

    def hook(owner: nn.Module, args: Any, output: Any) -> Any:
        if running.alone or running.batch.joins or not running.shape:
            return output
        named = isinstance(output, dict)
        hidden = output["last_hidden_state"] if named else output if isinstance(output, Tensor) else output[0]
        if tuple(hidden.shape[:2]) != running.shape:
            problem = f"rearranges what its last block returns, {list(running.shape)} rows and positions"
            raise config_error(
                FIELD, list(hidden.shape), problem + f", in {type(owner).__name__}", f"set {FIELD}.joined"
            )
        if not running.tail:
            return output
        part = place.cut(hidden)
        if named:
            output["last_hidden_state"] = part
            return output
        return part if isinstance(output, Tensor) else type(output)((part, *output[1:]))

    return hook
