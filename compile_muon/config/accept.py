"""Checks of single values: each returns the value in canonical form, or raises a ConfigError that names the field."""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from compile_muon.errors import ConfigError, config_error, shown
from compile_muon.passes.ranges import nvtx_installed

_LARGEST = 2**63 - 1  # torch cannot hold larger integers
_NAME_WIDTH = 80  # longer than any name: comparing takes the product of both lengths

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"} | {
    name: str(getattr(torch, name)).removeprefix("torch.") for name in ("half", "float", "double")
}


#: paths of a config at which ``compile_muon.integrations.transformers.MuonTrainer`` fills in "auto"
FILLED = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    *(f"optimizer.params.{key}" for key in ("lr", "weight_decay", "betas", "eps")),
    *(f"scheduler.params.{key}" for key in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")),
)

Patterns = Callable[[str, torch.nn.Parameter], Any] | tuple[str, ...]
C = TypeVar("C", bound=Callable[..., Any])
_TAKEN: dict[Callable[..., Any], str | Callable[..., str]] = {}


def takes(values: str | Callable[..., str]) -> Callable[[C], C]:
    """Decorate a check with the values it accepts, in words, or with a function from its limits to these words."""

    def described(check: C) -> C:
        _TAKEN[check] = values
        return check

    return described


def taken(check: Callable[..., Any], **limits: Any) -> str:
    """Return in words which values a check accepts.

    >>> taken(integer, low=0, high=3)
    'an integer from 0 to 3'
    """
    values = _TAKEN[check]
    return values if isinstance(values, str) else values(**limits)


def _interval(positive: bool, below: float, most: float) -> str:
    return f"{'(' if positive else '['}0, {f'{most:g}]' if most < below else f'{below:g})'}"


def _numbers(positive: bool = False, below: float = math.inf, most: float = math.inf) -> str:
    if below == most:
        return f"a number {'above' if positive else 'from'} 0"
    return f"a number in {_interval(positive, below, most)}"


def integers(low: int, high: int | None = None) -> str:
    """Return in words the values of :func:`integer`."""
    return f"an integer from {low}" if high is None else f"an integer from {low} to {high}"


def _choices(allowed: Collection[str]) -> str:
    return ", ".join(f'"{choice}"' for choice in allowed)


def _refuse_auto(field: str, value: object, remedy: str) -> None:
    """Refuse "auto", which DeepSpeed configs written for Transformers contain."""
    if isinstance(value, str) and value == "auto":
        if field in FILLED:
            remedy += ", or use MuonTrainer, which fills it in"
        raise config_error(field, value, "is filled in by the Trainer of Hugging Face Transformers, not here", remedy)


def of_type(field: str, value: Any, kind: type, expected: str, remedy: str) -> Any:
    """Accept an instance of `kind`; a boolean counts as no number, and a string as no sequence."""
    alien: Any = str if kind is Sequence else () if kind is bool else bool
    if not isinstance(value, kind) or isinstance(value, alien):
        raise config_error(field, value, f"must be {expected}, not {type(value).__name__}", remedy)
    return value


@takes(_numbers)
def real(
    field: str, value: object, *, positive: bool = False, below: float = math.inf, most: float = math.inf
) -> float:
    """Accept a finite float from 0, or above 0 if `positive`, below `below` and at most `most`."""
    _refuse_auto(field, value, "write the number")
    try:
        number = float(of_type(field, value, numbers.Real, "a number", "write a plain number"))
    except OverflowError:
        number = math.inf
    at_least = number > 0 if positive else number >= 0
    if not (at_least and number < below and number <= most):  # NaN lies outside too
        interval = _interval(positive, below, most)
        raise config_error(field, value, f"lies outside {interval}", f"choose a finite number in {interval}")
    return number


@takes("a number from 0, or a tensor of one")
def rate(field: str, value: object) -> float | Tensor:
    """Accept a float as :func:`real` does, or a tensor of one element.

    The tensor itself is kept, as in torch.optim, so that in-place writes change the rate.
    """
    if not isinstance(value, Tensor):
        return real(field, value)
    if value.dim() or value.dtype.is_complex or value.dtype == torch.bool or value.is_meta:
        kind = f"a tensor of shape {list(value.shape)} and dtype {value.dtype}"
        raise config_error(field, kind, "is no number", "give a tensor of no dimension, or a plain number")
    real(field, value.item())
    return value


def two(field: str, value: object, remedy: str) -> Sequence[Any]:
    """Accept a sequence of two values of any kind."""
    values: Sequence[Any] = of_type(field, value, Sequence, "a pair", remedy)
    if len(values) != 2:
        raise config_error(field, value, "is not a pair", remedy)
    return values


@takes("two numbers in [0, 1)")
def pair(field: str, value: object) -> tuple[float, float]:
    """Accept two floats in [0, 1)."""
    _refuse_auto(field, value, "write the two numbers")
    try:
        first, second = (real(field, number, below=1.0) for number in two(field, value, "use two numbers in [0, 1)"))
    except ConfigError as error:
        raise config_error(field, value, f"holds {error.shown}, which {error.problem}", error.remedy) from None
    return first, second


