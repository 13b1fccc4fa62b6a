"""What stands behind the last block of a stack whose positions stay cut: whether it takes a part for the whole.

GPT-2 views its hidden states in the shape of the ids behind its last norm: of a part of the positions that makes other
rows, or an error. Positions are joined in front of such a tail, and cut again behind it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from compile_muon.errors import config_error
from compile_muon.passes.torch_private import without_numbers
from compile_muon.sequence.running import FIELD, Running

__all__ = ["behind_tail", "takes_parts"]

#: of the batch that is tried: an odd number of rows, so that views of other lengths cannot fit
_ROWS, _LENGTH = 3, 4


def takes_parts(model: nn.Module, path: str) -> bool:
    """Whether logits of half the positions come of half the positions behind the last block, tried without numbers.

    Nothing of ``model`` is changed, and nothing computed. True where a copy of it does not run so: what comes of a
    batch is checked all the same.

    Args:
        model: with a causal loss.
        path: in it, of the ``ModuleList`` of blocks.
    """
    mode = without_numbers()
    try:
        tried = _copied(model, path, mode)
        with mode:
            whole = _logits(tried)
    except Exception:  # whatever a model of others raises where there are no numbers
        return True
    blocks: Any = tried.get_submodule(path)
    blocks[-1].register_forward_hook(_first_half)
    try:
        with mode:
            part = _logits(tried)
    except Exception:
        return False
    return part.shape == (_ROWS, _LENGTH // 2, *whole.shape[2:])


def _copied(model: nn.Module, path: str, mode: AbstractContextManager[Any]) -> nn.Module:
    """A copy without numbers, with one block and without hooks."""

    def emptied(x: Tensor) -> Tensor:
        # Grouped products of experts are known without numbers in this dtype only.
        empty = torch.empty(x.shape, dtype=torch.bfloat16 if x.is_floating_point() else x.dtype, device="cpu")
        return nn.Parameter(empty, requires_grad=False) if isinstance(x, nn.Parameter) else empty

    with mode:
        memo: dict[int, Any] = {id(x): emptied(x) for x in (*model.parameters(), *model.buffers())}
    tried = copy.deepcopy(model, memo).eval()
    for module in tried.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    owner, _, name = path.rpartition(".")
    blocks: Any = tried.get_submodule(path)
    tried.get_submodule(owner)._modules[name] = blocks[:1]
    return tried


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
    """A hook behind the module that has the blocks: this rank's positions, where those of all went through its tail.

    Raises:
        ConfigError: its output has other rows or positions than its last block.
    """
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
        own = place.cut(hidden)
        if named:
            output["last_hidden_state"] = own
            return output
        return own if isinstance(output, Tensor) else type(output)((own, *output[1:]))

    return hook
