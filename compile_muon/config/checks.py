"""Checks of single values: each returns its value in canonical form, or raises a ConfigError naming the field."""

from __future__ import annotations

import difflib
import math
import numbers
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compile_muon.errors import ConfigError, config_error
from compile_muon.passes.ranges import nvtx_installed

__all__ = [
    "FILLED",
    "check_boolean",
    "check_choice",
    "check_dtype",
    "check_dtype_name",
    "check_folder",
    "check_instance",
    "check_integer",
    "check_mapping",
    "check_pair",
    "check_patterns",
    "check_ranges",
    "check_real",
    "check_share",
    "unknown_name",
]

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float64")}
_SHORT_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"} | {
    name: str(getattr(torch, name)).removeprefix("torch.") for name in ("half", "float", "double")
}


#: Paths of a config at which ``compile_muon.integrations.transformers.MuonTrainer`` takes "auto".
FILLED = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    *(f"optimizer.params.{key}" for key in ("lr", "weight_decay", "betas", "eps")),
    *(f"scheduler.params.{key}" for key in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")),
)


def _refuse_auto(field: str, value: object, remedy: str) -> None:
    """Common in DeepSpeed configs written for Transformers."""
    if isinstance(value, str) and value == "auto":
        if field in FILLED:
            remedy += ", or use MuonTrainer, which fills it in"
        raise config_error(field, value, "is filled in by the Trainer of Hugging Face Transformers, not here", remedy)


def check_real(field: str, value: object, *, positive: bool = False, below: float = math.inf) -> float:
    """A finite float in [0, below), or in (0, below) when ``positive``."""
    _refuse_auto(field, value, "write the number")
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise config_error(field, value, f"must be a number, not {type(value).__name__}", "write a plain number")
    number = float(value)
    if not math.isfinite(number):
        raise config_error(field, value, "is not finite", "give a finite number")
    if number < 0 or (positive and number == 0) or number >= below:
        interval = f"{'(' if positive else '['}0, {below:g})"
        raise config_error(field, value, f"lies outside {interval}", f"choose a number in {interval}")
    return number


def check_share(field: str, value: object) -> float:
    """A float in (0, 1]."""
    share = check_real(field, value, positive=True)
    if share > 1:
        raise config_error(field, value, "is more than all of it", "give a share, up to 1.0")
    return share


def check_pair(field: str, value: object) -> tuple[float, float]:
    """Two floats in [0, 1)."""
    _refuse_auto(field, value, "write the two numbers")
    if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
        raise config_error(field, value, "must be a pair", "use two numbers in [0, 1)")
    try:
        first, second = (check_real(field, number, below=1.0) for number in value)
    except ConfigError as error:
        raise config_error(field, value, f"holds {error.shown}, which {error.problem}", error.remedy) from None
    return first, second


def check_integer(field: str, value: object, low: int, high: int | None = None) -> int:
    _refuse_auto(field, value, "write the number")
    span = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise config_error(field, value, f"must be an integer, not {type(value).__name__}", f"use {span}")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise config_error(field, value, "is out of range", f"use {span}")
    return number


def check_boolean(field: str, value: object) -> bool:
    _refuse_auto(field, value, "write true or false")
    if not isinstance(value, bool):
        raise config_error(field, value, f"must be true or false, not {type(value).__name__}", "use a boolean")
    return value


def check_ranges(field: str, value: object) -> bool:
    """Whether to make ranges: refused where a tool listens for NVTX, which would see none."""
    made = check_boolean(field, value)
    if made and os.environ.get("NVTX_INJECTION64_PATH") and not nvtx_installed():
        problem = "is for the tool that NVTX_INJECTION64_PATH names, but the package nvtx is not installed"
        raise config_error(field, value, problem, "pip install 'compile_muon[profile]', or run without the tool")
    return made


def unknown_name(field: str, value: object, name: str, known: Collection[str], problem: str) -> ConfigError:
    """The error about a setting called ``name``, with the nearest of the known names as remedy, or else all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(known)}"
    return config_error(field, value, problem, remedy)


def check_choice(field: str, value: object, allowed: Collection[str]) -> str:
    if not isinstance(value, str) or value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1) if isinstance(value, str) else []
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise config_error(field, value, "is not a known choice", f"{hint}use one of {', '.join(map(repr, allowed))}")
    return value


def check_folder(field: str, value: object) -> Path:
    """A path, which need not exist yet."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise config_error(field, value, "is not a folder", "give a path, or None")
    return Path(os.fsdecode(value))


def check_instance(field: str, value: object, kind: type) -> Any:
    if not isinstance(value, kind):
        raise config_error(field, value, f"must be a {kind.__name__}", f"build it with {kind.__name__}(...)")
    return value


def check_mapping(field: str, value: object, example: str = "{...}", problem: str = "") -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        problem = problem or f"must be an object, not {type(value).__name__}"
        raise config_error(field, value, problem, f"write {example}")
    return value


def check_dtype_name(field: str, value: object, extra: Sequence[str] = ()) -> str:
    """Canonical name ("bfloat16") of a torch.dtype or of one of its usual names."""
    name = str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
    if isinstance(name, str):
        name = _SHORT_DTYPES.get(name.removeprefix("torch."), name.removeprefix("torch."))
    allowed = (*extra, *_DTYPES)
    if not isinstance(name, str) or name not in allowed:
        raise config_error(field, value, "is not a supported dtype", f"use one of {', '.join(allowed)}")
    return name


def check_dtype(field: str, value: object) -> torch.dtype:
    return _DTYPES[check_dtype_name(field, value)]


def check_patterns(field: str, value: object) -> Callable[[str, torch.nn.Parameter], Any] | tuple[str, ...]:
    if callable(value):
        return value
    if isinstance(value, str) or not isinstance(value, Sequence):
        problem = "must be a predicate f(name, param) or a list of name patterns"
        raise config_error(field, value, problem, 'write ["pattern", ...]')
    if not value:
        raise config_error(field, value, "selects nothing", "leave it out to let compile_muon choose")
    for pattern in value:
        if not isinstance(pattern, str) or not pattern:
            raise config_error(field, value, f"holds {pattern!r}, which is not a name pattern", "use non-empty strings")
    return tuple(value)
