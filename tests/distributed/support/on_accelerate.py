"""Accelerate, as its scripts have it: its schedules count processes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import compile_muon
from support.launched import accelerated
from support.trainers import (
    ACCUMULATED,
    BATCH,
    BATCHES_OF_EPOCH,
    LIMIT,
    MUON,
    STEPS_OF_EPOCH,
    Run,
    causal_loss,
    of_epochs,
    sentences,
    small,
    state_of,
)  # fmt: skip

STEPS, SAVED, BY_ITEMS = 6, 4, False
CHECKPOINTS = ["checkpoint_0", "checkpoint_1"]
model, loss, batches, LIMITS = small, causal_loss, of_epochs, dict.fromkeys((1, 2, 3), LIMIT)


def faded(done: int) -> float:
    return 1 / (1 + 0.3 * done)


def rate(step: int, worlds: Sequence[int]) -> float:
    return faded(sum(worlds[:step]))


def evaluated(step: int, world: int) -> list[Tensor]:
    return [sentences(12)] if step % STEPS_OF_EPOCH == 2 else []


def prepared(stage: int, *, compiled: bool = False, shared: int = 1, given: Any = None, **settings: Any) -> Any:
    """(accelerator, model, optimizer, loader, scheduler), as a script has them."""
    from accelerate import Accelerator

    from compile_muon.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True, **{"gradient_accumulation_steps": ACCUMULATED, **settings})
    config = {"optimizer": MUON, "zero_optimization": {"stage": stage}, "sequence_parallel": {"size": shared}}
    config |= {"compile": {"codegen": "eager"} if compiled else False, **(given or {})}
    model, optimizer = compile_muon.initialize(small(shared).to(accelerator.device), config)
    tokens = sentences()[: accelerator.num_processes // shared * BATCHES_OF_EPOCH * BATCH]
    loader = DataLoader(TensorDataset(tokens), batch_size=BATCH)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: faded(done // shared))
    return accelerator, *prepare(accelerator, model, optimizer, loader, scheduler)


def fit(folder: str, stage: int, compiled: bool = False, resume: bool = False, shared: int = 1, **settings: Any) -> Run:
    from accelerate.utils import ProjectConfiguration

    run, total = Run(), 0.0
    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    settings = {"project_config": project, **settings}
    with accelerated():
        accelerator, model, optimizer, loader, scheduler = prepared(stage, compiled=compiled, shared=shared, **settings)
        accelerator.register_for_checkpointing(scheduler)
        done, before = SAVED if resume else 0, state_of(model)
        if resume:
            try:
                accelerator.load_state(f"{folder}/checkpoints/checkpoint_1")
            except compile_muon.CheckpointError:
                assert all(torch.equal(value, before[name]) for name, value in state_of(model).items())
                raise
            run.state = state_of(model, optimizer.optimizer)
        for _ in range(done // STEPS_OF_EPOCH, STEPS // STEPS_OF_EPOCH):
            skipped = done % STEPS_OF_EPOCH * ACCUMULATED
            for (tokens,) in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
                with accelerator.accumulate(model):
                    found = loss(model, tokens)
                    accelerator.backward(found)
                    total += accelerator.gather(found.detach()).mean().item() / ACCUMULATED
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), LIMIT)
                        assert type(norm) is Tensor
                        run.norms.append(norm.item())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    run.losses.append(total)
                    run.sent.append(optimizer.totals()["bytes_sent"])
                    total, done = 0.0, done + 1
                    if done in (2, SAVED) and not resume:
                        accelerator.save_state()
                        run.state = state_of(model, optimizer.optimizer)
            model.eval()
            with torch.no_grad():
                run.evaluations.append(accelerator.gather_for_metrics(loss(model, sentences(12))).mean().item())
            model.train()
        accelerator.save_model(model, Path(folder) / "weights")
        assert accelerator.unwrap_model(model) is model
        run.weights, run.totals = state_of(model), optimizer.totals()
    return run


def saved(folder: Path) -> tuple[list[str], dict[str, Tensor]]:
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    return names, load_file(folder / "weights" / "model.safetensors")


def build(change: str) -> None:
    """Arguments of :func:`prepared`."""
    import accelerate.utils

    with accelerated():
        eval(f"prepared(2, {change})", {**vars(accelerate), **vars(accelerate.utils), "prepared": prepared})
