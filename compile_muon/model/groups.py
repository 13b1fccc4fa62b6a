"""Parameter groups: which parameters share a method and its rates, as the configuration says and else by the rules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor, nn

from compile_muon.config import AdamWConfig, Config
from compile_muon.config.checked import Mistakes
from compile_muon.config.groups import GroupConfig, setting_of
from compile_muon.errors import ConfigError, config_error, listed, warn_user
from compile_muon.model.assignment import Assignment, assign
from compile_muon.model.views import with_views
from compile_muon.passes.methods import ElementMethod, MatrixMethod, Method, method_of

__all__ = [
    "Group",
    "group_problems",
    "plan",
    "state_problems",
    "value_problems",
    "values_of",
    "warn_of_shared_rates",
    "warn_of_unread",
]

_NOT_RATES = ("params", "param_names")


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
    mistakes, found, wanted = Mistakes(), dict[str, GroupConfig](), set(names)
    for group in config.groups:
        hits = group.members(parameters)  # some are frozen, and perhaps not for ever
        if not hits:
            remedy = "match one, or leave the group out"
            mistakes.add(config_error(f"groups[{group.name}]", group.said, "holds no parameter", remedy))
        for name in hits:
            if name not in wanted:
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


def plan(config: Config, model: nn.Module, *, partial: bool) -> tuple[dict[str, Assignment], list[Group]]:
    """By what each parameter is trained, as groups, rules and views say, and the groups of those that are.

    Args:
        partial: whether the model is a part of another.
    Raises:
        ConfigError: a rate, method, view or group that does not fit.
    """
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
    return assignments, _planned(config, assignments, model)


def _planned(config: Config, assignments: Mapping[str, Assignment], model: nn.Module) -> list[Group]:
    """The groups of the trained parameters: matrices ahead of the rest, configured ones behind the default ones.

    A group of the configuration whose parameters have several methods, or of which some decay and some do not, becomes
    as many groups; what each is called says so.

    Raises:
        ConfigError: a rate that no method of the group has, and all that is wrong with groups; in one error.
    """
    named = dict(model.named_parameters())
    trained = {name: a for name, a in assignments.items() if a.algorithm != "frozen"}
    members = _members(config, list(trained), named)
    methods_of = defaultdict[str, set[str]](set)
    for name, group in members.items():
        methods_of[group.name].add(trained[name].algorithm)
    groups: dict[tuple[object, ...], Group] = {}
    for name, assignment in trained.items():
        method, given = method_of(assignment.algorithm), members.get(name)
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
            if given is not None and len(methods_of[given.name]) > 1:
                label += f"_{method.name}"
            groups[key] = Group(label if decays else f"{label}_no_decay", method, rates, key[0])
        groups[key].members.append(name)
    _check_rates(config, groups.values())
    configured = {group.name: number for number, group in enumerate(config.groups)}

    def order(key: tuple[Any, ...]) -> tuple[object, ...]:
        label, method, decays = key
        place = -1 if label is None else configured[label]
        return place, not isinstance(method_of(method), MatrixMethod), method, not decays

    return [groups[key] for key in sorted(groups, key=order)]


def _check_rates(config: Config, groups: Collection[Group]) -> None:
    """Raise all the rates that no method has, and those outside the range of the method that has them."""
    mistakes = Mistakes()
    methods_of = defaultdict[str | None, dict[str, Method]](dict)
    for group in groups:
        methods_of[group.configured][group.method.name] = group.method
    for given in config.groups:
        methods = methods_of[given.name]
        known = [rate.name for method in methods.values() for rate in method.rates]
        for name, value in given.rates:
            if methods and name not in known:
                mistakes.add(_unknown(f"groups[{given.name}].{name}", value, methods, known))
    used = [config.method, config.auxiliary] if config.algorithm == "muon" else [config.auxiliary]
    methods = {name: method_of(name) for name in used} | {group.method.name: group.method for group in groups}
    # What is an argument of its own has no default here, and is not read from `rates`.
    known = [rate.name for method in methods.values() for rate in method.rates if rate.default is not None]
    for name, value in config.rates:
        if name not in known:
            mistakes.add(_unknown(f"rates.{name}", value, methods, known))
    configured = {given.name: dict(given.rates) for given in config.groups}
    for group in groups:  # of rates with one name, as `eps`, each method has a range of its own
        said = configured.get(group.configured or "", {})
        for rate in group.method.rates:
            path = f"groups[{group.configured}].{rate.name}" if rate.name in said else f"rates.{rate.name}"
            with mistakes.collected():
                group.rates[rate.name] = setting_of(rate)["check"](path, group.rates[rate.name])
    mistakes.raise_all()


def _unknown(path: str, value: object, methods: Collection[str], known: Sequence[str]) -> ConfigError:
    remedy = f"use some of {', '.join(dict.fromkeys(known))}"
    return config_error(path, value, f"is no rate of {listed(sorted(methods))}", remedy)


def warn_of_shared_rates(config: Config, groups: Sequence[Group], own: GroupConfig | None = None) -> None:
    """Tell of each rate that was written for matrices, and that embeddings, heads or vectors are trained with, too.

    A group that names its method means its rate. One of vectors alone is told from ten times the default on.

    Args:
        own: a group beside those of the configuration.
    """
    for given in (*config.groups, *([] if own is None else [own])):
        rate, mine = dict(given.rates).get("lr"), [group for group in groups if group.configured == given.name]
        others = [group for group in mine if isinstance(group.method, ElementMethod)]
        if rate is None or given.method is not None or not others or config.muon.matches_adamw:
            continue
        if len(others) < len(mine) or float(rate) >= 10 * AdamWConfig.lr:
            names = listed([name for group in others for name in group.members])
            warn_user(
                f"groups[{given.name}].lr = {float(rate):g} is the rate of {others[0].method.name} too: that of "
                f"{names}, for which MuonZero takes {float(config.adamw.lr):g} otherwise; give these a group of their "
                'own, with "method" where the rate is meant'
            )


def warn_of_unread(config: Config, groups: Sequence[Group]) -> None:
    """Tell of the settings that were given and that no method of these groups reads."""
    methods = [group.method for group in groups]
    unread = [
        prefix + f.name
        for half, kind, prefix in (
            (config.muon, MatrixMethod, ""),
            (config.muon.ns, MatrixMethod, "ns_"),
            (config.adamw, ElementMethod, "adamw_"),
        )
        if (own := [method for method in methods if isinstance(method, kind)])
        for f in fields(half)
        if not any(_reads(method, prefix, f.name) for method in own) and getattr(half, f.name) != f.default
    ]
    if unread:
        names = listed([*dict.fromkeys(method.name for method in methods)])
        warn_user(f"{listed(unread)}: has no effect, since no method in use ({names}) reads it; leave it out")


def _reads(method: Method, prefix: str, name: str) -> bool:
    """Whether a method heeds a setting of its part of the configuration."""
    if isinstance(method, MatrixMethod) and prefix == "ns_":
        return method.orthogonalizes or name == "dtype"  # in which matrices travel, too
    if isinstance(method, MatrixMethod) and name in ("nesterov", "momentum_dtype"):
        return method.keeps_momentum and (method.nesterov or name != "nesterov")
    if isinstance(method, MatrixMethod) and name == "adjust_lr":
        return method.adjust_lr is not None
    return method.has(name) or name not in ("lr", "momentum", "weight_decay", "betas", "eps")


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


# ------------------------------------------------------------------------------------------ groups that were saved


def values_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What is saved of a group of the optimizer: all but its parameters."""
    return {key: value for key, value in group.items() if key not in _NOT_RATES}


