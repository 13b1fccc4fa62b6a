"""Shards behind parameters: their gradients become those of the parameters, placed and strided as these."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import compile_muon
from compile_muon.backend import compile_frame
from compile_muon.config import read_options
from compile_muon.engine import local
from compile_muon.engine.frame import eager_codegen, lower_and_compile
from compile_muon.passes import torch_private as private


@pytest.fixture
def params() -> Iterator[list[DTensor]]:
    """Two that are cut over two ranks, of which the second one's shard lies in columns."""
    with private.fake_group(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        shards = torch.randn(2, 3), torch.randn(3, 2).t()
        found = [DTensor.from_local(shard, mesh, [Shard(0)], run_check=False) for shard in shards]
        yield [nn.Parameter(value) for value in found]


def test_gradients_of_shards_are_those_of_the_parameters(params: list[DTensor]) -> None:
    first, second = local.locals_of(params)
    (first.square().sum() + second.square().sum()).backward()
    for param in params:
        grad = param.grad
        assert type(grad) is DTensor and grad.placements == param.placements and grad.shape == param.shape
        assert torch.equal(grad.to_local(), 2 * param.to_local().detach())


def test_shards_of_frozen_parameters_are_not_trained(params: list[DTensor]) -> None:
    params[0].requires_grad_(False)
    first, second = local.locals_of(params)
    assert not first.requires_grad and second.requires_grad
    (first.sum() + second.sum()).backward()
    assert params[0].grad is None and params[1].grad is not None


def test_a_gradient_lies_as_the_shard(params: list[DTensor]) -> None:
    first, second = local.locals_of(params)
    given = torch.randn(2, 3)
    (second * given).sum().backward()  # the product's gradient lies in rows
    assert first.grad_fn is second.grad_fn and params[0].grad is None
    grad = params[1].grad
    assert grad is not None and torch.equal(grad.to_local(), given)
    assert grad.to_local().stride() == params[1].to_local().stride() == (1, 2)


def test_derivatives_of_gradients_go_on(params: list[DTensor]) -> None:
    first, _ = local.locals_of(params)
    (grad,) = torch.autograd.grad(first.pow(3).sum(), params[:1], create_graph=True)
    grad.to_local().square().sum().backward()
    whole = params[0].to_local().detach()
    assert torch.allclose(params[0].grad.to_local(), 2 * 3 * whole**2 * 6 * whole)


@pytest.mark.parametrize("views", [False, True])
def test_a_frame_takes_shards_of_constant_shapes(views: bool) -> None:
    """Whether it returns views of one tensor or not."""
    inputs: list[torch.Tensor] = []

    def lowering(gm, given, ctx):
        inputs.extend(node.meta["val"] for node in gm.graph.find_nodes(op="placeholder"))
        return lower_and_compile(gm, given, ctx, eager_codegen)

    def backend(gm, given):
        return compile_frame(gm, given, read_options({"codegen": "eager"}), lowering)

    class Model(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return (y.view(-1), y.t()) if views else y

    with private.fake_group(0, 2):
        model, _ = compile_muon.initialize(Model(6, 4), {"zero_optimization": {"stage": 3}, "compile": False})
        torch.compile(model, backend=backend)(torch.randn(5, 6))
    assert inputs and all(isinstance(value, torch.Tensor) for value in inputs)  # and no mesh
    assert {type(size) for value in inputs for size in value.shape} == {int}
