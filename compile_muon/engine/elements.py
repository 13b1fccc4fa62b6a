"""The writes of a step to parameters that are no matrices, element by element of the shards."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import GRADIENT, ROWS
from compile_muon.engine.written import gradient_of, restore_if_found_inf, round_masters, weight_of
from compile_muon.passes.methods import ElementMethod

__all__ = ["commit_elements"]


def commit_elements(
    method: ElementMethod,
    rates: Mapping[str, Any],
    sharded_params: Sequence[ShardedParam],
    slots: Sequence[MutableMapping[str, Tensor]],
    found_inf: Tensor | None,
) -> None:
    """Run one step of an elementwise method on the shards of parameters with a gradient.

    ``slots``: the optimizer's states of each. A state provider adds tensors to all of them or none: ``GRADIENT``
    without ``ROWS`` means that the host computes the step and the provider copies the weights back.
    """
    if not sharded_params:
        return
    step, on_host = method.step, GRADIENT in slots[0] and ROWS not in slots[0]
    if on_host:
        assert method.on_host is not None
        step, found_inf = method.on_host, None
        rates = {name: rate.item() if isinstance(rate, Tensor) else rate for name, rate in rates.items()}
    for sharded, row in zip(sharded_params, slots, strict=True):
        for state in method.states:  # kernels count steps on the GPU; a loaded count may be on the host
            count = row[state.name]
            if state.each == "parameter" and sharded.local.is_cuda and not (on_host or count.is_cuda):
                row[state.name] = count.to(sharded.local.device, non_blocking=True)
    params = [weight_of(sharded, row) for sharded, row in zip(sharded_params, slots, strict=True)]
    states: list[MutableMapping[str, Tensor]] = [
        {state.name: local_tensor(row[state.name]) for state in method.states} for row in slots
    ]
    # Tensors to restore; a method that withholds its writes on CUDA by itself needs none.
    restored = [] if method.withholds and params[0].is_cuda else [*params, *(x for row in states for x in row.values())]
    decay = rates.get("weight_decay", 0.0) if rates.get("cautious_decay", False) else 0.0
    cautious = isinstance(decay, Tensor) or decay != 0  # a CUDA graph may get another decay
    with restore_if_found_inf(found_inf if restored else None, restored):
        old_params = [param.clone() for param in params] if cautious else []
        step_rates = {**rates, "weight_decay": 0.0} if cautious else rates
        grads = [gradient_of(sharded, row) for sharded, row in zip(sharded_params, slots, strict=True)]
        step(params, grads, states, step_rates, found_inf)
        for param, old in zip(params, old_params, strict=False):
            # Cautious weight decay: only where the step moves toward zero.
            lost = (rates["lr"] * decay) * old.to(torch.promote_types(old.dtype, torch.float32))
            param.sub_(lost * ((old - param) * old >= 0))
    if not on_host:
        round_masters(sharded_params, slots)
