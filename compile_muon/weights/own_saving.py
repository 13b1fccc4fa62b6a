"""``model.save_pretrained`` of a model that is sharded, in the layout of the model's own class.

A library's own method writes on the first rank what this one holds. Of Transformers' and PEFT's models, whose layout
:func:`compile_muon.save_pretrained` writes, it is that, which needs no room for whole weights. Any other class writes
more than weights (the constructor's arguments, a tokenizer, other modules' files): its own method runs on the first
rank, with whole weights.
"""

from __future__ import annotations

import os
import sys
from types import MethodType
from typing import Any

from torch import nn

from compile_muon.errors import config_error
from compile_muon.model.full_parameters import full_parameters
from compile_muon.model.readers import sharded_params_of

__all__ = ["save_by_class", "saves_whole"]

#: arguments of Transformers' and PEFT's that ask for nothing else than is done
_HEEDED = {"is_main_process", "save_function", "safe_serialization", "token", "save_peft_format"}
#: classes whose ``save_pretrained`` compile_muon's stands for
_SAME_LAYOUT = (("transformers", "PreTrainedModel"), ("peft", "PeftModel"))


def saves_whole(model: nn.Module) -> None:
    """Have ``save_pretrained`` of this model, and of models in it, write whole weights."""
    for module in model.modules():
        if callable(getattr(type(module), "save_pretrained", None)):
            # A copy of the module has one that is bound to it.
            vars(module)["save_pretrained"] = MethodType(_save, module)


def save_by_class(model: nn.Module, folder: str | os.PathLike) -> None:
    """Write whole weights, and what else the model's class writes; collective over the ranks that share the model.

    Args:
        folder: need only be seen by rank 0.
    Raises:
        CheckpointError, PeerError: as :func:`compile_muon.save_pretrained`.
    """
    if hasattr(type(model), "save_pretrained") and not _has_same_layout(model):
        _save_on_first_rank(model, folder, (), {})
    else:
        from compile_muon.weights.pretrained import save_pretrained

        save_pretrained(model, folder)


def _has_same_layout(module: nn.Module) -> bool:
    """Whether the class saves by a method that compile_muon's stands for, and not by one of its own."""
    known = [getattr(sys.modules.get(library), name, None) for library, name in _SAME_LAYOUT]
    own: Any = type(module)
    return own.save_pretrained in [cls.save_pretrained for cls in known if cls is not None]


def _save(self: Any, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") is not None or not any(map(sharded_params_of, self.modules())):
        return type(self).save_pretrained(self, save_directory, *args, **kwargs)
    if not _has_same_layout(self):
        return _save_on_first_rank(self, save_directory, args, kwargs)
    if args:
        return type(self).save_pretrained(self, save_directory, *args, **kwargs)
    from compile_muon.weights.pretrained import save_pretrained

    sizes = {"max_shard_size": size} if (size := kwargs.pop("max_shard_size", None)) is not None else {}
    for name, value in kwargs.items():
        if name not in _HEEDED and value not in (None, False, True if name == "save_original_format" else None):
            problem = "is not done with a sharded model"
            raise config_error(f"save_pretrained.{name}", value, problem, "leave it out, and do it with the folder")
    return save_pretrained(self, save_directory, **sizes)


def _save_on_first_rank(
    module: Any, folder: str | os.PathLike, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any | None:
    """Returns what the class's own method returns, None on other ranks."""
    from compile_muon.weights.named_tensors import weights_of

    weights = weights_of(module)
    with weights.status.at("save_pretrained"):
        ranks = weights.meet("save_pretrained")
        with full_parameters(module), ranks.together(f"{folder}: weights were not saved"):
            return type(module).save_pretrained(module, folder, *args, **kwargs) if ranks.rank == 0 else None
