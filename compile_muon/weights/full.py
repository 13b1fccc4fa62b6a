"""Tensors of a sharded model, each once, by the name it has in a file; and whole state dicts of it on rank 0, from and
into shards, one tensor at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_muon.agreement.compare import by_rank, compare
from compile_muon.agreement.status import RankStatus
from compile_muon.engine.resident import start_refresh_by_owner
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import CheckpointError, UnsupportedModelError, listed
from compile_muon.files.tensors import converted
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


# ---------------------------------------------------------------------------------------------------- whole state dicts


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """Return ``model.state_dict()`` as if nothing had been sharded; collective over the ranks that share the model.

    Returns:
        On rank 0 every parameter (master values) and persistent buffer, whole, plain, on the CPU, in memory of its own;
        tied ones are one tensor under all their names. Elsewhere an empty dictionary.
    Raises:
        UnsupportedModelError: nothing in ``model`` is sharded.
        CheckpointError: ranks call this with different models, or rank 0 has no room; on every rank.
        PeerError: a rank does not come; it takes the time-out of the process group.
    """
    weights = weights_of(model)
    with weights.status.at("full_state_dict"):
        ranks = weights.meet("full_state_dict")
        return gather(weights, ranks, "full_state_dict")


def gather(weights: Weights, ranks: Wire, doing: str, names: Collection[str] | None = None) -> dict[str, Any]:
    """Gather whole tensors, or those of ``names``, on rank 0; collective. If rank 0 has no room, all raise."""
    wanted = {n: e for n, e in weights.entries.items() if names is None or any(a in names for a in weights.names[n])}
    with ranks.together(doing):
        unsharded = ranks.collect_all(wanted)
    if ranks.rank != 0:
        return {}
    named = {alias: unsharded[name] for name in unsharded for alias in weights.names[name]} | weights.others
    order = [key.replace("_orig_mod.", "") for key in weights.module.state_dict(keep_vars=True)]
    return {name: named[name] for name in order if names is None or name in names}


def load_full_state_dict(model: nn.Module, mapping: Mapping[str, Any] | None, *, strict: bool = True) -> None:
    """Load what only rank 0 has into the shards of all; collective over the ranks that share the model.

    Optimizer state is not touched; resident weights are gathered anew.

    Args:
        mapping: on rank 0, names to whole plain tensors on any device and of any dtype, which are cast to those of the
            model; it is asked for one tensor at a time, so it may read them from somewhere. Ignored elsewhere.
        strict: False to leave alone what is missing, and ignore what is not in the model.
    Raises:
        UnsupportedModelError: nothing in ``model`` is sharded.
        CheckpointError: on every rank: names or shapes do not fit, a tensor is a shard, and nothing was changed then;
            or the mapping raised on the way.
        PeerError: a rank does not come.
    """
    weights = weights_of(model)
    with weights.status.at("load_full_state_dict"):
        ranks = weights.meet("load_full_state_dict", strict)
        mapping = {} if mapping is None or ranks.rank != 0 else mapping
        sources, others = ranks.by_first("nothing was loaded", lambda: _sources(weights, mapping, strict))
        entries = {name: entry for name, entry in weights.entries.items() if name in sources}
        try:
            with ranks.together("loading stopped halfway, and the model holds old and new weights: load again"):
                ranks.spread(entries, lambda name: _checked(entries[name], sources[name], mapping[sources[name]]))
        finally:
            start_refresh_by_owner(weights.sharded_params)
        if others:
            weights.module.load_state_dict(others, strict=False)


def _checked(entry: Entry, name: str, value: Any) -> Tensor:
    """Cast ``value`` of a mapping to the dtype of ``entry``, once it can be the whole of that."""
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{name}: is a {type(value).__name__}, not a tensor")
    if isinstance(value, DTensor):
        raise CheckpointError(f"{name}: is a DTensor; give whole tensors (value.full_tensor() on every rank)")
    if tuple(value.shape) != entry.shape:
        problem = f"{name}: has shape {list(value.shape)}, the model's {list(entry.shape)}"
        if entry.layout is not None and (owner := entry.layout.owner_of(tuple(value.shape))) is not None:
            problem += f"; it is what {owner} holds, saved without the others"
        raise CheckpointError(problem)
    return converted(name, value.detach(), entry.tensor.dtype)


def _sources(weights: Weights, mapping: Mapping[str, Any], strict: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Find the name in ``mapping`` of each entry, and what is no tensor; one error lists all that does not fit."""
    check_live(weights.module, {name: entry.tensor for name, entry in weights.entries.items()})
    sources, problems = dict[str, str](), list[str]()
    stored = set(mapping)  # `in` of a Mapping may read a tensor
    for name, entry in weights.entries.items():
        if (source := next((n for n in weights.names[name] if n in stored), None)) is not None:
            sources[name] = source
            try:
                _checked(entry, source, mapping[source])
            except CheckpointError as error:
                problems.append(str(error))
        elif strict:
            problems.append(f"{name}: is missing")
    if strict:
        model_names = {*weights.others, *(alias for names in weights.names.values() for alias in names)}
        problems += [f"{name}: is not in the model" for name in mapping if name not in model_names]
    if problems:
        raise CheckpointError(listed(problems))
    return sources, {name: mapping[name] for name in weights.others if name in stored}
