"""Saved activations that move to host memory: the same values, a bounded pool, and copies that are waited for."""

from __future__ import annotations

import copy

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule, Node

from compile_muon.passes.errors import VerificationError
from compile_muon.passes.joint.move import AWAIT_MOVE, BRING_BACK, MOVE_OUT, move_activations, verify_moves
from compile_muon.passes.lowering.aliases import base, nbytes


def layers(x: Tensor, weight: Tensor, narrow: Tensor) -> Tensor:
    """Saved: whole results, three views of one result, a result that is returned too."""
    for _ in range(3):
        q, k, v = (x @ weight).view(8, 4, 36).split(12, dim=-1)
        x = x + torch.tanh(torch.sigmoid(q.transpose(0, 1) * k.transpose(0, 1)) * v.transpose(0, 1)).transpose(
            0, 1
        ).reshape(8, 48).matmul(narrow)
    return x.exp()


def halves(part: float) -> tuple[list[Tensor], GraphModule, GraphModule]:
    """Return loss and gradients with ``part`` of the saved bytes moved, and both graphs."""
    torch.manual_seed(0)
    inputs = [torch.randn(8, 48), torch.randn(48, 144) / 7, torch.randn(48, 48) / 7]
    for value in inputs:
        value.requires_grad_()
    graphs = list[GraphModule]()

    def partition(gm: GraphModule, joint_inputs: object, *, num_fwd_outputs: int, **kwargs: object) -> object:
        graphs.extend(min_cut_rematerialization_partition(gm, joint_inputs, num_fwd_outputs=num_fwd_outputs, **kwargs))
        move_activations(*graphs, num_fwd_outputs, part)
        return tuple(graphs)

    compiler = aot_autograd(
        fw_compiler=lambda gm, _: make_boxed_func(gm.forward),
        bw_compiler=lambda gm, _: make_boxed_func(gm.forward),
        partition_fn=partition,
    )
    torch.compiler.reset()
    result = torch.compile(layers, backend=compiler)(*inputs)
    result.square().sum().backward()
    grads = [value.grad for value in inputs if value.grad is not None]
    return [result.detach(), *grads], *graphs


def copies(gm: GraphModule, target: object) -> list[Node]:
    return [node for node in gm.graph.nodes if node.target is target]


def test_moved_activations_have_the_same_bits() -> None:
    usual, *_ = halves(0.0)
    counts = []
    for part in (0.3, 1.0):
        values, forward, backward = halves(part)
        assert all(torch.equal(value, one) for value, one in zip(values, usual, strict=True))
        outs, backs = copies(forward, MOVE_OUT), copies(backward, BRING_BACK)
        assert len(outs) == len(backs) > 0
        assert {node.args[0].name for node in backs} == {node.name for node in outs}
        counts.append(len(outs))
    assert counts[0] < counts[1]
    # What the caller holds anyway stays on the device: the result, and inputs of the graph.
    stays = {base(node) for node in forward.graph.output_node().all_input_nodes if node.target is not MOVE_OUT}
    assert [node.target for node in stays if node.op == "call_function"] == [torch.ops.aten.exp.default]


def test_copies_under_way_hold_no_more_than_twice_the_largest() -> None:
    """In forward, of memory that nobody but the copy reads."""
    _, forward, backward = halves(1.0)
    for gm, start in ((forward, MOVE_OUT), (backward, BRING_BACK)):
        read_until = dict[Node, Node]()
        for node in gm.graph.nodes:
            for source in node.all_input_nodes:
                if node.target is not AWAIT_MOVE:
                    read_until[base(source)] = node
        under_way, waiting, most = dict[Node, int](), dict[Node, int](), 0
        for node in gm.graph.nodes:
            if node.target is start:
                waiting[node if start is BRING_BACK else node.args[0]] = nbytes(node)
            if node.target is AWAIT_MOVE:
                waiting.pop(node.args[0])
                under_way.pop(node.args[0], None)
            if start is BRING_BACK:
                under_way = waiting
            most = max(most, sum(under_way.values()))
            under_way |= {memory: size for memory, size in waiting.items() if read_until[memory] is node}
        largest = max(nbytes(node) for node in copies(gm, start))
        assert not waiting
        assert largest < most <= 2 * largest


@pytest.mark.parametrize("half", [0, 1])
def test_copies_without_a_wait_and_reads_beside_it_are_refused(half: int) -> None:
    gm = halves(1.0)[1 + half]
    verify_moves(gm)
    broken = copy.deepcopy(gm)
    wait = copies(broken, AWAIT_MOVE)[0]
    broken.graph.erase_node(wait)
    with pytest.raises(VerificationError, match="0 waits"):
        verify_moves(broken)
    broken = copy.deepcopy(gm)
    wait = copies(broken, AWAIT_MOVE)[0]
    where = wait.args[0].next if half == 0 else broken.graph.output_node()
    if half == 0:
        where.append(wait)  # behind the start of the copy, ahead of the readers of forward
    else:
        where.prepend(wait)  # behind all readers of backward
    with pytest.raises(VerificationError, match="is read"):
        verify_moves(broken)
