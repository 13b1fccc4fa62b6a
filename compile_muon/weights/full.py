"""Whole state dicts on rank 0, from and into shards, one tensor at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_muon.engine.resident import start_refresh_by_owner
from compile_muon.errors import CheckpointError, listed
from compile_muon.files.tensors import converted
from compile_muon.weights.named_tensors import Weights, check_live, weights_of
from compile_muon.weights.wire import Entry, Wire


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
