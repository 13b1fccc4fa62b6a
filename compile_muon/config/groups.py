"""The setting ``groups``: parameters by pattern, each with its method and rates."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from compile_muon.config import accept
from compile_muon.config.checked import Mistakes, setting
from compile_muon.config.elsewhere import OF_GROUPS
from compile_muon.errors import config_error
from compile_muon.passes.methods import Method, Rate, method_names, method_of, rates_of_methods

OF_A_VIEW = "write some of split, heads, groups and dim: docs/how-to/methods.md"
_GROUP = '{"lr": 0.01}'
_NOT_RATES = ("params", "method", "name")
_WILDCARDS = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class GroupConfig:
    """A group of parameters with a method or rates of its own."""

    name: str  # the pattern, where the user gives no name
    params: accept.Patterns  # a predicate, or name patterns
    method: str | None = None  # key of ``METHODS``; None keeps the method that the rules give each parameter
    rates: tuple[tuple[str, Any], ...] = ()  # (name, value) of rates that differ from the defaults
    complete: bool = False  # whether a parameter in no group is an error, as with lists of parameters

    def members(self, parameters: Mapping[str, nn.Parameter]) -> list[str]:
        """Return the names of the group's parameters among `parameters`."""
        if callable(self.params):
            return [name for name, param in parameters.items() if self.params(name, param)]
        if not any(_WILDCARDS.search(pattern) for pattern in self.params):  # linear for a group per parameter
            return [name for name in dict.fromkeys(self.params) if name in parameters]
        return [name for name in parameters if any(fnmatchcase(name, pattern) for pattern in self.params)]

    @property
    def said(self) -> str:
        """The patterns as errors show them."""
        return "a function" if callable(self.params) else ", ".join(self.params[:3])


@accept.takes(lambda kind=Method: accept.taken(accept.choice, allowed=method_names(kind)))
def check_method(field: str, value: object, kind: type[Method] = Method) -> str:
    """Accept the name of a method of one kind."""
    return accept.choice(field, value, method_names(kind))


def setting_of(rate: Rate) -> Mapping[str, Any]:
    """Return the metadata of :func:`setting` for a rate: "check"(path, value), and "values"(), the range in words."""
    if rate.whole:
        return setting(rate.default, accept.integer, low=int(rate.positive)).metadata
    check = {"lr": accept.rate, "betas": accept.pair}.get(rate.name)
    if isinstance(rate.default, bool):
        check = accept.boolean
    if check is not None:
        return setting(rate.default, check).metadata
    return setting(rate.default, accept.real, positive=rate.positive, below=rate.below, most=rate.most).metadata


@accept.takes("rates by name")
def check_own_rates(field: str, value: object) -> tuple[tuple[str, Any], ...]:
    """Accept rates of methods that have no field in the configuration."""
    value = accept.pairs(field, value, '{"beta2": 0.95}', "a mapping")
    for name in ("lr", "momentum", "weight_decay"):
        if name in value:
            problem, remedy = "is an argument of its own", f"write {name}=..., or adamw_{name} of AdamW's half"
            raise config_error(f"{field}.{name}", value[name], problem, remedy)
    return _rates(field, value)


def _rates(field: str, values: Mapping[Any, Any]) -> tuple[tuple[str, Any], ...]:
    known_rates = rates_of_methods()
    mistakes, rates = Mistakes(), []
    for name, value in values.items():
        with mistakes.collected():
            path = f"{field}.{accept.key_name(name)}"
            accept.known(path, value, name, known_rates, "a rate of any method", remedies=OF_GROUPS)
            rates.append((name, setting_of(known_rates[name])["check"](path, value)))
    mistakes.raise_all()
    return tuple(rates)


