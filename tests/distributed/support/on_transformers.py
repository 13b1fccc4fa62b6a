"""The Trainer of Transformers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler

from support.launched import accelerated
from support.reference import world_and_rank
from support.trainers import (
    ACCUMULATED,
    BATCH,
    BATCHES_OF_EPOCH,
    LIMIT,
    MUON,
    STEPS_OF_EPOCH,
    Run,
    causal_loss,
    gpt,
    of_epochs,
    sentences,
    state_of,
)  # fmt: skip

STEPS, SAVED, BY_ITEMS = 6, 4, True
CHECKPOINTS = ["checkpoint-4", "checkpoint-6"]
RATE = MUON["params"]["lr"]
CONFIG = {
    "optimizer": {"type": "Muon", "params": {**MUON["params"], "lr": "auto"}},
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
loss, batches, LIMITS = causal_loss, of_epochs, dict.fromkeys((1, 2, 3), LIMIT)


def model(shared: int = 1) -> Any:
    return gpt()


class Sentences(Dataset):
    def __init__(self, size: int = 96) -> None:
        self.tokens = sentences(size)
        # The Trainer divides by the number of labels, of which the first predicts nothing.
        self.labels = torch.cat((torch.full((size, 1), -100), self.tokens[:, 1:]), dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def rate(step: int, worlds: Sequence[int]) -> float:
    """A warmup of two steps, then down to the end."""
    return step / 2 if step < 2 else (STEPS - step) / (STEPS - 2)


def evaluated(step: int, world: int) -> list[Tensor]:
    return [sentences(12)] if step % STEPS_OF_EPOCH == 2 else []


def trainer_of(
    folder: str, stage: int, *, compiled: bool = False, config: dict[str, Any] = CONFIG, groups: Any = None,
    extensions: Any = (), net: Any = None, **settings: Any,
) -> Any:  # fmt: skip
    from transformers import TrainingArguments

    from compile_muon.integrations.transformers import MuonTrainer

    class InOrder(MuonTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    defaults: dict[str, Any] = dict(
        max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED, use_cpu=True,
        max_grad_norm=LIMIT, learning_rate=RATE, warmup_steps=2, logging_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4,
    )  # fmt: skip
    config = {**config, "zero_optimization": {"stage": stage}, "compile": {"codegen": "eager"} if compiled else False}
    arguments = TrainingArguments(output_dir=folder, **{**defaults, **settings})
    return InOrder(
        model=net or gpt(), args=arguments, train_dataset=Sentences(), eval_dataset=Sentences(12), muon_config=config,
        muon_groups=groups, muon_extensions=extensions,
    )  # fmt: skip


def logged(trainer: Any, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def fit(folder: str, stage: int, compiled: bool = False, resume: bool = False, shared: int = 1, **settings: Any) -> Run:
    from transformers import TrainerCallback

    run = Run()

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == SAVED:
                run.state = state_of(trainer.model, trainer.muon)

    with accelerated():
        config = {**CONFIG, "sequence_parallel": {"size": shared}}
        settings = {"max_steps": -1, "num_train_epochs": STEPS // STEPS_OF_EPOCH, "save_steps": SAVED, **settings}
        trainer = trainer_of(folder, stage, compiled=compiled, config=config, **settings)
        trainer.train_dataset = Sentences(world_and_rank()[0] // shared * BATCHES_OF_EPOCH * BATCH)
        trainer.add_callback(Watch())
        trainer.train(resume_from_checkpoint=str(Path(folder) / f"checkpoint-{SAVED}") if resume else None)
        run.sent = logged(trainer, "muon_zero/bytes_sent")
        run.losses, run.norms = (logged(trainer, key)[SAVED if resume else 0 :] for key in ("loss", "grad_norm"))
        run.evaluations = logged(trainer, "eval_loss")[1 if resume else 0 :]
        run.weights, run.totals = state_of(trainer.model), trainer.muon.totals()
    return run


def saved(folder: Path) -> tuple[list[str], dict[str, Tensor]]:
    return sorted(path.name for path in folder.iterdir()), load_file(folder / "checkpoint-6" / "model.safetensors")


def build(change: str) -> None:
    """Arguments of the Trainer's arguments, and of the Trainer ``config`` and ``optimizers``."""
    from transformers import TrainingArguments

    from compile_muon.integrations.transformers import MuonTrainer

    def made(config: Any = None, optimizers: Any = (None, None), **settings: Any) -> None:
        arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], **settings)
        muon = {**CONFIG, **(config or {})}
        MuonTrainer(gpt(), arguments, train_dataset=Sentences(), muon_config=muon, optimizers=optimizers)

    with accelerated():
        eval(f"made({change})", {"made": made, "torch": torch})
