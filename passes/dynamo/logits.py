"""The pass behind MuonClip: it notes the largest logit of each head where attention is called.

It runs over Dynamo's graph, where attention is one call, and finds the weights and biases that queries and keys come
from. Ahead of ``scaled_dot_product_attention``, ``largest_logits`` computes the products of queries and keys again, a
block of rows at a time; FlexAttention's kernel returns the maximum of each row. ``watch_logits`` passes the maxima to
the holder of the weight's state when its backward runs. So a forward without backward (evaluation, a dropped loss) does
not affect a step, and a recomputed one counts once. Source: Kimi K2, arXiv 2507.20534.
"""

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

#: ``Holder.notify`` of the queries' weight: the state of the keys' weight, the largest logit of each head, the size of
#: a head, then ``dims``, ``unshared_size`` and ``(query_bias, key_bias)`` of :func:`note_logits`
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


@torch.library.custom_op("muon_zero::largest_logits", mutates_args=())
def largest_logits(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """Return the largest ``scale <q, k> + mask`` of each head, over batch and visible pairs: ``[heads]`` fp32.

    ``query`` is ``[..., heads, queries, size]``, ``key`` ``[..., key heads, keys, size]``, where key heads divide
    heads. ``mask`` is as in ``scaled_dot_product_attention``: True for visible pairs, or added to logits. Memory is
    that of a block of rows.
    """
    heads, length = query.shape[-3], query.shape[-2]
    if key.shape[-3] != heads:
        key = key.repeat_interleave(heads // key.shape[-3], -3)
    maxima = torch.full((heads,), -math.inf, device=query.device)
    for start in range(0, length, _BLOCK):
        stop = min(start + _BLOCK, length)
        visible = min(stop, key.shape[-2]) if causal else key.shape[-2]
        logits = (query[..., start:stop, :] @ key[..., :visible, :].mT).float() * scale
        if causal:
            rows = torch.arange(start, stop, device=query.device)[:, None]
            logits = logits.masked_fill(torch.arange(visible, device=query.device) > rows, -math.inf)
        if mask is not None:
            tile = mask[..., start:stop, :visible] if mask.shape[-2] > 1 else mask[..., :visible]
            logits = logits.masked_fill(~tile, -math.inf) if tile.dtype is torch.bool else logits + tile
        maxima = torch.maximum(maxima, logits.amax((-2, -1)).reshape(-1, heads).amax(0))
    return maxima


largest_logits.register_fake(lambda query, *_: query.new_empty(query.shape[-3], dtype=torch.float32))


def _logits_of(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    mask = None if mask is None else mask.detach()
    return torch.ops.muon_zero.largest_logits(query.detach(), key.detach(), mask, scale, causal)


def _logits_in(maxima: Tensor) -> Tensor:
    """Return ``[heads]`` from FlexAttention's row maxima ``[B, heads, rows]``, taken after mask and ``score_mod``."""
    return maxima.detach().float().amax((0, 2)) * math.log(2)  # the kernel computes in base 2


_SCHEMA = (
    "(Tensor x, Tensor largest, Tensor query_state, Tensor key_state, Tensor? query_bias, Tensor? key_bias, "
    "SymInt size, SymInt[] dims, SymInt unshared_size, SymInt part, SymInt parts) -> Tensor"
)


# A replayed CUDA graph would skip the call into Python: with the tag Inductor runs the op between CUDA graphs.
@torch.library.custom_op("muon_zero::note_logits", mutates_args=(), schema=_SCHEMA, tags=(torch.Tag.cudagraph_unsafe,))
def note_logits(grad: Tensor, largest: Tensor, query_state: Tensor, key_state: Tensor, *facts: Any) -> Tensor:
    """Return the gradient, and pass the largest logits of its forward to the holder of the queries' weight.

    ``largest`` has this rank's ``[heads]``; these are part ``part`` of ``parts`` equal parts of all heads.
    ``query_bias`` and ``key_bias`` are the states of the biases added to queries and keys, ``size`` the size of a head,
    ``dims`` the dims of the two weights along which heads lie. The first ``unshared_size`` entries of a key belong
    to its head alone, the others are shared by all heads (MLA).
    """
    *biases, size, dims, unshared_size, part, parts = facts
    if (holder := holder_of(query_state)) is not None:
        of_all = largest.new_full((parts, len(largest)), -math.inf)
        of_all[part] = largest
        holder.notify(LOGITS, key_state, of_all.flatten(), size, dims, unshared_size, tuple(biases))
    return grad.clone()


@torch.library.custom_op("muon_zero::watch_logits", mutates_args=(), schema=_SCHEMA)
def watch_logits(x: Tensor, *_: Any) -> Tensor:
    """Return ``x``; its backward runs :func:`note_logits`."""
    return x.clone()


def _save_for_note(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:_TENSORS])
    ctx.facts = inputs[_TENSORS:]


def _note_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input_grad = torch.ops.muon_zero.note_logits.default(grad, *ctx.saved_tensors, *ctx.facts)
    return input_grad, *[None] * (_TENSORS - 1 + len(ctx.facts))


#: number of tensor arguments of both ops, which come first
_TENSORS = 6

for _op in (note_logits, watch_logits):
    _op.register_fake(lambda x, *_: torch.empty_like(x, memory_format=torch.preserve_format))
note_logits.register_autograd(lambda ctx, grad: (grad, *[None] * 10))
watch_logits.register_autograd(_note_backward, setup_context=_save_for_note)


@dataclass(frozen=True)
class _Source:
    """A projection of queries or keys, or a bias added to its result."""

    state: Node  # of the weight or bias
    dim: int | None  # dim of the weight along which outputs lie; None for a bias
    cut: tuple[int, int]  # tensor-parallel part on this rank: ``(index, parts)``


def note_attention(gm: GraphModule, part: int = 0, parts: int = 1) -> None:
    """Note the logits of every attention in Dynamo's graph and its subgraphs, or raise :class:`UnknownAttention`. Where
    ranks exchange positions for heads, this rank has part ``part`` of ``parts`` equal parts of the heads."""
    for sub in (m for m in gm.modules() if isinstance(m, GraphModule)):
        for node in list(sub.graph.nodes):
            if is_flex_attention(node):
                _note_flex(sub, node, part, parts)
            elif node.target in _SDPA:
                _note(sub, node, part, parts)
        sub.recompile()


def _note(gm: GraphModule, node: Node, part: int, parts: int) -> None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    query, key = arguments["query"], arguments["key"]
    facts, scale = _told(query, key, part, parts), arguments.get("scale")
    scale = 1 / math.sqrt(query.meta["example_value"].shape[-1]) if scale is None else float(scale)
    with gm.graph.inserting_before(node):
        causal = bool(arguments.get("is_causal", False))
        largest = gm.graph.call_function(_logits_of, (query, key, arguments.get("attn_mask"), scale, causal))
        watched = gm.graph.call_function(torch.ops.muon_zero.watch_logits.default, (query, largest, *facts))
    watched.meta["example_value"] = query.meta["example_value"]
    if "query" in node.kwargs:
        node.update_kwarg("query", watched)
    else:
        node.update_arg(0, watched)


def _note_flex(gm: GraphModule, node: Node, part: int, parts: int) -> None:
    query, key, *_ = node.args
    facts = _told(query, key, part, parts)
    if not flex_with_maxima(node):
        raise UnknownAttention("flex_attention with BACKEND='FLASH' hands out no logits; use another backend")
    (out,) = (user for user in node.users if user.target is operator.getitem and user.args[1] == 0)
    with gm.graph.inserting_after(out):
        maxima = gm.graph.call_function(operator.getitem, (node, 2))
    with gm.graph.inserting_after(maxima):
        largest = gm.graph.call_function(_logits_in, (maxima,))
    with gm.graph.inserting_after(largest):
        watched = gm.graph.call_function(torch.ops.muon_zero.watch_logits.default, (out, largest, *facts))
    watched.meta["example_value"] = out.meta["example_value"]
    # Watched on the output, not on queries as for SDPA: the maxima do not exist ahead of the call.
    out.replace_all_uses_with(watched, delete_user_cb=lambda user: user is not watched)


def _told(query: Node, key: Node, part: int, parts: int) -> tuple[Any, ...]:
    """Return the arguments of both ops from ``query_state`` on."""
    size = per_head = query.meta["example_value"].shape[-1]
    queries, keys = set(_sources_of(query)), set(_sources_of(key))
    if sum(each.dim is not None for each in keys) == 2:  # noqa: PLR2004 - MLA: entries per head, and shared ones
        first_pieces = [_pieces(each)[0] for each in (query, key)]
        widths = {first.meta["example_value"].shape[-1] for first in first_pieces}
        keys, per_head = set(_sources_of(first_pieces[1])), first_pieces[1].meta["example_value"].shape[-1]
        if len(widths) != 1 or not all(map(_is_first_part, first_pieces)):
            raise UnknownAttention(
                "keys come from two weights, and not as in MLA: first what is of a head, then shared"
            )
    weights, biases = list[_Source](), list["Node | None"]()
    for what, sources in (("queries", queries), ("keys", keys)):
        projections = [source for source in sources if source.dim is not None]
        bias_states = [source.state for source in sources if source.dim is None]
        if len(projections) != 1:
            raise UnknownAttention(f"{what} come from {len(projections)} weights, where the rows of one are scaled")
        if len(bias_states) > 1:
            raise UnknownAttention(f"{len(bias_states)} biases are added to {what}, where those of one are scaled")
        weights.append(projections[0])
        biases.append(bias_states[0] if bias_states else None)
    (slice_of, slices), sequence_part = weights[0].cut, (part, parts) if _exchanged(query) else (0, 1)
    heads = slice_of * sequence_part[1] + sequence_part[0], slices * sequence_part[1]
    states = (*(source.state for source in weights), *biases)
    return (*states, size, [source.dim for source in weights], per_head, *heads)


def _sources_of(start: Node) -> Iterator[_Source]:
    for piece in _pieces(start):
        yield from _sources(piece)


def _pieces(node: Node) -> list[Node]:
    """Return the tensors that ``node`` joins along its last dim, by ``cat`` or writes to slices; else ``[node]``."""
    while node.target in _CASTS:
        node = node.all_input_nodes[0]
    if node.target in _CATS and len(node.args[0]) > 1:
        arguments = {"dim": 0, **dict(zip(("tensors", "dim"), node.args, strict=False)), **node.kwargs}
        return list(arguments["tensors"]) if arguments["dim"] in (-1, node.meta["example_value"].ndim - 1) else [node]
    values_by_start: dict[int, Node] = {}
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
                values_by_start[last.start or 0] = value
    return [values_by_start[start] for start in sorted(values_by_start)] or [node]


def _is_part_of_split(node: Node) -> bool:
    is_item = node.target is operator.getitem and isinstance(node.args[1], int)
    return is_item and "split" in str(getattr(node.args[0], "target", ""))


def _is_first_part(node: Node) -> bool:
    """Whether ``node`` is the first part of a split."""
    while not _is_part_of_split(node):
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return node.args[1] == 0


def _way(start: Node) -> Iterator[Node]:
    """Yield ``start`` and its ancestors, up to the matrix products of projections."""
    visited, pending = set[tuple[Node, int, tuple[int, ...]]](), [(start, 0, ())]
    while pending:
        node, index, widths = pending.pop()
        if (node, index, widths) in visited:
            continue
        visited.add((node, index, widths))
        yield node
        if node.target in _PRODUCTS:
            continue
        if _is_part_of_split(node):
            outputs = node.args[0].meta["example_value"]
            index, widths = node.args[1], tuple(output.shape[-1] for output in outputs)
        sources = node.all_input_nodes
        # Queries, keys and values travel concatenated where positions are exchanged for heads: only the part that
        # ``start`` was split off is followed.
        if node.target in _CATS and widths == tuple(tensor.meta["example_value"].shape[-1] for tensor in node.args[0]):
            sources, index, widths = [node.args[0][index]], 0, ()
        pending += [(source, index, widths) for source in sources]


def _exchanged(start: Node) -> bool:
    """Whether ranks exchanged positions for heads between the projection and ``start``."""
    return any(map(is_autograd_function, _way(start)))


def _sources(start: Node) -> Iterator[_Source]:
    """Yield the projections that ``start`` comes from, past rotations, views and copies, and their biases. Raises
    :class:`UnknownAttention` where scaling the weight would not scale ``start``: behind a norm, or an added tensor."""
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
    """Yield the weights and biases among the operands of a product or sum, or among ``args``."""
    for arg in args or node.all_input_nodes:
        if (weight := _weight(arg)) is None:
            continue
        unshard, transposed = weight
        layout = ParamSpec.decode(unshard.args[-1]).layout
        if len(layout.shape) == 1:
            yield _Source(unshard.args[1], None, (0, 1))
        elif len(layout.shape) > 1:
            dim = int(transposed == (node.target in _LINEAR))
            cut = (layout.tensor.index, layout.tensor.size) if layout.tensor_dim == dim else (0, 1)
            yield _Source(unshard.args[1], dim, cut)


def _added(node: Node) -> Iterator[_Source]:
    """Yield the biases that a sum adds to a projection; none for other sums, as in tables of rotations."""
    # Per operand, whether it comes from a projection.
    projected = {
        arg: any(n.target in _PRODUCTS and any(_operands(n)) for n in _way(arg)) for arg in node.all_input_nodes
    }
    for arg in node.all_input_nodes if any(projected.values()) else ():
        biases = list(_operands(node, arg))
        scaled = projected[arg] or not isinstance(arg.meta.get("example_value"), Tensor)
        if any(each.dim is not None for each in biases) or not (biases or scaled):
            raise UnknownAttention(f"{arg} is added behind the projection and not scaled with it; a bias has one dim")
        yield from biases


def _weight(node: Node) -> tuple[Any, bool] | None:
    """Return the ``unshard`` that ``node`` casts or transposes, and whether it is transposed; else None."""
    transposed = False
    while node.target not in _UNSHARDS:
        if node.target in _TURNS:
            transposed = not transposed
        elif node.target not in _CASTS and not is_from_local(node):  # a tensor-parallel weight
            return None
        node = node.all_input_nodes[0]
    return node, transposed
