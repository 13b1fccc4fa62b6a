"""Parameter groups: parameters that share a method and its rates, by the configuration's groups or else the rules."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from compile_muon.config import AdamWConfig, Config, accept
from compile_muon.config.checked import Mistakes
from compile_muon.config.groups import GroupConfig, setting_of
from compile_muon.config.settings import matches_adamw
from compile_muon.errors import config_error, listed, warn_user
from compile_muon.model.assignment import Assignment, assign
from compile_muon.model.views import with_views
from compile_muon.passes.methods import ElementMethod, MatrixMethod, Method, method_of

_NOT_RATES = ("params", "param_names")


@dataclass
class Group:
    """A parameter group of the optimizer: one method, one set of rates."""

    name: str  # stored in checkpoints
    method: Method
    rates: dict[str, Any]  # by name, one for each rate of the method
    # Name of the configuration's group; None for the defaults. Groups of one share the tensor graphs read rates from.
    configured: str | None = None
    members: list[str] = field(default_factory=list)  # names of parameters


def _members(config: Config, names: Sequence[str], parameters: Mapping[str, nn.Parameter]) -> dict[str, GroupConfig]:
    """Map each parameter of ``names`` to its configured group, if it has one; raise all mistakes of groups at once."""
    mistakes, group_of, name_set = Mistakes(), dict[str, GroupConfig](), set(names)
    for group in config.groups:
        hits = group.members(parameters)  # of all parameters: frozen ones may be unfrozen later
        if not hits:
            remedy = "match one, or leave the group out"
            mistakes.add(config_error(f"groups[{group.name}]", group.said, "holds no parameter", remedy))
        for name in hits:
            if name not in name_set:
                continue
            if name in group_of and group_of[name] is not group:
                problem = f"is in the groups {group_of[name].name} and {group.name}"
                mistakes.add(config_error("groups", name, problem, "let one pattern match it"))
            group_of[name] = group
    if config.groups and config.groups[0].complete and (rest := [name for name in names if name not in group_of]):
        problem = "in no group, so nothing would train them"
        remedy = "add them to one, set requires_grad=False, or give groups by patterns, which leave the rest as it is"
        mistakes.add(config_error("groups", listed(rest), problem, remedy))
    mistakes.raise_all()
    return group_of


def plan(config: Config, model: nn.Module, *, partial: bool) -> tuple[dict[str, Assignment], list[Group]]:
    """Return the assignment of every parameter, by groups, rules and views, and the groups of those that train.
    ``partial``: the model is one stage of a pipeline, which may have nothing for Muon."""
    named = dict(model.named_parameters())
    members = _members(config, [name for name, param in named.items() if param.requires_grad], named)
    assignments = assign(
        model,
        config.muon_params,
        use_muon=config.algorithm == "muon",
        partial=partial,
        chosen={n: (method_of(g.method), f"group {g.name}") for n, g in members.items() if g.method is not None},
        methods=(config.method, config.auxiliary),
    )
    assignments = with_views(config, assignments, model)
    return assignments, _planned(config, assignments, members)


def _planned(config: Config, assignments: Mapping[str, Assignment], members: Mapping[str, GroupConfig]) -> list[Group]:
    """Return the groups of the trained parameters: matrices before the rest, defaults before configured groups.

    A configured group whose parameters have several methods, or of which some decay and some do not, becomes several
    groups, told apart by the suffixes ``_<method>`` and ``_no_decay`` of their names.
    """
    trained = {name: a for name, a in assignments.items() if a.algorithm != "frozen"}
    methods_of = defaultdict[str, set[str]](set)
    for name, group in members.items():
        methods_of[group.name].add(trained[name].algorithm)
    groups: dict[tuple[object, ...], Group] = {}
    for name, assignment in trained.items():
        method, entry = method_of(assignment.algorithm), members.get(name)
        group_rates = dict(entry.rates) if entry is not None else {}
        rate_names = {rate.name for rate in method.rates}
        decays = assignment.decays(vectors=config.adamw.decay_vectors) or "weight_decay" in group_rates
        key = (None if entry is None else entry.name, method.name, decays)
        if key not in groups:
            rates = _defaults(config, method)
            rates |= {rate: value for rate, value in group_rates.items() if rate in rate_names}
            if not decays and "weight_decay" in rate_names:
                rates["weight_decay"] = 0.0
            label = method.name if entry is None else entry.name
            if entry is not None and len(methods_of[entry.name]) > 1:
                label += f"_{method.name}"
            groups[key] = Group(label if decays else f"{label}_no_decay", method, rates, key[0])
        groups[key].members.append(name)
    _check_rates(config, groups.values())
    order_of_group = {group.name: number for number, group in enumerate(config.groups)}

    def order(key: tuple[Any, ...]) -> tuple[object, ...]:
        label, method, decays = key
        place = -1 if label is None else order_of_group[label]
        return place, not isinstance(method_of(method), MatrixMethod), method, not decays

    return [groups[key] for key in sorted(groups, key=order)]


def _check_rates(config: Config, groups: Collection[Group]) -> None:
    """Raise one error for all rates that no method has, or that are out of their method's range."""
    mistakes = Mistakes()
    methods_of = defaultdict[str | None, dict[str, Method]](dict)
    for group in groups:
        methods_of[group.configured][group.method.name] = group.method
    for entry in config.groups:
        methods = methods_of[entry.name]
        known_rates = list(dict.fromkeys(rate.name for method in methods.values() for rate in method.rates))
        for name, value in entry.rates:
            with mistakes.collected():
                accept.known(f"groups[{entry.name}].{name}", value, name, known_rates or [name], _rate_of(methods))
    used_methods = [config.method, config.auxiliary] if config.algorithm == "muon" else [config.auxiliary]
    methods = {name: method_of(name) for name in used_methods} | {group.method.name: group.method for group in groups}
    # A rate that is an argument of MuonZero itself, as lr, has no default here and is not read from `rates`.
    known_rates = [rate.name for method in methods.values() for rate in method.rates if rate.default is not None]
    for name, value in config.rates:
        with mistakes.collected():
            accept.known(f"rates.{name}", value, name, known_rates, _rate_of(methods))
    rates_of_group = {entry.name: dict(entry.rates) for entry in config.groups}
    for group in groups:  # methods may bound a rate of one name, as `eps`, differently
        group_rates = rates_of_group.get(group.configured or "", {})
        for rate in group.method.rates:
            path = f"groups[{group.configured}].{rate.name}" if rate.name in group_rates else f"rates.{rate.name}"
            with mistakes.collected():
                group.rates[rate.name] = setting_of(rate)["check"](path, group.rates[rate.name])
    mistakes.raise_all()