def group_problems(here: Mapping[str, Sequence[str]], saved: Mapping[str, Sequence[str] | None]) -> list[str]:
    """How groups differ from saved ones, one sentence each: a group that was not saved would keep its first rates.

    Args:
        here: names of parameters by the name of the group.
        saved: the same; None where it is not known.
    """
    known = listed(list(saved)) or "none"
    problems = [
        f"group {name}: was not saved (there are {known}), so nothing says its rates"
        for name in here
        if name not in saved
    ]
    problems += [f"group {name}: was saved, and is not among the optimizer's" for name in saved if name not in here]
    before = {param: name for name, members in saved.items() for param in members or ()}
    moved: dict[tuple[str, str], list[str]] = {}
    for name, members in here.items():
        for param in members:
            if before.get(param, name) != name:
                moved.setdefault((before[param], name), []).append(param)
    return problems + [f"{listed(params)}: was in group {old}, is in {new} now" for (old, new), params in moved.items()]


def value_problems(group: Mapping[str, Any], saved: Any) -> list[str]:
    """What of the ``saved`` values of a group cannot be those of ``group``, one sentence each."""
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
        return isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value)
    return True


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer without end
        return False


def state_problems(groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> list[str]:
    """What does not fit of the groups of ``state_dict()``, which torch takes by their order alone.

    Nothing is known of groups without a name, which are none of ours.
    """
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
