"""What trainers have in common: ``"auto"`` in a configuration is what their own settings say of the same, say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from compile_muon.config import Config, MeshConfig
from compile_muon.config.checked import Mistakes
from compile_muon.config.sources import as_mapping
from compile_muon.errors import ConfigError, config_error
from compile_muon.model.readers import sharded_params_of

__all__ = ["Source", "filled", "is_sharded", "refused_tensor"]

#: what ``compile_muon.load_config`` takes
Source = str | os.PathLike | Mapping[str, Any] | Config


def is_sharded(model: object) -> bool:
    """Whether a MuonZero has it, or a part of it."""
    return isinstance(model, nn.Module) and any(sharded_params_of(inner) for inner in model.modules())


def refused_tensor(mesh: MeshConfig | None) -> list[ConfigError]:
    """Tensor slices, which a trainer whose loader gives each process its own batches cannot serve."""
    size = 1 if mesh is None else mesh.tensor
    problem = "needs the same batches on its ranks, and loaders here give each process its own"
    remedy = "leave it out, or write the loop yourself (docs/how-to/meshes.md)"
    return [config_error("mesh.tensor", size, problem, remedy)] if size != 1 else []


def filled(source: Source, automatic: Mapping[tuple[str, ...], Any], *, defaults: Mapping[str, Any]) -> Any:
    """``source`` with ``"auto"`` replaced at these paths.

    Args:
        automatic: values by path of keys.
        defaults: of keys at the top that are not there.
    Returns:
        A new mapping; ``source`` itself if it is a :class:`Config`, or cannot be read, as ``load_config`` will say.
    """
    if isinstance(source, Config):
        return source
    mistakes, values = Mistakes(), dict[str, Any]()
    with mistakes.collected():
        values = as_mapping(source, mistakes)
    if mistakes.found:
        return source
    values = {**values, **{key: value for key, value in defaults.items() if key not in values}}
    for path, value in automatic.items():
        section: Any = values
        for key in path[:-1]:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict) and section.get(path[-1]) == "auto":
            section[path[-1]] = value
    return values
