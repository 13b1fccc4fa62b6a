"""How tokens travel to the experts of a Transformers mixture that other ranks hold, and back.

Dropless, the default: (token, slot) pairs are sorted by expert, travel to the experts' rank by one all-to-all, go
through grouped products and back by another one; weights are applied and summed over the slots on the token's rank, in
the dtype in which Transformers' ``grouped_mm`` does it. Backward sends the same rows the other way.

With ``capacity_factor`` c shapes are static: of its T tokens a rank keeps at most C = ceil(c T k / E) for each expert,
those with the largest routing weight (among equals the earlier tokens), as Megatron's ``drop_policy="probs"`` does.
What is dropped adds nothing, and its weight gets no gradient. "Probable" means that weight, as the router hands it
over: softmax before or after top-k, a sigmoid, scaled or not. All ranks of the group need the same T; in eager mode
another one is an error on every rank, inside a compiled graph it is not looked for.

Gradients: that of a rank's experts is the sum over the group's losses; what is not a stack (``post_expert_norm``) stays
whole everywhere, and its gradients must be summed over the group as those of all other parameters.

Under ``torch.compile``:

==============  ===================================================================================================
capacity        one graph
dropless        one graph where sizes that depend on data may be traced: ``fullgraph=True``, or
                ``torch.compiler.config.capture_scalar_outputs`` (both are torch's own switches). Otherwise one
                graph break around each experts module, whose forward then runs eagerly; all else compiles.
==============  ===================================================================================================

Seen with torch 2.13, aot_eager, Inductor and ``backend="muon_zero"``, forward and backward. What a dropless graph sends
is not in ``optimizer.traffic``: only the data say how much.
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

__all__ = ["AXIS", "FIELD", "IMPLEMENTATION", "RECORD", "ExpertDispatch"]

#: dimension of a mesh along which ranks hold different experts
AXIS = "expert"
#: what Transformers calls this implementation of experts
IMPLEMENTATION = "compile_muon_expert_parallel"
#: where an experts module has its :class:`ExpertDispatch`
RECORD = "_expert_dispatch"
#: the section of a config, in errors
FIELD = "expert_parallel"


@dataclass(frozen=True)
class ExpertDispatch:
    """How the tokens of one experts module travel; lives on it.

    Args:
        group: name of the process group of the ranks that share the experts.
        size: how many they are.
        experts: of the whole module.
        capacity_factor: None is dropless.
    """

    group: str
    size: int
    experts: int
    capacity_factor: float | None = None


# ------------------------------------------------------------------------------------------------------- the forward


def _forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What an experts module of Transformers computes, its experts being on several ranks.

    Args:
        hidden_states: [T, H].
        top_k_index: int64 [T, k], each in [0, E).
        top_k_weights: [T, k].
    Returns:
        [T, H], in the dtype of ``hidden_states``.
    """
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
    chosen = index.reshape(-1)
    chosen_sorted, order = torch.sort(chosen)  # as Transformers does: one rank alone has its numbers bit for bit
    rows = hidden[order // slots]
    counts = _counts(chosen, dispatch.experts)
    if dispatch.size == 1:
        out = _grouped(module, dispatch, rows, chosen_sorted, counts)
    else:
        out = _exchanged(module, dispatch, rows, counts)
    out = out[_inverse(order)]
    return _summed(out, weights, hidden)


def _exchanged(module: Any, dispatch: ExpertDispatch, rows: Tensor, counts: Tensor) -> Tensor:
    """The experts' outputs for ``rows``, which are in the order of the experts.

    Nothing here branches on what is in the tensors: a rank without rows does, and records for backward, what the
    others do, so every rank takes part in every exchange, also where a checkpoint is computed again.
    """
    size, group = dispatch.size, dispatch.group
    sent = counts.view(size, -1)
    even = [sent.shape[1]] * size
    received = _all_to_all(counts, even, even, group).view(size, -1)
    # The one synchronization with the host.
    sizes = torch.cat((sent.sum(1), received.sum(1))).tolist()
    for number in sizes:
        torch._check(number >= 0)
    here, there = sizes[:size], sizes[size:]
    torch._check(sum(here) == rows.shape[0])
    total = sum(there)
    rows = _Exchange.apply(rows, there, here, group)
    # They come by rank, and by expert within; they are wanted by expert.
    local = received.shape[1]
    experts = torch.arange(local, device=rows.device).repeat(size)
    experts = experts.repeat_interleave(received.reshape(-1), output_size=total)
    order = torch.argsort(experts, stable=True)
    out = _grouped(module, dispatch, rows[order], experts[order], received.sum(0))
    return _Exchange.apply(out[_inverse(order)], here, there, group)


def _grouped(module: Any, dispatch: ExpertDispatch, rows: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
    """The outputs of this rank's experts, ``counts`` rows for each."""
    offsets = counts.cumsum(0).to(torch.int32)

    def linear(rows: Tensor, name: str) -> Tensor:
        bias = _own(module, dispatch, f"{name}_bias")[experts] if module.has_bias else None
        weight = _own(module, dispatch, name)
        return _grouped_linear(rows, weight, offsets, bias=bias, is_transposed=module.is_transposed)

    return _through(module, rows, linear)


def _through(module: Any, rows: Tensor, linear: Callable[[Tensor, str], Tensor]) -> Tensor:
    """As Transformers' implementations compute, but for the products and the routing weights."""
    if module.has_gate:
        rows = module._apply_gate(linear(rows, "gate_up_proj"))
    else:
        rows = module.act_fn(linear(rows, "up_proj"))
    rows = linear(rows, "down_proj")
    return module.post_expert_norm(rows) if module.has_post_expert_norm else rows


def _own(module: Any, dispatch: ExpertDispatch, name: str) -> Tensor:
    """This rank's experts of a stack: [E / size, ...]."""
    stack = getattr(module, name)
    own = stack.to_local() if isinstance(stack, DTensor) else stack
    if own.shape[0] * dispatch.size != dispatch.experts:
        problem = f"is not one rank's part of {dispatch.experts} experts on {dispatch.size} ranks"
        remedy = "run the model with its experts shared, outside of full_parameters()"
        raise config_error(name, list(own.shape), problem, remedy)
    return own


def _summed(out: Tensor, weights: Tensor, hidden: Tensor) -> Tensor:
    """[T, H] from the outputs of all pairs."""
    out = out.view(*weights.shape, out.shape[-1]) * weights.unsqueeze(-1)
    return out.sum(dim=1).to(hidden.dtype)


def _counts(chosen: Tensor, experts: int) -> Tensor:
    """How many pairs each expert gets; unlike ``torch.bincount`` of a size that is known when it is traced."""
    counts = torch.zeros(experts, dtype=torch.long, device=chosen.device)
    return counts.scatter_add(0, chosen, torch.ones_like(chosen))


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))


