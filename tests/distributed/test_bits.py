"""Trained weights have the same bits at every stage, with both updates, offloaded or not."""

from typing import Any

import pytest
import torch
from support.harness import RanksOf, on_ranks
from support.reference import full, relative_error, train_step, world_and_rank
from support.zoo import Uneven
from torch import Tensor, nn

import compile_muon
from compile_muon.passes.methods import METHODS, MatrixMethod

EAGER = [(0, "step"), (1, "backward"), (2, "step"), (3, "backward")]
COMPILED = [(0, "step"), (0, "backward"), (1, "backward"), (3, "step")]


def trained(compiled: bool, stage: int, update: str, **settings: Any) -> bytes:
    torch.manual_seed(0)
    model = Uneven()
    optimizer = compile_muon.MuonZero(model, stage=stage, update=update, adamw_lr=0.01, ns_dtype="float32", **settings)
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    for step in range(3):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + world_and_rank()[1]))
        train_step(optimizer, run(x).square().mean())
    torch._dynamo.reset()
    return b"".join(full(param.detach()).contiguous().numpy().tobytes() for param in model.parameters())


def everywhere(compiled: bool) -> dict[str, bytes]:
    cases = COMPILED if compiled else EAGER
    found = {f"{stage} {update}": trained(compiled, stage, update) for stage, update in cases}
    for stage in () if compiled else (1, 3):
        found[f"{stage} offloaded"] = trained(compiled, stage, "step", offload="cpu")
        found[f"{stage} clipped"] = trained(compiled, stage, "step", gradient_clipping=0.1)
    return found


class Stacked(Uneven):
    """With a stack of matrices, whose rows no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(5, 9, 6) / 3)

    def hidden(self, h: Tensor) -> Tensor:
        return h + (h @ self.stack).tanh().mean(0) @ self.up.weight.T


def of_method(name: str, stage: int, micro: int) -> Tensor:
    torch.manual_seed(0)
    model = Stacked()
    optimizer = compile_muon.MuonZero(
        model, stage=stage, method=name, update="step", ns_dtype="float32", gradient_accumulation_steps=micro,
        rates={"basis_every": 1} if name == "soap" else {},
    )  # fmt: skip
    for step in range(3 if name == "soap" else 2):
        for k in range(micro):
            seed = 100 * step + 10 * k + world_and_rank()[1]
            model(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([full(param.detach()).flatten() for param in model.parameters()])


@pytest.mark.parametrize(
    ("world", "every"), [(2, False), *(pytest.param(world, True, marks=pytest.mark.full) for world in (2, 3))]
)
@on_ranks()
def test_methods_have_the_same_bits_at_every_stage(every: bool) -> None:
    """But SOAP, whose owners differ; and of micro-batches stage 1 adds up those of each rank first. In short the others
    than Muon by turns: at stage 0 and one more."""
    names = [method.name for method in METHODS if isinstance(method, MatrixMethod)]
    for turn, (name, micro) in enumerate([*((name, 1) for name in names), ("muon", 2)]):
        first = of_method(name, 0, micro)
        for stage in (1, 2, 3) if every or name == "muon" else (1 + turn % 3,):
            weights = of_method(name, stage, micro)
            if name == "soap":
                assert relative_error(weights, first) < 4e-4
            else:
                assert torch.equal(weights, first) == (micro == 1 or stage != 1), (name, stage)


@pytest.mark.parametrize(
    ("world", "compiled"),
    [(2, False), *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, True), (3, True), (4, False)))],
)
def test_weights_have_the_same_bits_at_every_stage(ranks: RanksOf, world: int, compiled: bool) -> None:
    results = ranks(world).run(everywhere, compiled=compiled)
    first = results[0]["0 step"]
    clipped = {bits for found in results for what, bits in found.items() if "clipped" in what}
    assert len(clipped) == (0 if compiled else 1) and first not in clipped
    for found in results:
        assert not [what for what, bits in found.items() if bits != first and "clipped" not in what]
