"""compile_muon: ZeRO data parallelism and the Muon optimizer as part of torch.compile's graphs.

    model, optimizer = compile_muon.initialize(model, "config.json")

or, by hand, ``MuonZero(model, ...)`` and ``torch.compile(model, backend="muon_zero")``.
"""

# ruff: noqa: E402
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout passes/ and kernels/ lie beside this folder, in a wheel inside it. Python started in the checkout's root
# imports this folder whatever is installed, and needs both at least for `doctor` to report that.
if not Path(__file__).with_name("passes").is_dir():
    __path__.append(str(Path(__file__).resolve().parents[1]))

from compile_muon.config import Config, load_config
from compile_muon.engine import Extension
from compile_muon.errors import (
    CheckpointError,
    ConfigError,
    LedgerError,
    MuonZeroError,
    MuonZeroWarning,
    NonFiniteError,
    PeerError,
    UnsupportedModelError,
)
from compile_muon.initialize import initialize
from compile_muon.model.full_parameters import full_parameters
from compile_muon.model.readers import forward_methods
from compile_muon.optimizer import MuonZero
from compile_muon.summary import Summary

if TYPE_CHECKING:
    from compile_muon.checkpoint import Checkpointer
    from compile_muon.model.norms import clip_grad_norm_, parameter_norms
    from compile_muon.sequence import check_sequence
    from compile_muon.weights import (
        full_state_dict,
        load_full_state_dict,
        load_pretrained,
        merge_adapters,
        save_pretrained,
    )

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "Config",
    "ConfigError",
    "Extension",
    "LedgerError",
    "MuonZero",
    "MuonZeroError",
    "MuonZeroWarning",
    "NonFiniteError",
    "PeerError",
    "Summary",
    "UnsupportedModelError",
    "check_sequence",
    "clip_grad_norm_",
    "forward_methods",
    "full_parameters",
    "full_state_dict",
    "initialize",
    "load_config",
    "load_full_state_dict",
    "load_pretrained",
    "merge_adapters",
    "parameter_norms",
    "save_pretrained",
]

__version__ = "0.1.0"


#: names imported on first use, since they import torch.distributed.checkpoint and safetensors
_LATE = {
    "Checkpointer": "compile_muon.checkpoint",
    "check_sequence": "compile_muon.sequence",
    "clip_grad_norm_": "compile_muon.model.norms",
    "full_state_dict": "compile_muon.weights",
    "load_full_state_dict": "compile_muon.weights",
    "load_pretrained": "compile_muon.weights",
    "merge_adapters": "compile_muon.weights",
    "parameter_norms": "compile_muon.model.norms",
    "save_pretrained": "compile_muon.weights",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
