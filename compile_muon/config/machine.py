"""The setting ``machine``: a machine by its name, out of ``machines/`` or from a JSON file, and what it costs there."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from compile_muon.errors import config_error
from compile_muon.passes.costs import COLLECTIVES, Costs, Link, Protocol, Table

__all__ = ["READERS", "check_machine", "costs_for", "known_machines", "load_costs", "read_machine", "read_record"]

_FOLDER = Path(__file__).parent / "machines"
#: by type of device, where no machine is named
_DEFAULTS = {"cuda": "h100", "cpu": "cpu"}
#: fields that a file must have, and those that the planner reads (``compile_muon.planning.machine``) and nothing here
_REQUIRED = ("memory_bandwidth", "kernel_seconds", "rates", "links")
_PLANNED = (
    *("name", "device", "memory_bytes", "attention_fraction", "attention_rates"),
    *("function_seconds", "host_seconds", "late_seconds", "host_bandwidth", "disk_bandwidth", "sources"),
)

Reader = Callable[[str, object], Any]
C = TypeVar("C", bound=Costs)


def known_machines() -> list[str]:
    """Names that the setting takes."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def read_record(name_or_path: str | os.PathLike, field: str = "machine") -> object:
    """What the file of a machine holds: by name, or one that `python -m compile_muon calibrate` wrote.

    A name is what has neither a folder nor a suffix.

    Args:
        field: how the user calls the setting.
    Raises:
        ConfigError: no such machine or file, or a file that is not JSON.
    """
    given = os.fspath(name_or_path)
    path = Path(given)
    if path.name == given and not path.suffix:
        path = _FOLDER / f"{given}.json"
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        remedy = (
            f"use {', '.join(known_machines())}, or a file that `python -m compile_muon calibrate --out FILE` wrote"
        )
        raise config_error(field, given, "is neither a known machine nor a file", remedy) from None
    except (OSError, ValueError) as error:  # a folder, bytes that are not text, text that is not JSON
        problem = f"cannot be read: {error}"
        raise config_error(field, given, problem, "measure again: `python -m compile_muon calibrate`") from None


def load_costs(name_or_path: str | os.PathLike, field: str = "machine") -> Costs:
    """What a machine costs; arguments and errors as of :func:`read_record` and :func:`read_machine`."""
    record = read_record(name_or_path, field)
    return read_machine(Costs, READERS, record, f"{field} {os.fspath(name_or_path)}", passed_over=_PLANNED)


def costs_for(name_or_path: str | None, device: str) -> Costs:
    """Of the machine that is named, else of the one that decides for ranks on devices of this type."""
    return load_costs(name_or_path or _DEFAULTS.get(device, "h100"))


def check_machine(field: str, value: object) -> str:
    """The setting: a name or path of a machine that can be read."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise config_error(field, value, "is not the name or path of a machine", f"use one of {known_machines()}")
    load_costs(value, field)
    return os.fspath(value)


def read_machine(
    kind: type[C],
    readers: Mapping[str, Reader],
    record: object,
    where: str,
    *,
    required: Collection[str] = (),
    passed_over: Collection[str] = (),
) -> C:
    """A dataclass of what the file of a machine holds; optional fields may be left out.

    Args:
        kind: :class:`Costs`, or one that has more.
        readers: of its fields, each by name.
        where: how the user calls the file.
        required: fields that the file must have, beside those of :class:`Costs`.
        passed_over: those that it may have, and that nobody reads.
    Raises:
        ConfigError: naming the first field that is unknown, missing, of a wrong type or out of range.
    """
    found = _fields(f"{where}: ", record, readers, (*_REQUIRED, *required), passed_over)
    for number, protocol in enumerate(found.get("protocols", ())):
        if len(protocol.latencies) != len(found["links"]):
            problem = f"has {len(protocol.latencies)} of them for {len(found['links'])} links"
            at = f"{where}: protocols[{number}].latencies"
            raise config_error(at, list(protocol.latencies), problem, "give one for each link")
    return kind(**found)


# -------------------------------------------------------------------------------------------- reading what JSON holds


def _fields(
    prefix: str,
    record: object,
    readers: Mapping[str, Reader],
    required: Collection[str],
    passed_over: Collection[str] = (),
) -> dict[str, Any]:
    given = mapping(prefix.rstrip(":. "), record)
    known = [*readers, *passed_over]
    for name, value in given.items():
        if name not in known:
            raise config_error(f"{prefix}{name}", value, "is not a field", f"use some of {', '.join(known)}")
    for name in required:
        if name not in given:
            raise config_error(f"{prefix}{name}", None, "is missing", "add it")
    return {name: readers[name](f"{prefix}{name}", value) for name, value in given.items() if name in readers}


def mapping(path: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise config_error(path, value, f"must be an object, not {type(value).__name__}", "write {...}")
    return value


def _sequence(path: str, value: object) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise config_error(path, value, f"must be a list, not {type(value).__name__}", "write [...]")
    return value


def text(path: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise config_error(path, value, "is not a text", 'write "..."')
    return value


def number(path: str, value: object) -> float:
    """At least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise config_error(path, value, f"must be a number, not {type(value).__name__}", "write a plain number")
    if not 0 <= value < math.inf:
        raise config_error(path, value, "is negative or not finite", "use a finite number of at least 0")
    return float(value)


