"""The writes of a step to all that is no matrix, element by element of the shards."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import GRADIENT, ROWS
from compile_muon.engine.written import gradient_of, round_masters, unless, weight_of
from compile_muon.passes.methods import ElementMethod

__all__ = ["commit_elements"]


def commit_elements(
    method: ElementMethod,
    rates: Mapping[str, Any],
    sharded_params: Sequence[ShardedParam],
    slots: Sequence[MutableMapping[str, Tensor]],
    found_inf: Tensor | None,
) -> None:
    """One step of a method for all that is no matrix, on the shards.

    Args:
        sharded_params: parameters with a gradient.
        slots: the optimizer's states of each; of all, or of none, with what :class:`~.StateProvider` adds for the host:
            then whoever provided it brings the weights back.
        found_inf: as for :func:`~compile_muon.kernels.muon_apply`.
    """
    if not sharded_params:
        return
    step, on_host = method.step, GRADIENT in slots[0] and ROWS not in slots[0]
    if on_host:
        assert method.on_host is not None
        step, found_inf = method.on_host, None
        rates = {name: rate.item() if isinstance(rate, Tensor) else rate for name, rate in rates.items()}
    for sharded, row in zip(sharded_params, slots, strict=True):
        for state in method.states:  # kernels count steps themselves; a checkpoint may have brought them to the host
            count = row[state.name]
            if state.each == "parameter" and sharded.local.is_cuda and not (on_host or count.is_cuda):
                row[state.name] = count.to(sharded.local.device, non_blocking=True)
    params = [weight_of(sharded, row) for sharded, row in zip(sharded_params, slots, strict=True)]
    states: list[MutableMapping[str, Tensor]] = [
        {state.name: local_tensor(row[state.name]) for state in method.states} for row in slots
    ]
    written = [] if method.withholds and params[0].is_cuda else [*params, *(x for row in states for x in row.values())]
    decay = rates.get("weight_decay", 0.0) if rates.get("cautious_decay", False) else 0.0
    cautious = isinstance(decay, Tensor) or decay != 0  # a graph holds a decay that may become another one
    with unless(found_inf if written else None, written):
        before = [param.clone() for param in params] if cautious else []
        given = {**rates, "weight_decay": 0.0} if cautious else rates
        grads = [gradient_of(sharded, row) for sharded, row in zip(sharded_params, slots, strict=True)]
        step(params, grads, states, given, found_inf)
        for param, old in zip(params, before, strict=False):
            # Decay where the step went toward zero; a weight of zero has nothing to lose.
            lost = (rates["lr"] * decay) * old.to(torch.promote_types(old.dtype, torch.float32))
            param.sub_(lost * ((old - param) * old >= 0))
    if not on_host:
        round_masters(sharded_params, slots)
