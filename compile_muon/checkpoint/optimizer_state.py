"""Whole optimizer state on rank 0, from and into shards, for checkpoints of other people's that are one file.

A :class:`compile_muon.Checkpointer` writes each rank's rows from that rank, and keeps more; use it where the file may
be a folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from compile_muon.agreement.together import Ranks
from compile_muon.engine.owner_states import each_matrix, every_shape, matrices_here, states_kept
from compile_muon.errors import CheckpointError, listed
from compile_muon.files.tensors import converted
from compile_muon.model.groups import group_problems, value_problems, values_of
from compile_muon.optimizer import MuonZero
from compile_muon.weights.named_tensors import Entry
from compile_muon.weights.wire import Wire

__all__ = ["full_optimizer_state", "load_full_optimizer_state"]


def _slots(optimizer: MuonZero, ranks: Ranks) -> Iterator[tuple[str, str, Entry]]:
    """Parameter, slot, tensor; the same on every rank. Of states at owners there is a slot for each matrix."""
    sharded_params = {id(sharded.param): sharded for sharded in optimizer.engine.params}
    numbers = {a.name: matrices_here(a) for a in sharded_params.values() if a.owners}
    holders = {
        (name, number): rank
        for rank, held in enumerate(ranks.gather(numbers) if numbers else ())
        for name, own in held.items()
        for number in own
    }
    for group in optimizer.param_groups:
        for param in group["params"]:
            sharded = sharded_params[id(param)]
            at_owner = {state.name: state for state in states_kept(sharded)}
            for slot, value in optimizer.state[param].items():
                if (state := at_owner.get(slot)) is not None:
                    mine = dict(each_matrix(sharded, state, value))
                    for number, shape in every_shape(sharded, state).items():
                        own = mine.get(number, torch.empty(shape, dtype=value.dtype, device="meta"))
                        entry = Entry(own, None, holders[sharded.name, number])
                        yield sharded.name, f"{slot}.{number}", entry
                    continue
                cut = sharded if isinstance(value, DTensor) else None  # a step count is not
                yield sharded.name, slot, Entry(value, cut)


def _ranks(optimizer: MuonZero) -> tuple[Ranks, Wire]:
    group, device = optimizer.engine.group, optimizer.engine.device
    return Ranks(group, device, optimizer.engine.status, apart=False), Wire(group, device)


def full_optimizer_state(optimizer: MuonZero) -> dict[str, Any]:
    """Momenta, moments and hyperparameters as if nothing had been sharded; collective over the optimizer's ranks.

    Returns:
        On rank 0 ``{"state": {parameter: {slot: tensor}}, "param_groups": [{"params": names, "algorithm": ..., "name":
        ..., "lr": ..., ...}]}``, whole tensors on the CPU in memory of their own. Elsewhere an empty dictionary.
    Raises:
        CheckpointError: rank 0 has no room; on every rank.
        PeerError: a rank does not come; it takes the time-out of the process group.
    """
    with optimizer.engine.status.at("full_optimizer_state"):
        ranks, wire = _ranks(optimizer)
        optimizer.engine.step.own_momenta()
        found, error = wire.whole({(name, slot): entry for name, slot, entry in _slots(optimizer, ranks)})
        ranks.agree("full_optimizer_state", error)
    if wire.rank != 0:
        return {}
    groups = [{"params": list(names), **values_of(group)} for names, group in _named(optimizer)]
    state: dict[str, dict[str, Tensor]] = {}
    for (name, slot), value in found.items():
        state.setdefault(name, {})[slot] = value
    return {"state": state, "param_groups": groups}


def load_full_optimizer_state(optimizer: MuonZero, saved: Mapping[str, Any] | None) -> None:
    """Load what :func:`full_optimizer_state` gave, at any world and stage; collective over the optimizer's ranks.

    Args:
        saved: of rank 0; ignored elsewhere.
    Raises:
        CheckpointError: on every rank: it does not fit, all that is wrong listed, and nothing was changed.
        PeerError: a rank does not come.
    """
    with optimizer.engine.status.at("load_full_optimizer_state"):
        ranks, wire = _ranks(optimizer)
        trained: list[str] = []
        with ranks.together("optimizer state was not loaded"):
            if wire.rank == 0:
                trained = [name for group in _groups_in(saved) for name in group["params"]]
        optimizer.unfreeze(ranks.first(trained))
    with optimizer.engine.status.at("load_full_optimizer_state"):
        optimizer.engine.step.own_momenta()
        slots = list(_slots(optimizer, ranks))
        groups: list[dict[str, Any]] = []
        with ranks.together("optimizer state was not loaded"):
            if wire.rank == 0:
                groups = _checked(optimizer, slots, saved)
                optimizer.engine.step.check_momentum(groups)
        groups = ranks.first(groups)
        for name, slot, entry in slots:
            wire.deal(entry, saved["state"][name][slot] if wire.rank == 0 and saved is not None else None)
        for (_, group), settings in zip(_named(optimizer), groups, strict=True):
            group.update(settings)
        optimizer.loaded()


def _named(optimizer: MuonZero) -> list[tuple[list[str], dict[str, Any]]]:
    """The parameters' names beside each group."""
    names = {id(sharded.param): sharded.name for sharded in optimizer.engine.params}
    return [([names[id(param)] for param in group["params"]], group) for group in optimizer.param_groups]


def _groups_in(saved: Any) -> list[Mapping[str, Any]]:
    """The groups that were saved.

    Raises:
        CheckpointError: it is something else.
    """
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    if (
        not isinstance(groups, list)
        or not groups
        or not isinstance(saved.get("state"), Mapping)
        or not all(isinstance(g, Mapping) and {"name", "params", "algorithm"} <= g.keys() for g in groups)
    ):
        raise CheckpointError("it is not optimizer state of MuonZero; begin anew from the weights alone")
    return groups


def _checked(optimizer: MuonZero, slots: list[tuple[str, str, Entry]], saved: Any) -> list[dict[str, Any]]:
    """The hyperparameters of each group of ``optimizer``, if ``saved`` fits it.

    Raises:
        CheckpointError: listing all that does not.
    """
    groups = _groups_in(saved)
    named = _named(optimizer)
    trained = {name: group["algorithm"] for group in groups for name in group["params"]}
    problems = []
    for names, group in named:
        for name in names:
            if trained.get(name) != group["algorithm"]:
                before = f"was {trained[name]} in it" if name in trained else "is not in it"
                problems.append(f"{name}: {before}, is {group['algorithm']} now")
    wrong = {problem.split(":")[0] for problem in problems}
    ours = {name for names, _ in named for name in names}
    problems += [f"{name}: is in it, and not trained here" for name in trained if name not in ours]
    for name, slot, entry in slots:
        value = saved["state"].get(name, {}).get(slot)
        if name in wrong:
            continue
        if not isinstance(value, Tensor) or tuple(value.shape) != entry.shape:
            shape = list(value.shape) if isinstance(value, Tensor) else None
            problems.append(f"{name}: its {slot} has shape {shape} in it, {list(entry.shape)} here")
        else:
            converted(f"{name}/{slot}", value.detach(), entry.tensor.dtype)
    by_name = {group["name"]: group for group in groups}
    problems += group_problems({g["name"]: names for names, g in named}, {n: g["params"] for n, g in by_name.items()})
    for _, group in named:
        if group["name"] in by_name:
            problems += value_problems(values_of(group), values_of(by_name[group["name"]]))
    if problems:
        raise CheckpointError(listed(problems))
    return [values_of(by_name[group["name"]]) for _, group in named]