@accept.takes("a mapping of patterns, or a list of mappings")
def check_groups(field: str, value: object) -> tuple[GroupConfig, ...]:
    """Accept a mapping of patterns to settings, or a list of mappings with ``params``."""
    if isinstance(value, Mapping):
        by_pattern = ((pattern, f"{field}.{accept.key_name(pattern)}", group) for pattern, group in value.items())
        value = [
            {"params": [name], "name": name, **accept.mapping(at, group, _GROUP)} for name, at, group in by_pattern
        ]
    expected, remedy = "a mapping of patterns or a list", 'write {"*.qkv.weight": {"lr": 0.01}}'
    mistakes, groups = Mistakes(), list[GroupConfig]()
    for number, group in enumerate(accept.of_type(field, value, Sequence, expected, remedy)):
        with mistakes.collected():
            groups.append(group if isinstance(group, GroupConfig) else _group(field, number, group))
    names = set[str]()
    for number, group in enumerate(groups):
        if group.name in names:
            mistakes.add(config_error(f"{field}[{number}].name", group.name, "is given twice", "name each otherwise"))
        names.add(group.name)
    mistakes.raise_all()
    return tuple(groups)


def _group(field: str, number: int, group: object) -> GroupConfig:
    if not isinstance(group, Mapping) or "params" not in group:
        raise config_error(f"{field}[{number}]", group, "is not a group", 'write {"params": ["pattern"], "lr": 0.01}')
    name = accept.key_name(group.get("name", str(number)))
    path, params, method = f"{field}[{name}]", group["params"], group.get("method")
    mistakes = Mistakes()
    with mistakes.collected():
        params = accept.patterns(f"{path}.params", [params] if isinstance(params, str) else params)
    if method is not None:
        with mistakes.collected():
            method = check_method(f"{path}.method", method)
    rates: tuple[tuple[str, Any], ...] = ()
    with mistakes.collected():
        rates = _rates(path, {key: entry for key, entry in group.items() if key not in (*_NOT_RATES, "complete")})
    if method is not None and not mistakes.found:
        method_rates = [rate.name for rate in method_of(method).rates]
        for rate, value in rates:
            with mistakes.collected():
                accept.known(f"{path}.{rate}", value, rate, method_rates, f"a rate of {method}")
    mistakes.raise_all()
    return GroupConfig(name, params, method, rates, bool(group.get("complete", False)))


@accept.takes("a mapping of patterns")
def check_views(field: str, value: object) -> tuple[tuple[str, tuple[tuple[str, Any], ...]], ...]:
    """Accept a mapping of patterns to views; sizes are checked against the model later."""
    example = '{"*.qkv.weight": {"split": [8, 2, 2]}}'
    views = []
    for pattern, view in accept.pairs(field, value, example, "a mapping of patterns").items():
        try:
            entries = dict(view) if isinstance(view, (Mapping, tuple)) else None
        except (TypeError, ValueError):  # a tuple that is not of pairs
            entries = None
        if not isinstance(pattern, str) or not entries:
            raise config_error(f"{field}.{accept.key_name(pattern)}", view, "is no view", OF_A_VIEW)
        plain = ((key, tuple(entry) if isinstance(entry, list) else entry) for key, entry in entries.items())
        views.append((pattern, tuple(plain)))
    return tuple(views)


def named_groups(groups: object, model: nn.Module) -> object:
    """Replace groups of tensors, as ``torch.optim`` takes them, by groups of names; return other groups as they are.

    Raises a ConfigError about a tensor that is no parameter of `model`.
    """
    if groups is None or isinstance(groups, Mapping | str) or not isinstance(groups, Iterable):
        return groups
    names = {id(param): name for name, param in model.named_parameters()}
    by_name: list[Any] = []
    for number, group in enumerate(groups):
        params = group.get("params") if isinstance(group, Mapping) else None
        listed = [params] if isinstance(params, Tensor) or not isinstance(params, Iterable) else params
        tensors: list[Any] = [entry[1] if isinstance(entry, tuple) else entry for entry in listed]
        if isinstance(params, str) or not all(isinstance(tensor, Tensor) for tensor in tensors):
            by_name.append(group)
        elif unknown := [list(tensor.shape) for tensor in tensors if id(tensor) not in names]:
            raise config_error(
                f"groups[{number}].params", unknown[0], "is the shape of a tensor that is no parameter of the model",
                "give model.parameters() as they are when the optimizer is made",
            )  # fmt: skip
        elif patterns := tuple(glob.escape(names[id(tensor)]) for tensor in tensors):
            by_name.append({**group, "params": patterns, "complete": True})
    return by_name
