"""Configuration: settings, the vocabularies that express them, and their errors.

Modules import one another in this order only: ``accept`` and ``checked`` (single values, and dataclasses of
them), ``elsewhere``, ``compile_options``, ``groups``, ``lr_schedule``, ``machine``, ``offload``, ``settings``,
``sources``, ``vocabulary``, ``deepspeed``, ``convert``.
"""

from compile_muon.config.compile_options import CompileOptions, FrameOptions, read_options
from compile_muon.config.convert import convert
from compile_muon.config.deepspeed import load_config
from compile_muon.config.lr_schedule import (
    LRRangeTest,
    OneCycle,
    ScheduleConfig,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from compile_muon.config.offload import OffloadConfig
from compile_muon.config.settings import (
    ARGUMENTS,
    AdamWConfig,
    CompileConfig,
    Config,
    ExpertParallelConfig,
    MeshConfig,
    MuonConfig,
    NSConfig,
    SequenceParallelConfig,
    ZeroConfig,
    config_from_kwargs,
)

__all__ = [
    "ARGUMENTS",
    "AdamWConfig",
    "CompileConfig",
    "CompileOptions",
    "Config",
    "ExpertParallelConfig",
    "FrameOptions",
    "LRRangeTest",
    "MeshConfig",
    "MuonConfig",
    "NSConfig",
    "SequenceParallelConfig",
    "OffloadConfig",
    "OneCycle",
    "ScheduleConfig",
    "WarmupCosineLR",
    "WarmupDecayLR",
    "WarmupLR",
    "ZeroConfig",
    "config_from_kwargs",
    "convert",
    "load_config",
    "read_options",
]