def _positive(path: str, value: object) -> float:
    if number(path, value) == 0:
        raise config_error(path, value, "is not positive", "use a number above 0")
    return number(path, value)


def fraction(path: str, value: object) -> float:
    if _positive(path, value) > 1:
        raise config_error(path, value, "is more than all", "use a fraction in (0, 1]")
    return _positive(path, value)


def count(path: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise config_error(path, value, "is not a positive integer", "use an integer of at least 1")
    return value


def _count_or_none(path: str, value: object) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else count(path, value)


def _flag(path: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise config_error(path, value, "is no truth value", "use true or false")
    return value


def _pair(path: str, value: object, entry: Reader = _positive) -> tuple[float, float]:
    pair = _sequence(path, value)
    if len(pair) != 2:
        raise config_error(path, value, "is not a pair", "write two numbers")
    return entry(f"{path}[0]", pair[0]), entry(f"{path}[1]", pair[1])


def _table(path: str, value: object) -> Table:
    table = tuple(_pair(f"{path}[{row}]", pair) for row, pair in enumerate(_sequence(path, value)))
    for row, ((low, _), (high, _)) in enumerate(zip(table, table[1:], strict=False)):
        if low >= high:
            raise config_error(f"{path}[{row + 1}]", high, f"comes after {low:g}", "sort by the first numbers")
    return table


def _fractions(path: str, value: object) -> Table:
    table = _table(path, value)
    for row, (_, part) in enumerate(table):
        fraction(f"{path}[{row}][1]", part)
    return table


def tables(path: str, value: object) -> dict[str, Table]:
    """By dtype."""
    found = {}
    for dtype, table in mapping(path, value).items():
        found[_dtype(path, dtype)] = _table(f"{path}.{dtype}", table)
        if not found[dtype]:
            raise config_error(f"{path}.{dtype}", table, "is empty", "give at least one pair, or leave it out")
    return found


def _rates(path: str, value: object) -> dict[str, Table]:
    found = tables(path, value)
    if not found:
        raise config_error(path, value, "is empty", "give the rate of one dtype at least")
    return found


def _starts(path: str, value: object) -> dict[str, float]:
    return {_dtype(path, dtype): _positive(f"{path}.{dtype}", one) for dtype, one in mapping(path, value).items()}


def _dtype(path: str, name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise config_error(f"{path}.{name}", name, "is not a dtype of torch", 'use names like "bfloat16"')
    return name


def _links(path: str, value: object) -> tuple[Link, ...]:
    found: list[Link] = []
    for row, record in enumerate(_sequence(path, value)):
        at = f"{path}[{row}]"
        link = Link(**_fields(f"{at}.", record, _LINK, ("within", "bandwidth", "latency")))
        if found and (found[-1].within is None or (link.within is not None and link.within % found[-1].within)):
            problem = "does not hold whole blocks of the link before"
            raise config_error(f"{at}.within", link.within, problem, "sort them")
        found.append(link)
    if not found or found[-1].within is not None:
        raise config_error(path, value, "has no link of all ranks", 'give the last one "within": null')
    return tuple(found)


def _protocols(path: str, value: object) -> tuple[Protocol, ...]:
    return tuple(
        Protocol(**_fields(f"{path}[{row}].", record, _PROTOCOL, ("name", "start_seconds", "latencies")))
        for row, record in enumerate(_sequence(path, value))
    )


def _latencies(path: str, value: object) -> tuple[float, ...]:
    return tuple(number(f"{path}[{level}]", latency) for level, latency in enumerate(_sequence(path, value)))


def _kinds(path: str, value: object) -> dict[str, tuple[float, float]]:
    found = {}
    for kind, pair in mapping(path, value).items():
        if kind not in COLLECTIVES:
            remedy = f"use some of {', '.join(COLLECTIVES)}"
            raise config_error(f"{path}.{kind}", pair, "is not a kind of collective", remedy)
        found[kind] = _pair(f"{path}.{kind}", pair, number)
    return found


_LINK: dict[str, Reader] = {
    "within": lambda path, value: None if value is None else count(path, value),
    "bandwidth": _positive,
    "latency": number,
    "fraction": fraction,
    "bandwidths": _table,
}
_PROTOCOL: dict[str, Reader] = {
    "name": text,
    "start_seconds": number,
    "latencies": _latencies,
    "fraction": fraction,
    "tree": _flag,
}
READERS: dict[str, Reader] = {
    "memory_bandwidth": _positive,
    "kernel_seconds": _positive,
    "rates": _rates,
    "links": _links,
    "memory_fraction": fraction,
    "product_starts": _starts,
    "rate_fractions": _fractions,
    "bandwidths": _table,
    "start_seconds": number,
    "protocols": _protocols,
    "collectives": _kinds,
    "cores": _count_or_none,
    "fill_entries": _count_or_none,
}
