"""MuonClip: rows of queries and keys scaled down where the logits of their head grew too large.

    S_h = largest logit of head h in what the gradients are of, over micro-batches and ranks
    g_h = min(1, threshold / S_h), of the query heads that share a key head the least
    W_q,h <- g_h^alpha W_q,h,   W_k,h <- g_h^(1 - alpha) W_k,h,   and so their biases

Of multi-head latent attention, where all heads share the part of the keys with positions: the rows of queries that meet
it by g_h, the others and the head's own rows of keys as above. Source: Kimi K2, arXiv 2507.20534, and for shared key
heads Megatron's ``qk_clip``. The momentum is not scaled.
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

__all__ = ["MuonClip"]

_ALL = slice(None)


@dataclass(frozen=True)
class _Heads:
    """What of a parameter is of which head.

    Args:
        dim: that heads lie along, 0 of a bias.
        numbers: of every row, or column, that this rank has: its head, or ``count`` for none.
        count: heads.
    """

    dim: int
    numbers: Tensor
    count: int


@dataclass(eq=False)
class _Attention:
    """Attention whose queries a parameter projects.

    Args:
        key: what projects its keys.
        biases: what is added to queries, and to keys.
        largest: ``[heads]`` fp32, the largest logit of each in what ``.grad`` is the gradient of.
        size: of a head.
        dims: of the weights of queries and keys, that heads lie along.
        own: of these, how many entries of a key are of its head alone; all but in MLA.
        scaled: what a step scales, and the specs of the parameters that it was made for.
    """

    key: ShardedParam
    biases: tuple[ShardedParam | None, ShardedParam | None]
    largest: Tensor
    size: int
    dims: tuple[int, ...]
    own: int
    scaled: Sequence[tuple[ShardedParam, _Heads, float]] = ()
    made_for: tuple[ParamSpec, ...] = ()


@dataclass(frozen=True)
class _Projection:
    """A weight that projects queries or keys along ``dim``, and the bias that is added to them."""

    weight: ShardedParam
    bias: ShardedParam | None
    dim: int

    @property
    def rows(self) -> int:
        """Along ``dim``, of the whole weight."""
        return self.weight.spec.layout.whole[self.dim]

    def _order(self) -> Tensor:
        """Rows or columns of the whole parameter, part by part where a view says what its parts are."""
        muon = self.weight.spec.muon
        order = torch.arange(self.rows, device="cpu")
        if muon is None or muon.view is None or muon.view.dim != self.dim:
            return order
        shape = (-1, 1) if self.dim == 0 else (1, -1)
        return torch.cat([part.flatten() for part in muon.view.cut(order.view(shape))])

    def heads(self, first: int, count: int, size: int, of: slice = _ALL) -> Iterator[tuple[ShardedParam, _Heads]]:
        """Of weight and bias, the heads in ``count * size`` rows behind the ``first`` ones, in the order of the parts.

        Args:
            of: which rows of each head.
        """
        numbers = torch.full((self.rows,), count, device="cpu")
        rows = self._order()[first : first + count * size].view(count, size)[:, of]
        numbers[rows] = torch.arange(count, device="cpu")[:, None].expand_as(rows)
        for sharded, dim in ((self.weight, self.dim), (self.bias, 0)):
            if sharded is None:
                continue
            layout = sharded.spec.layout  # a bias is cut otherwise than its weight
            own = numbers[layout.part[dim]]
            if dim == 0 and layout.sharded:
                own = own[layout.local_rows]
            yield sharded, _Heads(dim, own.to(sharded.local.device), count)


def _scaled(sharded: ShardedParam, noted: _Attention, alpha: float) -> list[tuple[ShardedParam, _Heads, float]]:
    """Which heads are scaled, of an attention whose queries ``sharded`` projects: of which parameter, by which power.

    Raises:
        UnsupportedModelError: it is not known which rows are whose, or a parameter that is to be scaled is frozen.
    """
    query, key = (_Projection(*given) for given in zip((sharded, noted.key), noted.biases, noted.dims, strict=True))
    heads, size, own = len(noted.largest), noted.size, noted.own
    rows, key_rows = query.rows, key.rows
    fused, latent = noted.key is sharded, own < size
    keys = heads if latent else (rows // size - heads) // 2 if fused else key_rows // size
    muon = sharded.spec.muon
    fits = rows == (heads + 2 * keys if fused else heads) * size and (fused or key_rows == keys * size)
    if latent:  # values lie behind a head's own part of a key
        fits = not fused and rows == heads * size and key_rows % heads == 0 and key_rows // heads >= own
    added = [
        (bias.name, bias.spec.layout.whole[0], projection.rows)
        for projection in (query, key)
        if (bias := projection.bias) is not None
    ]
    frozen = next((each.name for each in (noted.key, *noted.biases) if each and not each.param.requires_grad), None)
    unfit = next(
        (f"{name} has {length} entries, not {number}" for name, length, number in added if length != number), None
    )
    if fused and sharded.spec.layout.joined:
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
            *((*each, alpha) for each in query.heads(0, heads, size, slice(0, own))),
            *((*each, 1.0) for each in query.heads(0, heads, size, slice(own, size))),
            *((*each, 1 - alpha) for each in key.heads(0, heads, key_rows // heads, slice(0, own))),
        ]
    else:
        return [
            *((*each, alpha) for each in query.heads(0, heads, size)),
            *((*each, 1 - alpha) for each in key.heads(heads * size if fused else 0, keys, size)),
        ]
    raise UnsupportedModelError(f"qk_clip of {sharded.name}, {list(sharded.spec.layout.whole)}: {remedy}")


class MuonClip(Extension):
    """Scales down heads whose largest logit is over a threshold, behind each step.

    Args:
        threshold: ``qk_clip``.
        alpha: ``qk_clip_alpha``.
        part, parts: which of how many equal parts of the heads attention has on this rank.
    Attributes:
        max_logit: of all heads over all ranks in the latest step, 0-dim fp32 on the device; None before.
    """

    unrecorded = "qk_clip scales heads by what forward has seen"

    def __init__(self, threshold: float, alpha: float, part: int = 0, parts: int = 1) -> None:
        self._threshold, self._alpha, self._part, self._parts = threshold, alpha, part, parts
        self._attentions: dict[ShardedParam, _Attention] = {}
        self.dynamo_passes = (GraphPass("note_attention", self._watch, kinds=(GraphKind.DYNAMO,)),)
        self.max_logit: Tensor | None = None

    def _watch(self, gm: GraphModule, ctx: PassContext) -> GraphModule:
        try:
            note_attention(gm, self._part, self._parts)
        except UnknownAttention as problem:
            raise UnsupportedModelError(f"qk_clip: {problem}; leave qk_clip out") from None
        return gm

    def told(self, sharded: ShardedParam, what: str, *facts: Any) -> None:
        """Keep the largest logit of each head with the gradient that the backward under way adds to ``.grad``."""
        if what != LOGITS or not sharded.visits.delivers:
            return
        key_state, largest, size, dims, own, biases = facts
        if sharded not in self._attentions:
            key, added = sharded_param_of(key_state), (sharded_param_of(biases[0]), sharded_param_of(biases[1]))
            assert key is not None
            before = torch.full_like(largest, -math.inf)
            self._attentions[sharded] = _Attention(key, added, before, size, tuple(dims), own)
        noted = self._attentions[sharded]
        noted.largest.copy_(torch.maximum(noted.largest, largest))

    def dropped(self, sharded: ShardedParam) -> None:
        """What was noted belonged to gradients that are no more."""
        if (noted := self._attentions.get(sharded)) is not None:
            noted.largest.fill_(-math.inf)

    def check(self) -> None:
        """See to it that heads can be scaled, and note which rows are whose.

        Raises:
            UnsupportedModelError: heads are not all rows of a weight, or of a fused one on tensor-parallel ranks, or of
                a frozen one; or no attention was noted.
        """
        if not self._attentions:
            raise UnsupportedModelError(
                "qk_clip: no compiled graph has noted a logit in backward; compile the model with backend='muon_zero', "
                "and let its attention call scaled_dot_product_attention or flex_attention"
            )
        for sharded, noted in self._noted.items():
            specs = tuple(each.spec for each in (sharded, noted.key, *noted.biases) if each is not None)
            if noted.made_for != specs:
                noted.scaled, noted.made_for = _scaled(sharded, noted, self._alpha), specs

    @property
    def _noted(self) -> dict[ShardedParam, _Attention]:
        """In the same order on every rank."""
        return {a: self._attentions[a] for a in self.engine.step.muon if a in self._attentions}

    @torch.no_grad()
    def after_commit(self, found_inf: Tensor | None) -> None:
        """Scale the rows of queries and keys; one collective for all heads, which the host does not wait for."""
        noted = list(self._noted.values())
        if not noted:
            return
        largest = torch.cat([attention.largest for attention in noted])
        if self.engine.group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.engine.group)
        sizes = [len(attention.largest) for attention in noted]
        for attention, own in zip(noted, largest.split(sizes), strict=True):
            _, keys, _ = attention.scaled[-1]
            # Also where nothing, or something that is not a number, was noted.
            factor = torch.where(own > self._threshold, self._threshold / own, torch.ones_like(own))
            if found_inf is not None:
                factor = torch.where(found_inf == 1, torch.ones_like(factor), factor)
            shared = factor.view(keys.count, -1).amin(1)
            for weight, rows, power in attention.scaled:
                _scale(weight, rows, shared.repeat_interleave(rows.count // keys.count) ** power)
        self.max_logit = largest.max()

    def metrics(self) -> Mapping[str, float]:
        """``max_logit``."""
        return {"max_logit": math.nan if self.max_logit is None else float(self.max_logit)}


def _scale(sharded: ShardedParam, heads: _Heads, factors: Tensor) -> None:
    local = sharded.local.detach()
    of_rows = torch.cat([factors, factors.new_ones(1)])[heads.numbers].to(local.dtype)
    local.mul_(of_rows[:, None] if local.ndim > heads.dim + 1 else of_rows)
