"""Token dispatch: rows travel to experts of a Transformers mixture on other ranks, and back.

Dropless, the default: (token, slot) pairs are sorted by expert, travel to the experts' rank by one all-to-all, go
through grouped products and back by another one; the token's rank applies weights and sums over slots, in the dtype of
Transformers' ``grouped_mm``. Backward sends the same rows the other way.

With ``capacity_factor`` c shapes are static: of its T tokens a rank keeps at most C = ceil(c T k / E) for each expert,
those with the largest routing weight (among equals the earlier tokens), as Megatron's ``drop_policy="probs"`` does. The
weight is the router's output: softmax before or after top-k, a sigmoid, scaled or not. A dropped pair adds nothing, and
its weight gets no gradient. All ranks of the group need the same T: eager mode checks it, a compiled graph does not.

Gradients: a rank's experts get the sum over the group's losses. Parameters outside of stacks (``post_expert_norm``) are
whole on every rank, and need their gradients summed over the group like all others.

Under ``torch.compile`` capacity makes one graph. So does dropless where sizes that depend on data may be traced
(``fullgraph=True``, or ``torch.compiler.config.capture_scalar_outputs``); otherwise each experts module breaks the
graph and runs eagerly. Tested with torch 2.13, aot_eager, Inductor and ``backend="muon_zero"``, forward and backward.
``optimizer.traffic`` leaves out the bytes of dropless exchanges, which depend on data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear

from compile_muon.errors import config_error
from compile_muon.passes.exchange.transfers import AllToAll, all_to_all

#: dimension of a mesh along which ranks hold different experts
AXIS = "expert"
#: name of this implementation in Transformers' registry of experts functions
IMPLEMENTATION = "compile_muon_expert_parallel"
#: attribute of an experts module with its :class:`ExpertDispatch`
RECORD = "_expert_dispatch"
#: the section of a config, in errors
FIELD = "expert_parallel"


@dataclass(frozen=True)
class ExpertDispatch:
    """The dispatch of one experts module, kept as its attribute ``RECORD``."""

    group: str  # name of the process group of the ranks that share the experts
    size: int  # number of these ranks
    experts: int  # E, of the whole module
    capacity_factor: float | None = None  # None is dropless


# ------------------------------------------------------------------------------------------------------- the forward


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the forward of an experts module whose experts are on several ranks. `hidden_states`: [T, H];
    `top_k_index`: int64 [T, k] in [0, E); `top_k_weights`: [T, k]. Returns [T, H] in the dtype of `hidden_states`."""
    dispatch: ExpertDispatch | None = getattr(self, RECORD, None)
    if dispatch is None:
        problem = f"{type(self).__name__} has its experts to itself"
        raise config_error("experts_implementation", IMPLEMENTATION, problem, f'leave it out, and set "{FIELD}"')
    if dispatch.capacity_factor is not None:
        return _with_capacity(self, dispatch, hidden_states, top_k_index, top_k_weights)
    if torch.compiler.is_compiling() and not _sizes_are_traced():
        return _outside_graphs(self, dispatch, hidden_states, top_k_index, top_k_weights)
    return _dropless(self, dispatch, hidden_states, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _forward)


