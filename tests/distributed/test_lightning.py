"""``MuonZeroStrategy`` beside a plain loop: clipped, accumulated, evaluated, saved, gone on with, on several ranks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from support.harness import Ranks
from support.launched import launched
from support.reference import full, world_and_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import compile_muon
from compile_muon.integrations.lightning import MuonZeroStrategy, grad_norm

CONFIG = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003, "ns_dtype": "fp32"}}}
ACCUMULATED, BATCH, LIMIT, EPOCH = 2, 2, 0.5, 3  # an epoch has so many steps


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


class Counting(compile_muon.Extension):
    written = 0

    def after_commit(self, found_inf: Tensor | None) -> None:
        self.written += 1


def train(folder: str, stage: int, compiled: bool) -> Found:
    with launched():
        counting = Counting()
        strategy = MuonZeroStrategy(config_of(stage, compiled), extensions=[counting])
        trainer, module = trainer_of(strategy, **every_epoch(folder)), Language()
        trainer.fit(module, loader(), loader(12))
        metrics = trainer.strategy.muon.totals()
        assert counting.written == 2 * EPOCH
        assert (metrics["directions_speculated"] > 0) == compiled
        return found_in(module)


def dealt(world: int, rank: int, epoch: int) -> list[int]:
    """The indices that Lightning gives a rank, which it shuffles in training whatever the loader says."""
    sampler: DistributedSampler = DistributedSampler(range(96), world, rank, shuffle=True, seed=0)
    sampler.set_epoch(epoch)
    return list(sampler)


def plain(
    worlds: Sequence[int],
    dtype: torch.dtype | None = None,
    clip: Callable[..., Any] | None = None,
    thawed: Sequence[int] = (),
    **net: Any,
) -> Found:
    """The same by hand, in one process on the batches of as many ranks as each step has.

    Args:
        thawed: of the steps behind those, before which a module is frozen.
        dtype: of autocast.
        clip: what clips the gradients of parameters by a limit; default: by their norm.
    """
    module = Language(**net)
    data = tokens()
    optimizer = compile_muon.MuonZero(
        module, lr=0.02, adamw_lr=0.003, ns_dtype="fp32", gradient_accumulation_steps=None, update="step"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for step, world in enumerate([*worlds, *thawed]):
        module.model.up.requires_grad_(not thawed or step >= len(worlds))
        first = step % EPOCH * ACCUMULATED
        for batch in range(first, first + ACCUMULATED):
            for rank in range(world):
                chosen = dealt(world, rank, step // EPOCH)[batch * BATCH : (batch + 1) * BATCH]
                with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
                    loss = module.loss((data[chosen],))
                (loss / (world * ACCUMULATED)).backward()
                module.losses.append(loss.item())
        gradients = [param.grad for param in module.parameters() if param.grad is not None]
        module.norms.append(float(nn.utils.get_total_norm(gradients)))
        (clip or nn.utils.clip_grad_norm_)(module.parameters(), LIMIT)
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
    [
        (2, 2, False),
        (1, 2, True),
        pytest.param(2, 3, True, marks=pytest.mark.campaign),
        *(pytest.param(*given, marks=pytest.mark.campaign) for given in ((2, 0, False), (2, 1, True), (3, 3, False))),
    ],
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


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(((2, 3), (1, 0)), marks=pytest.mark.full),
        pytest.param(((2, 3), (1, 0), (3, 1)), marks=pytest.mark.campaign),
    ],
)
def test_a_run_goes_on_bit_for_bit_and_on_another_world(
    ranks: Callable[[int], Ranks], tmp_path: Path, others: tuple[tuple[int, int], ...]
) -> None:
    whole = ranks(2).run(train, folder=str(tmp_path), stage=3, compiled=False)[0]
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)["state_dict"]
    for world, stage in others:
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


# ------------------------------------------------------------------------------------------------- other settings


def train_with(stage: int, settings: dict[str, Any], compiled: bool = False) -> Found:
    with launched():
        trainer, module = trainer_of(config_of(stage, compiled), **settings), Language()
        trainer.fit(module, loader(), loader(12))
        return found_in(module)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "other", "near"),
    [
        pytest.param(
            {"gradient_clip_algorithm": "value"}, {"clip": nn.utils.clip_grad_value_}, 1e-5, marks=pytest.mark.full
        ),
        ({"precision": "bf16-mixed"}, {"dtype": torch.bfloat16}, 1e-5),
    ],
)
def test_other_settings_train_as_a_plain_loop_too(
    ranks: Callable[[int], Ranks], settings: dict[str, Any], other: dict[str, Any], near: float
) -> None:
    expected = plain([2] * 2 * EPOCH, **other)
    several = ranks(2).run(train_with, stage=1, settings=settings, compiled=True)
    assert of_all_ranks([found[0] for found in several]) == pytest.approx(expected[0], rel=near)
    assert several[0][1] == pytest.approx(expected[1], rel=10 * near)


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


def train_by_hand() -> list[float]:
    with launched():
        module = ByHand()
        trainer = trainer_of(config_of(1), accumulate_grad_batches=1, gradient_clip_val=None)
        trainer.fit(module, loader())
        assert trainer.global_step == 2 * EPOCH
        return module.losses


class Two(pl.LightningModule):
    """Two optimizers, each of a part, made by the module."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2)
        )

    def configure_optimizers(self) -> Any:
        return [compile_muon.MuonZero(part, stage=stage) for part, stage in zip(self.parts, (3, 1), strict=True)], []

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        for optimizer, part in zip(self.optimizers(), self.parts, strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(part(batch[0] / 61).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


def momenta(trainer: pl.Trainer) -> list[Tensor]:
    return [
        full(slots["momentum_buffer"]).clone()
        for o in trainer.optimizers
        for slots in o.state.values()
        if len(slots) == 1
    ]


def train_two(path: str) -> bool:
    with launched():
        settings = dict(accumulate_grad_batches=1, gradient_clip_val=None, max_epochs=1)
        trainer = trainer_of(None, **settings)
        trainer.fit(Two(), loader())
        trainer.save_checkpoint(path)
        saved, again = momenta(trainer), trainer_of(None, **settings)
        again.fit(Two(), loader(), ckpt_path=path)  # there is nothing left to do
        return len(saved) == 4 and all(torch.equal(*pair) for pair in zip(saved, momenta(again), strict=True))


@pytest.mark.full
def test_manual_optimization(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    assert of_all_ranks(ranks(2).run(train_by_hand)) == pytest.approx(plain([2] * 2 * EPOCH)[0], rel=1e-5)
    assert all(ranks(2).run(train_two, path=str(tmp_path / "two.ckpt")))


class Layers(pl.LightningModule):
    """Layers in a list, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16)])
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x * self.scale

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self(batch[0] / 61).square().mean()

    def configure_optimizers(self) -> None:
        """The config's is enough."""


def sent(accumulated: int) -> float:
    """Bytes that a rank sends in an epoch at stage 1."""
    trainer = trainer_of(
        config_of(1, True), max_epochs=1, accumulate_grad_batches=accumulated, limit_train_batches=EPOCH * accumulated,
        gradient_clip_val=None,
    )  # fmt: skip
    trainer.fit(Layers(), loader())
    return trainer.strategy.muon.totals()["bytes_sent"]


def train_layers() -> tuple[float, float, list[float]]:
    """How many directions came of graphs, how many did not, and what is sent with and without accumulation."""
    with launched():
        trainer = trainer_of(config_of(3, True), max_epochs=1, gradient_clip_val=None)
        trainer.fit(Layers(), loader())
        metrics = trainer.strategy.muon.totals()
        return metrics["directions_used"], metrics["directions_in_step"], [sent(1), sent(ACCUMULATED)]


def test_micro_batches_are_reduced_once_and_everything_is_compiled(ranks: Callable[[int], Ranks]) -> None:
    for used, late, traffic in ranks(2).run(train_layers):
        assert (used, late) == (2 * EPOCH, 0)
        assert traffic[0] == traffic[1] > 0


def train_twice() -> tuple[list[float], list[float]]:
    """Losses of a second fit of the same module, and of a first one of another with its weights."""
    with launched():
        trainer, module = trainer_of(config_of(3, True), max_epochs=1), Language()
        trainer.fit(module, loader())
        trainer.fit_loop.max_epochs = 2
        between, done = compile_muon.full_state_dict(module), len(module.losses)
        trainer.fit(module, loader())
        other, another = trainer_of(config_of(3, True), max_epochs=2), Language()
        several = [between]
        if dist.is_initialized():
            dist.broadcast_object_list(several)
        another.load_state_dict(several[0])
        other.fit_loop.epoch_progress.current.processed = 1  # the second epoch's data
        other.fit_loop.epoch_progress.current.completed = 1
        other.fit(another, loader())
        return module.losses[done:], another.losses


@pytest.mark.full
def test_a_second_fit_begins_anew(ranks: Callable[[int], Ranks]) -> None:
    for second, first in ranks(2).run(train_twice):
        assert len(second) == EPOCH * ACCUMULATED
        assert second == pytest.approx(first, rel=1e-5)


def test_what_was_frozen_begins_anew_from_a_checkpoint() -> None:
    with launched():
        trainer, module = trainer_of(config_of(2), max_epochs=1), Language()
        module.model.down.requires_grad_(False)
        trainer.fit(module, loader())
        module.model.down.requires_grad_(True)
        with pytest.raises(compile_muon.ConfigError, match=r"model.down.weight, .* frozen .* load_from_checkpoint"):
            trainer.fit(module, loader())


def evaluate_alone(path: str) -> tuple[list[float], list[Tensor], list[Tensor], dict[str, Tensor]]:
    """From the meta device: fitted, saved; evaluated and predicted where nothing is sharded, and where it is.

    And what a module that no fit has seen is evaluated with.
    """
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
        found = [module.evaluations[-1], trainer.validate(module, loader(12), verbose=False)[0]["val_loss"]]
        found.append(fresh.validate(alone, loader(12), ckpt_path=path, verbose=False)[0]["val_loss"])
        return found, trainer.predict(module, loader(12)), fresh.predict(alone, loader(12)), weights(new)


def test_evaluation_without_a_fit_and_from_the_meta_device(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    for evaluations, sharded, whole, values in ranks(2).run(evaluate_alone, path=str(tmp_path / "x.ckpt")):
        assert all(map(torch.equal, values.values(), weights(Language()).values()))
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


def test_loggers_and_callbacks(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    assert ranks(2).run(train_logged, folder=str(tmp_path)) == [(6, 9), (6, 9)]
    (table,) = tmp_path.glob("lightning_logs/*/metrics.csv")
    logged = table.read_text().splitlines()[0].split(",")
    named = {"muon_zero/bytes_sent", "grad_2.0_norm_total", "grad_2.0_norm/model.up.weight", "loss", "val_loss"}
    assert named <= set(logged)
    assert {"lr-MuonZero/muon", "lr-MuonZero/adamw"} <= set(logged)
    assert len(list(tmp_path.glob("*.ckpt"))) == 2  # the best, and a link to the last
    assert list(tmp_path.glob("lightning_logs/*/events*"))


# ------------------------------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_needs_neither_us_nor_lightning(tmp_path: Path) -> None:
    with launched():
        module, trainer = Language(), trainer_of(config_of(2), max_epochs=1)
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "x.ckpt")
    code = (
        "import sys, torch; saved = torch.load(sys.argv[1], weights_only=True); print(saved['state_dict'].keys()); "
        "assert not {'compile_muon', 'lightning'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.ckpt")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(list(module.state_dict())) in done.stdout


class Compiled(Language):
    def __init__(self) -> None:
        super().__init__()
        self.model = torch.compile(self.model, backend="muon_zero", options={"codegen": "eager"})


def test_names_of_a_compiled_child_are_its_own(tmp_path: Path) -> None:
    with launched():
        trainer, module = trainer_of(config_of(2), max_epochs=1), Compiled()
        trainer.fit(module, loader())
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        again = Compiled()
        trainer_of(config_of(2), max_epochs=1).fit(again, loader(), ckpt_path=tmp_path / "x.ckpt")
    loaded = Compiled.load_from_checkpoint(tmp_path / "x.ckpt")
    for found in (again, loaded):
        assert all(map(torch.equal, weights(found).values(), weights(module).values()))


def refuse_checkpoints(folder: str) -> list[str]:
    said = []
    with launched():
        module, trainer = Language(), trainer_of(config_of(3), max_epochs=1)
        trainer.fit(module, loader())
        blocked = Path(folder) / "file"
        blocked.write_text("")
        with pytest.raises(compile_muon.CheckpointError) as error:
            trainer.save_checkpoint(blocked / "x.ckpt")
        said.append(str(error.value))
        paths = [Path(folder) / name for name in ("adamw.ckpt", "muon.ckpt", "folder.ckpt", "none.ckpt")]
        trainer.save_checkpoint(paths[1])
        if world_and_rank()[1] == 0:
            saved = torch.load(paths[1], weights_only=True)
            saved["optimizer_states"][0] = torch.optim.AdamW(Net().parameters()).state_dict()
            torch.save(saved, paths[0])
            paths[2].mkdir()
        trainer.strategy.barrier()
        adamw = {**config_of(3), "optimizer": {"type": "AdamW"}}
        for path, config in zip(paths, (config_of(3), adamw, config_of(3), config_of(3)), strict=True):
            with pytest.raises(compile_muon.CheckpointError) as error:
                trainer_of(config, max_epochs=2).fit(Language(), loader(), ckpt_path=str(path))
            said.append(str(error.value))
    return said


def test_checkpoints_that_cannot_be_written_or_do_not_fit_are_named_on_all_ranks(
    ranks: Callable[[int], Ranks], tmp_path: Path
) -> None:
    for said in ranks(2).run(refuse_checkpoints, folder=str(tmp_path)):
        for text, words in zip(
            said,
            (
                "x.ckpt: was not saved: rank 0:",
                "optimizer state was not loaded: rank 0: it is not optimizer state of MuonZero",
                "model.up.weight: was muon in it, is adamw now",
                "it is a folder, as FSDP's",
                "none.ckpt: was not loaded: ",
            ),
            strict=True,
        ):
            assert words in text


# ------------------------------------------------------------------------------------------------- unfreezing


class Unfreezes(pl.Callback):
    """A module is trained from the second epoch on."""

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        module.model.up.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            module.model.up.requires_grad_(True)


def fit_and_unfreeze(stage: int) -> tuple[Found, dict[str, Tensor]]:
    with launched():
        trainer, module = trainer_of(config_of(stage), callbacks=[Unfreezes()]), Language()
        trainer.fit(module, loader(), loader(12))
        return found_in(module), module.began


def test_a_callback_unfreezes(ranks: Callable[[int], Ranks]) -> None:
    per_rank = ranks(2).run(fit_and_unfreeze, stage=3)
    expected = plain([2] * EPOCH, thawed=[2] * EPOCH)
    assert of_all_ranks([found[0] for found, _ in per_rank]) == pytest.approx(expected[0], rel=1e-5)
    for found, began in per_rank:
        assert not torch.equal(found[3]["model.up.weight"], began["model.up.weight"])
        for name, value in expected[3].items():
            torch.testing.assert_close(found[3][name], value, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_honoured_is_refused_in_one_error() -> None:
    from lightning.pytorch.callbacks import BackboneFinetuning, EMAWeightAveraging, StochasticWeightAveraging
    from lightning.pytorch.plugins.precision import HalfPrecision

    config = {**config_of(2), "gradient_accumulation_steps": 3, "gradient_clipping": 2.0, "compil": True}
    callbacks = [EMAWeightAveraging(), StochasticWeightAveraging(1e-2), BackboneFinetuning()]
    settings = dict(callbacks=callbacks, plugins=[HalfPrecision("16-true")], sync_batchnorm=True)
    with launched(), pytest.raises(compile_muon.ConfigError) as error:
        trainer_of(config, **settings).fit(Language(), loader())
    fields = [(each.field, each.shown) for each in error.value.errors]
    assert fields == [
        ("Trainer.precision", "'16-true'"),
        ("Trainer.sync_batchnorm", "True"),
        ("Trainer.callbacks", "'EMAWeightAveraging'"),
        ("Trainer.callbacks", "'StochasticWeightAveraging'"),
        ("Trainer.callbacks", "'BackboneFinetuning'"),
        ("compil", "True"),
    ]
    with launched(), pytest.raises(compile_muon.ConfigError) as error:
        config = {**config_of(2), "gradient_accumulation_steps": 3, "gradient_clipping": 2.0, "mesh": {"tensor": 2}}
        trainer_of(config).fit(Language(), loader())
    assert [each.problem for each in error.value.errors] == [
        "needs the same batches on its ranks, and loaders here give each process its own",
        "contradicts Trainer(accumulate_grad_batches=2)",
        "contradicts Trainer(gradient_clip_val=0.5)",
    ]


def test_auto_is_what_the_trainer_says() -> None:
    config = {**config_of(2), "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}
    with launched():
        trainer = trainer_of({**config, "bf16": {"enabled": "auto"}}, fast_dev_run=True)
        trainer.fit(Language(), loader())
    zero = trainer.strategy.muon.config.zero
    assert (zero.gradient_accumulation_steps, zero.gradient_clipping, zero.param_dtype) == (1, LIMIT, None)


class Configured(Language):
    """``configure_optimizers`` is a function of the module."""

    def __init__(self, configure: Callable[[Any], Any]) -> None:
        super().__init__()
        self._configure = configure

    def configure_optimizers(self) -> Any:
        return self._configure(self)


@pytest.mark.parametrize(
    ("config", "configure", "said"),
    [
        (CONFIG, lambda m: torch.optim.AdamW(m.parameters()), "'AdamW': is another .*return trainer.strategy.muon"),
        (None, lambda m: torch.optim.AdamW(m.parameters()), r"'AdamW': is another .*MuonZero\(self"),
        (None, lambda m: None, "None: makes no optimizer, and neither does the strategy"),
        (None, lambda m: compile_muon.MuonZero(m.model.up, muon_params=["weight"]), "'model.embed.weight, model.down"),
        (None, lambda m: m.trainer.strategy.muon, "is made from MuonZeroStrategy"),
    ],
)
def test_other_optimizers_are_refused(config: Any, configure: Callable[[Any], Any], said: str) -> None:
    with launched(), pytest.raises(compile_muon.ConfigError, match=said):
        trainer_of(config).fit(Configured(configure), loader())


def test_a_module_that_another_strategy_sharded_is_refused() -> None:
    module = Language()
    with launched():
        trainer_of(config_of(2), fast_dev_run=True).fit(module, loader())
        with pytest.raises(compile_muon.ConfigError, match="has been sharded by another strategy"):
            trainer_of(config_of(2)).fit(module, loader())


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


# ------------------------------------------------------------------------------------------------- shared sequences


class Llama(Language):
    """A causal language model of Transformers, which computes its loss."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        torch.manual_seed(3)
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=61,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=1,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=16,
                pad_token_id=0,
                use_cache=False,
            )  # fmt: skip
        )

    def loss(self, batch: tuple[Tensor]) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


def fit_llama(sequence: int) -> Found:
    config = {**config_of(2), "sequence_parallel": {"size": sequence}} if sequence > 1 else config_of(2)
    with launched():
        trainer, module = trainer_of(config, max_epochs=1), Llama()
        trainer.fit(module, loader(), loader(12))
        return found_in(module)


def test_ranks_of_one_sequence_are_given_the_same_batches(ranks: Callable[[int], Ranks]) -> None:
    pytest.importorskip("transformers")
    (alone,) = ranks(1).run(fit_llama, sequence=1)
    for found in ranks(2).run(fit_llama, sequence=2):
        for mine, theirs in zip(found[:3], alone[:3], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)
        for name, value in alone[3].items():
            torch.testing.assert_close(found[3][name], value, rtol=1e-4, atol=1e-5)


def test_sequences_of_a_module_whose_batch_nobody_sees_are_refused(ranks: Callable[[int], Ranks]) -> None:
    for said in ranks(2).run(fit_own_blocks):
        assert "sequence_parallel.size = 2: is checked where a causal language model" in said


def fit_own_blocks() -> str:
    config = {**config_of(2), "sequence_parallel": {"size": 2, "blocks": ["model.blocks"]}}
    with launched():
        module = Language()
        module.model.blocks = nn.ModuleList([nn.Linear(24, 24)])
        with pytest.raises(compile_muon.ConfigError) as caught:
            trainer_of(config).fit(module, loader())
        assert all(type(param) is nn.Parameter for param in module.parameters())
        return str(caught.value)


class Fails(Language):
    """Rank 1 does not come to the second step; ranks wait for each other four seconds."""

    def configure_optimizers(self) -> Any:
        group = dist.new_group(timeout=timedelta(seconds=4))
        return compile_muon.MuonZero(self, stage=3, mesh=DeviceMesh.from_group(group, "cpu"))

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        if world_and_rank()[1] == 1 and self.trainer.global_step == 1:
            raise ValueError("a batch of another shape")
        return super().training_step(batch, batch_idx)


def fail() -> str:
    with launched():
        try:
            trainer_of(None).fit(Fails(), loader())
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_rank_that_raises_is_named_on_the_others(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(fail)
    assert second == "ValueError: a batch of another shape"
    assert first.startswith("PeerError: ") and "rank 1" in first


@pytest.mark.full
def test_the_package_does_not_import_lightning() -> None:
    code = "import compile_muon.integrations, sys; assert 'lightning' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
