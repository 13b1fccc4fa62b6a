"""torchtitan's trainer with ``with_muon``."""

import contextlib
import gc
import os
import sys
import time
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from support.trainers import ACCUMULATED, BATCH, MUON, Run, state_of

EXAMPLES = Path(__file__).parents[3] / "examples"
STEPS, SAVED, BY_ITEMS, LENGTH = 4, 2, False, 8
LIMITS = {1: 0.82, 2: 0.6, 3: 0.5}  # some steps are clipped, some are not


def parts() -> Any:
    """torchtitan's classes, behind what says that there is no GPU."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import torchtitan_on_cpu  # noqa: F401
    finally:
        sys.path.remove(str(EXAMPLES))
    import torchtitan.tools.utils as device

    from support import titan_parts

    # Another test of this process may have imported torchtitan before, whose modules then have the accelerator's.
    for name, module in list(sys.modules.items()):
        for bound in ("device_type", "device_module"):
            if name.startswith("torchtitan.") and hasattr(module, bound):
                setattr(module, bound, getattr(device, bound))
    return titan_parts


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """They, in the environment that torchrun gives a rank; one process has a group of its own."""
    titan, alone = parts(), not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    there = {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world)}
    # The trainer's last words are two seconds of sleep.
    awake = types.SimpleNamespace(sleep=lambda _: None, perf_counter=time.perf_counter)
    try:
        with mock.patch.dict(os.environ, there), mock.patch("torchtitan.trainer.time", awake):
            yield titan
    finally:
        gc.enable()  # the trainer collects garbage by itself
        if alone:
            dist.destroy_process_group()


def batches(step: int, worlds: Sequence[int]) -> list[Tensor]:
    first = sum(worlds[:step]) * ACCUMULATED
    return [parts().batch_of(first + batch, BATCH, LENGTH) for batch in range(worlds[step] * ACCUMULATED)]


def rate(step: int, worlds: Sequence[int]) -> float:
    return (0.5, 1.0, 1.0, 0.5, 0.0)[step]


def evaluated(step: int, world: int) -> list[Tensor]:
    return [parts().batch_of(500 + rank, BATCH, LENGTH) for rank in range(world)] if step in (0, 1, 3) else []


def model(shared: int = 1) -> Any:
    with launched() as titan:
        spec = titan.llama()
        spec.model.update_from_config(config=titan.config(""))
        return titan.built(spec, seed=7)


def loss(model: Any, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def training(world: int, **more: Any) -> dict[str, Any]:
    """As many batches a step as a plain loop takes."""
    return {"global_batch_size": BATCH * ACCUMULATED * world, "max_norm": LIMITS[world], **more}


def config_of(
    titan: Any, folder: str, stage: int, *, optimizer: Any = MUON, compiled: bool = False, groups: Any = (),
    **sections: Any,
) -> Any:  # fmt: skip
    from compile_muon.integrations.torchtitan import with_muon

    sections.setdefault("training", training(dist.get_world_size()))
    muon = {"optimizer": optimizer, "zero_optimization": {"stage": stage}}
    names = ("pattern", "optimizer_name", "optimizer_kwargs")
    own = [titan.ParamGroupConfig(**dict(zip(names, group, strict=True))) for group in groups]
    muon["compile"] = {"codegen": "eager"} if compiled else False
    return with_muon(titan.config(folder, **sections), muon, own)


def trained(config: Any) -> Run:
    run, trainer = Run(), config.build()
    step = type(trainer).train_step

    def train_step(self: Any, microbatches: Any) -> None:
        if self.step == SAVED + 1 and hasattr(self.optimizers, "muon"):
            run.state = state_of(self.model_parts[0], self.optimizers.muon)
        step(self, microbatches)

    with mock.patch.object(type(trainer), "train_step", train_step):
        trainer.train()
    model = trainer.model_parts[0]
    if hasattr(trainer.optimizers, "muon"):
        run.totals, compiled = trainer.optimizers.muon.totals(), trainer.config.optimizer.muon_config["compile"]
        assert bool(run.totals["compiled_graphs"]) == bool(compiled or run.totals["directions_in_step"])
        blocks = [type(block).__name__ for block in model.layers.values()]
        assert ("CheckpointWrapper" in blocks) == (trainer.config.activation_checkpoint is not None)
    vars(run).update(trainer.metrics_processor.heard, weights=state_of(model))
    trainer.close()
    return run


def fit(folder: str, stage: int, compiled: bool = False, resume: bool = False, shared: int = 1, **more: Any) -> Run:
    """With an activation checkpoint and a loss in chunks at stage 1, and at stage 3 where no sequence is shared."""
    with launched() as titan:
        chunked = titan.ChunkedLossWrapper.Config(num_chunks=4 if stage == 1 else 2)
        checkpoint = titan.FullAC.Config() if stage == 1 else titan.SelectiveAC.Config()
        odd = {"loss": chunked, "activation_checkpoint": checkpoint} if stage == 1 or stage == 3 and shared == 1 else {}
        sections = {"parallelism": {"context_parallel_degree": shared}} if shared > 1 else {}
        sections["training"] = training(dist.get_world_size() // shared)
        config = config_of(titan, folder, stage, compiled=compiled, **{**sections, **odd, **more})
        config.checkpoint.load_step = SAVED if resume else -1
        return trained(config)


def build(change: str) -> None:
    """Statements over a configuration behind ``with_muon``, as the command line would change it."""
    with launched() as titan:
        config = config_of(titan, "", 3, checkpoint={"enable": False})
        exec(change, {**vars(titan), "config": config, "shared": config.parallelism})
        config.build().train()
