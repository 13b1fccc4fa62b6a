"""Hooks around a stack of blocks: positions are cut in front of the first, and joined behind the last.

Where positions stay cut, the modules between the last block and the head are the tail. GPT-2 views the hidden states
behind its last norm in the shape of the ids: with a part of the positions that makes other rows, or an error. Positions
are joined in front of such a tail, and cut again behind it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compile_muon.errors import config_error
from compile_muon.model.fused import copy_without_hooks
from compile_muon.passes.dynamo.attend import SEQUENCE
from compile_muon.passes.sequence.exchange_heads import attention, join
from compile_muon.passes.sequence.place import Place
from compile_muon.passes.torch_private import without_numbers
from compile_muon.sequence.batch import FIELD, Running

#: keyword arguments that blocks hand on to attention: the number of all positions, if padded, and all position ids
LENGTH, POSITIONS = "_sequence_length", "_sequence_position_ids"
#: name prefixes of blocks' arguments that have a row per position, along dim -2
_PER_POSITION = ("position_embeddings", "per_layer_input", "cos", "sin", "freqs", "rotary")


def _own_rows(name: str, value: Any, whole: int, place: Place) -> Any:
    if isinstance(value, Tensor):
        if value.shape[-2] != whole:
            raise config_error(FIELD, name, f"has {value.shape[-2]} positions of {whole}", "leave it out")
        return place.cut(value, -2)
    if isinstance(value, (tuple, list)):
        return type(value)(_own_rows(name, each, whole, place) for each in value)
    if isinstance(value, dict):
        return {key: _own_rows(f"{name}.{key}", each, whole, place) for key, each in value.items()}
    return value


def enter(running: Running, block: nn.Module, *, first: bool, passes_on: bool) -> Callable[..., Any]:
    """Return a pre-hook of `block` that cuts its arguments, and the hidden states of the first block. `first`: whether
    the block is the first of its stack. `passes_on`: whether blocks hand keyword arguments on to attention."""
    place = running.place
    names = list(inspect.signature(inspect.unwrap(type(block).forward)).parameters)[1:]
    per_position = {number: name for number, name in enumerate(names) if name.startswith(_PER_POSITION)}

    def hook(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = args[0] if args else kwargs["hidden_states"]
        if first and passes_on:
            has_cache = not torch.is_grad_enabled() and kwargs.get("past_key_values") is not None
            running.reads = has_cache and running.batch.wanted != "cut"
        if running.alone:
            return args, kwargs
        if first:
            whole = hidden.shape[1]
            part = place.cut(hidden)
            if running.batch.doubt is not None:
                part = part + running.batch.doubt.to(part.dtype)
            args, kwargs = ((part, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": part})
            if passes_on:  # Transformers' layers run hooks outside of checkpointed regions; inside, none may set state
                running.whole = whole
        else:
            whole = running.whole if passes_on else hidden.shape[1] * place.size
        args = tuple(
            _own_rows(per_position[number], value, whole, place) if number in per_position else value
            for number, value in enumerate(args)
        )
        new_kwargs = dict(kwargs)
        for name, value in kwargs.items():
            if name.startswith(_PER_POSITION):
                new_kwargs[name] = _own_rows(name, value, whole, place)
            elif name == "position_ids" and isinstance(value, Tensor) and passes_on:
                # Blocks scale queries by them; attention finds packed sequences in them.
                new_kwargs[name], new_kwargs[POSITIONS] = place.cut(value, -1), value
            elif name.startswith("past_key_value"):
                new_kwargs[name] = None
            elif name == "use_cache":
                new_kwargs[name] = False
        if place.local(whole) * place.size != whole:
            if not passes_on:
                problem = f"does not divide {whole} positions, and {type(block).__name__} hands nothing on to attention"
                multiple = place.local(1) * place.size
                raise config_error(f"{FIELD}.size", place.size, problem, f"pad to a multiple of {multiple}")
            new_kwargs[LENGTH] = whole
        return args, new_kwargs

    return hook


def leave(running: Running, *, passes_on: bool) -> Callable[..., Any]:
    """Return a hook of the last block that joins positions where the model needs all."""
    place = running.place

    def hook(block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if running.alone:
            return output
        part = output if isinstance(output, Tensor) else output[0]
        running.shape = tuple(part.shape[:2])
        if not (running.batch.joins or running.tail):
            return output
        whole = join(part, place, running.whole if passes_on else part.shape[1] * place.size)
        running.shape = tuple(whole.shape[:2])
        return whole if isinstance(output, Tensor) else type(output)((whole, *output[1:]))

    return hook


class _Calls(TorchFunctionMode):
    """Redirects eager calls of ``scaled_dot_product_attention`` in blocks to :func:`attention`."""

    def __init__(self, place: Place) -> None:
        super().__init__()
        self._place = place

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            with torch._C.DisableTorchFunction():
                return attention(*args, **kwargs, place=self._place)
        return func(*args, **kwargs)


def _is_mask(hidden: Any, place: Place, value: Any) -> bool:
    """Return whether `value` is a mask [..., S, S] over all positions."""
    whole = hidden.shape[1] * place.size if isinstance(hidden, Tensor) else 0
    return isinstance(value, Tensor) and value.ndim > 1 and tuple(value.shape[-2:]) == (whole, whole)


@torch.compiler.disable(reason="sequence_parallel: a mask of all positions does not fit the calls that Dynamo looks at")
def _outside_of_graphs(forward: Callable[..., Any], place: Place, args: Any, kwargs: Any) -> Any:
    with _Calls(place):
        return forward(*args, **kwargs)


def intercepting(cls: type) -> type:
    """Return a subclass of `cls` whose calls of ``scaled_dot_product_attention`` see all positions."""
    base: Any = cls

    class Block(base):
        _sequence_running: Running

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            running = self._sequence_running
            place = running.place
            if running.alone:
                return super().forward(*args, **kwargs)
            if torch.compiler.is_compiling() and any(map(partial(_is_mask, args[0], place), (*args, *kwargs.values()))):
                return _outside_of_graphs(super().forward, place, args, kwargs)
            if torch.compiler.is_compiling():  # the backend changes the calls in Dynamo's graph
                with torch.fx.traceback.annotate({SEQUENCE: place.fields}):
                    return super().forward(*args, **kwargs)
            with _Calls(place):
                return super().forward(*args, **kwargs)

    Block.__name__, Block.__qualname__, Block.__module__ = cls.__name__, cls.__qualname__, cls.__module__
    return Block


# ------------------------------------------------------------------------------------------------------------- the tail


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
