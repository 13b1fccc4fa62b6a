"""``model.save_pretrained`` of Transformers, PEFT and Diffusers, of a model that is sharded.

Their own writes on the first rank what this one holds. Of a sharded model it is :func:`compile_muon.save_pretrained`,
on all ranks together.
"""

from __future__ import annotations

import os
from types import MethodType
from typing import Any

from torch import nn

from compile_muon.errors import config_error
from compile_muon.model.readers import sharded_params_of

__all__ = ["saves_whole"]

#: their arguments that ask for nothing else than is done
_HEEDED = {"is_main_process", "save_function", "safe_serialization", "token", "save_peft_format"}


def saves_whole(model: nn.Module) -> None:
    """Have ``save_pretrained`` of this model, and of models in it, write whole weights."""
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            # A copy of the module has one that is bound to it.
            vars(module)["save_pretrained"] = MethodType(_save, module)


def _save(self: Any, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
    if args or kwargs.get("state_dict") is not None or not any(map(sharded_params_of, self.modules())):
        return type(self).save_pretrained(self, save_directory, *args, **kwargs)
    from compile_muon.weights.pretrained import save_pretrained

    sizes = {"max_shard_size": size} if (size := kwargs.pop("max_shard_size", None)) is not None else {}
    for name, value in kwargs.items():
        if name not in _HEEDED and value not in (None, False, True if name == "save_original_format" else None):
            problem = "is not done with a sharded model"
            raise config_error(f"save_pretrained.{name}", value, problem, "leave it out, and do it with the folder")
    return save_pretrained(self, save_directory, **sizes)