def _dropless(module: Any, dispatch: ExpertDispatch, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    slots = index.shape[1]
    pair_experts = index.reshape(-1)
    sorted_experts, order = torch.sort(pair_experts)  # the order of Transformers, whose bits one rank alone reproduces
    rows = hidden[order // slots]
    counts = _counts(pair_experts, dispatch.experts)
    if dispatch.size == 1:
        out = _grouped(module, dispatch, rows, sorted_experts, counts)
    else:
        out = _exchanged(module, dispatch, rows, counts)
    out = out[_inverse(order)]
    return _summed(out, weights, hidden)


def _exchanged(module: Any, dispatch: ExpertDispatch, rows: Tensor, counts: Tensor) -> Tensor:
    """Return the experts' outputs for `rows`, sorted by expert; `counts`: int64 [E], rows per expert. It does not
    branch on data: without rows, and recomputed by activation checkpointing, the same exchanges run."""
    size, group = dispatch.size, dispatch.group
    sent_counts = counts.view(size, -1)
    even = [sent_counts.shape[1]] * size
    received_counts = all_to_all(counts, even, even, group).view(size, -1)
    # The only host synchronization.
    sizes = torch.cat((sent_counts.sum(1), received_counts.sum(1))).tolist()
    # In a graph these sizes depend on data: the tracer needs their bounds.
    for number in sizes:
        torch._check(number >= 0)
    rows_sent, rows_received = sizes[:size], sizes[size:]
    torch._check(sum(rows_sent) == rows.shape[0])
    total = sum(rows_received)
    rows = AllToAll.apply(rows, rows_received, rows_sent, group)
    # Rows arrive by rank, then by expert; grouped products need them by expert.
    local = received_counts.shape[1]
    experts = torch.arange(local, device=rows.device).repeat(size)
    experts = experts.repeat_interleave(received_counts.reshape(-1), output_size=total)
    order = torch.argsort(experts, stable=True)
    out = _grouped(module, dispatch, rows[order], experts[order], received_counts.sum(0))
    return AllToAll.apply(out[_inverse(order)], rows_sent, rows_received, group)


def _grouped(module: Any, dispatch: ExpertDispatch, rows: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
    """Return this rank's experts' outputs for `rows`, sorted by expert; `experts`: of each row, `counts`: of rows."""
    offsets = counts.cumsum(0).to(torch.int32)

    def linear(rows: Tensor, name: str) -> Tensor:
        bias = _own(module, dispatch, f"{name}_bias")[experts] if module.has_bias else None
        weight = _own(module, dispatch, name)
        return _grouped_linear(rows, weight, offsets, bias=bias, is_transposed=module.is_transposed)

    return _through(module, rows, linear)


def _through(module: Any, rows: Tensor, linear: Callable[[Tensor, str], Tensor]) -> Tensor:
    """Apply projections and activation as Transformers does; `linear` computes the product with a named stack."""
    if module.has_gate:
        rows = module._apply_gate(linear(rows, "gate_up_proj"))
    else:
        rows = module.act_fn(linear(rows, "up_proj"))
    rows = linear(rows, "down_proj")
    return module.post_expert_norm(rows) if module.has_post_expert_norm else rows


def _own(module: Any, dispatch: ExpertDispatch, name: str) -> Tensor:
    """Return this rank's experts of a stack, [E / size, ...]."""
    stack = getattr(module, name)
    local = stack.to_local() if isinstance(stack, DTensor) else stack
    if local.shape[0] * dispatch.size != dispatch.experts:
        problem = f"is not one rank's part of {dispatch.experts} experts on {dispatch.size} ranks"
        remedy = "run the model with its experts shared, outside of full_parameters()"
        raise config_error(name, list(local.shape), problem, remedy)
    return local


def _summed(out: Tensor, weights: Tensor, hidden: Tensor) -> Tensor:
    """Return [T, H]: the outputs of all pairs [T * k, H], weighted and summed over the slots."""
    out = out.view(*weights.shape, out.shape[-1]) * weights.unsqueeze(-1)
    return out.sum(dim=1).to(hidden.dtype)


def _counts(chosen: Tensor, experts: int) -> Tensor:
    """Return the number of pairs per expert, [experts]; ``torch.bincount`` has no size that tracing knows."""
    counts = torch.zeros(experts, dtype=torch.long, device=chosen.device)
    return counts.scatter_add(0, chosen, torch.ones_like(chosen))


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


@torch.compiler.assume_constant_result
def _sizes_are_traced() -> bool:
    """Return whether the frame under compilation may hold sizes that depend on data."""
    # Private in torch 2.13: Dynamo's context and shape environment have no public accessor.
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    return mode is None or mode.shape_env is None or mode.shape_env.allow_scalar_outputs


_outside_graphs = torch.compiler.disable(_dropless, reason="how many tokens each expert gets depends on data")

# ------------------------------------------------------------------------------------------------------- capacity


def _with_capacity(module: Any, dispatch: ExpertDispatch, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Compute the forward in buffers [E, C, H], whose shape does not depend on the router's choice."""
    tokens, slots = index.shape
    assert dispatch.capacity_factor is not None
    capacity = min(math.ceil(dispatch.capacity_factor * tokens * slots / dispatch.experts), tokens * slots)
    if not torch.compiler.is_compiling():
        _check_tokens(dispatch, tokens, index.device)
    place = _places(index.reshape(-1), weights.detach().reshape(-1), dispatch.experts, capacity)
    # The pair at each place, or T * k where there is none. Dropped pairs share the last entry, which is cut off.
    pairs = torch.full((dispatch.experts * capacity + 1,), tokens * slots, device=index.device)
    pairs = pairs.scatter(0, place, torch.arange(tokens * slots, device=index.device))[:-1]
    rows = _and_zeros(hidden)[pairs // slots]
    rows = _swap(rows, dispatch, to_experts=True)
    linear = partial(_batched, module, dispatch)
    rows = _swap(_through(module, rows, linear), dispatch, to_experts=False)
    return _summed(_and_zeros(rows)[place], weights, hidden)


def _places(chosen: Tensor, weights: Tensor, experts: int, capacity: int) -> Tensor:
    """Return each pair's place in [E * C], or E * C if it is dropped, int64 [T * k]. `chosen`: int64 [T * k], the
    pairs' experts; `weights`: [T * k]."""
    # Order by expert, then weight, then token: each stable sort keeps the order of the one before.
    order = torch.argsort(weights, descending=True, stable=True)
    order = order[torch.argsort(chosen[order], stable=True)]
    sorted_experts = chosen[order]
    counts = _counts(chosen, experts)
    first = counts.cumsum(0) - counts
    position = torch.arange(chosen.shape[0], device=chosen.device) - first[sorted_experts]
    place = torch.where(position < capacity, sorted_experts * capacity + position, experts * capacity)
    return torch.empty_like(place).scatter(0, order, place)


def _and_zeros(rows: Tensor) -> Tensor:
    return torch.cat((rows, rows.new_zeros(1, rows.shape[1])))


def _swap(rows: Tensor, dispatch: ExpertDispatch, *, to_experts: bool) -> Tensor:
    """Move rows [E * C] between the tokens' rank, C per expert, and the experts' rank, size * C per local expert."""
    size = dispatch.size
    if size == 1:
        return rows
    local, width = dispatch.experts // size, rows.shape[1]
    if not to_experts:
        rows = rows.view(local, size, -1, width).transpose(0, 1).reshape(-1, width)
    even = [rows.shape[0] // size] * size
    rows = AllToAll.apply(rows, even, even, dispatch.group)
    return rows.view(size, local, -1, width).transpose(0, 1).reshape(-1, width) if to_experts else rows


def _batched(module: Any, dispatch: ExpertDispatch, rows: Tensor, name: str) -> Tensor:
    """Return a batched product of equally many rows per expert, in the dtype of grouped products."""
    weight = _own(module, dispatch, name)
    weight = weight if module.is_transposed else weight.transpose(1, 2)
    with torch.autocast(rows.device.type, enabled=False):
        out = torch.bmm(rows.to(weight.dtype).view(weight.shape[0], -1, rows.shape[1]), weight)
    if module.has_bias:
        out = out + _own(module, dispatch, f"{name}_bias").unsqueeze(1)
    return out.flatten(0, 1)


def _check_tokens(dispatch: ExpertDispatch, tokens: int, device: torch.device) -> None:
    """Raise a ConfigError, on every rank, if ranks have different numbers of tokens: buffers would differ in size."""
    if dispatch.size == 1:
        return
    own_count = torch.full((dispatch.size,), tokens, device=device)
    ones = [1] * dispatch.size
    token_counts = all_to_all(own_count, ones, ones, dispatch.group).tolist()
    if len(set(token_counts)) > 1:
        problem = f"ranks have {token_counts} tokens, and static shapes need as many on each"
        remedy = "pad batches to one length and drop the last incomplete one, or leave it out"
        raise config_error(f"{FIELD}.capacity_factor", dispatch.capacity_factor, problem, remedy)
