"""Parameter groups: which parameters share a method and its rates, as the configuration says and else by the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from compile_muon.config import AdamWConfig, Config
from compile_muon.config.checked import Mistakes
from compile_muon.config.groups import GroupConfig
from compile_muon.errors import config_error, listed, warn_user
from compile_muon.model.assignment import Assignment
from compile_muon.passes.methods import METHODS, ElementMethod, MatrixMethod, Method

__all__ = ["Group", "chosen_methods", "plan_groups", "warn_of_shared_rates"]

_BY_NAME = {method.name: method for method in METHODS}


@dataclass
class Group:
    """Parameters of one method with the same rates.

    Args:
        name: as checkpoints know it.
        rates: by name, one for each that the method has.
        configured: name of the group of the configuration, None for the defaults. Groups of one share what graphs read
            of their rates.
        members: names of its parameters.
    """

    name: str
    method: Method
    rates: dict[str, Any]
    configured: str | None = None
    members: list[str] = field(default_factory=list)


def _members(config: Config, names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> dict[str, GroupConfig]:
    """The configured group of each parameter that is in one.

    Raises:
        ConfigError: groups that overlap or match nothing, and parameters in none where all were to be listed; all in
            one error.
    """
    mistakes, found = Mistakes(), dict[str, GroupConfig]()
    for group in config.groups:
        hits = group.members(parameters)  # some are frozen, and perhaps not for ever
        if not hits:
            remedy = "match one, or leave the group out"
            mistakes.add(config_error(f"groups[{group.name}]", group.said, "holds no parameter", remedy))
        for name in hits:
            if name not in names:
                continue
            if name in found and found[name] is not group:
                problem = f"is in the groups {found[name].name} and {group.name}"
                mistakes.add(config_error("groups", name, problem, "let one pattern match it"))
            found[name] = group
    if config.groups and config.groups[0].complete and (left := [name for name in names if name not in found]):
        problem = "in no group, so nothing would train them" if len(left) > 1 else "in no group: nothing would train it"
        remedy = "add them to one, set requires_grad=False, or give groups by patterns, which leave the rest as it is"
        mistakes.add(config_error("groups", listed(left), problem, remedy))
    mistakes.raise_all()
    return found


def chosen_methods(config: Config, model: nn.Module) -> dict[str, tuple[Method, str]]:
    """Methods that groups choose, with the reason, by parameter.

    Raises:
        ConfigError: as of the groups.
    """
    named = dict(model.named_parameters())
    found = _members(config, [name for name, param in named.items() if param.requires_grad], named)
    return {
        name: (_BY_NAME[group.method], f"group {group.name}")
        for name, group in found.items()
        if group.method is not None
    }


def plan_groups(config: Config, assignments: Mapping[str, Assignment], model: nn.Module) -> list[Group]:
    """The groups of the trained parameters: matrices ahead of the rest, configured ones behind the default ones.

    A group of the configuration whose parameters have several methods, or of which some decay and some do not, becomes
    as many groups; what each is called says so.

    Raises:
        ConfigError: a rate that no method of the group has, and all that is wrong with groups; in one error.
    """
    named = dict(model.named_parameters())
    trained = {name: a for name, a in assignments.items() if a.algorithm != "frozen"}
    members = _members(config, list(trained), named)
    groups: dict[tuple[object, ...], Group] = {}
    mistakes = Mistakes()
    for name, assignment in trained.items():
        method, given = _BY_NAME[assignment.algorithm], members.get(name)
        said = dict(given.rates) if given is not None else {}
        own = {rate.name for rate in method.rates}
        decays = assignment.decays(vectors=config.adamw.decay_vectors) or "weight_decay" in said
        key = (None if given is None else given.name, method.name, decays)
        if key not in groups:
            rates = _defaults(config, method)
            rates |= {rate: value for rate, value in said.items() if rate in own}
            if not decays and "weight_decay" in own:
                rates["weight_decay"] = 0.0
            label = method.name if given is None else given.name
            if len({trained[n].algorithm for n, group in members.items() if group is given}) > 1:
                label += f"_{method.name}"
            groups[key] = Group(label if decays else f"{label}_no_decay", method, rates, key[0])
        groups[key].members.append(name)
    for given in config.groups:
        methods = [group.method for (label, *_), group in groups.items() if label == given.name]
        for rate, value in given.rates:
            if methods and not any(rate in {r.name for r in method.rates} for method in methods):
                known = ", ".join(dict.fromkeys(r.name for method in methods for r in method.rates))
                problem = f"is no rate of {listed(sorted({method.name for method in methods}))}"
                mistakes.add(config_error(f"groups[{given.name}].{rate}", value, problem, f"use some of {known}"))
    mistakes.raise_all()
    configured = [group.name for group in config.groups]

    def order(key: tuple[Any, ...]) -> tuple[object, ...]:
        label, method, decays = key
        place = -1 if label is None else configured.index(label)
        return place, not isinstance(_BY_NAME[method], MatrixMethod), method, not decays

    return [groups[key] for key in sorted(groups, key=order)]


def warn_of_shared_rates(config: Config, groups: Sequence[Group], own: GroupConfig | None = None) -> None:
    """Tell of each rate that was written for matrices, and that embeddings, heads or vectors are trained with, too.

    A group that names its method means its rate. One of vectors alone is told from ten times the default on.

    Args:
        own: a group beside those of the configuration.
    """
    for given in (*config.groups, *([] if own is None else [own])):
        rate, mine = dict(given.rates).get("lr"), [group for group in groups if group.configured == given.name]
        others = [group for group in mine if isinstance(group.method, ElementMethod)]
        if rate is None or given.method is not None or not others or config.muon.adjust_lr == "match_rms_adamw":
            continue
        if len(others) < len(mine) or float(rate) >= 10 * AdamWConfig.lr:
            names = listed([name for group in others for name in group.members])
            warn_user(
                f"groups[{given.name}].lr = {float(rate):g} is the rate of {others[0].method.name} too: that of "
                f"{names}, for which MuonZero takes {float(config.adamw.lr):g} otherwise; give these a group of their "
                'own, with "method" where the rate is meant'
            )


def _defaults(config: Config, method: Method) -> dict[str, Any]:
    """The rates of a method where no group says otherwise: the configuration's, then its own."""
    half = config.muon if isinstance(method, MatrixMethod) else config.adamw
    found, said = {}, dict(config.rates)
    for rate in method.rates:
        own = getattr(half, rate.name, rate.default)
        default = getattr(type(half), rate.name, own)
        if rate.default is not None and own == default:  # the configuration says nothing of it
            own = said.get(rate.name, rate.default)
        found[rate.name] = own
    return found
