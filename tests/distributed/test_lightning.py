"""``MuonZeroStrategy`` beyond test_trainers.py: manual optimization, evaluation alone, files, loggers and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from support import on_lightning
from support.harness import RanksOf, on_ranks
from support.launched import launched
from support.on_lightning import SAVED, Language, config_of, loader, trainer_of
from support.reference import refusal
from support.trainers import ACCUMULATED, LIMIT, plain, state_of
from torch import Tensor, nn

import compile_muon
from compile_muon.integrations.lightning import grad_norm


class ByHand(Language):
    """Manual optimization, as Lightning's guide has it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        optimizer, last = self.optimizers(), (batch_idx + 1) % ACCUMULATED == 0
        with optimizer.toggle_model(sync_grad=last):
            self.manual_backward(super().training_step(batch, batch_idx) / ACCUMULATED)
        if last:
            self.on_before_optimizer_step(optimizer)
            self.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()
            self.lr_schedulers().step()


def train_by_hand(expected: list[float]) -> None:
    with launched():
        module, trainer = ByHand(), trainer_of(config_of(1), accumulate_grad_batches=1, gradient_clip_val=None)
        trainer.fit(module, loader())
        assert trainer.global_step == on_lightning.STEPS
        assert module.run.losses == pytest.approx(expected, rel=1e-5), module.run.losses


@pytest.mark.full
def test_manual_optimization(ranks: RanksOf) -> None:
    ranks(2).run(train_by_hand, expected=plain(on_lightning, [2] * on_lightning.STEPS).losses)


@on_ranks(2)
def test_micro_batches_are_reduced_once() -> None:
    """At stage 1, without accumulation and with it."""
    totals = []
    with launched():
        for count in (1, ACCUMULATED):
            settings = dict(accumulate_grad_batches=count, limit_train_batches=SAVED * count, max_epochs=1)
            trainer = trainer_of(config_of(1), **settings)
            trainer.fit(Language(), loader())
            totals.append(trainer.strategy.muon.totals()["bytes_sent"])
    assert totals[0] == totals[1] > 0, totals


@on_ranks(2)
def test_a_second_fit_begins_anew() -> None:
    """Losses of a second fit of the same module, and its momenta where it begins."""
    with launched():
        trainer, module = trainer_of(config_of(3), max_epochs=1), Language()
        trainer.fit(module, loader())
        trainer.fit_loop.max_epochs = 2
        done, begun = len(module.run.losses), list[Tensor]()
        module.on_train_start = lambda: begun.extend(
            value for name, value in state_of(module.model, trainer.strategy.muon).items() if "momentum" in name
        )
        trainer.fit(module, loader())
    assert len(module.run.losses) - done == SAVED and begun and not any(momentum.any() for momentum in begun)


def test_what_was_frozen_begins_anew_from_a_checkpoint() -> None:
    with launched():
        trainer, module = trainer_of(config_of(2), max_epochs=1), Language()
        module.model.down.requires_grad_(False)
        trainer.fit(module, loader())
        module.model.down.requires_grad_(True)
        with pytest.raises(compile_muon.ConfigError, match=r"model.down.weight, .* frozen .* load_from_checkpoint"):
            trainer.fit(module, loader())


def evaluate_alone(path: str) -> tuple[list[float], list[Tensor], list[Tensor], dict[str, Tensor]]:
    """From the meta device: fitted, saved; evaluated and predicted where nothing is sharded, and where it is. And what
    a module that no fit has seen is evaluated with."""
    with launched():
        new = Language()
        trainer_of(config_of(3)).validate(new, loader(12), verbose=False)
        trainer = trainer_of(config_of(3), max_epochs=1)
        with trainer.init_module(empty_init=True):
            module = Language(normalized=True)  # what is evaluated is what the checkpoint has
        assert module.model.up.weight.is_meta
        trainer.fit(module, loader(), loader(12))
        trainer.save_checkpoint(path)
        fresh, alone = trainer_of(config_of(3)), Language(normalized=True)
        losses = [module.run.evaluations[-1], trainer.validate(module, loader(12), verbose=False)[0]["val_loss"]]
        losses.append(fresh.validate(alone, loader(12), ckpt_path=path, verbose=False)[0]["val_loss"])
        return losses, trainer.predict(module, loader(12)), fresh.predict(alone, loader(12)), state_of(new)


def test_evaluation_without_a_fit_and_from_the_meta_device(ranks: RanksOf, tmp_path: Path) -> None:
    several = ranks(2).run(evaluate_alone, path=str(tmp_path / "x.ckpt"))
    for evaluations, sharded, whole, values in several:
        assert all(map(torch.equal, values.values(), several[0][3].values()))  # rank 0's
        assert evaluations == pytest.approx([evaluations[0]] * 3, rel=1e-6)
        assert all(torch.equal(*pair) for pair in zip(sharded, whole, strict=True))


class Logged(Language):
    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        metrics = {**self.trainer.strategy.muon.metrics(), **self.trainer.strategy.muon.totals()}
        self.log_dict({f"muon_zero/{name}": value for name, value in metrics.items()})
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, 2))


