"""Sources of a configuration: a file, JSON text, a mapping, or an object that stands for a mapping."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import nn

from compile_muon.config import accept
from compile_muon.config.checked import Checked, Mistakes
from compile_muon.config.settings import Config
from compile_muon.errors import ConfigError, config_error

_DEPTH = 64  # of nested sections, also in a mapping that contains itself; a config has four
_NAMESPACES = (Namespace, SimpleNamespace)
_GIVE = "give the path of a JSON file, a dict, or a Config"


def as_mapping(source: object, mistakes: Mistakes) -> dict[Any, Any]:
    """Return a configuration as plain dicts and lists of finite depth.

    `source`: path of a JSON file; JSON text, which begins with a brace; a mapping (OmegaConf's among them), a
    dataclass, or a namespace. `mistakes` gets keys that a file has twice. Raises a ConfigError if `source` is
    unreadable or anything else.
    """
    if isinstance(source, (str, os.PathLike)):
        path_or_text = os.fsdecode(source)
        whole = _read_json(path_or_text, isinstance(source, str) and source.lstrip().startswith("{"), mistakes)
    else:
        whole = _values_of(source)
    return _plain(accept.of_type("config", whole, Mapping, "an object", _remedy(whole)), "", {})


def _remedy(value: object) -> str:
    if value is None:
        return f"{_GIVE}; {{}} for the defaults"
    if isinstance(value, type):
        return f"make one: {value.__name__}(...)"
    if isinstance(value, Checked):
        part = type(value).__name__
        field = next((f.name for f in dataclasses.fields(Config) if isinstance(f.default, type(value))), None)
        return f"write Config({field}={part}(...))" if field else _GIVE
    if hasattr(value, "read") and isinstance(name := getattr(value, "name", None), str):
        return f"give its path, {name!r}"
    return _GIVE


def _values_of(source: object) -> object:
    """Return the mapping that an object stands for, or the object itself."""
    if isinstance(source, Mapping | Checked | type):
        return source
    if dataclasses.is_dataclass(source):
        return {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    if isinstance(source, _NAMESPACES):
        return vars(source)
    for method in ("to_dict", "model_dump"):  # ConfigDict of ml_collections; pydantic
        if not hasattr(nn.Module, method) and callable(convert := getattr(source, method, None)):
            with contextlib.suppress(Exception):  # a foreign method may raise anything
                return convert()
    return source


def _plain(value: Any, path: str, memo: dict[int, tuple[Any, Any]], depth: int = 0) -> Any:
    """Return `value` with mappings and sequences as dicts and lists; other values stay.

    `memo` maps the ``id`` of each section so far to the section and its result: a shared section is converted once.
    """
    if depth > _DEPTH:
        raise _too_deep(path, "...")
    is_ours = dataclasses.is_dataclass(value) and type(value).__module__.startswith("compile_muon.")
    if depth and not is_ours and (isinstance(value, _NAMESPACES) or dataclasses.is_dataclass(value)):
        value = _values_of(value)
    if not isinstance(value, Mapping | Sequence) or isinstance(value, (str, bytes, tuple)):
        return value
    if id(value) not in memo:
        converted: Any
        if isinstance(value, Mapping):
            converted = {}
            for key in value:
                name = f"{path}.{accept.key_name(key)}" if path else accept.key_name(key)
                converted[key] = _plain(_entry(value, key, name), name, memo, depth + 1)
        else:
            converted = [_plain(entry, path, memo, depth + 1) for entry in value]
        memo[id(value)] = value, converted
    return memo[id(value)][1]


def _too_deep(field: str, shown: object) -> ConfigError:
    return config_error(field, shown, f"is nested more than {_DEPTH} deep", "write sections as they are known")


def _entry(value: Mapping[Any, Any], key: Any, name: str) -> Any:
    try:
        return value[key]
    except Exception as error:  # OmegaConf raises for unresolved interpolations and missing values
        said = str(error).partition("\n")[0]
        raise config_error(name, "???", f"has no value ({said})", "give it one") from None


def _read_json(source: str, is_text: bool, mistakes: Mistakes) -> object:
    """Return the content of JSON text, or of the file at a path."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        section: dict[str, Any] = {}
        for key, value in pairs:
            if key in section:
                place = "config" if is_text else source
                mistakes.add(config_error(key, value, f"is given twice in {place}", "keep one of the two"))
            section[key] = value
        return section

    try:
        text = source if is_text else Path(source).read_text(encoding="utf-8-sig")
        return json.loads(text, object_pairs_hook=unique)
    except RecursionError:
        raise _too_deep("config", source) from None
    except (OSError, ValueError) as error:  # also bytes that are no text, a NUL in the path, integers of many digits
        problem = f"cannot be read as JSON ({getattr(error, 'strerror', None) or error})"
        remedy = "mend it, or give another JSON file or a dict, of YAML yaml.safe_load(...)"
        raise config_error("config", source, problem, remedy) from None
