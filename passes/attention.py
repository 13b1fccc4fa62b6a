"""MuonClip's eyes: the largest logit of each head, noted where attention is called.

A pass over Dynamo's graph, where attention is still one call. It finds the weights that queries and keys come from, and
keeps the maximum beside the weight's state. ``note_logits`` in front of ``scaled_dot_product_attention`` computes the
products of queries and keys once more, a block of rows at a time; FlexAttention's kernel hands out the maximum of each
row, which ``note_maxima`` takes behind it. Source: Kimi K2, arXiv 2507.20534.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from .holder import holder_of
from .markers import UNSHARD
from .spec import ParamSpec
from .torch_private import flex_with_maxima, is_autograd_function, is_flex_attention, is_from_local

__all__ = ["UnknownAttention", "largest_logits", "note_attention"]

#: rows of queries at a time
_BLOCK = 256
_SDPA = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
_LINEAR = (F.linear, torch._C._nn.linear)
_PRODUCTS = (*_LINEAR, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum, operator.matmul, "matmul", "addmm")
_TURNS = ("t", "transpose", "permute", torch.t, torch.transpose, torch.permute)
_SUMS = (operator.add, operator.iadd, torch.add, "add", "add_")
_CASTS = ("to", "contiguous", "type", "float", "bfloat16", "half", torch.Tensor.to)
_CATS = (torch.cat, torch.concat, torch.concatenate)
_UNSHARDS = (UNSHARD, torch.ops.muon_zero.unshard)


class UnknownAttention(Exception):
    """Attention whose queries or keys do not come straight from one weight each."""


def largest_logits(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """``max over batch and pairs of scale <q, k> + mask``, of the pairs that see each other.

    Args:
        query: ``[..., heads, queries, size]``.
        key: ``[..., key heads, keys, size]``, where key heads divide heads.
        mask: as ``scaled_dot_product_attention`` takes it: True where a pair counts, or what is added.
        causal: whether a query sees only keys up to its own place.
    Returns:
        ``[heads]`` fp32. Memory is that of a block of rows.
    """
    heads, length = query.shape[-3], query.shape[-2]
    if key.shape[-3] != heads:
        key = key.repeat_interleave(heads // key.shape[-3], -3)
    found = torch.full((heads,), -math.inf, device=query.device)
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        seen = min(stop, key.shape[-2]) if causal else key.shape[-2]
        logits = (query[..., start:stop, :] @ key[..., :seen, :].mT).float() * scale
        if causal:
            rows = torch.arange(start, stop, device=query.device)[:, None]
            logits = logits.masked_fill(torch.arange(seen, device=query.device) > rows, -math.inf)
        if mask is not None:
            own = mask[..., start:stop, :seen] if mask.shape[-2] > 1 else mask[..., :seen]
            logits = logits.masked_fill(~own, -math.inf) if own.dtype is torch.bool else logits + own
        found = torch.maximum(found, logits.amax((-2, -1)).reshape(-1, heads).amax(0))
    return found


def _keep(
    holder: Any, largest: Tensor, key_state: Tensor, size: int, dims: list[int], own: int, part: int, parts: int
) -> None:
    """Tell the holder of the state of the queries' weight.

    Args:
        largest: ``[heads]``, of this rank.
        size: of a head.
        dims: of the weights of queries and keys, that their heads lie along.
        own: entries of a key that are of its head alone; the others are the same for all heads (MLA).
        part, parts: which of how many equal parts of all heads these are.
    """
    of_all = largest.new_full((parts, len(largest)), -math.inf)
    of_all[part] = largest
    holder.note_logits(key_state, of_all.flatten(), size, dims, own)


def _hands_on(op: Any) -> None:
    """Register what autograd and traces are to know of an op that gives its first argument again."""
    op.register_fake(lambda first, *args: torch.empty_like(first, memory_format=torch.preserve_format))
    others = len(op._opoverload._schema.arguments) - 1
    op.register_autograd(lambda ctx, grad: (grad, *[None] * others))


@torch.library.custom_op("muon_zero::note_logits", mutates_args=())
def note_logits(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    query_state: Tensor,
    key_state: Tensor,
    size: int,
    dims: list[int],
    own: int,
    part: int,
    parts: int,
) -> Tensor:
    """The queries again; their largest logits are kept, see :func:`_keep`."""
    if (holder := holder_of(query_state)) is not None:
        largest = largest_logits(query, key, mask, scale, causal)
        _keep(holder, largest, key_state, size, dims, own, part, parts)
    return query.clone()


@torch.library.custom_op("muon_zero::note_maxima", mutates_args=())
def note_maxima(
    out: Tensor,
    maxima: Tensor,
    query_state: Tensor,
    key_state: Tensor,
    size: int,
    dims: list[int],
    own: int,
    part: int,
    parts: int,
) -> Tensor:
    """What FlexAttention makes, again; its largest logits are kept, see :func:`_keep`.

    Args:
        maxima: ``[B, heads, rows]``, in powers of two as its kernel counts them, behind ``score_mod`` and mask.
    """
    if (holder := holder_of(query_state)) is not None:
        _keep(holder, maxima.float().amax((0, 2)) * math.log(2), key_state, size, dims, own, part, parts)
    return out.clone()


_hands_on(note_logits)
_hands_on(note_maxima)


@dataclass(frozen=True)
class _Source:
    """What projects queries or keys.

    Args:
        state: of its weight.
        dim: of the weight, that outputs lie along.
        cut: which of how many parts of them this rank has (tensor parallelism).
    """

    state: Node
    dim: int
    cut: tuple[int, int]


def note_attention(gm: GraphModule, part: int = 0, parts: int = 1) -> None:
    """Note the logits of every attention of a graph of Dynamo, and of those inside it.

    Args:
        part, parts: which of how many equal parts of the heads this rank has where ranks exchange positions for heads.
    Raises:
        UnknownAttention: naming why.
    """
    for sub in (m for m in gm.modules() if isinstance(m, GraphModule)):
        for node in list(sub.graph.nodes):
            if is_flex_attention(node):
                _note_flex(sub, node, part, parts)
            elif node.target in _SDPA:
                _note(sub, node, part, parts)
        sub.recompile()


def _note(gm: GraphModule, node: Node, part: int, parts: int) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    query, key = given["query"], given["key"]
    told, scale = _told(query, key, part, parts), given.get("scale")
    scale = 1 / math.sqrt(query.meta["example_value"].shape[-1]) if scale is None else float(scale)
    with gm.graph.inserting_before(node):
        noted = gm.graph.call_function(
            torch.ops.muon_zero.note_logits.default,
            (query, key, given.get("attn_mask"), scale, bool(given.get("is_causal", False)), *told),
        )
    noted.meta["example_value"] = query.meta["example_value"]
    if "query" in node.kwargs:
        node.update_kwarg("query", noted)
    else:
        node.update_arg(0, noted)


def _note_flex(gm: GraphModule, node: Node, part: int, parts: int) -> None:
    query, key, *_ = node.args
    told = _told(query, key, part, parts)
    if not flex_with_maxima(node):
        raise UnknownAttention("flex_attention with BACKEND='FLASH' hands out no logits; use another backend")
    (out,) = (user for user in node.users if user.target is operator.getitem and user.args[1] == 0)
    with gm.graph.inserting_after(out):
        maxima = gm.graph.call_function(operator.getitem, (node, 2))
    with gm.graph.inserting_after(maxima):
        noted = gm.graph.call_function(torch.ops.muon_zero.note_maxima.default, (out, maxima, *told))
    noted.meta["example_value"] = out.meta["example_value"]
    out.replace_all_uses_with(noted, delete_user_cb=lambda user: user is not noted)


def _told(query: Node, key: Node, part: int, parts: int) -> tuple[Any, ...]:
    """What both ops are told of an attention of ``query`` and ``key``, from ``query_state`` on."""
    size = own = query.meta["example_value"].shape[-1]
    queries, keys = set(_weights_of(query)), set(_weights_of(key))
    if len(keys) == 2:  # noqa: PLR2004 - multi-head latent attention: what is of each head, and what all heads share
        firsts = [_pieces(each)[0] for each in (query, key)]
        widths = {first.meta["example_value"].shape[-1] for first in firsts}
        keys, own = set(_weights_of(firsts[1])), firsts[1].meta["example_value"].shape[-1]
        if len(widths) != 1 or not all(map(_is_first_part, firsts)):
            raise UnknownAttention(
                "keys come from two weights, and not as in MLA: first what is of a head, then shared"
            )
    for what, weights in (("queries", queries), ("keys", keys)):
        if len(weights) != 1:
            raise UnknownAttention(f"{what} come from {len(weights)} weights, where the rows of one are scaled")
    sources = [*queries, *keys]
    (slice_of, slices), of_sequence = sources[0].cut, (part, parts) if _exchanged(query) else (0, 1)
    heads = slice_of * of_sequence[1] + of_sequence[0], slices * of_sequence[1]
    return (*(source.state for source in sources), size, [source.dim for source in sources], own, *heads)


def _weights_of(start: Node) -> Iterator[_Source]:
    for piece in _pieces(start):
        yield from _sources(piece)


def _pieces(node: Node) -> list[Node]:
    """What ``node`` is put together of along its last dim, by ``cat`` or by writes to slices; itself otherwise."""
    while node.target in _CASTS:
        node = node.all_input_nodes[0]
    if node.target in _CATS and len(node.args[0]) > 1:
        given = {"dim": 0, **dict(zip(("tensors", "dim"), node.args, strict=False)), **node.kwargs}
        return list(given["tensors"]) if given["dim"] in (-1, node.meta["example_value"].ndim - 1) else [node]
    written: dict[int, Node] = {}
    for user in node.users:
        if user.target is operator.setitem and user.args[0] is node:
            writes = [(user.args[1], user.args[2])]
        elif user.target is operator.getitem:
            writes = [(user.args[1], write.args[1]) for write in user.users if write.target == "copy_"]
        else:
            continue
        for index, value in writes:
            last = index[-1] if isinstance(index, tuple) else index
            if isinstance(last, slice):
                written[last.start or 0] = value
    return [written[start] for start in sorted(written)] or [node]


def _is_part_of_split(node: Node) -> bool:
    taken = node.target is operator.getitem and isinstance(node.args[1], int)
    return taken and "split" in str(getattr(node.args[0], "target", ""))


def _is_first_part(node: Node) -> bool:
    """Whether ``node`` is the beginning of what was split along its last dim."""
    while not _is_part_of_split(node):
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return node.args[1] == 0


def _way(start: Node) -> Iterator[Node]:
    """``start`` and what it comes from, up to the products of projections.

    What was put together along the last dim and is taken apart again alike (queries, keys and values travel together
    where positions are exchanged for heads) has only its own part on the way.
    """
    seen, left = set[tuple[Node, int, tuple[int, ...]]](), [(start, 0, ())]
    while left:
        node, index, widths = left.pop()
        if (node, index, widths) in seen:
            continue
        seen.add((node, index, widths))
        yield node
        if node.target in _PRODUCTS:
            continue
        if _is_part_of_split(node):
            outputs = node.args[0].meta["example_value"]
            index, widths = node.args[1], tuple(each.shape[-1] for each in outputs)
        sources = node.all_input_nodes
        if node.target in _CATS and widths == tuple(each.meta["example_value"].shape[-1] for each in node.args[0]):
            sources, index, widths = [node.args[0][index]], 0, ()
        left += [(each, index, widths) for each in sources]


def _exchanged(start: Node) -> bool:
    """Whether ranks have exchanged positions for heads between the projection and ``start``."""
    return any(map(is_autograd_function, _way(start)))


def _sources(start: Node) -> Iterator[_Source]:
    """The projections that ``start`` comes from, past rotations, views and copies.

    Raises:
        UnknownAttention: a norm lies between, which undoes what scaling the weight would do.
    """
    for node in _way(start):
        if node.target in _PRODUCTS:
            for arg in node.all_input_nodes:
                if (found := _weight(arg)) is None:
                    continue
                unshard, turned = found
                layout, dim = ParamSpec.decode(unshard.args[-1]).layout, int(turned == (node.target in _LINEAR))
                if len(layout.shape) > 1:
                    cut = (layout.tensor.index, layout.tensor.size) if layout.tensor_dim == dim else (0, 1)
                    yield _Source(unshard.args[1], dim, cut)
            continue
        weighs = node.target not in _SUMS and any(_weight(arg) is not None for arg in node.all_input_nodes)
        if weighs or any(word in str(node.target) for word in ("norm", "rsqrt")):
            raise UnknownAttention("a norm lies between projection and attention (QK-norm), where scaling does nothing")


def _weight(node: Node) -> tuple[Any, bool] | None:
    """The ``unshard`` that ``node`` is, but for casts, and whether it is turned; None if it is something else."""
    turned = False
    while node.target not in _UNSHARDS:
        if node.target in _TURNS:
            turned = not turned
        elif node.target not in _CASTS and not is_from_local(node):  # a tensor-parallel weight
            return None
        node = node.all_input_nodes[0]
    return node, turned
