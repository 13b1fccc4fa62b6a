"""docs/start/from-fsdp2.md: both columns run as they stand, and train alike."""

import re
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from support.harness import RanksOf
from support.reference import full
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import compile_muon

PAGE = Path(__file__).resolve().parents[2] / "docs" / "start" / "from-fsdp2.md"
#: Inductor has its own tests
CHEAPER = {".compile()": '.compile(backend="eager")', '"muon_zero")': '"muon_zero", options={"codegen": "eager"})'}


def columns() -> tuple[list[str], list[str]]:
    """The page's blocks of code: FSDP2's, and ours."""
    rows = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return rows[::2], rows[1::2]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 31, bias=False)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def a_place() -> str:
    place = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(place)
    return place[0]


Found = tuple[list[tuple[float, float]], dict[str, Tensor], list[Tensor], float]


def run(blocks: list[str], stage: int | None) -> Found:
    """What the loop logs, rank 0's whole weights, the averages, and a loss after the checkpoint was loaded."""
    dice = torch.Generator().manual_seed(dist.get_rank())
    logged: list[tuple[float, float]] = []
    names: dict[str, Any] = {
        **{name: value for name, value in globals().items() if name in " ".join(blocks)},
        "batches": [[torch.randint(0, 31, (4, 9), generator=dice) for _ in range(2)]] * 4,
        "folder": a_place(),
        "log": lambda loss, norm: logged.append((loss.item(), norm.item())),
    }
    for block in blocks:
        if stage is not None and "config = {" in block:
            block += f"""
config["zero_optimization"]["stage"] = {stage}
adamw = {{"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "adamw_decay_vectors": True}}
config["optimizer"] = {{"type": "AdamW", "params": adamw}}
"""
        for call, cheaper in CHEAPER.items():
            block = block.replace(call, cheaper)
        exec(block, names)
    averages = names["ema"] if isinstance(names["ema"], list) else names["ema"].module.parameters()
    with torch.no_grad():
        after = loss_of(names["model"], names["batches"][0][0]).item()
    whole = {name: value.clone() for name, value in names["whole"].items()}
    return logged, whole, [full(average.detach()) for average in averages], after


@pytest.mark.full
def test_both_columns_train_alike(ranks: RanksOf) -> None:
    theirs, ours = columns()
    assert len(theirs) == len(ours) > 6
    expected = ranks(2).run(run, blocks=theirs, stage=None)
    for before, found in zip(expected, ranks(2).run(run, blocks=ours, stage=3), strict=True):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(before[0]), rtol=1e-5, atol=1e-5)
        for part in (1, 2):
            torch.testing.assert_close(found[part], before[part], rtol=1e-5, atol=1e-5)
        assert found[3] == pytest.approx(before[3], rel=1e-5)


@pytest.mark.full
def test_the_page_as_it_stands_trains_with_muon(ranks: RanksOf) -> None:
    for logged, *_ in ranks(2).run(run, blocks=columns()[1], stage=None):
        assert logged[-1][0] < logged[0][0]


assert all(
    (AdamW, AveragedModel, LinearLR, StateDictOptions, checkpoint_wrapper, clip_grad_norm_, compile_muon, dcp,
     get_ema_multi_avg_fn, get_model_state_dict, get_state_dict, nullcontext, set_state_dict)
)  # what the page's code uses without importing it  # fmt: skip
