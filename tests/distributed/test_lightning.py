"""``MuonZeroStrategy`` beside a plain loop: clipped, accumulated, evaluated, saved, gone on with, on several ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from harness import Ranks
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from reference import full
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import compile_muon
from compile_muon.integrations.lightning import MuonZeroStrategy, grad_norm

CONFIG = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003, "ns_dtype": "fp32"}}}
ACCUMULATED, BATCH, LIMIT, EPOCH = 2, 2, 0.5, 3  # an epoch has so many steps


def world_and_rank() -> tuple[int, int]:
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


class Net(nn.Module):
    """An embedding that is the head too, two hidden matrices, dropout and BatchNorm if asked for."""

    def __init__(self, dropout: float = 0.0, normalized: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 24)
        self.up, self.down = nn.Linear(24, 36), nn.Linear(36, 24)
        self.drop = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(24) if normalized else nn.Identity()
        self.lm_head = nn.Linear(24, 61, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.drop(x))))
        return self.lm_head(self.norm(x.flatten(0, 1)))


def rate(step: int) -> float:
    return min(1.0, (step + 1) / 3) / (1 + step)


class Language(pl.LightningModule):
    def __init__(self, **net: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(3 + world_and_rank()[1])  # ranks begin with rank 0's values, whatever their seeds
        self.model = Net(**net)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.evaluations: list[float] = []
        self.began: dict[str, Tensor] = {}

    def loss(self, batch: tuple[Tensor]) -> Tensor:
        (tokens,) = batch
        return cross_entropy(self.model(tokens[:, :-1]), tokens[:, 1:].flatten())

    def on_train_start(self) -> None:
        self.began = weights(self)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.evaluations.append(float(self.trainer.callback_metrics["val_loss"]))

    def predict_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0]).argmax(-1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

    def configure_optimizers(self) -> Any:
        optimizer = self.trainer.strategy.muon
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def tokens(size: int = 96) -> Tensor:
    return torch.randint(0, 61, (size, 8), generator=torch.Generator().manual_seed(1))


def loader(size: int = 96) -> DataLoader:
    return DataLoader(TensorDataset(tokens(size)), batch_size=BATCH)


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The environment that torchrun gives a rank."""
    world, rank = world_and_rank()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    if world > 1:
        os.environ.update(zip(names, map(str, (rank, world, rank, world, 0, "127.0.0.1", 1)), strict=True))
        os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    try:
        yield
    finally:
        for name in (*names, "TORCHELASTIC_RUN_ID"):
            os.environ.pop(name, None)


def config_of(stage: int, compiled: bool = False) -> dict[str, Any]:
    return {**CONFIG, "zero_optimization": {"stage": stage}, "compile": {"codegen": "eager"} if compiled else False}


def trainer_of(config: Any, **settings: Any) -> pl.Trainer:
    defaults: dict[str, Any] = dict(
        max_epochs=2, limit_train_batches=EPOCH * ACCUMULATED, accumulate_grad_batches=ACCUMULATED, logger=False,
        gradient_clip_val=LIMIT, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        enable_checkpointing=False,
    )  # fmt: skip
    strategy = MuonZeroStrategy(config) if isinstance(config, (dict, type(None))) else config
    world, _ = world_and_rank()
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=world, **{**defaults, **settings})


def every_epoch(folder: str, **settings: Any) -> dict[str, Any]:
    saves = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, **settings)
    return {"callbacks": [saves], "enable_checkpointing": True}


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(param.detach()).clone() for name, param in model.named_parameters()}


Found = tuple[list[float], list[float], list[float], dict[str, Tensor]]


def found_in(module: Language) -> Found:
    return module.losses, module.norms, module.evaluations, weights(module)


def train(folder: str, stage: int, compiled: bool) -> Found:
    with launched():
        trainer, module = trainer_of(config_of(stage, compiled), **every_epoch(folder)), Language()
        trainer.fit(module, loader(), loader(12))
        metrics = trainer.strategy.muon.metrics()
        assert (metrics["directions_speculated"] > 0) == compiled
        return found_in(module)


