"""Unfreezing: parameters that were frozen at sharding and train from now on: their method and group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from compile_muon.agreement.compare import by_rank, compare
from compile_muon.config import Config
from compile_muon.config.groups import GroupConfig, check_groups, named_groups
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import deal_owners, new_graph_scalars
from compile_muon.errors import UnsupportedModelError, config_error, listed
from compile_muon.model.assignment import Assignment
from compile_muon.model.groups import Group, plan
from compile_muon.model.param_spec import muon_spec
from compile_muon.model.support import check_trainable
from compile_muon.passes.methods import method_of


def group_of(
    param_group: Mapping[str, Any], model: nn.Module, groups: Sequence[Mapping[str, Any]]
) -> tuple[GroupConfig, list[str]]:
    """Return the group given to ``add_param_group``, and the names of its parameters; ``groups``: the existing ones."""
    taken_names = [group["name"] for group in groups]
    name = str(param_group.get("name", f"added_{len(taken_names)}"))
    if name in taken_names:
        raise config_error("add_param_group.name", name, "is the name of another group", "leave it out")
    named_group: Any = named_groups([{**param_group, "name": name}], model)
    (new_group,) = check_groups("add_param_group", named_group)
    named = dict(model.named_parameters())
    members = new_group.members(named)
    trained_ids = {id(param) for group in groups for param in group["params"]}
    if duplicates := [name for name in members if id(named[name]) in trained_ids]:
        raise ValueError(f"some parameters appear in more than one parameter group: {listed(duplicates)}")
    if frozen := [name for name in members if not named[name].requires_grad]:
        raise config_error("add_param_group", listed(frozen), "needs no gradient", "set requires_grad_(True) first")
    return replace(new_group, complete=False), members


def agree_on(sharded_params: Sequence[ShardedParam], group: dist.ProcessGroup | None) -> None:
    """Raise on all ranks if they unfreeze other parameters, or some of a dtype that cannot be trained; collective."""
    if differences := compare({"names": [sharded.name for sharded in sharded_params]}, group):
        names_by_rank = by_rank([listed(names) for names in differences["names"]])
        raise UnsupportedModelError(
            f"parameters were unfrozen otherwise: {names_by_rank}; set requires_grad alike on all ranks"
        )
    for sharded in sharded_params:
        check_trainable(sharded.name, sharded.param)


def plan_unfrozen(
    model: nn.Module, config: Config, names: Sequence[str], group_config: GroupConfig | None, *, partial: bool
) -> tuple[dict[str, Assignment], list[Group]]:
    """Return the assignments of these parameters, and their groups with no other members. ``group_config``: a group
    for them in place of the configuration's; ``partial``: the model is one stage of a pipeline."""
    if group_config is not None:
        config = replace(config, groups=(group_config,))
    assignments, groups = plan(config, model, partial=partial)
    groups = [replace(group, members=[name for name in group.members if name in names]) for group in groups]
    return {name: assignments[name] for name in names}, [group for group in groups if group.members]


def take_up(
    sharded_params: Sequence[ShardedParam],
    assignments: Mapping[str, Assignment],
    config: Config,
    graph_scalars: Tensor,
    like: ShardedParam | None,
) -> None:
    """Train these parameters of one group from now on, in their present layout and dtype. ``graph_scalars``: the tensor
    of any group, for its device; ``like``: another parameter of their group, where they join one."""
    algorithm = assignments[sharded_params[0].name].algorithm
    graph_scalars_and_rates = (
        (new_graph_scalars(method_of(algorithm), graph_scalars.device), ())
        if like is None
        else (like.graph_scalars, like.rates)
    )
    for sharded in sharded_params:
        muon = muon_spec(assignments[sharded.name], config, graph_scalars.device, sharded.spec.layout)
        sharded.take_up(replace(sharded.spec, muon=muon), *graph_scalars_and_rates)
    deal_owners(sharded_params)
