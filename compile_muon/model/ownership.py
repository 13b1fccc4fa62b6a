"""The check before each step that the model still holds the sharded parameters, and no others that train."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import UnsupportedModelError, listed
from compile_muon.model.readers import check_kind, sharded_param_key, sharded_params_of
from compile_muon.model.support import wrapper_types

_REMEDY = "change the model before MuonZero shards it, or build a new MuonZero over a new model"


class Ownership:
    """The modules that held each parameter when ``model`` was sharded, to compare the model with."""

    def __init__(self, model: nn.Module, sharded_params: Sequence[ShardedParam]) -> None:
        self.model = model
        self._sharded_params = list(sharded_params)
        self._params: list[nn.Parameter] = [sharded.param for sharded in sharded_params]
        self._frozen = [sharded for sharded in sharded_params if not sharded.param.requires_grad]
        self._kinds = self._kinds_now()
        self._places = [
            (module, type(module), name, sharded)
            for module in model.modules()
            for name, sharded in sharded_params_of(module).items()
        ]
        self._remember()

    def _remember(self) -> None:
        self._modules = list(self.model.modules())
        self._classes = [type(module) for module in self._modules]
        # nn.Module's own dicts, private to torch: named_parameters() of 2,000 modules at every step would be slow.
        self._tables: list[dict[str, Any]] = [
            table for module in self._modules for table in (module.__dict__["_parameters"], module._modules)
        ]
        self._entries: list[Any] = list(chain.from_iterable(map(dict.values, self._tables)))

    def _unchanged(self) -> bool:
        """Compare identities of all parameters, children and classes, in C: 1 ms for 2,000 modules."""
        return (
            sum(map(len, self._tables)) == len(self._entries)
            and all(map(is_, chain.from_iterable(map(dict.values, self._tables)), self._entries))
            and all(map(is_, map(type, self._modules), self._classes))
        )

    def _kinds_now(self) -> list[torch.dtype | int]:
        return [param.dtype for param in self._params] + [param.numel() for param in self._params]

    def unfrozen(self) -> list[ShardedParam]:
        """Return the parameters that were frozen when the model was sharded and require a gradient by now."""
        return [sharded for sharded in self._frozen if sharded.param.requires_grad]

    def take_up(self, sharded_params: Sequence[ShardedParam]) -> None:
        """Count these parameters as trained from now on."""
        self._frozen = [sharded for sharded in self._frozen if sharded not in sharded_params]

    def check(self) -> None:
        """Raise if the model lost, replaced, cast or gained parameters that train, or was wrapped by FSDP or DDP. Cheap
        as long as nothing changed."""
        if self._kinds_now() != self._kinds:
            for sharded in self._sharded_params:
                check_kind(sharded, sharded.local)
        if not self._unchanged():
            self._examine()
            self._remember()  # a harmless change: a frozen part was added, or a block taken out

    def _examine(self) -> None:
        """Look for the change that `_unchanged` saw, and raise if it concerns a trained parameter."""
        for module, cls, name, sharded in self._places:
            if sharded.name in sharded.ledger.unsharded:
                raise UnsupportedModelError(
                    f"{sharded.name}: is whole inside a full_parameters block; leave the block before optimizer.step()"
                )
            holds_param = module.__dict__["_parameters"].get(name) is sharded.param
            has_reader = module.__dict__.get(sharded_param_key(name)) is sharded and issubclass(type(module), cls)
            if not holds_param:
                raise UnsupportedModelError(
                    f"{sharded.name}: is sharded, and its module holds another parameter in its place; {_REMEDY}, or "
                    "write values inside `with compile_muon.full_parameters(module, write=True):`"
                )
            if not has_reader:
                raise UnsupportedModelError(
                    f"{sharded.name}: another optimizer or library has taken over its module "
                    f"({type(module).__name__}); {_REMEDY}"
                )
        wrappers = wrapper_types()
        for path, module in self.model.named_modules():
            if isinstance(module, wrappers):
                raise UnsupportedModelError(
                    f"{path or 'model'}: was made data-parallel ({type(module).__name__}) after MuonZero sharded it, "
                    "which already averages gradients over the ranks; leave the wrapper out"
                )
        sharded_ids = {id(param) for param in self._params}
        added = [name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in sharded_ids]
        if added:
            raise UnsupportedModelError(
                f"{listed(added)}: came into the model after MuonZero sharded it, and no optimizer trains it; "
                f"{_REMEDY}; or set requires_grad=False"
            )
