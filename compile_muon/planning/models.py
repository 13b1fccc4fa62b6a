"""Load the model of a plan, by the name of a function or a Hugging Face config, as fake tensors without memory.

The fake tensors are on the CPU, so that their trace is that of real ones. On the meta device attention would be traced
as the products it consists of, with all its probabilities in memory.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode

from compile_muon.config import accept
from compile_muon.errors import MuonZeroError, config_error

#: arguments of ``forward`` that get the tokens as targets
_TARGETS = ("labels", "targets")
_KINDS = "give module:function, a folder with a config.json of Transformers, or that file"


@dataclass(frozen=True)
class Batch:
    """The tokens that a rank computes at a time.

    Raises a ConfigError if a number is below 1, or `tokens` is no multiple of `sequence`.
    """

    tokens: int  # in all sequences
    sequence: int  # tokens of one sequence

    def __post_init__(self) -> None:
        for field, value in (("--tokens", self.tokens), ("--sequence", self.sequence)):
            accept.integer(field, value, low=1)
        check_multiple("--tokens", self.tokens, self.sequence, "sequences", "--sequence")


def check_multiple(option: str, tokens: int, part: int, parts: str, other: str) -> None:
    """Raise a ConfigError unless tokens are a multiple of those of a part, which the option `other` gives."""
    if tokens < part or tokens % part:
        nearest = max(1, round(tokens / part)) * part
        problem = f"is no whole number of {parts} of {part} tokens"
        raise config_error(option, tokens, problem, f"use {nearest}, or another {other}")


@dataclass(frozen=True)
class Subject:
    """A model that can be built as often as needed."""

    name: str  # as given
    build: Callable[[], nn.Module]  # returns a new model of fake tensors
    batch: Mapping[str, Any]  # arguments of its forward by name, fake too


def load_subject(name: str, batch: Batch) -> Subject:
    """Load the model that users call `name`.

    Raises a ConfigError if there is none, it cannot be built without values, or its forward takes no tokens.
    """
    function = _of_transformers(name, batch) if Path(name).exists() else _imported(name)
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def build() -> nn.Module:
        remedy = "build it of nn.Modules, and read no value of a tensor on the way"
        with naming_model(name, "built without values", remedy), mode:
            model = function()
        if not isinstance(model, nn.Module):
            raise config_error("MODEL", name, f"returns a {type(model).__name__}", "return an nn.Module")
        with mode:
            _leave_meta(model)
        return model

    with mode:
        tokens = torch.zeros(batch.tokens // batch.sequence, batch.sequence, dtype=torch.int64)
    return Subject(name, build, _arguments(name, build(), tokens))


@contextmanager
def naming_model(name: str, done: str, remedy: str) -> Iterator[None]:
    """Turn any error of the model's code inside this block into a one-line ConfigError that names the model.

    `done` says what the block does with the model.
    """
    try:
        yield
    except MuonZeroError:
        raise
    except Exception as error:
        said = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        raise config_error("MODEL", name, f"cannot be {done}: {said}", remedy) from error


def plan_module(name: str, field: str, value: str) -> ModuleType:
    """Import a module of the extra ``plan``; a ConfigError on `field` says what to install if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        remedy = "pip install '.[plan]' in compile_muon's checkout"
        raise config_error(field, value, f"needs {name}, which is not installed", remedy) from None


def _arguments(name: str, model: nn.Module, tokens: torch.Tensor) -> dict[str, Any]:
    """Pass the tokens as the first argument of ``forward`` and as targets; Transformers models get no cache."""
    named = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if not named:
        raise config_error("MODEL", name, "has a forward without arguments", "let it take tokens [batch, sequence]")
    arguments: dict[str, Any] = {argument: tokens for argument in (named[0], *(a for a in named if a in _TARGETS))}
    return arguments | ({"use_cache": False} if "use_cache" in named else {})


def _imported(name: str) -> Callable[[], nn.Module]:
    module, _, function = name.partition(":")
    if not module or not function:
        raise config_error("MODEL", name, "is neither a function nor a file", _KINDS)
    with naming_model(name, "imported", "check the name, and that its folder is on PYTHONPATH"):
        factory = getattr(importlib.import_module(module), function, None)
    if not callable(factory):
        raise config_error("MODEL", name, f"{module} has no function of that name", "give one that returns the model")
    return factory


def _of_transformers(name: str, batch: Batch) -> Callable[[], nn.Module]:
    transformers = plan_module("transformers", "MODEL", name)
    with naming_model(name, "read as a config of Transformers", _KINDS):
        config = transformers.AutoConfig.from_pretrained(os.path.abspath(name), local_files_only=True)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and batch.sequence > longest:
        problem = f"is longer than the {longest} positions of the model"
        raise config_error("--sequence", batch.sequence, problem, f"use at most {longest}")
    return lambda: transformers.AutoModelForCausalLM.from_config(config)


def _leave_meta(model: nn.Module) -> None:
    """Replace parameters and buffers on the meta device by fake ones on the CPU; tied ones stay tied."""
    fakes: dict[torch.Tensor, torch.Tensor] = {}
    tables: list[dict[str, Any]] = []
    for module in model.modules():
        tables += module._parameters, module._buffers
    for tensors in tables:
        for name, value in tensors.items():
            if value is not None and value.device.type == "meta":
                fake = torch.empty_like(value, device="cpu")
                if isinstance(value, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=value.requires_grad)
                tensors[name] = fakes.setdefault(value, fake)
