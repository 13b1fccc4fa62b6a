"""``initialize``: from a config file to a sharded, compiled model and its optimizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compile_muon.config import Config, load_config
from compile_muon.optimizer import MuonZero

__all__ = ["initialize"]

M = TypeVar("M", bound=nn.Module)


def initialize(
    model: M,
    config: str | os.PathLike | Mapping[str, Any] | Config,
    *,
    mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[M, MuonZero]:
    """Shard ``model`` in place, compile it in place if the config says so, and build its optimizer.

    Args:
        model: module with all parameters on one device.
        config: path of a JSON file, a mapping in DeepSpeed's vocabulary, or a :class:`Config`.
        mesh: 1-D data-parallel mesh; default: all ranks of the default process group.
        process_group: the data-parallel group, instead of ``mesh``.
    Returns:
        The same model object, and its :class:`MuonZero`.
    Raises:
        ConfigError, UnsupportedModelError: nothing is changed then.
    """
    resolved = load_config(config)
    optimizer = MuonZero.from_config(model, resolved, mesh=mesh, process_group=process_group)
    settings = resolved.compile
    if settings.enabled:
        # nn.Module.compile keeps the type and the state_dict keys
        model.compile(
            backend="muon_zero",
            fullgraph=settings.fullgraph,
            dynamic=settings.dynamic,
            options=settings.options(),
        )
    return model, optimizer
