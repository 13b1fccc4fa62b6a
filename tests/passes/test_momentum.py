"""Momenta of many gradients by one operator: the same training as by operations that a compiler fuses."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

import compile_muon
from compile_muon.engine import frame
from compile_muon.engine.dtensors import local_tensor
from compile_muon.passes import momentum
from compile_muon.passes.fingerprint import FINGERPRINT_OF_ROWS, ROW_SUMS
from compile_muon.passes.pipeline import GraphKind, GraphPass, PassContext


class Model(nn.Module):
    """Matrices that the operator takes, one whose rows are too short, one that is read twice, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.twice = nn.Linear(64, 96), nn.Linear(96, 96, bias=False)
        self.down = nn.Linear(96, 64, bias=False)
        self.short = nn.Linear(16, 80, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.twice(self.twice(self.up(x).relu()).relu())
        return self.down(hidden) + self.short(x[..., :16])[..., :64]


def train(by_operator: bool, half: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, Any]:
    """Weights, losses and gradients of a few steps, and the operators of the lowered backward graph."""
    found: Counter[str] = Counter()

    def noting(gm: GraphModule, ctx: PassContext) -> GraphModule:
        if ctx.kind in (GraphKind.BACKWARD, GraphKind.STEP):
            found.update(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
            for node in gm.graph.find_nodes(op="call_function", target=FINGERPRINT_OF_ROWS):
                assert all(source.target is not ROW_SUMS for source in node.args[0])
        return gm

    kinds = (GraphKind.BACKWARD, GraphKind.STEP)
    with monkeypatch.context() as patch:
        patch.setattr(frame, "LOWERING_PASSES", (*frame.LOWERING_PASSES, GraphPass("note", noting, kinds=kinds)))
        patch.setattr(momentum, "kernel_on", lambda device: by_operator)
        torch.compiler.reset()  # each run is to have graphs of its own
        torch.manual_seed(0)
        model = Model()
        optimizer = compile_muon.MuonZero(model, lr=0.02, adamw_lr=0.01, stage=2, **settings)
        compiled = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
        losses, grads = [], []
        for step in range(4):
            batches = [torch.randn(8, 64) for _ in range(1 + step % 2)]
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16, enabled=half):
                    loss = compiled(batch).float().square().mean()
                loss.backward()
                losses.append(loss.detach())
            grads += [local_tensor(p.grad).clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        used = optimizer.totals()["directions_used"]
    weights = [local_tensor(p.detach()) for p in model.parameters()]
    return {"weights": weights, "losses": losses, "grads": grads, "nodes": found, "used": used}


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="torch 2.11 decomposes lerp into other roundings")
@pytest.mark.parametrize(
    ("half", "settings"),
    [
        (True, {}),
        (False, {"update": "step", "nesterov": False}),
        pytest.param(True, {"update": "step"}, marks=pytest.mark.full),
        pytest.param(False, {"nesterov": False}, marks=pytest.mark.full),
        *(pytest.param(*given, marks=pytest.mark.campaign) for given in ((False, {}), (True, {"nesterov": False}))),
    ],
)
def test_training_is_the_same_bit_for_bit(monkeypatch, half, settings):
    plain, made = (train(by_operator, half, monkeypatch, **settings) for by_operator in (False, True))
    for name in ("weights", "losses", "grads"):
        for one, other in zip(plain[name], made[name], strict=True):
            assert torch.equal(one, other), name
    assert made["used"] == plain["used"] and (made["used"] > 0 or "update" in settings)
    if "update" not in settings:  # a step of two micro-batches: sums are made by the operator
        assert made["nodes"]["aten.add.Tensor"] < plain["nodes"]["aten.add.Tensor"]
    operator = "muon_zero.momentum.default"
    assert made["nodes"][operator] and not plain["nodes"][operator]
