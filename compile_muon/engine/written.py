"""Tensors that a step writes of one parameter: rows of a shard, master weights, and their restoration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import GRADIENT, MASTER, ROWS, WEIGHT
from compile_muon.passes.language.spec import decode_dtype

__all__ = ["are_first", "gradient_of", "in_rows", "provided_rows", "restore_if_found_inf", "round_masters", "weight_of"]


def weight_of(sharded: ShardedParam, states: Mapping[str, Tensor]) -> Tensor:
    """Return the tensor that a step writes: the shard, the master weight that it is rounded from, or the host's copy;
    some rows of it where states are provided by rows."""
    if WEIGHT in states:
        return states[WEIGHT]
    return local_tensor(states[MASTER]) if sharded.spec.master else provided_rows(sharded, states)


def are_first(sharded: ShardedParam, states: Mapping[str, Tensor]) -> bool:
    """Return whether these are the parameter's first rows, or all of them."""
    return ROWS not in states or states[ROWS].storage_offset() == sharded.local.storage_offset()


def provided_rows(sharded: ShardedParam, states: Mapping[str, Tensor]) -> Tensor:
    """Return the rows of the shard that the states belong to."""
    return states[ROWS] if ROWS in states else sharded.local.detach()


def gradient_of(sharded: ShardedParam, states: Mapping[str, Tensor] = MappingProxyType({})) -> Tensor:
    """Return the gradient of the shard, or of provided rows, in the dtype of states; a copy if that differs."""
    return states.get(GRADIENT, sharded.local_grad).to(decode_dtype(sharded.spec.state_dtype))


def round_masters(sharded_params: Sequence[ShardedParam], states: Sequence[Mapping[str, Tensor]]) -> None:
    """Round the written master weights to their parameters."""
    for sharded, own in zip(sharded_params, states, strict=True):
        if sharded.spec.master:
            provided_rows(sharded, own).copy_(local_tensor(own[MASTER]))


@contextmanager
def restore_if_found_inf(found_inf: Tensor | None, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore these tensors after the block where ``found_inf`` is 1."""
    before = [] if found_inf is None else [tensor.clone() for tensor in tensors]
    yield
    if found_inf is not None:
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(torch.where(found_inf == 1, old, tensor))


@contextmanager
def in_rows(tensor: Tensor) -> Iterator[Tensor]:
    """Yield contiguous memory that is copied back to ``tensor``, which may be channels last."""
    rows = tensor.contiguous()
    yield rows
    if rows is not tensor:
        tensor.copy_(rows)
