"""Train a small Llama with torchtitan's trainer, with Muon under ZeRO.

    torchrun --standalone --nproc_per_node=2 examples/train_torchtitan.py --training.steps 200 --dump_folder runs/titan

Arguments are torchtitan's. The text is the source code of Python's own standard library, by bytes. On GPUs a registry
like this one needs no script: torchrun ... -m torchtitan.train --module my_registry --config small
"""

import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torchtitan_on_cpu  # noqa: F401  (first: torchtitan looks for its device when it is imported)
from torch import Tensor
from torchtitan import train
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from compile_muon.integrations.torchtitan import with_muon

# Learning rates are the peaks of torchtitan's schedule; accumulation, clipping and bfloat16 are its own settings.
MUON = {
    "compile": True,
    "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003, "weight_decay": 0.1}},
    "zero_optimization": {"stage": 3},
}


class Bytes(BaseDataLoader):
    """Windows of text in an order that does not depend on how many ranks there are; ``held_out`` is its last tenth."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        held_out: bool = False
        infinite: bool = True

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ):
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
        self.text = text[len(text) * 9 // 10 :] if config.held_out else text[: len(text) * 9 // 10]
        self.world, self.rank, self.size, self.length = dp_world_size, dp_rank, local_batch_size, seq_len
        self.dealt = 0  # batches, to all ranks

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            dice = torch.Generator().manual_seed(self.dealt + self.rank)
            starts = torch.randint(len(self.text) - self.length, (self.size, 1), generator=dice)
            tokens = self.text[starts + torch.arange(self.length + 1)].long()
            self.dealt += self.world
            yield {"input": tokens[:, :-1], "positions": torch.arange(self.length).expand(self.size, -1)}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"dealt": self.dealt}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.dealt = state_dict["dealt"]


class NoTokenizer(BaseTokenizer):
    """Bytes are tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def get_vocab_size(self) -> int:
        return 256


def small() -> Trainer.Config:
    """A registry function: torchtitan calls it, and applies the command line to what it returns."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:  # FlexAttention has no backward on a CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    training = TrainingConfig(local_batch_size=8, seq_len=128, steps=200, disable_cuda_graphs=True)
    training.mixed_precision_param = "bfloat16" if torch.accelerator.is_available() else "float32"
    config = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        training=training,
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=10, decay_ratio=0.5),
        checkpoint=CheckpointManager.Config(enable=True, interval=50, last_save_model_only=False),
        validator=Validator.Config(enable=True, freq=50, steps=4, dataloader=Bytes.Config(held_out=True)),
        dataloader=Bytes.Config(),
        tokenizer=NoTokenizer.Config(),
    )
    return with_muon(config, MUON)


if __name__ == "__main__":
    sys.argv[1:1] = ["--module", "__main__", "--config", "small"]
    train.main()  # started again, it goes on from its last checkpoint, on as many ranks as there are now