@takes(integers)
def integer(field: str, value: object, low: int, high: int | None = None) -> int:
    _refuse_auto(field, value, "write the number")
    span = integers(low, high)
    number = int(of_type(field, value, numbers.Integral, "an integer", f"use {span}"))
    if not low <= number <= (_LARGEST if high is None else high):
        raise config_error(field, value, "is out of range", f"use {span}")
    return number


@takes("a boolean")
def boolean(field: str, value: object) -> bool:
    _refuse_auto(field, value, "write true or false")
    return bool(of_type(field, value, bool, "true or false", "use a boolean"))


@takes("a boolean")
def ranges(field: str, value: object) -> bool:
    """Accept whether to make ranges; True is an error if a tool listens for NVTX and the package nvtx is missing."""
    enabled = boolean(field, value)
    if enabled and os.environ.get("NVTX_INJECTION64_PATH") and not nvtx_installed():
        problem = "is for the tool that NVTX_INJECTION64_PATH names, but the package nvtx is not installed"
        raise config_error(field, value, problem, "pip install '.[profile]' in the checkout, or run without the tool")
    return enabled


def missing(field: str) -> ConfigError:
    """Return the error about a required setting that is absent."""
    return config_error(field, None, "is missing", "write it")


def key_name(key: object) -> str:
    """Return a key as paths show it; mappings of Python and YAML may have keys that are no strings."""
    return key if isinstance(key, str) else shown(key)


def known(
    field: str,
    value: object,
    name: object,
    names: Collection[str],
    kind: str,
    also: Collection[str] = (),
    remedies: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise about `value` at `field` unless `name` is one of `names`; `kind` says of what: "a known key".

    The remedy is that of `remedies`, the nearest name, or a list of all. `also` are further names that may be the
    nearest, but are not listed.
    """
    if isinstance(name, str) and name in names:
        return
    near = nearest(name, (*names, *also))
    remedy = f"did you mean {near!r}?" if near else f"use one of {', '.join(names)}"
    remedy = remedies.get(name, remedy) if isinstance(name, str) else remedy
    raise config_error(field, value, f"is not {kind}", remedy)


def nearest(name: object, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the one of `names` that `name` may be a slip of; None if there is none, or `name` is longer than any."""
    if not isinstance(name, str) or len(name) > _NAME_WIDTH:
        return None
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=cutoff)), None)


@takes(_choices)
def choice(field: str, value: object, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise config_error(field, value, "is not a known choice", f"use one of {', '.join(map(repr, allowed))}")
    return value


@takes("a path")
def folder(field: str, value: object) -> Path:
    """Accept a path, which need not exist yet."""
    path = os.fsdecode(value) if isinstance(value, (str, os.PathLike)) else ""
    if not path or "\0" in path:
        raise config_error(field, value, "is no path", "give one, or None")
    return Path(path)


@takes(lambda kind: f"fields of {kind.__name__}")
def instance(field: str, value: object, kind: type) -> Any:
    return of_type(field, value, kind, f"a {kind.__name__}", f"build it with {kind.__name__}(...)")


def pairs(field: str, value: object, example: str, expected: str) -> Mapping[Any, Any]:
    """Accept a mapping, or the tuple of its items, which is how frozen dataclasses keep a mapping."""
    if isinstance(value, tuple) and all(isinstance(item, tuple) and len(item) == 2 for item in value):
        value = {key: entry for key, entry in value if isinstance(key, Hashable)}
    return mapping(field, value, example, expected)


def mapping(field: str, value: object, example: str = "{...}", expected: str = "an object") -> Mapping[Any, Any]:
    return cast(Mapping[Any, Any], of_type(field, value, Mapping, expected, f"write {example}"))


@takes(lambda extra=(): _choices([*extra, *_DTYPES]))
def dtype_name(field: str, value: object, extra: Sequence[str] = ()) -> str:
    """Return the canonical name ("bfloat16") of a torch.dtype or of a usual name of it."""
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    if isinstance(name, str):
        name = _SHORT_DTYPES.get(name.removeprefix("torch."), name.removeprefix("torch."))
    allowed = (*extra, *_DTYPES)
    return name if name in allowed else choice(field, value, allowed)


@takes(_choices(_DTYPES))
def dtype(field: str, value: object) -> torch.dtype:
    return _DTYPES[dtype_name(field, value)]


@takes("name patterns, or a predicate")
def patterns(field: str, value: object) -> Patterns:
    if callable(value):
        return value
    remedy = 'write ["pattern", ...] or a predicate f(name, param), or leave it out to let compile_muon choose'
    return strings(field, value, "name patterns", remedy)


def strings(field: str, value: object, kind: str, remedy: str) -> tuple[str, ...]:
    """Accept a list of strings, none of them empty, and at least one."""
    listed = tuple(of_type(field, value, Sequence, f"a list of {kind}", remedy))
    if not listed or not all(isinstance(entry, str) and entry for entry in listed):
        raise config_error(field, value, f"is no list of {kind}", remedy)
    return listed
