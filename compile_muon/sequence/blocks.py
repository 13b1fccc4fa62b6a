"""Hooks at the ends of a stack of blocks: positions are cut in front of the first, and joined behind the last."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compile_muon.errors import config_error
from compile_muon.passes.dynamo.attend import SEQUENCE
from compile_muon.passes.sequence.exchange_heads import attention, join
from compile_muon.passes.sequence.place import Place
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
            running.look_for_cache(kwargs)
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
