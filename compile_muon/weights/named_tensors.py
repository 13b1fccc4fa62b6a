"""What a sharded model holds, each tensor once, by the name it has in a file."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_muon.agreement.compare import by_rank, compare
from compile_muon.agreement.status import RankStatus
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import CheckpointError, UnsupportedModelError, listed
from compile_muon.model.readers import sharded_params_of
from compile_muon.passes.language.spec import encode_dtype
from compile_muon.weights.wire import Entry, Wire


@dataclass
class Weights:
    """Live references to all of a model's parameters and persistent buffers."""

    module: nn.Module  # without torch.compile's wrapper
    entries: dict[str, Entry]  # in the order of ``state_dict()``; tied ones by their first name
    names: dict[str, list[str]]  # all names of each entry
    others: dict[str, Any]  # values in ``state_dict()`` that are no tensors
    sharded_params: list[ShardedParam]
    group: dist.ProcessGroup | None  # None for one process
    status: RankStatus  # of the optimizer, for errors
    device: torch.device

    def meet(self, doing: str, *facts: object) -> Wire:
        """Connect the ranks, once all have come to do the same with the same model; collective. CheckpointErrors say
        that ranks do different things, or hold different models."""
        ranks = Wire(self.group, self.device, self.status)
        entry_facts = [(name, entry.shape, encode_dtype(entry.tensor.dtype)) for name, entry in self.entries.items()]
        digest = hashlib.sha256(repr((entry_facts, sorted(self.others), facts)).encode()).hexdigest()
        different = ranks.compare({"function": doing, "digest": digest[:16]})
        if "function" in different:
            said = by_rank(different["function"])
            raise CheckpointError(f"ranks call different functions: {said}; call one on every rank")
        if different:
            raise CheckpointError(
                f"{doing}: ranks hold different models or give different arguments ({by_rank(different['digest'])}); "
                "give the same on every rank"
            )
        return ranks


def check_live(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors of ``state_dict()`` that are neither parameters nor buffers: nothing could be loaded into them."""
    live = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    if computed_names := [name for name, tensor in tensors.items() if id(tensor) not in live]:
        raise CheckpointError(
            f"{listed(computed_names)}: in model.state_dict(), and neither a parameter nor a buffer: nothing could be "
            "loaded into it; take it out and save it by itself, with a Checkpointer among the extra values"
        )


def named_state(module: nn.Module) -> tuple[dict[str, Tensor], dict[str, list[str]], dict[str, Any]]:
    """Sort ``module.state_dict()``, live, by the names it has without torch.compile. Return each tensor by its first
    name, all names by the first one, and what is no tensor."""
    tensors, names = dict[str, Tensor](), dict[str, list[str]]()
    others, first = dict[str, Any](), dict[int, str]()
    for key, value in module.state_dict(keep_vars=True).items():
        name = key.replace("_orig_mod.", "")
        # nn.Module's name for the value of get_extra_state()
        if not isinstance(value, Tensor) or name.rpartition(".")[2] == "_extra_state":
            others[name] = value
        else:
            tensors.setdefault(first.setdefault(id(value), name), value)
            names.setdefault(first[id(value)], []).append(name)
    return tensors, names, others


def check_alike(buffers: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Compare names, shapes and dtypes of buffers ahead of collectives on each, and refuse others on all ranks."""
    facts = {name: f"{encode_dtype(buffer.dtype)} {list(buffer.shape)}" for name, buffer in buffers.items()}
    for name, said in compare(facts, group, absent="none").items():
        raise UnsupportedModelError(
            f"{name}: ranks have different buffers of that name ({by_rank(said)}); register the same on every rank"
        )


def shared_params(module: nn.Module) -> tuple[list[ShardedParam], dist.ProcessGroup | None]:
    """Find all sharded parameters, each once, and the group of ranks that shares them; None for one process.

    UnsupportedModelErrors say that nothing in the model is sharded, that it is inside a ``full_parameters`` block, or
    that its parameters are shared by different groups of ranks.
    """
    sharded_params = list(dict.fromkeys(a for inner in module.modules() for a in sharded_params_of(inner).values()))
    if not sharded_params:
        raise UnsupportedModelError(
            f"model: {type(module).__name__} holds no parameter that MuonZero sharded; give the sharded model, outside "
            "of full_parameters(), or use state_dict() and load_state_dict() of a plain one"
        )
    if whole := sorted({name for sharded in sharded_params for name in sharded.ledger.unsharded}):
        raise UnsupportedModelError(f"{listed(whole)}: whole inside a full_parameters block; leave the block first")
    groups = {sharded.group for sharded in sharded_params}
    if len(groups) > 1:
        raise UnsupportedModelError(
            f"model: its parameters are shared by {len(groups)} different groups of ranks; save and load each part by "
            "itself"
        )
    return sharded_params, groups.pop()


def weights_of(model: nn.Module) -> Weights:
    """Gather references; nothing is copied or sent. UnsupportedModelErrors are those of :func:`shared_params`, or name
    a DTensor that is not ours."""
    module = getattr(model, "_orig_mod", model)  # torch.compile(model)
    sharded_params, group = shared_params(module)
    by_id = {id(sharded.param): sharded for sharded in sharded_params}
    tensors, names, others = named_state(module)
    for name, value in tensors.items():
        if isinstance(value, DTensor) and id(value) not in by_id:
            raise UnsupportedModelError(f"{name}: is a DTensor that MuonZero did not make; save and load it by itself")
    entries = {name: Entry(value, by_id.get(id(value))) for name, value in tensors.items()}
    status, device = sharded_params[0].ledger.status, sharded_params[0].graph_scalars.device
    return Weights(module, entries, names, others, sharded_params, group, status, device)
