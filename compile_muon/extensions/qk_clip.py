"""MuonClip: rows of queries and keys are scaled down where the logits of their head grew too large.

    S_h = largest logit of head h that the gradients are of, over micro-batches and ranks
    g_h = min(1, threshold / S_h), of the query heads that share a key head the least
    W_q,h <- g_h^alpha W_q,h,   W_k,h <- g_h^(1 - alpha) W_k,h,   and so their biases

In multi-head latent attention all heads share the part of the keys with positions: the rows of queries that meet it are
scaled by g_h, the others and the head's own rows of keys as above. Source: Kimi K2, arXiv 2507.20534, and for shared
key heads Megatron's ``qk_clip``. The momentum is not scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule

from compile_muon.engine import Extension
from compile_muon.engine.sharded_param import ShardedParam, sharded_param_of
from compile_muon.errors import UnsupportedModelError
from compile_muon.passes import GraphKind, GraphPass, PassContext
from compile_muon.passes.dynamo.logits import LOGITS, UnknownAttention, note_attention
from compile_muon.passes.language.spec import ParamSpec

_ALL = slice(None)


@dataclass(frozen=True)
class _Heads:
    """The head of each row (``dim`` 0, also of a bias) or column of a parameter."""

    dim: int
    numbers: Tensor  # head of every row or column on this rank; `count` for none
    count: int  # heads


@dataclass(eq=False)
class _Attention:
    """An attention, and the parameters that project its keys and add biases; kept by the queries' parameter."""

    key: ShardedParam
    biases: tuple[ShardedParam | None, ShardedParam | None]  # of queries, and of keys
    largest: Tensor  # [heads] fp32, the largest logit of each head in the batches that `.grad` is the gradient of
    size: int  # of a head
    dims: tuple[int, ...]  # of the weights of queries and keys, that heads lie along
    own: int  # of `size`, entries of a key that belong to its head alone: all but in MLA
    scaled: Sequence[tuple[ShardedParam, _Heads, float]] = ()  # what a step scales, each with the power of g_h
    made_for: tuple[ParamSpec, ...] = ()  # specs of the parameters when `scaled` was made


@dataclass(frozen=True)
class _Projection:
    """A weight that projects queries or keys along ``dim``, and their bias."""

    weight: ShardedParam
    bias: ShardedParam | None
    dim: int

    @property
    def rows(self) -> int:
        """Length of the whole weight along ``dim``."""
        return self.weight.spec.layout.unsharded_shape[self.dim]

    def _order(self) -> Tensor:
        """Return the indices of all rows (columns), part by part where a view says what the parts are."""
        muon = self.weight.spec.muon
        order = torch.arange(self.rows, device="cpu")
        if muon is None or muon.view is None or muon.view.dim != self.dim:
            return order
        shape = (-1, 1) if self.dim == 0 else (1, -1)
        return torch.cat([part.flatten() for part in muon.view.cut(order.view(shape))])

    def heads(self, first: int, count: int, size: int, of: slice = _ALL) -> Iterator[tuple[ShardedParam, _Heads]]:
        """Yield weight and bias with the heads of the ``count * size`` rows behind the ``first`` ones, in that order.
        ``of``: the rows of each head that count."""
        numbers = torch.full((self.rows,), count, device="cpu")
        rows = self._order()[first : first + count * size].view(count, size)[:, of]
        numbers[rows] = torch.arange(count, device="cpu")[:, None].expand_as(rows)
        for sharded, dim in ((self.weight, self.dim), (self.bias, 0)):
            if sharded is None:
                continue
            layout = sharded.spec.layout  # the bias has another layout than its weight
            local_numbers = numbers[layout.part[dim]]
            if dim == 0 and layout.sharded:
                local_numbers = local_numbers[layout.local_rows]
            yield sharded, _Heads(dim, local_numbers.to(sharded.local.device), count)


