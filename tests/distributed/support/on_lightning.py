"""Lightning's Trainer, which shuffles in training whatever a loader says."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import compile_muon  # noqa: F401, in what build() evaluates
from compile_muon.integrations.lightning import MuonZeroStrategy, grad_norm
from support.launched import launched
from support.reference import world_and_rank
from support.trainers import (
    ACCUMULATED,
    BATCH,
    LIMIT,
    MUON,
    Counting,
    Net,
    Run,
    causal_loss,
    sentences,
    small,
    state_of,
)

STEPS, SAVED, BY_ITEMS = 6, 3, False  # of two epochs
CHECKPOINTS = ["epoch=0.ckpt", "epoch=1.ckpt"]
model, loss, LIMITS = small, causal_loss, dict.fromkeys((1, 2, 3), LIMIT)


def batches(step: int, worlds: Sequence[int]) -> list[Tensor]:
    world, first = worlds[step], step % SAVED * ACCUMULATED
    dealt = [DistributedSampler(range(96), world, rank, shuffle=True, seed=0) for rank in range(world)]
    for sampler in dealt:
        sampler.set_epoch(step // SAVED)
    places = [torch.tensor(list(sampler)).split(BATCH)[first : first + ACCUMULATED] for sampler in dealt]
    return [sentences()[rows] for micro in zip(*places, strict=True) for rows in micro]


def rate(step: int, worlds: Sequence[int] = ()) -> float:
    return min(1.0, (step + 1) / 3) / (1 + step)


def evaluated(step: int, world: int) -> list[Tensor]:
    return list(sentences(12).split(BATCH)) if step % SAVED == SAVED - 1 else []


class Language(pl.LightningModule):
    """:class:`Net` with some settings, or GPT-2 for ranks that share sequences."""

    def __init__(self, shared: int = 1, **net: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Net(**net) if net else small(shared)
        for param in self.model.parameters():  # ranks begin with rank 0's values, whatever their own
            param.data += world_and_rank()[1]
        self.run, self.total = Run(), 0.0

    def loss(self, batch: tuple[Tensor]) -> Tensor:
        return loss(self.model, batch[0])

    def on_train_start(self) -> None:
        self.note()

    def on_train_epoch_end(self) -> None:
        self.note()

    def note(self) -> None:
        """The state where a checkpoint is."""
        if self.trainer.global_step == SAVED:
            self.run.state = state_of(self.model, self.trainer.strategy.muon)

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        self.total += mean.item() / world_and_rank()[0] / ACCUMULATED
        if (batch_idx + 1) % ACCUMULATED == 0:
            self.run.losses.append(self.total)
            self.total = 0.0
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.run.evaluations.append(float(self.trainer.callback_metrics["val_loss"]))

    def predict_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0], batch[0])["logits"].argmax(-1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.run.norms.append(float(grad_norm(self, 2)["grad_2.0_norm_total"]))

    def configure_optimizers(self) -> Any:
        optimizer = self.trainer.strategy.muon
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(size: int = 96) -> DataLoader:
    return DataLoader(TensorDataset(sentences(size)), batch_size=BATCH)


def config_of(stage: int, compiled: bool = False, **more: Any) -> dict[str, Any]:
    compile_ = {"codegen": "eager"} if compiled else False
    return {"optimizer": MUON, "zero_optimization": {"stage": stage}, "compile": compile_, **more}


def trainer_of(config: Any, **settings: Any) -> pl.Trainer:
    """``config`` is that of a strategy, the strategy itself, or None: the module makes its optimizer."""
    defaults: dict[str, Any] = dict(
        max_epochs=2, limit_train_batches=SAVED * ACCUMULATED, accumulate_grad_batches=ACCUMULATED, logger=False,
        gradient_clip_val=LIMIT, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        enable_checkpointing=False,
    )  # fmt: skip
    strategy = MuonZeroStrategy(config) if isinstance(config, (dict, type(None))) else config
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=world_and_rank()[0], **{**defaults, **settings})


PART = "up"


class Unfreezes(Callback):
    """A part is trained from the second epoch on."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        module.get_submodule(f"model.{PART}").requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.get_submodule(f"model.{PART}").requires_grad_(True)


def fit(
    folder: str, stage: int, compiled: bool = False, resume: bool = False, shared: int = 1, thawed: bool = False,
    **settings: Any,
) -> Run:  # fmt: skip
    with launched():
        config = config_of(stage, compiled, sequence_parallel={"size": shared})
        counting, module = Counting(), Language(shared=shared)
        saves = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
        trainer = trainer_of(
            MuonZeroStrategy(config, extensions=[counting]), enable_checkpointing=True,
            callbacks=[saves, *([Unfreezes()] if thawed else ())], **settings,
        )  # fmt: skip
        start = str(Path(folder) / "epoch=0.ckpt") if resume else None
        trainer.fit(module, loader(), loader(12), ckpt_path=start)
        assert trainer.global_step == STEPS and counting.written == STEPS - (SAVED if resume else 0)
        run = module.run
        run.weights, run.totals = state_of(module.model), trainer.strategy.muon.totals()
    return run


def saved(folder: Path) -> tuple[list[str], dict[str, Tensor]]:
    values = torch.load(folder / "epoch=1.ckpt", weights_only=True)["state_dict"]
    return sorted(path.name for path in folder.iterdir()), {k.removeprefix("model."): v for k, v in values.items()}


class Configured(Language):
    """``configure_optimizers`` is a function of the module, which has a list of blocks."""

    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        self._configure, self.blocks = configure, torch.nn.ModuleList([torch.nn.Linear(24, 24)])

    def configure_optimizers(self) -> Any:
        return self._configure(self)


def build(change: str) -> None:
    """A strategy's config, and what ``configure_optimizers`` of module ``m`` returns."""
    config, configure = eval(change, {**globals(), "CONFIG": config_of(2)})
    with launched():
        trainer_of(config).fit(Configured(configure), loader())
