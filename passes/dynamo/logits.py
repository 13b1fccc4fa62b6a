"""MuonClip's eyes: the largest logit of each head, noted where attention is called.

A pass over Dynamo's graph, where attention is still one call. It finds the weights that queries and keys come from, and
the biases added to them. ``largest_logits`` in front of ``scaled_dot_product_attention`` computes the products of
queries and keys once more, a block of rows at a time; FlexAttention's kernel hands out the maximum of each row.
``watch_logits`` has their maximum noted beside the weight's state where its backward runs: what trains nothing (an
evaluation, a forward whose loss is dropped) has no say in what a step scales, and what is recomputed for a backward is
counted once. Source: Kimi K2, arXiv 2507.20534.
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

from ..language.holder import holder_of
from ..language.spec import ParamSpec
from ..markers import UNSHARD
from ..torch_private import flex_with_maxima, is_autograd_function, is_flex_attention, is_from_local

__all__ = ["LOGITS", "UnknownAttention", "largest_logits", "note_attention"]

#: what holders of weights of queries are told: the state of the keys' weight, the largest logit of each head, its
#: size, and what :func:`note_logits` says of ``dims``, ``own`` and the biases
LOGITS = "logits"

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


@torch.library.custom_op("muon_zero::largest_logits", mutates_args=())
def _largest(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    return largest_logits(query, key, mask, scale, causal)


_largest.register_fake(lambda query, *_: query.new_empty(query.shape[-3], dtype=torch.float32))


def _logits_of(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    mask = None if mask is None else mask.detach()
    return torch.ops.muon_zero.largest_logits(query.detach(), key.detach(), mask, scale, causal)


def _logits_in(maxima: Tensor) -> Tensor:
    """Of FlexAttention's ``[B, heads, rows]``, in powers of two as its kernel counts them, behind mask and
    ``score_mod``."""
    return maxima.detach().float().amax((0, 2)) * math.log(2)


# A CUDA graph that is replayed would not ask whether this backward trains: Inductor runs the op between the graphs.
@torch.library.custom_op("muon_zero::note_logits", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def note_logits(
    grad: Tensor,
    largest: Tensor,
    query_state: Tensor,
    key_state: Tensor,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    size: int,
    dims: list[int],
    own: int,
    part: int,
    parts: int,
) -> Tensor:
    """The gradient again; the holder of the state of the queries' weight is told the largest logits of its forward.

    Args:
        largest: ``[heads]``, of this rank.
        query_bias, key_bias: states of the biases that are added to queries and keys.
        size: of a head.
        dims: of the weights of queries and keys, that their heads lie along.
        own: entries of a key that are of its head alone; the others are the same for all heads (MLA).
        part, parts: which of how many equal parts of all heads these are.
    """
    if (holder := holder_of(query_state)) is not None:
        of_all = largest.new_full((parts, len(largest)), -math.inf)
        of_all[part] = largest
        holder.tell(LOGITS, key_state, of_all.flatten(), size, dims, own, (query_bias, key_bias))
    return grad.clone()


@torch.library.custom_op("muon_zero::watch_logits", mutates_args=())
def watch_logits(
    x: Tensor,
    largest: Tensor,
    query_state: Tensor,
    key_state: Tensor,
    query_bias: Tensor | None,
    key_bias: Tensor | None,
    size: int,
    dims: list[int],
    own: int,
    part: int,
    parts: int,
) -> Tensor:
    """``x`` again; its backward tells the largest logits, see :func:`note_logits`. What trains nothing tells none."""
    return x.clone()


def _save_for_note(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:_TENSORS])
    ctx.facts = inputs[_TENSORS:]


def _note_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    told = torch.ops.muon_zero.note_logits.default(grad, *ctx.saved_tensors, *ctx.facts)
    return told, *[None] * (_TENSORS - 1 + len(ctx.facts))


#: of the arguments of both ops, those that are tensors come first
_TENSORS = 6

for _op in (note_logits, watch_logits):
    _op.register_fake(lambda x, *_: torch.empty_like(x, memory_format=torch.preserve_format))
note_logits.register_autograd(lambda ctx, grad: (grad, *[None] * 10))
watch_logits.register_autograd(_note_backward, setup_context=_save_for_note)


@dataclass(frozen=True)
class _Source:
    """What projects queries or keys, or a bias that is added to them.

    Args:
        state: of its weight, or of the bias.
        dim: of the weight, that outputs lie along; None of a bias.
        cut: which of how many parts of them this rank has (tensor parallelism).
    """

    state: Node
    dim: int | None
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
        causal = bool(given.get("is_causal", False))
        largest = gm.graph.call_function(_logits_of, (query, key, given.get("attn_mask"), scale, causal))
        noted = gm.graph.call_function(torch.ops.muon_zero.watch_logits.default, (query, largest, *told))
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
        largest = gm.graph.call_function(_logits_in, (maxima,))
    with gm.graph.inserting_after(largest):
        noted = gm.graph.call_function(torch.ops.muon_zero.watch_logits.default, (out, largest, *told))
    noted.meta["example_value"] = out.meta["example_value"]
    out.replace_all_uses_with(noted, delete_user_cb=lambda user: user is not noted)


def _told(query: Node, key: Node, part: int, parts: int) -> tuple[Any, ...]:
    """What both ops are told of an attention of ``query`` and ``key``, from ``query_state`` on."""
    size = own = query.meta["example_value"].shape[-1]
    queries, keys = set(_sources_of(query)), set(_sources_of(key))
    if sum(each.dim is not None for each in keys) == 2:  # noqa: PLR2004 - multi-head latent attention: own, and shared
        firsts = [_pieces(each)[0] for each in (query, key)]
        widths = {first.meta["example_value"].shape[-1] for first in firsts}
        keys, own = set(_sources_of(firsts[1])), firsts[1].meta["example_value"].shape[-1]
        if len(widths) != 1 or not all(map(_is_first_part, firsts)):
            raise UnknownAttention(
                "keys come from two weights, and not as in MLA: first what is of a head, then shared"
            )
    weights, biases = list[_Source](), list["Node | None"]()
    for what, sources in (("queries", queries), ("keys", keys)):
        found = [source for source in sources if source.dim is not None]
        added = [source.state for source in sources if source.dim is None]
        if len(found) != 1:
            raise UnknownAttention(f"{what} come from {len(found)} weights, where the rows of one are scaled")
        if len(added) > 1:
            raise UnknownAttention(f"{len(added)} biases are added to {what}, where those of one are scaled")
        weights.append(found[0])
        biases.append(added[0] if added else None)
    (slice_of, slices), of_sequence = weights[0].cut, (part, parts) if _exchanged(query) else (0, 1)
    heads = slice_of * of_sequence[1] + of_sequence[0], slices * of_sequence[1]
    states = (*(source.state for source in weights), *biases)
    return (*states, size, [source.dim for source in weights], own, *heads)


def _sources_of(start: Node) -> Iterator[_Source]:
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
    """The projections that ``start`` comes from, past rotations, views and copies, and the biases added behind them.

    Raises:
        UnknownAttention: a norm lies between, which undoes what scaling the weight would do, or something is added
            that is not scaled with it.
    """
    for node in _way(start):
        if node.target in _PRODUCTS:
            yield from _operands(node)
            continue
        if node.target in _SUMS:
            yield from _added(node)
            continue
        weighs = any(_weight(arg) is not None for arg in node.all_input_nodes)
        if weighs or any(word in str(node.target) for word in ("norm", "rsqrt")):
            raise UnknownAttention("a norm lies between projection and attention (QK-norm), where scaling does nothing")


def _operands(node: Node, *args: Node) -> Iterator[_Source]:
    """The weights and biases among the operands of a product or sum; of all of them, or ``args``."""
    for arg in args or node.all_input_nodes:
        if (found := _weight(arg)) is None:
            continue
        unshard, turned = found
        layout = ParamSpec.decode(unshard.args[-1]).layout
        if len(layout.shape) == 1:
            yield _Source(unshard.args[1], None, (0, 1))
        elif len(layout.shape) > 1:
            dim = int(turned == (node.target in _LINEAR))
            cut = (layout.tensor.index, layout.tensor.size) if layout.tensor_dim == dim else (0, 1)
            yield _Source(unshard.args[1], dim, cut)


def _added(node: Node) -> Iterator[_Source]:
    """The biases that a sum adds to what was projected; none of a sum of other things, as tables of rotations have."""
    projected = {
        arg: any(n.target in _PRODUCTS and any(_operands(n)) for n in _way(arg)) for arg in node.all_input_nodes
    }
    for arg in node.all_input_nodes if any(projected.values()) else ():
        added = list(_operands(node, arg))
        scaled = projected[arg] or not isinstance(arg.meta.get("example_value"), Tensor)
        if any(each.dim is not None for each in added) or not (added or scaled):
            raise UnknownAttention(f"{arg} is added behind the projection and not scaled with it; a bias has one dim")
        yield from added


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
