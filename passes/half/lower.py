"""Markers to functional collectives, Newton-Schulz and plain tensor code.

One function per marker. Backward graphs have up to three lowerings (:class:`Lowering`); what a lowering needs beyond
the graph's own inputs (sums of earlier micro-batches) and yields beyond its outputs (unreduced gradients, new momenta)
is appended at the end and described in a :class:`BackwardPlan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from ..exchange import transfers
from ..exchange.orthogonalize import assign_owners, orthogonalize_group
from ..inline import inline
from ..joint.recompute import is_view_or_cast
from ..markers import ORTHOGONALIZE, REDUCE_GRAD, UNSHARD
from ..pipeline import GraphPass, Half, Lowering, PassContext, tensor_value
from ..spec import ParamSpec, decode_dtype

__all__ = ["LOWER", "BackwardPlan", "ReducedGrad", "gradient_positions", "reduced_grads"]


@dataclass(frozen=True)
class ReducedGrad:
    """One parameter whose gradient a backward graph produces.

    Args:
        spec: its static facts.
        state_index: position of its state tensor among the graph's inputs.
        updates: whether an update lowering orthogonalizes it in this graph.
    """

    spec: ParamSpec
    state_index: int
    updates: bool


@dataclass(frozen=True)
class BackwardPlan:
    """What a lowered backward takes and returns beyond the original graph.

    Indices point into ``grads``. Extra inputs: one per ``priors``. Extra outputs, in order: one unreduced gradient per
    ``accumulated``, one new momentum per ``updated``, and (if any is updated) one fp32 vector of the squared norms of
    the local gradient shards of ``updated``.
    """

    grads: tuple[ReducedGrad, ...]
    priors: tuple[int, ...]
    accumulated: tuple[int, ...]
    updated: tuple[int, ...]


# A graph's tensors are cut into this many collectives or more: with the next one prefetched, a quarter of a model's
# weights are gathered at a time, however small the model is. Below a mebibyte latency outweighs that.
_COLLECTIVES = 8
_SMALLEST = 2**20


def _escapes(node: Node, output: Node) -> bool:
    """Whether the graph returns ``node`` or a view of it."""
    return any(user is output or (is_view_or_cast(user) and _escapes(user, output)) for user in node.users)


def _groups(
    items: Sequence[tuple[Node, ParamSpec]], dtype_of: Callable[[ParamSpec], str], cap_bytes: int
) -> list[list[tuple[Node, ParamSpec]]]:
    """Neighbours in graph order that can share one collective, up to ``cap_bytes`` of full tensors each, or less
    where that would make fewer than ``_COLLECTIVES``.

    Not PyTorch's own bucketing passes: their topological sort orders collectives by what surrounds them, which is not
    the same on every rank when shards are uneven (docs/decisions.md). Marker order is.
    """
    groups: list[list[tuple[Node, ParamSpec]]] = []
    sizes: dict[int, int] = {}
    open_group: dict[tuple[object, ...], int] = {}
    bytes_of = [spec.numel * decode_dtype(dtype_of(spec)).itemsize for _, spec in items]
    cap_bytes = min(cap_bytes, max(sum(bytes_of) // _COLLECTIVES, _SMALLEST))
    for (node, spec), nbytes in zip(items, bytes_of, strict=True):
        dtype = dtype_of(spec)
        key = (spec.group, spec.world, spec.sharded, dtype)
        index = open_group.get(key)
        if index is None or sizes[index] + nbytes > cap_bytes:
            index = open_group[key] = len(groups)
            groups.append([])
            sizes[index] = 0
        groups[index].append((node, spec))
        sizes[index] += nbytes
    return groups


def _lower_unshards(gm: GraphModule, cap_bytes: int) -> None:
    output = gm.graph.output_node()
    gathered = []
    for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
        shard, _, _, replica, text = node.args
        spec = ParamSpec.decode(text)
        if spec.gathered:
            gathered.append((node, spec))
            continue
        copy = _escapes(node, output)

        def weight(
            shard: torch.Tensor, replica: torch.Tensor | None = None, spec: ParamSpec = spec, copy: bool = copy
        ) -> list[torch.Tensor]:
            full = transfers.unshard(shard, replica, spec)
            # A weight handed out of the graph must not change when the resident copy is refreshed.
            return [full.clone() if copy else full]

        _replace(gm, node, inline(gm, node, weight, [shard] if replica is None else [shard, replica])[0])
    _lower_gathers(gm, _groups(gathered, lambda spec: spec.compute_dtype, cap_bytes))


def _lower_gathers(gm: GraphModule, groups: list[list[tuple[Node, ParamSpec]]]) -> None:
    """Stage 3: each group is gathered while the one before it is in use (prefetch by one group)."""
    firsts = [group[0][0] for group in groups]
    handles = []
    for number, group in enumerate(groups):
        specs = [spec for _, spec in group]

        def start(*shards: torch.Tensor, specs: list[ParamSpec] = specs) -> list[torch.Tensor]:
            return [transfers.gather_start(shards, specs)]

        # Shards are graph inputs, so a gather can start anywhere.
        at = firsts[max(0, number - 1)]
        handles += inline(gm, at, start, [node.args[0] for node, _ in group])
    for group, handle in zip(groups, handles, strict=True):
        specs = [spec for _, spec in group]

        def finish(handle: torch.Tensor, specs: list[ParamSpec] = specs) -> list[torch.Tensor]:
            return transfers.gather_finish(handle, specs)

        for (node, _), full in zip(group, inline(gm, group[0][0], finish, [handle]), strict=True):
            _replace(gm, node, full)


def _replace(gm: GraphModule, node: Node, new: Node) -> None:
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)


def _collect(gm: GraphModule) -> list[tuple[Node, Node | None, ReducedGrad]]:
    """``(reduce_grad, orthogonalize or None, facts)`` in graph order."""
    positions = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    found = []
    for node in gm.graph.find_nodes(op="call_function", target=REDUCE_GRAD):
        direction = next((user for user in node.users if user.target is ORTHOGONALIZE), None)
        facts = ReducedGrad(ParamSpec.decode(node.args[3]), positions[node.args[1]], direction is not None)
        found.append((node, direction, facts))
    return found


def reduced_grads(gm: GraphModule) -> tuple[ReducedGrad, ...]:
    """The parameters whose gradients a backward graph with markers produces."""
    return tuple(facts for _, _, facts in _collect(gm))


def gradient_positions(gm: GraphModule) -> tuple[int | None, ...]:
    """Where a backward graph with markers returns each of :func:`reduced_grads`; None if only in some other form."""
    outputs = list(gm.graph.output_node().args[0])
    nodes = [direction or node for node, direction, _ in _collect(gm)]
    return tuple(outputs.index(node) if node in outputs else None for node in nodes)


def _placeholder(gm: GraphModule, name: str, like: torch.Tensor) -> Node:
    last = list(gm.graph.find_nodes(op="placeholder"))[-1]
    with gm.graph.inserting_after(last):
        node = gm.graph.placeholder(name)
    node.meta["val"] = like
    return node


def _lower_reductions(
    gm: GraphModule, items: Sequence[tuple[Node, ParamSpec]], priors: dict[Node, Node], cap_bytes: int
) -> dict[Node, Node]:
    """Averaged gradients of the shards, with what earlier micro-batches left unreduced (``priors``).

    Each group's collective starts with its last gradient and is waited for when the next group starts.
    """
    results: dict[Node, Node] = {}
    alone = [(node, spec) for node, spec in items if spec.world == 1]
    groups = _groups([(n, s) for n, s in items if s.world > 1], lambda spec: spec.reduce_dtype, cap_bytes)
    order = {node: position for position, (node, _) in enumerate(items)}
    groups.sort(key=lambda group: order[group[-1][0]])
    for node, spec in alone:
        results[node] = inline(gm, node, lambda g, s=spec: [transfers.reduce_grad(g, s)], [node.args[0]])[0]
    started = []
    for group in groups:
        specs = [spec for _, spec in group]
        with_prior = [k for k, (node, _) in enumerate(group) if node in priors]

        def start(
            *tensors: torch.Tensor, specs: list[ParamSpec] = specs, with_prior: list[int] = with_prior
        ) -> list[torch.Tensor]:
            grads = list(tensors[: len(specs)])
            for k, prior in zip(with_prior, tensors[len(specs) :], strict=True):
                grads[k] = grads[k] + prior
            return [transfers.reduce_start(grads, specs)]

        inputs = [node.args[0] for node, _ in group] + [priors[group[k][0]] for k in with_prior]
        started += inline(gm, group[-1][0], start, inputs)
    ends = [*(group[-1][0] for group in groups[1:]), gm.graph.output_node()][: len(groups)]
    for group, handle, end in zip(groups, started, ends, strict=True):
        specs = [spec for _, spec in group]

        def finish(handle: torch.Tensor, specs: list[ParamSpec] = specs) -> list[torch.Tensor]:
            return transfers.reduce_finish(handle, specs)

        results.update(zip((node for node, _ in group), inline(gm, end, finish, [handle]), strict=True))
    return results


def _keep_local(gm: GraphModule, node: Node, spec: ParamSpec) -> tuple[Node, Node]:
    """Zeros to return for the shard (AOTAutograd cannot return None for a DTensor leaf), and the gradient to keep."""

    def kept(grad: torch.Tensor) -> list[torch.Tensor]:
        dtype = decode_dtype(spec.dtype)
        return [grad.new_zeros(spec.local_shape, dtype=dtype), grad.to(dtype, copy=True)]

    zeros, grad = inline(gm, node, kept, [node.args[0]])
    return zeros, grad


def _buckets(specs: Sequence[ParamSpec], cap_bytes: int) -> list[list[int]]:
    """Neighbours up to ``cap_bytes`` of full matrices each: bounds the memory of one exchange."""
    buckets: list[list[int]] = []
    size = 0
    for index, spec in enumerate(specs):
        nbytes = spec.numel * decode_dtype(spec.dtype).itemsize
        if not buckets or size + nbytes > cap_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(index)
        size += nbytes
    return buckets


def _orthogonalize(
    gm: GraphModule, directions: list[Node], priors: list[Node | None], cap_bytes: int
) -> tuple[list[Node], list[Node]]:
    """Replace ``directions`` markers; return the new momenta and the squared norms (0-dim each)."""
    specs = [ParamSpec.decode(node.args[3]) for node in directions]
    owners = assign_owners(specs)
    raw = [node.args[0] for node in directions]
    momenta: dict[int, Node] = {}
    norms: dict[int, Node] = {}
    for bucket in _buckets(specs, cap_bytes):
        count = len(bucket)
        with_prior = [k for k, i in enumerate(bucket) if priors[i] is not None]

        def update(
            *tensors: torch.Tensor, bucket: list[int] = bucket, count: int = count, with_prior: list[int] = with_prior
        ) -> list[torch.Tensor]:
            grads = list(tensors[:count])
            for k, prior in zip(with_prior, tensors[3 * count :], strict=True):
                grads[k] = grads[k] + prior
            directions, momenta = orthogonalize_group(
                grads,
                tensors[count : 2 * count],
                tensors[2 * count : 3 * count],
                [specs[i] for i in bucket],
                [owners[i] for i in bucket],
            )
            return [*directions, *momenta, *(g.float().square().sum() for g in grads)]

        inputs = [raw[i] for i in bucket] + [directions[i].args[1] for i in bucket]
        inputs += [directions[i].args[2] for i in bucket] + [priors[bucket[k]] for k in with_prior]
        results = inline(gm, gm.graph.output_node(), update, inputs)
        for k, i in enumerate(bucket):
            momenta[i], norms[i] = results[count + k], results[2 * count + k]
            _replace(gm, directions[i], results[k])
    return [momenta[i] for i in range(len(directions))], [norms[i] for i in range(len(directions))]


def _lower_backward(gm: GraphModule, ctx: PassContext) -> None:
    found = _collect(gm)
    output = gm.graph.output_node()
    for _, direction, _ in found:
        if direction is not None:
            output.prepend(direction)  # behind every reduction, wherever their groups end
    priors: dict[int, Node] = {}
    updated: list[int] = []
    kept: dict[int, Node] = {}
    reduced: list[int] = []
    for i, (node, direction, facts) in enumerate(found):
        update = ctx.lowering is Lowering.UPDATE and direction is not None
        if update:
            updated.append(i)
        if ctx.with_prior and (facts.spec.accumulates or update):
            shape = facts.spec.shape if facts.spec.accumulates else facts.spec.local_shape
            like = tensor_value(node).new_empty(shape, dtype=decode_dtype(facts.spec.dtype))
            priors[i] = _placeholder(gm, f"prior_{i}", like)
        if ctx.lowering is Lowering.ACCUMULATE and facts.spec.accumulates:
            zeros, kept[i] = _keep_local(gm, node, facts.spec)
            _replace(gm, node, zeros)
        else:
            reduced.append(i)

    unreduced = {found[i][0]: prior for i, prior in priors.items() if found[i][2].spec.accumulates}
    to_reduce = [(found[i][0], found[i][2].spec) for i in reduced]
    results = _lower_reductions(gm, to_reduce, unreduced, ctx.options.bucket_bytes)
    for node, result in results.items():
        _replace(gm, node, result)

    extra = [kept[i] for i in sorted(kept)]
    for i, (_, direction, _) in enumerate(found):
        if direction is not None and i not in updated:
            _replace(gm, direction, direction.args[0])
    if updated:
        directions = [found[i][1] for i in updated]
        shard_priors = [None if found[i][2].spec.accumulates else priors.get(i) for i in updated]
        momenta, norms = _orthogonalize(gm, directions, shard_priors, ctx.options.bucket_bytes)
        extra += momenta + inline(gm, output, lambda *n: [torch.stack(n)], norms)
    _append_outputs(gm, extra)
    grads = tuple(facts for _, _, facts in found)
    ctx.facts["plan"] = BackwardPlan(grads, tuple(sorted(priors)), tuple(sorted(kept)), tuple(updated))


def _lower_step(gm: GraphModule, ctx: PassContext) -> None:
    """The step graph: every input gradient is a shard's, every output a direction, then the new momenta."""
    directions = list(gm.graph.find_nodes(op="call_function", target=ORTHOGONALIZE))
    momenta, _ = _orthogonalize(gm, directions, [None] * len(directions), ctx.options.bucket_bytes)
    _append_outputs(gm, momenta)


def _append_outputs(gm: GraphModule, extra: list[Node]) -> None:
    output = gm.graph.output_node()
    output.args = ((*output.args[0], *extra),)
    for key in ("desc", "output_stack_traces"):
        if key in output.meta:
            output.meta[key] = [*output.meta[key], *(None for _ in extra)]


def _lower(gm: GraphModule, ctx: PassContext) -> GraphModule:
    _lower_unshards(gm, ctx.options.bucket_bytes)
    if ctx.half is Half.BACKWARD:
        _lower_backward(gm, ctx)
    if ctx.half is Half.STEP:
        _lower_step(gm, ctx)
    gm.graph.eliminate_dead_code()
    return gm


LOWER = GraphPass("lower", _lower, halves=(Half.FORWARD, Half.BACKWARD, Half.INFERENCE, Half.STEP))
