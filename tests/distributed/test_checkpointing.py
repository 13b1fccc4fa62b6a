"""Activation checkpointing, by hand, by a selective policy or by Hugging Face's switch, changes no number.

Each run checkpoints the blocks of the sharded model only: its reference keeps every activation.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.harness import Ranks
from support.reference import Report, hidden_matrices, train
from support.zoo import ZOO, ZooModel
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

STEPS = 2
_aten = torch.ops.aten
_MATMULS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default)


def save_matmuls(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _MATMULS else CheckpointPolicy.PREFER_RECOMPUTE


def by_hand(entry: ZooModel, model: Any, **arguments: Any) -> None:
    for block in entry.blocks(model):
        block.forward = partial(checkpoint, block.forward, **{"use_reentrant": False, **arguments})


def selective(entry: ZooModel, model: Any) -> None:
    by_hand(entry, model, context_fn=partial(create_selective_checkpoint_contexts, save_matmuls))


def reentrant(entry: ZooModel, model: Any) -> None:
    by_hand(entry, model, use_reentrant=True)


def hugging_face(entry: ZooModel, model: Any) -> None:
    model.gradient_checkpointing_enable()


def hugging_face_reentrant(entry: ZooModel, model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": True})


WAYS: dict[str, Callable[[ZooModel, Any], None]] = {
    way.__name__: way for way in (by_hand, selective, reentrant, hugging_face, hugging_face_reentrant)
}


def train_checkpointed(name: str, way: str, codegen: str | None, **settings: Any) -> Report:
    torch.manual_seed(0)
    entry = ZOO[name]
    model = entry.build()

    def compiled(model: nn.Module) -> Any:
        WAYS[way](entry, model)
        if codegen is None:
            return model
        return torch.compile(model, backend="muon_zero", options={"codegen": codegen})

    # Inductor's own random numbers are not those of the reference.
    with torch._inductor.config.patch(fallback_random=True):
        return train(
            model, entry.matrices(model), entry.loss, entry.data,
            steps=STEPS, measure_noise=entry.noisy, compiled=compiled, **settings,
        )  # fmt: skip


def check(group: Ranks, name: str, way: str, codegen: str | None, **settings: Any) -> None:
    for rank, report in enumerate(group.run(train_checkpointed, name=name, way=way, codegen=codegen, **settings)):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


#: Every model, way and stage is here.
CASES = (
    ("gpt", "selective", 2, 2), ("mixtral", "hugging_face", 1, 3), ("gpt-dropout", "by_hand", 2, 3),
    ("gpt2", "by_hand", 1, 3), ("convnet", "by_hand", 2, 1), ("gpt", "by_hand", 2, 0),
    ("llama", "hugging_face_reentrant", 2, 1),
)  # fmt: skip


def test_every_model_way_and_stage_is_there() -> None:
    assert {row[0] for row in CASES} == set(ZOO)
    assert {row[1] for row in CASES} == WAYS.keys() - {"reentrant"}
    assert {row[3] for row in CASES if row[2] == 2} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("name", "way", "world", "stage"),
    [pytest.param(*case, marks=() if case == CASES[0] else pytest.mark.full) for case in CASES],
)
def test_eager_codegen(ranks: Callable[[int], Ranks], name: str, way: str, world: int, stage: int) -> None:
    check(ranks(world), name, way, "eager", stage=stage)


@pytest.mark.full
@pytest.mark.parametrize(("name", "stage"), [("gpt", 3), ("convnet", 0)])
def test_inductor(ranks: Callable[[int], Ranks], name: str, stage: int) -> None:
    check(ranks(2), name, "by_hand", "inductor", stage=stage)


PRODUCT = [
    (name, way)
    for name, way in itertools.product(ZOO, ("by_hand", "selective", "hugging_face"))
    if way != "hugging_face" or ZOO[name].loss is ZOO["gpt2"].loss
]


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "way"), PRODUCT)
@pytest.mark.parametrize(("world", "codegen"), itertools.product((1, 2), ("eager", "inductor")))
def test_every_combination(ranks: Callable[[int], Ranks], name: str, way: str, world: int, codegen: str) -> None:
    for stage in range(4):
        check(ranks(world), name, way, codegen, stage=stage)


@pytest.mark.parametrize(("world", "way"), [(2, "by_hand"), (1, "reentrant")])
def test_not_compiled(ranks: Callable[[int], Ranks], world: int, way: str) -> None:
    """Backward reads the weights again, through the markers' eager implementation."""
    check(ranks(world), "gpt", way, None, stage=3)


class Shared(nn.Module):
    """Weights read in several checkpointed regions, before one, or handed to one."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.embedding, self.a, self.b = nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def block(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.relu(self.a(x))))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.reads == "by several":
            x = checkpoint(self.block, x, use_reentrant=False)
        elif self.reads == "before":
            x = torch.tanh(self.a(x))
        elif self.reads == "as an argument":
            x = checkpoint(lambda x, w: F.linear(x, w).tanh().sin(), x, self.a.weight, use_reentrant=False)
        x = checkpoint(self.block, x, use_reentrant=False)
        return checkpoint(lambda x: F.linear(x, self.embedding.weight).tanh(), x, use_reentrant=False)


def shared_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens % 16)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten() % 16)


def train_shared(reads: str) -> Report:
    torch.manual_seed(0)
    model = Shared(reads)
    matrices = hidden_matrices(model, exclude=("embedding",))
    return train(model, matrices, shared_loss, ZOO["gpt"].data, steps=STEPS, stage=3, codegen="eager")


LATER = ["by several", *(pytest.param(how, marks=pytest.mark.full) for how in ("before", "as an argument"))]


@pytest.mark.parametrize("reads", LATER)
def test_weights_read_in_several_regions_are_gathered_again(ranks: Callable[[int], Ranks], reads: str) -> None:
    for rank, report in enumerate(ranks(2).run(train_shared, reads=reads)):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


class Regional(nn.Module):
    """Blocks that are one region to compile; a checkpoint within it is a graph in its graph."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        @torch.compiler.nested_compile_region
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.a(x)
            return x + checkpoint(lambda h: torch.tanh(self.b(torch.relu(h))), h, use_reentrant=False), h

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x, h = block(x)
        return self.head(x + h)


def train_regional(stage: int) -> Report:
    torch.manual_seed(0)
    model = Regional()
    matrices = hidden_matrices(model, exclude=("embedding", "head"))
    return train(model, matrices, shared_loss, ZOO["gpt"].data, steps=STEPS, stage=stage, codegen="eager")


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="Dynamo of torch 2.11 takes no DTensor into a region")
def test_regions_of_a_model_train_as_what_is_in_them(ranks: Callable[[int], Ranks]) -> None:
    for stage in (1, 3):
        for rank, report in enumerate(ranks(2).run(train_regional, stage=stage)):
            assert not report.problems(), f"stage {stage}, rank {rank}: {report.problems()}"