def _rate_of(methods: Collection[str]) -> str:
    return f"a rate of {listed(sorted(methods))}"


def warn_of_shared_rates(config: Config, groups: Sequence[Group], group_config: GroupConfig | None = None) -> None:
    """Warn of each lr that was set for matrices and also applies to embeddings, heads or vectors.

    A group that names its method means its rate. A group without matrices is warned of only from ten times the default
    rate on. ``group_config``: a group that ``add_param_group`` adds to the configuration's.
    """
    for entry in (*config.groups, *([] if group_config is None else [group_config])):
        rate, derived = dict(entry.rates).get("lr"), [group for group in groups if group.configured == entry.name]
        others = [group for group in derived if isinstance(group.method, ElementMethod)]
        if rate is None or entry.method is not None or not others or matches_adamw(config.muon.adjust_lr):
            continue
        if len(others) < len(derived) or float(rate) >= 10 * AdamWConfig.lr:
            names = listed([name for group in others for name in group.members])
            warn_user(
                f"groups[{entry.name}].lr = {float(rate):g} is the rate of {others[0].method.name} too: that of "
                f"{names}, for which MuonZero takes {float(config.adamw.lr):g} otherwise; give these a group of their "
                'own, with "method" where the rate is meant'
            )


def warn_of_unread(config: Config, groups: Sequence[Group]) -> None:
    """Warn of settings that were given and that no method of these groups reads."""
    methods = [group.method for group in groups]
    unread = [
        prefix + f.name
        for half, kind, prefix in (
            (config.muon, MatrixMethod, ""),
            (config.muon.ns, MatrixMethod, "ns_"),
            (config.adamw, ElementMethod, "adamw_"),
        )
        if (readers := [method for method in methods if isinstance(method, kind)])
        for f in fields(half)
        if not any(_reads(method, prefix, f.name) for method in readers) and getattr(half, f.name) != f.default
    ]
    if unread:
        names = listed([*dict.fromkeys(method.name for method in methods)])
        warn_user(f"{listed(unread)}: has no effect, since no method in use ({names}) reads it; leave it out")


