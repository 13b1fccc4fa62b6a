"""compile_muon: ZeRO data parallelism and the Muon optimizer as part of torch.compile's graphs.

    model, optimizer = compile_muon.initialize(model, "config.json")

or, by hand, ``MuonZero(model, ...)`` and ``torch.compile(model, backend="muon_zero")``.
"""

from typing import TYPE_CHECKING, Any

from compile_muon.config import Config, load_config
from compile_muon.errors import (
    CheckpointError,
    ConfigError,
    LedgerError,
    MuonZeroError,
    NonFiniteError,
    PeerError,
    UnsupportedModelError,
)
from compile_muon.initialize import initialize
from compile_muon.model.full_parameters import full_parameters
from compile_muon.optimizer import MuonZero
from compile_muon.summary import Summary

if TYPE_CHECKING:
    from compile_muon.checkpoint import Checkpointer

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Config",
    "ConfigError",
    "LedgerError",
    "MuonZero",
    "MuonZeroError",
    "NonFiniteError",
    "PeerError",
    "Summary",
    "UnsupportedModelError",
    "full_parameters",
    "initialize",
    "load_config",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Checkpoints bring in torch.distributed.checkpoint and safetensors, for those who save any."""
    if name == "Checkpointer":
        from compile_muon.checkpoint import Checkpointer

        return Checkpointer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
