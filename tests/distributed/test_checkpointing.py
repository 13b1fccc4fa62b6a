"""Activation checkpointing, by hand, by a selective policy or by Hugging Face's switch, changes no number.

Each run checkpoints the blocks of the sharded model only: its reference keeps every activation.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.harness import on_ranks
from support.reference import hidden_matrices, train
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


def train_checkpointed(name: str, way: str, codegen: str | None, **settings: Any) -> None:
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
        train(
            model, entry.matrices(model), entry.loss, entry.data,
            steps=STEPS, measure_noise=entry.noisy, compiled=compiled, **settings,
        ).check()  # fmt: skip


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
@on_ranks()
def test_eager_codegen(name: str, way: str, stage: int) -> None:
    train_checkpointed(name, way, "eager", stage=stage)


@pytest.mark.full
@pytest.mark.parametrize(("name", "stage"), [("gpt", 3), ("convnet", 0)])
@on_ranks(2)
def test_inductor(name: str, stage: int) -> None:
    train_checkpointed(name, "by_hand", "inductor", stage=stage)


PRODUCT = [
    (name, way)
    for name, way in itertools.product(ZOO, ("by_hand", "selective", "hugging_face"))
    if way != "hugging_face" or ZOO[name].loss is ZOO["gpt2"].loss
]


@pytest.mark.campaign
@pytest.mark.parametrize(("name", "way"), PRODUCT)
@pytest.mark.parametrize(("world", "codegen"), itertools.product((1, 2), ("eager", "inductor")))
@on_ranks()
def test_every_combination(name: str, way: str, codegen: str) -> None:
    for stage in range(4):
        train_checkpointed(name, way, codegen, stage=stage)


@pytest.mark.parametrize(("world", "way"), [(2, "by_hand"), (1, "reentrant")])
@on_ranks()
def test_not_compiled(way: str) -> None:
    """Backward reads the weights again, through the markers' eager implementation."""
    train_checkpointed("gpt", way, None, stage=3)


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


LATER = ["by several", *(pytest.param(how, marks=pytest.mark.full) for how in ("before", "as an argument"))]


@pytest.mark.parametrize("reads", LATER)
@on_ranks(2)
def test_weights_read_in_several_regions_are_gathered_again(reads: str) -> None:
    torch.manual_seed(0)
    model = Shared(reads)
    matrices = hidden_matrices(model, exclude=("embedding",))
    train(model, matrices, shared_loss, ZOO["gpt"].data, steps=STEPS, stage=3, codegen="eager").check()


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


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="Dynamo of torch 2.11 takes no DTensor into a region")
@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.full)])
@on_ranks(2)
def test_regions_of_a_model_train_as_what_is_in_them(stage: int) -> None:
    torch.manual_seed(0)
    model = Regional()
    matrices = hidden_matrices(model, exclude=("embedding", "head"))
    train(model, matrices, shared_loss, ZOO["gpt"].data, steps=STEPS, stage=stage, codegen="eager").check()
