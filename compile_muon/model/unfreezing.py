"""Parameters that were frozen when the model was sharded and are trained from now on: by what, and in which group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from compile_muon.agreement.compare import by_rank, compare
from compile_muon.config import Config
from compile_muon.config.groups import GroupConfig, check_groups, named_groups
from compile_muon.engine.owner_states import deal_owners
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import new_hyper
from compile_muon.errors import UnsupportedModelError, config_error, listed
from compile_muon.model.assignment import Assignment
from compile_muon.model.groups import Group, plan
from compile_muon.model.param_spec import muon_spec
from compile_muon.model.support import check_trainable
from compile_muon.passes.methods import method_of

__all__ = ["agree_on", "group_of", "plan_unfrozen", "take_up"]


def group_of(
    param_group: Mapping[str, Any], model: nn.Module, groups: Sequence[Mapping[str, Any]]
) -> tuple[GroupConfig, list[str]]:
    """What was given to ``add_param_group``, and the names of its parameters.

    Args:
        groups: that there are.
    Raises:
        ConfigError: a tensor is none of the model's, or needs no gradient; a rate is none; the name is taken.
        ValueError: a parameter is in another group.
    """
    taken = [group["name"] for group in groups]
    name = str(param_group.get("name", f"added_{len(taken)}"))
    if name in taken:
        raise config_error("add_param_group.name", name, "is the name of another group", "leave it out")
    given: Any = named_groups([{**param_group, "name": name}], model)
    (own,) = check_groups("add_param_group", given)
    named = dict(model.named_parameters())
    members = own.members(named)
    trained = {id(param) for group in groups for param in group["params"]}
    if twice := [name for name in members if id(named[name]) in trained]:
        raise ValueError(f"some parameters appear in more than one parameter group: {listed(twice)}")
    if frozen := [name for name in members if not named[name].requires_grad]:
        raise config_error("add_param_group", listed(frozen), "needs no gradient", "set requires_grad_(True) first")
    return replace(own, complete=False), members


def agree_on(sharded_params: Sequence[ShardedParam], group: dist.ProcessGroup | None) -> None:
    """Compare with the other ranks what is unfrozen; collective.

    Raises:
        UnsupportedModelError: it differs, or has a dtype that cannot be trained; on all ranks.
    """
    if found := compare({"names": [sharded.name for sharded in sharded_params]}, group):
        said = by_rank([listed(names) for names in found["names"]])
        raise UnsupportedModelError(f"parameters were unfrozen otherwise: {said}; set requires_grad alike on all ranks")
    for sharded in sharded_params:
        check_trainable(sharded.name, sharded.param)


def plan_unfrozen(
    model: nn.Module, config: Config, names: Sequence[str], own: GroupConfig | None, *, partial: bool
) -> tuple[dict[str, Assignment], list[Group]]:
    """By what these parameters are trained, and the groups that they are in, without the others in those.

    Args:
        own: their group, in place of the configuration's.
        partial: whether the model is a part of another.
    Raises:
        ConfigError: a rate, method or view that does not fit them.
    """
    if own is not None:
        config = replace(config, groups=(own,))
    assignments, groups = plan(config, model, partial=partial)
    groups = [replace(group, members=[name for name in group.members if name in names]) for group in groups]
    return {name: assignments[name] for name in names}, [group for group in groups if group.members]


def take_up(
    sharded_params: Sequence[ShardedParam],
    assignments: Mapping[str, Assignment],
    config: Config,
    hyper: Tensor,
    like: ShardedParam | None,
) -> None:
    """Train these, of one group, from now on; they are laid out as they were, in the dtype they were in.

    Args:
        hyper: of another group.
        like: another of their group, where they join one.
    """
    algorithm = assignments[sharded_params[0].name].algorithm
    own = (new_hyper(method_of(algorithm), hyper.device), ()) if like is None else (like.hyper, like.rates)
    for sharded in sharded_params:
        muon = muon_spec(assignments[sharded.name], config, hyper.device, sharded.spec.layout)
        sharded.take_up(replace(sharded.spec, muon=muon), *own)
    deal_owners(sharded_params)
