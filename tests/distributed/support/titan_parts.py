"""A small Llama, data and a configuration for torchtitan's trainer; imported once its device is known."""

# ruff: noqa: F401  what tests take from here

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, ParamGroupConfig, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT,
    _NORM_INIT,
    Llama3Model,
    _build_llama3_layers,
    _output_linear_init,
    model_registry,
)
from torchtitan.trainer import Trainer


def llama(dim: int = 16, heads: int = 2, keys: int | None = None, attention: Any = ScaledDotProductAttention) -> Any:
    """Its own ``ModelSpec``, smaller, with the only attention that has a backward on CPU."""
    spec = model_registry("debugmodel")
    spec.model = Llama3Model.Config(
        dim=dim, vocab_size=32, norm=RMSNorm.Config(normalized_shape=dim, param_init=_NORM_INIT),
        tok_embeddings=Embedding.Config(num_embeddings=32, embedding_dim=dim, param_init=_EMBEDDING_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=32, param_init=_output_linear_init(dim)),
        layers=_build_llama3_layers(
            n_layers=2, dim=dim, n_heads=heads, n_kv_heads=keys, hidden_dim=24, attn_backend="flex",
            rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=500000, scaling="llama"),
        ),
    )  # fmt: skip
    for layer in spec.model.layers:
        layer.attention.inner_attention = attention.Config(**{"block_size": 16} if attention is FlexAttention else {})
    return spec


def built(spec: Any, seed: int) -> Any:
    with torch.device("meta"):
        model = spec.model.build()
    torch.manual_seed(seed)
    model.to_empty(device="cpu").init_weights()
    return model


def batch_of(number: int, size: int, length: int) -> Tensor:
    """Batch ``number`` of all, ``length`` tokens and the next one; int64 of ``[size, length + 1]``."""
    dice = torch.Generator().manual_seed(1000 + number)
    return torch.randint(0, 32, (size, length + 1), generator=dice)


class Batches(BaseDataLoader):
    """Deals batches in order to the ranks there are; where it stands is how many all have had."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True
        first: int = 0

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.world, self.rank, self.shape = dp_world_size, dp_rank, (local_batch_size, seq_len)
        self.dealt = config.first

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            tokens = batch_of(self.dealt + self.rank, *self.shape)
            self.dealt += self.world
            positions = torch.arange(self.shape[1]).expand(self.shape)
            yield {"input": tokens[:, :-1], "positions": positions}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {"dealt": self.dealt}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.dealt = state_dict["dealt"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, *, tokenizer_path: str) -> None:
        super().__init__()

    def get_vocab_size(self) -> int:
        return 32

    encode = decode = get_vocab_size  # which nobody calls


class Heard(MetricsProcessor):
    """Keeps what is logged."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.heard: dict[str, list[float]] = {"losses": [], "norms": [], "evaluations": []}

    def log(self, step: int, loss: float, largest: float, norm: float, *args: Any, **kwargs: Any) -> None:
        self.heard["losses"].append(loss)
        self.heard["norms"].append(norm)

    def log_validation(self, loss: float, step: int) -> None:
        self.heard["evaluations"].append(loss)


def config(folder: str, **sections: Any) -> Any:
    """A ``Trainer.Config``; a section is a mapping of some of its settings, or the section itself."""
    defaults: dict[str, Any] = dict(
        training=dict(
            local_batch_size=2, seq_len=8, steps=4, max_norm=0.7, mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=dict(),
        compile=dict(),
        debug=dict(seed=7, enable_structured_logging=False),
        checkpoint=dict(enable=True, interval=2, last_save_model_only=False, keep_latest_k=0),
    )  # fmt: skip
    kinds = (TrainingConfig, ParallelismConfig, CompileConfig, DebugConfig, CheckpointManager.Config)
    for (name, own), kind in zip(defaults.items(), kinds, strict=True):
        sections[name] = kind(**{**own, **sections.get(name, {})})
    rest: dict[str, Any] = dict(
        model_spec=llama(), loss=CrossEntropyLoss.Config(), tokenizer=NoTokenizer.Config(), dump_folder=folder,
        dataloader=Batches.Config(), optimizer=default_adamw(lr=0.003), metrics=Heard.Config(log_freq=1),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2), activation_checkpoint=None,
        validator=Validator.Config(enable=True, freq=2, steps=1, dataloader=Batches.Config(first=500)),
        comm=CommConfig(train_timeout_seconds=60),
    )  # fmt: skip
    rest["optimizer"].implementation = "for-loop"
    return Trainer.Config(**{**rest, **sections})
