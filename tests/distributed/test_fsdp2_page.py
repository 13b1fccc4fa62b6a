"""docs/start/from-fsdp2.md: both columns run as they stand, and train alike."""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness import RanksOf
from support.reference import full
from support.zoo import ZOO
from torch import Tensor, nn

PAGE = Path(__file__).resolve().parents[2] / "docs" / "start" / "from-fsdp2.md"
#: Inductor has its own tests
CHEAPER = {".compile()": '.compile(backend="eager")', '"muon_zero")': '"muon_zero", options={"codegen": "eager"})'}
GPT = ZOO["gpt"]


def columns() -> tuple[list[str], list[str]]:
    """The page's blocks of code: FSDP2's, and ours."""
    rows = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return rows[::2], rows[1::2]


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return GPT.build()


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
        "make_model": make_model,
        "loss_of": GPT.loss,
        "batches": [[torch.randint(0, 31, (4, 12), generator=dice) for _ in range(2)]] * 4,
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
        after = GPT.loss(names["model"], names["batches"][0][0]).item()
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