def dealt(world: int, rank: int, epoch: int) -> list[int]:
    """The indices that Lightning gives a rank, which it shuffles in training whatever the loader says."""
    sampler: DistributedSampler = DistributedSampler(range(96), world, rank, shuffle=True, seed=0)
    sampler.set_epoch(epoch)
    return list(sampler)


def plain(worlds: Sequence[int], dtype: torch.dtype | None = None) -> Found:
    """The same by hand, in one process on the batches of as many ranks as each step has."""
    module = Language()
    data = tokens()
    optimizer = compile_muon.MuonZero(
        module, lr=0.02, adamw_lr=0.003, ns_dtype="fp32", gradient_accumulation_steps=None, update="step"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step, world in enumerate(worlds):
        first = step % EPOCH * ACCUMULATED
        for batch in range(first, first + ACCUMULATED):
            for rank in range(world):
                chosen = dealt(world, rank, step // EPOCH)[batch * BATCH : (batch + 1) * BATCH]
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    loss = module.loss((data[chosen],))
                (loss / (world * ACCUMULATED)).backward()
                module.losses.append(loss.item())
        module.norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % EPOCH == 0:
            with torch.no_grad(), torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                module.evaluations.append(module.eval().loss((tokens(12),)).item())
            module.train()
    return found_in(module)


def of_all_ranks(per_rank: Sequence[list[float]]) -> list[float]:
    """Micro-batches in the order of :func:`plain`."""
    return [loss for micro in zip(*per_rank, strict=True) for loss in micro]


@pytest.mark.parametrize(
    ("world", "stage", "compiled"),
    [(2, 0, False), (2, 1, True), (2, 2, False), (2, 3, True), (3, 3, False), (1, 2, True)],
)
def test_a_fit_trains_as_a_plain_loop(
    ranks: Callable[[int], Ranks], tmp_path: Path, world: int, stage: int, compiled: bool
) -> None:
    expected = plain([world] * 2 * EPOCH)
    several = ranks(world).run(train, folder=str(tmp_path), stage=stage, compiled=compiled)
    assert of_all_ranks([found[0] for found in several]) == pytest.approx(expected[0], rel=1e-5)
    for found in several:
        assert found[1] == pytest.approx(expected[1], rel=1e-5)
        assert found[2] == pytest.approx(expected[2], rel=1e-5)
        for name, value in expected[3].items():
            torch.testing.assert_close(found[3][name], value, rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch=0.ckpt", "epoch=1.ckpt"]
    loaded = Language.load_from_checkpoint(tmp_path / "epoch=1.ckpt")
    assert all(torch.equal(value, several[0][3][name]) for name, value in loaded.named_parameters())


# ------------------------------------------------------------------------------------------------- going on


def go_on(folder: str, stage: int) -> tuple[Found, dict[str, Tensor]]:
    with launched():
        trainer, module = trainer_of(config_of(stage)), Language()
        trainer.fit(module, loader(), loader(12), ckpt_path=str(Path(folder) / "epoch=0.ckpt"))
        assert trainer.global_step == 2 * EPOCH
        return found_in(module), module.began


def test_a_run_goes_on_bit_for_bit_and_on_another_world(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    whole = ranks(2).run(train, folder=str(tmp_path), stage=3, compiled=False)[0]
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)["state_dict"]
    for world, stage in ((2, 3), (1, 0), (3, 1)):
        expected = plain([2] * EPOCH + [world] * EPOCH)
        several = ranks(world).run(go_on, folder=str(tmp_path), stage=stage)
        later = of_all_ranks([found[0] for found, _ in several])
        assert later == pytest.approx(expected[0][-len(later) :], rel=1e-5)
        for found, began in several:
            assert all(torch.equal(value, saved[name]) for name, value in began.items())
            assert found[1] == pytest.approx(expected[1][EPOCH:], rel=1e-5)
            if world == 2:
                assert found[1:3] == (whole[1][EPOCH:], whole[2][1:])
                assert all(torch.equal(value, whole[3][name]) for name, value in found[3].items())