@torch.compiler.assume_constant_result
def _sizes_are_traced() -> bool:
    """Whether the frame that is being compiled may hold sizes that depend on data."""
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    return mode is None or mode.shape_env is None or mode.shape_env.allow_scalar_outputs


_outside_graphs = torch.compiler.disable(_dropless, reason="how many tokens each expert gets depends on data")

# ------------------------------------------------------------------------------------------------------- capacity


def _with_capacity(module: Any, dispatch: ExpertDispatch, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The same in buffers [E, C, H]: their shape, and so the graph, does not depend on what the router chose."""
    tokens, slots = index.shape
    assert dispatch.capacity_factor is not None
    capacity = min(math.ceil(dispatch.capacity_factor * tokens * slots / dispatch.experts), tokens * slots)
    if not torch.compiler.is_compiling():
        _check_tokens(dispatch, tokens, index.device)
    place = _places(index.reshape(-1), weights.detach().reshape(-1), dispatch.experts, capacity)
    # Which pair is at a place: none, at first; of what is dropped, which has the place behind all, nobody looks.
    pairs = torch.full((dispatch.experts * capacity + 1,), tokens * slots, device=index.device)
    pairs = pairs.scatter(0, place, torch.arange(tokens * slots, device=index.device))[:-1]
    rows = _and_zeros(hidden)[pairs // slots]
    rows = _swap(rows, dispatch, to_experts=True)
    linear = partial(_batched, module, dispatch)
    rows = _swap(_through(module, rows, linear), dispatch, to_experts=False)
    return _summed(_and_zeros(rows)[place], weights, hidden)


def _places(chosen: Tensor, weights: Tensor, experts: int, capacity: int) -> Tensor:
    """Where each pair goes in [E * C]; behind all, if it is dropped.

    Args:
        chosen: int64 [T * k], the pairs' experts.
        weights: [T * k].
    """
    # By expert; within, by weight; within, by token: each sort keeps what the one before made.
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
    """[E * C] by expert on the tokens' rank to [E / size * (size * C)] by expert on the experts' rank, and back."""
    size = dispatch.size
    if size == 1:
        return rows
    local, width = dispatch.experts // size, rows.shape[1]
    if not to_experts:
        rows = rows.view(local, size, -1, width).transpose(0, 1).reshape(-1, width)
    even = [rows.shape[0] // size] * size
    rows = _Exchange.apply(rows, even, even, dispatch.group)
    return rows.view(size, local, -1, width).transpose(0, 1).reshape(-1, width) if to_experts else rows


def _batched(module: Any, dispatch: ExpertDispatch, rows: Tensor, name: str) -> Tensor:
    """As many rows for each expert: products of one batch, in the dtype in which grouped products are made."""
    weight = _own(module, dispatch, name)
    weight = weight if module.is_transposed else weight.transpose(1, 2)
    with torch.autocast(rows.device.type, enabled=False):
        out = torch.bmm(rows.to(weight.dtype).view(weight.shape[0], -1, rows.shape[1]), weight)
    if module.has_bias:
        out = out + _own(module, dispatch, f"{name}_bias").unsqueeze(1)
    return out.flatten(0, 1)


def _check_tokens(dispatch: ExpertDispatch, tokens: int, device: torch.device) -> None:
    """Raise, on every rank, where ranks have different numbers of tokens, and so buffers of different sizes."""
    if dispatch.size == 1:
        return
    mine = torch.full((dispatch.size,), tokens, device=device)
    one = [1] * dispatch.size
    found = _all_to_all(mine, one, one, dispatch.group).tolist()
    if len(set(found)) > 1:
        problem = f"ranks have {found} tokens, and static shapes need as many on each"
        remedy = "pad batches to one length and drop the last incomplete one, or leave it out"
        raise config_error(f"{FIELD}.capacity_factor", dispatch.capacity_factor, problem, remedy)


# ------------------------------------------------------------------------------------------------------- the exchange


def _all_to_all(rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    """Rows by rank, for each rank; so many from each, so many for each."""
    out = torch.ops._c10d_functional.all_to_all_single(rows.contiguous(), received, sent, group)
    return torch.ops._c10d_functional.wait_tensor(out)


class _Exchange(torch.autograd.Function):
    """The same, for autograd: gradients travel the other way, and are there when backward goes on."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        ctx.way = received, sent, group
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        received, sent, group = ctx.way
        return _Exchange.apply(gradient, sent, received, group), None, None, None