def _scaled(sharded: ShardedParam, noted: _Attention, alpha: float) -> list[tuple[ShardedParam, _Heads, float]]:
    """Return the parameters and heads to scale of an attention whose queries ``sharded`` projects, with powers of g_h.
    Raises UnsupportedModelError where rows of heads are not known, or a parameter to be scaled is frozen."""
    query, key = (_Projection(*args) for args in zip((sharded, noted.key), noted.biases, noted.dims, strict=True))
    heads, size, per_head = len(noted.largest), noted.size, noted.own
    rows, key_rows = query.rows, key.rows
    fused, latent = noted.key is sharded, per_head < size
    keys = heads if latent else (rows // size - heads) // 2 if fused else key_rows // size
    muon = sharded.spec.muon
    fits = rows == (heads + 2 * keys if fused else heads) * size and (fused or key_rows == keys * size)
    if latent:  # values lie behind a head's own part of a key
        fits = not fused and rows == heads * size and key_rows % heads == 0 and key_rows // heads >= per_head
    bias_lengths = [
        (bias.name, bias.spec.layout.unsharded_shape[0], projection.rows)
        for projection in (query, key)
        if (bias := projection.bias) is not None
    ]
    frozen = next((entry.name for entry in (noted.key, *noted.biases) if entry and not entry.param.requires_grad), None)
    unfit = next(
        (f"{name} has {length} entries, not {number}" for name, length, number in bias_lengths if length != number),
        None,
    )
    if fused and sharded.spec.layout.tensor_parallel:
        remedy = "leave qk_clip out: heads of fused projections on tensor-parallel ranks are not scaled"
    elif not fits or keys < 1 or heads % keys:
        remedy = f"leave qk_clip out: its {heads} heads of {size} are not all of its rows"
    elif unfit is not None:
        remedy = f"leave qk_clip out: {unfit}, and is no bias of its heads"
    elif frozen is not None:
        remedy = f"train {frozen}, too, or leave qk_clip out: it is frozen, and would be scaled with its heads"
    elif fused and (muon is None or muon.view is None):
        remedy = "set split_fused, or say in muon_views which rows are queries, keys and values"
    elif latent:
        return [
            *((*entry, alpha) for entry in query.heads(0, heads, size, slice(0, per_head))),
            *((*entry, 1.0) for entry in query.heads(0, heads, size, slice(per_head, size))),
            *((*entry, 1 - alpha) for entry in key.heads(0, heads, key_rows // heads, slice(0, per_head))),
        ]
    else:
        return [
            *((*entry, alpha) for entry in query.heads(0, heads, size)),
            *((*entry, 1 - alpha) for entry in key.heads(heads * size if fused else 0, keys, size)),
        ]
    raise UnsupportedModelError(f"qk_clip of {sharded.name}, {list(sharded.spec.layout.unsharded_shape)}: {remedy}")


class MuonClip(Extension):
    """Scales down heads whose largest logit is over ``threshold`` (setting ``qk_clip``), behind each step. Attention on
    this rank has part ``part`` of ``parts`` equal parts of the heads."""

    unrecorded = "qk_clip scales heads by what forward has seen"

    def __init__(self, threshold: float, alpha: float, part: int = 0, parts: int = 1) -> None:
        self._threshold, self._alpha, self._part, self._parts = threshold, alpha, part, parts
        self._attentions: dict[ShardedParam, _Attention] = {}
        self.dynamo_passes = (GraphPass("note_attention", self._watch, kinds=(GraphKind.DYNAMO,)),)
        self.max_logit: Tensor | None = None  # over all heads and ranks in the latest step, 0-dim fp32 on the device

    def _watch(self, gm: GraphModule, ctx: PassContext) -> GraphModule:
        try:
            note_attention(gm, self._part, self._parts)
        except UnknownAttention as problem:
            raise UnsupportedModelError(f"qk_clip: {problem}; leave qk_clip out") from None
        return gm

    def notify(self, sharded: ShardedParam, what: str, *facts: Any) -> None:
        """Note the largest logit of each head for the gradient that the backward under way adds to ``.grad``."""
        if what != LOGITS or not sharded.visits.delivers:
            return
        key_state, largest, size, dims, per_head, biases = facts
        if sharded not in self._attentions:
            key, key_biases = sharded_param_of(key_state), (sharded_param_of(biases[0]), sharded_param_of(biases[1]))
            assert key is not None
            largest_before = torch.full_like(largest, -math.inf)
            self._attentions[sharded] = _Attention(key, key_biases, largest_before, size, tuple(dims), per_head)
        attention = self._attentions[sharded]
        attention.largest.copy_(torch.maximum(attention.largest, largest))

    def dropped(self, sharded: ShardedParam) -> None:
        """Drop the logits that belong to dropped gradients."""
        if (attention := self._attentions.get(sharded)) is not None:
            attention.largest.fill_(-math.inf)

    def check(self) -> None:
        """Raise if no logit was noted or heads cannot be scaled, and note which rows belong to which head."""
        if not self._attentions:
            raise UnsupportedModelError(
                "qk_clip: no compiled graph has noted a logit in backward; compile the model with backend='muon_zero', "
                "and let its attention call scaled_dot_product_attention or flex_attention"
            )
        for sharded, attention in self._noted.items():
            specs = tuple(param.spec for param in (sharded, attention.key, *attention.biases) if param is not None)
            if attention.made_for != specs:
                attention.scaled, attention.made_for = _scaled(sharded, attention, self._alpha), specs

    @property
    def _noted(self) -> dict[ShardedParam, _Attention]:
        """Attentions in the order of the engine's parameters, the same on every rank."""
        return {a: self._attentions[a] for a in self.engine.step.muon if a in self._attentions}

    @torch.no_grad()
    def after_commit(self, found_inf: Tensor | None) -> None:
        """Scale the rows of queries and keys; one all-reduce for all heads, which the host does not wait for."""
        attentions = list(self._noted.values())
        if not attentions:
            return
        largest = torch.cat([attention.largest for attention in attentions])
        if self.engine.group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.engine.group)
        sizes = [len(attention.largest) for attention in attentions]
        for attention, logits in zip(attentions, largest.split(sizes), strict=True):
            _, keys, _ = attention.scaled[-1]
            # The factor is 1, too, where no logit was noted (-inf) or one was NaN.
            factor = torch.where(logits > self._threshold, self._threshold / logits, torch.ones_like(logits))
            if found_inf is not None:
                factor = torch.where(found_inf == 1, torch.ones_like(factor), factor)
            shared = factor.view(keys.count, -1).amin(1)
            for sharded, heads, power in attention.scaled:
                local, factors = sharded.local.detach(), shared.repeat_interleave(heads.count // keys.count) ** power
                of_rows = torch.cat([factors, factors.new_ones(1)])[heads.numbers].to(local.dtype)
                local.mul_(of_rows[:, None] if local.ndim > heads.dim + 1 else of_rows)
        self.max_logit = largest.max()

    def metrics(self) -> Mapping[str, float]:
        """Return ``max_logit``."""
        return {"max_logit": math.nan if self.max_logit is None else float(self.max_logit)}
