"""Lowering of ``reduce_grad`` markers: to reductions, bucket by bucket, or to unreduced gradients that accumulate."""

import torch
from torch.fx import GraphModule, Node

from ..edit import append_inputs, inline, insert_outputs, replace
from ..exchange import transfers
from ..language.request import BackwardRequest, Purpose, ReducedGrad
from ..language.spec import decode_dtype
from ..language.work import Category, Work
from ..markers import ReduceGrad
from ..pipeline import PassContext, tensor_value
from .buckets import group_neighbours


def reduced_grads(gm: GraphModule) -> tuple[ReducedGrad, ...]:
    """Return the parameters whose gradients a backward graph with markers makes, in graph order."""
    positions = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    output = gm.graph.output_node()
    grads = []
    for reduction in ReduceGrad.all(gm):
        # A gradient that the graph computes with, for a penalty, say, gets its direction in step().
        muon = reduction.spec.muon
        speculates = muon is not None and muon.speculates and set(reduction.node.users) == {output}
        returned = output.args[0].index(reduction.node) if speculates else None
        grads.append(ReducedGrad(reduction.spec, positions[reduction.state], returned))
    return tuple(grads)


def lower_gradients(gm: GraphModule, request: BackwardRequest, ctx: PassContext) -> None:
    """Replace every ``reduce_grad`` marker, in graph order; add the request's inputs and outputs of unreduced sums."""
    reductions = ReduceGrad.all(gm)
    examples = []
    for i in request.unreduced_inputs:
        spec = reductions[i].spec
        like = tensor_value(reductions[i].node).new_empty(spec.layout.shape, dtype=decode_dtype(spec.dtype))
        examples.append((f"unreduced_{i}", like))
    # The carried inputs come last; insert_orthogonalize has added them.
    sums = append_inputs(gm, examples, ahead_of_last=len(request.carried_inputs))
    earlier = {reductions[i].node: node for i, node in zip(request.unreduced_inputs, sums, strict=True)}

    unreduced = []
    to_reduce = []
    for purpose, reduction in zip(request.purposes, reductions, strict=True):
        if purpose is Purpose.ACCUMULATE:
            zeros, unreduced_grad = _keep_local(gm, reduction)
            unreduced.append(unreduced_grad)
            replace(gm, reduction.node, zeros)
        else:
            to_reduce.append(reduction)
    for node, result in _reduce(gm, to_reduce, earlier, ctx).items():
        replace(gm, node, result)
    insert_outputs(gm, unreduced, ahead_of_last=request.speculation_outputs)


def _keep_local(gm: GraphModule, reduction: ReduceGrad) -> list[Node]:
    """Return nodes for an ACCUMULATE: zeros in place of the shard's gradient, and the unreduced gradient."""
    spec = reduction.spec

    def kept(grad: torch.Tensor) -> list[torch.Tensor]:
        dtype = decode_dtype(spec.dtype)
        # AOTAutograd cannot return None for the gradient of a DTensor leaf.
        return [grad.new_zeros(spec.layout.local_shape, dtype=dtype), grad.to(dtype, copy=True)]

    return inline(gm, reduction.node, kept, [reduction.grad])


def _reduce(
    gm: GraphModule, reductions: list[ReduceGrad], earlier: dict[Node, Node], ctx: PassContext
) -> dict[Node, Node]:
    """Return by marker the averaged gradient; ``earlier``: by marker, an unreduced sum to add before the reduction."""
    results: dict[Node, Node] = {}
    for reduction in reductions:
        if reduction.spec.layout.everyone.alone:
            spec = reduction.spec
            results[reduction.node] = inline(
                gm, reduction.node, lambda g, spec=spec: [transfers.reduce_grad(g, spec)], [reduction.grad]
            )[0]
    cross_rank = [reduction for reduction in reductions if not reduction.spec.layout.everyone.alone]
    if not cross_rank:
        return results
    order = {node: position for position, node in enumerate(gm.graph.nodes)}
    # A gradient that is read before the last one exists (by a penalty on gradients) may be an input of a later one: one
    # bucket of both would make the graph cyclic.
    early = [any(order[user] < order[cross_rank[-1].node] for user in reduction.node.users) for reduction in cross_rank]
    late = [i for i, read in enumerate(early) if not read]
    specs = [cross_rank[i].spec for i in late]
    groups = group_neighbours(specs, lambda spec: spec.reduce_dtype, ctx.costs, ctx.options.bucket_bytes, reduces=True)
    groups = [[late[k] for k in group] for group in groups] + [[i] for i, read in enumerate(early) if read]
    for number, group in enumerate(sorted(groups, key=lambda group: group[-1])):
        members = [cross_rank[i] for i in group]
        averages = _reduce_group(gm, members, earlier, Work(Category.REDUCE, number))
        results.update(zip((reduction.node for reduction in members), averages, strict=True))
    return results


def _reduce_group(gm: GraphModule, group: list[ReduceGrad], earlier: dict[Node, Node], work: Work) -> list[Node]:
    specs = [reduction.spec for reduction in group]
    added = [k for k, reduction in enumerate(group) if reduction.node in earlier]

    def averaged(*tensors: torch.Tensor) -> list[torch.Tensor]:
        grads = list(tensors[: len(specs)])
        for k, sum_of_earlier in zip(added, tensors[len(specs) :], strict=True):
            grads[k] = grads[k] + sum_of_earlier
        return transfers.reduce_grads(grads, specs)

    inputs = [reduction.grad for reduction in group] + [earlier[group[k].node] for k in added]
    return inline(gm, group[-1].node, averaged, inputs, work)  # at the bucket's last gradient
