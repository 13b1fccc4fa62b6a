"""Whole optimizer state on rank 0, from and into shards, for checkpoints of other people's that are one file.

A :class:`compile_muon.Checkpointer` writes each rank's rows from that rank, and keeps more; use it where the file may
be a folder.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor
from torch.distributed.tensor import DTensor

from compile_muon.checkpoint.contents import fitting_groups, groups_of, states_of
from compile_muon.errors import CheckpointError, listed
from compile_muon.files.tensors import converted
from compile_muon.optimizer import MuonZero
from compile_muon.weights.wire import Entry, Wire


def _slots(optimizer: MuonZero, ranks: Wire) -> Iterator[tuple[tuple[str, str], Entry]]:
    """Yield parameter and slot, and tensor, the same on every rank."""
    members = [optimizer.engine.step.sharded_params[p] for group in optimizer.param_groups for p in group["params"]]
    states = [(sharded, *state) for sharded in members for state in states_of(optimizer, sharded)]
    at_owners = [(sharded.name, slot) for sharded, slot, _, matrix in states if matrix is not None]
    mine = [(sharded.name, slot) for sharded, slot, value, matrix in states if matrix is not None and not value.is_meta]
    holders = {key: rank for rank, keys in enumerate(ranks.gather(mine) if at_owners else ()) for key in keys}
    for sharded, slot, value, _ in states:
        key = sharded.name, slot
        yield key, Entry(value, sharded if isinstance(value, DTensor) else None, holders.get(key))


def full_optimizer_state(optimizer: MuonZero) -> dict[str, Any]:
    """Gather momenta, moments and hyperparameters as if nothing were sharded; collective over the optimizer's ranks.

    Returns:
        On rank 0 ``{"state": {parameter: {slot: tensor}}, "param_groups": [{"params": names, "algorithm": ..., "name":
        ..., "lr": ..., ...}]}``, whole tensors on the CPU in memory of their own. Elsewhere an empty dictionary.
    Raises:
        CheckpointError: rank 0 has no room; on every rank.
        PeerError: a rank does not come; it takes the time-out of the process group.
    """
    with optimizer.engine.status.at("full_optimizer_state"):
        ranks = Wire(optimizer.engine.group, optimizer.engine.device, optimizer.engine.status)
        optimizer.engine.step.own_momenta()
        slots = dict(_slots(optimizer, ranks))
        with ranks.together("full_optimizer_state"):
            whole = ranks.collect_all(slots)
    if ranks.rank != 0:
        return {}
    groups, members = groups_of(optimizer)
    state = defaultdict[str, dict[str, Tensor]](dict)
    for (name, slot), value in whole.items():
        state[name][slot] = value
    return {"state": dict(state), "param_groups": [{"params": members[name], **groups[name]} for name in groups]}


def load_full_optimizer_state(optimizer: MuonZero, saved: Mapping[str, Any] | None) -> None:
    """Load what :func:`full_optimizer_state` gave, at any world and stage; collective over the optimizer's ranks.

    Args:
        saved: of rank 0; ignored elsewhere.
    Raises:
        CheckpointError: on every rank: it does not fit, all that is wrong listed, and nothing was changed.
        PeerError: a rank does not come.
    """
    doing = "optimizer state was not loaded"
    with optimizer.engine.status.at("load_full_optimizer_state"):
        ranks = Wire(optimizer.engine.group, optimizer.engine.device, optimizer.engine.status)
        optimizer.unfreeze(ranks.by_first(doing, lambda: [n for group in _groups_in(saved) for n in group["params"]]))
    with optimizer.engine.status.at("load_full_optimizer_state"):
        optimizer.engine.step.own_momenta()
        slots = dict(_slots(optimizer, ranks))
        groups = ranks.by_first(doing, lambda: _checked(optimizer, slots, saved))
        with ranks.together(doing):
            ranks.spread(slots, lambda key: cast(Any, saved)["state"][key[0]][key[1]])
        for group in optimizer.param_groups:
            group.update(groups[group["name"]])
        optimizer.loaded()


def _groups_in(saved: Any) -> list[Mapping[str, Any]]:
    """Return the groups that were saved; refuse what is no optimizer state."""
    groups: Any = saved.get("param_groups") if isinstance(saved, Mapping) else None
    has_groups_and_state = isinstance(groups, list) and groups and isinstance(saved.get("state"), Mapping)
    if not has_groups_and_state or not all(
        isinstance(g, Mapping) and {"name", "params", "algorithm"} <= g.keys() for g in groups
    ):
        raise CheckpointError("it is not optimizer state of MuonZero; begin anew from the weights alone")
    return groups


def _checked(optimizer: MuonZero, slots: Mapping[tuple[str, str], Entry], saved: Any) -> dict[str, dict[str, Any]]:
    """Return the saved hyperparameters of each group of ``optimizer``; one error lists all that does not fit."""
    by_name = {group["name"]: group for group in _groups_in(saved)}
    groups, members = groups_of(optimizer)
    trained = {name: group["algorithm"] for group in by_name.values() for name in group["params"]}
    here = {name: group["algorithm"] for key, group in groups.items() for name in members[key]}
    problems = []
    for name, algorithm in here.items():
        if trained.get(name) != algorithm:
            before = f"was {trained[name]} in it" if name in trained else "is not in it"
            problems.append(f"{name}: {before}, is {algorithm} now")
    problems += [f"{name}: is in it, and not trained here" for name in trained if name not in here]
    for (name, slot), entry in slots.items():
        value = saved["state"].get(name, {}).get(slot)
        if trained.get(name) != here[name]:
            continue
        if not isinstance(value, Tensor) or tuple(value.shape) != entry.shape:
            shape = list(value.shape) if isinstance(value, Tensor) else None
            problems.append(f"{name}: its {slot} has shape {shape} in it, {list(entry.shape)} here")
        else:
            converted(f"{name}/{slot}", value.detach(), entry.tensor.dtype)
    fitting, wrong = fitting_groups(groups, members, by_name, {key: group["params"] for key, group in by_name.items()})
    if problems := problems + wrong:
        raise CheckpointError(listed(problems))
    optimizer.engine.step.check_momentum([*fitting.values()])
    return fitting