def train_logged(folder: str) -> tuple[int, int]:
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    with launched():
        saves = ModelCheckpoint(dirpath=folder, monitor="val_loss", save_last="link", save_top_k=1)
        settings: dict[str, Any] = dict(
            callbacks=[saves, LearningRateMonitor("step")], enable_checkpointing=True, log_every_n_steps=1,
            logger=[CSVLogger(folder), TensorBoardLogger(folder)],
        )  # fmt: skip
        trainer, module = trainer_of(config_of(1), **settings), Logged(dropout=0.1, normalized=True)
        trainer.fit(module, loader(), loader(12))
        done = trainer.global_step
        trainer.fit_loop.max_epochs = 3
        trainer.fit(module, loader(), loader(12), ckpt_path="last")
        return done, trainer.global_step


def test_loggers_and_callbacks(ranks: RanksOf, tmp_path: Path) -> None:
    assert ranks(2).run(train_logged, folder=str(tmp_path)) == [(6, 9), (6, 9)]
    (table,) = tmp_path.glob("lightning_logs/*/metrics.csv")
    logged = table.read_text().splitlines()[0].split(",")
    named = {"muon_zero/bytes_sent", "grad_2.0_norm_total", "grad_2.0_norm/model.up.weight", "loss", "val_loss"}
    assert named <= set(logged)
    assert {"lr-MuonZero/muon", "lr-MuonZero/adamw"} <= set(logged)
    assert len(list(tmp_path.glob("*.ckpt"))) == 2  # the best, and a link to the last
    assert list(tmp_path.glob("lightning_logs/*/events*"))


class Compiled(Language):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(self.model, backend="muon_zero", options={"codegen": "eager"})


def test_a_checkpoint_of_a_compiled_child_has_its_names_and_needs_nobody(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    with launched():
        trainer, module = trainer_of(config_of(2), max_epochs=1), Compiled()
        trainer.fit(module, loader())
        trainer.save_checkpoint(path)
        again = Compiled()
        trainer_of(config_of(2), max_epochs=1).fit(again, loader(), ckpt_path=path)
    for other in (again, Compiled.load_from_checkpoint(path)):
        assert all(map(torch.equal, state_of(other).values(), state_of(module).values()))
    assert list(torch.load(path, weights_only=True)["state_dict"]) == list(module.state_dict())


@on_ranks(2)
def test_a_checkpoint_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """In a folder that is a file."""
    with launched():
        module, trainer = Language(), trainer_of(config_of(3), max_epochs=1)
        trainer.fit(module, loader())
        (tmp_path / "file").write_text("")
        said = refusal(trainer.save_checkpoint, tmp_path / "file" / "x.ckpt")
    assert "x.ckpt: was not saved: rank 0:" in said


def test_what_cannot_be_honoured_is_refused_in_one_error() -> None:
    from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, StochasticWeightAveraging
    from lightning.pytorch.plugins.precision import HalfPrecision

    def errors(settings: dict[str, Any], **config: Any) -> tuple[Any, ...]:
        config = config_of(2, gradient_accumulation_steps=3, gradient_clipping=2.0, **config)
        with launched(), pytest.raises(compile_muon.ConfigError) as error:
            trainer_of(config, **settings).fit(Language(), loader())
        return error.value.errors

    callbacks = [EMAWeightAveraging(), StochasticWeightAveraging(1e-2), BackboneFinetuning()]
    settings = dict(callbacks=callbacks, plugins=[HalfPrecision("16-true")], sync_batchnorm=True)
    assert [(each.field, each.shown) for each in errors(settings, compil=True)] == [
        ("Trainer.precision", "'16-true'"), ("Trainer.sync_batchnorm", "True"),
        ("Trainer.callbacks", "'EMAWeightAveraging'"), ("Trainer.callbacks", "'StochasticWeightAveraging'"),
        ("Trainer.callbacks", "'BackboneFinetuning'"), ("compil", "True"),
    ]  # fmt: skip
    assert [each.problem for each in errors({}, mesh={"tensor": 2})] == [
        "needs the same batches on its ranks, and loaders here give each process its own",
        "contradicts Trainer.accumulate_grad_batches = 2",
        "contradicts Trainer.gradient_clip_val = 0.5",
    ]


def test_auto_is_what_the_trainer_says_and_one_strategy_shards_a_module() -> None:
    auto = config_of(2, gradient_accumulation_steps="auto", gradient_clipping="auto", bf16={"enabled": "auto"})
    module = Language()
    with launched():
        trainer = trainer_of(auto, fast_dev_run=True)
        trainer.fit(module, loader())
        with pytest.raises(compile_muon.ConfigError, match="has been sharded by another strategy"):
            trainer_of(config_of(2)).fit(module, loader())
    zero = trainer.strategy.muon.config.zero
    assert (zero.gradient_accumulation_steps, zero.gradient_clipping, zero.param_dtype) == (1, LIMIT, None)


def test_a_module_without_reset_parameters_is_refused_on_the_meta_device() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

    with launched():
        trainer = trainer_of(config_of(2))
        with trainer.init_module(empty_init=True):
            module = Language()
            module.model.bare = Bare()
        with pytest.raises(compile_muon.UnsupportedModelError, match=r"Bare: .* has no reset_parameters"):
            trainer.fit(module, loader())
