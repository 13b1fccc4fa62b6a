"""``model.save_pretrained`` of a model that is sharded, in the layout of the model's own class.

A library's own method writes on the first rank what this one holds. :func:`compile_muon.save_pretrained` stands for
those of Transformers' and PEFT's models, and needs no room for whole weights. Any other class writes more than weights
(the constructor's arguments, a tokenizer, other modules' files): its own method runs on the first rank, with whole
weights.
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


def save_by_class(model: Any, folder: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
    """Write whole weights into ``folder`` of rank 0, and what else the model's class writes; collective.

    Returns:
        What the class's own method returns on the first rank, else None.
    Raises:
        CheckpointError, PeerError: as :func:`compile_muon.save_pretrained`.
    """
    from compile_muon.weights.named_tensors import weights_of
    from compile_muon.weights.pretrained import save_pretrained

    own = getattr(type(model), "save_pretrained", None)
    known = [getattr(sys.modules.get(library), name, None) for library, name in _SAME_LAYOUT]
    if own is None or own in [cls.save_pretrained for cls in known if cls is not None]:
        if args:
            return type(model).save_pretrained(model, folder, *args, **kwargs)
        sizes = {"max_shard_size": size} if (size := kwargs.pop("max_shard_size", None)) is not None else {}
        for name, value in kwargs.items():
            if name not in _HEEDED and value not in (None, False, True if name == "save_original_format" else None):
                problem = "is not done with a sharded model"
                raise config_error(f"save_pretrained.{name}", value, problem, "leave it out, and do it with the folder")
        return save_pretrained(model, folder, **sizes)
    weights = weights_of(model)
    with weights.status.at("save_pretrained"):
        ranks = weights.meet("save_pretrained")
        with full_parameters(model), ranks.together(f"{folder}: weights were not saved"):
            return own(model, folder, *args, **kwargs) if ranks.rank == 0 else None


def _save(self: Any, save_directory: str | os.PathLike, *args: Any, **kwargs: Any) -> Any:
    """Stand for ``self.save_pretrained``."""
    if kwargs.get("state_dict") is not None or not any(map(sharded_params_of, self.modules())):
        return type(self).save_pretrained(self, save_directory, *args, **kwargs)
    return save_by_class(self, save_directory, *args, **kwargs)