def _reads(method: Method, prefix: str, name: str) -> bool:
    """Return whether a method reads the setting ``name`` of its part of the configuration."""
    if isinstance(method, MatrixMethod) and prefix == "ns_":
        return method.orthogonalizes or name == "dtype"  # the dtype of the exchange, so read without Newton-Schulz too
    if isinstance(method, MatrixMethod) and name in ("nesterov", "momentum_dtype"):
        return method.keeps_momentum and (method.nesterov or name != "nesterov")
    if isinstance(method, MatrixMethod) and name == "adjust_lr":
        return method.adjust_lr is not None
    return method.has(name) or name not in ("lr", "momentum", "weight_decay", "betas", "eps")


def _defaults(config: Config, method: Method) -> dict[str, Any]:
    """Return a method's rates outside of configured groups: the configuration's, else the method's own."""
    half = config.muon if isinstance(method, MatrixMethod) else config.adamw
    values, rates = {}, dict(config.rates)
    for rate in method.rates:
        value = getattr(half, rate.name, rate.default)
        default = getattr(type(half), rate.name, value)
        if rate.default is not None and value == default:  # left at its default: `rates` decides
            value = rates.get(rate.name, rate.default)
        values[rate.name] = value
    return values


# ------------------------------------------------------------------------------------------ saved groups


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint stores of an optimizer's group: everything but its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_RATES}


def group_problems(here: Mapping[str, Sequence[str]], saved: Mapping[str, Sequence[str] | None]) -> list[str]:
    """List how groups differ from saved ones: a group that was not saved would keep its initial rates. ``here`` and
    ``saved`` map group names to names of parameters; None in ``saved`` where these are not known."""
    saved_names = listed(list(saved)) or "none"
    problems = [
        f"group {name}: was not saved (there are {saved_names}), so nothing says its rates"
        for name in here
        if name not in saved
    ]
    problems += [f"group {name}: was saved, and is not among the optimizer's" for name in saved if name not in here]
    saved_group = {param: name for name, members in saved.items() for param in members or ()}
    moves: dict[tuple[str, str], list[str]] = {}
    for name, members in here.items():
        for param in members:
            if saved_group.get(param, name) != name:
                moves.setdefault((saved_group[param], name), []).append(param)
    return problems + [f"{listed(params)}: was in group {old}, is in {new} now" for (old, new), params in moves.items()]


def value_problems(group: Mapping[str, Any], saved: Any) -> list[str]:
    """List the ``saved`` values that cannot replace those of ``group``, one sentence each."""
    label = f"group {group['name']}"
    if not isinstance(saved, Mapping):
        return [f"{label}: a {type(saved).__name__} was saved, not values by name"]
    problems = [
        f"{label}: {key} = {value!r} was saved, {group[key]!r} is here"
        for key, value in saved.items()
        if key in ("name", "algorithm") and key in group and value != group[key]
    ]
    return problems + [
        f"{label}: {key} = {str(value)[:80]!r} was saved, which cannot stand for {group[key]!r}"
        for key, value in saved.items()
        if key in group and key not in ("name", "algorithm", *_NOT_RATES) and not _stands_for(value, group[key])
    ]


def _stands_for(value: Any, like: Any) -> bool:
    if isinstance(like, (bool, str)):
        return type(value) is type(like)
    if isinstance(like, (tuple, list)):
        return (
            isinstance(value, (tuple, list))
            and len(value) == len(like)
            and all(_stands_for(one, other) for one, other in zip(value, like, strict=True))
        )
    if isinstance(like, (int, float, Tensor)):
        if isinstance(value, Tensor):
            return value.numel() == 1 and not value.is_complex() and math.isfinite(float(value))
        # Not `math.isfinite`, which raises for an int too large for a float.
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    return True


def state_problems(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the misfits of ``state_dict()`` groups, which torch matches by their order alone. Groups without names come
    from another optimizer and are not checked."""
    if not all("name" in group for group in saved):
        return []
    here = {group["name"]: group.get("param_names", ()) for group in groups}
    problems = group_problems(here, {group["name"]: group.get("param_names") for group in saved})
    if problems:
        return problems
    for group, other in zip(groups, saved, strict=True):
        names = other.get("param_names")
        if other["name"] != group["name"] or (names is not None and list(names) != list(group["param_names"])):
            problems.append(f"group {group['name']}: was saved in another order, or with other parameters")
        problems += value_problems(group, other)
    return problems
