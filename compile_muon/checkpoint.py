"""Checkpoints through torch.distributed.checkpoint: sharded, by name, and independent of the world size.

Weights, momentum, AdamW moments and hyperparameters are saved under parameter names, so a checkpoint of N ranks at one
stage loads on M ranks at another.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from compile_muon.optimizer import MuonZero

__all__ = ["load_checkpoint", "save_checkpoint"]


def _tensors(model: nn.Module, optimizer: MuonZero) -> dict[str, Any]:
    """Everything tensor-valued, as live references: saving reads them, loading writes into them."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            for key, value in optimizer.state[param].items():
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def _hyperparameters(optimizer: MuonZero) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in optimizer.param_groups]


def _alone() -> bool:
    return not (dist.is_available() and dist.is_initialized())


def save_checkpoint(folder: str | os.PathLike, model: nn.Module, optimizer: MuonZero, **extra: Any) -> None:
    """Write a checkpoint; collective over all ranks.

    Args:
        folder: where to write.
        extra: picklable values to keep with it (step number, scheduler state, ...).
    """
    # One value each: nested containers would be taken apart, and only keys known beforehand would load again.
    rest = {"groups": pickle.dumps(_hyperparameters(optimizer)), "extra": pickle.dumps(extra)}
    state = {**_tensors(model, optimizer), **rest}
    dcp.save(state, checkpoint_id=os.fspath(folder), no_dist=_alone())


def load_checkpoint(folder: str | os.PathLike, model: nn.Module, optimizer: MuonZero) -> dict[str, Any]:
    """Read a checkpoint into ``model`` and ``optimizer``; collective over all ranks.

    Returns:
        The ``extra`` values it was saved with.
    Raises:
        torch.distributed.checkpoint.CheckpointException: missing files, names or shapes that do not match.
    """
    state = {**_tensors(model, optimizer), "groups": b"", "extra": b""}
    dcp.load(state, checkpoint_id=os.fspath(folder), no_dist=_alone())
    saved = {group["algorithm"]: group for group in pickle.loads(state["groups"])}
    for group in optimizer.param_groups:
        group.update(saved[group["algorithm"]])
    optimizer.loaded()
    return pickle.loads(state["extra"])
