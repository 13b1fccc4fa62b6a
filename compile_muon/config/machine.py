"""The setting ``machine``: a machine by its name, out of ``machines/`` or from a JSON file, and what it costs there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from compile_muon.config.checks import (
    check_boolean,
    check_choice,
    check_integer,
    check_mapping,
    check_real,
    check_share,
    taken,
    takes,
)
from compile_muon.errors import config_error
from compile_muon.passes.costs import COLLECTIVES, Costs, Link, Protocol, Table

__all__ = ["READERS", "check_machine", "costs_for", "known_machines", "load_costs", "read_machine", "read_record"]

_FOLDER = Path(__file__).parent / "machines"
#: fields that a file must have, and those that the planner reads (``compile_muon.planning.machine``) and nothing here
_REQUIRED = ("memory_bandwidth", "kernel_seconds", "rates", "links")
_PLANNED = (
    *("name", "device", "memory_bytes", "attention_fraction", "attention_rates"),
    *("function_seconds", "host_seconds", "late_seconds", "host_bandwidth", "disk_bandwidth", "sources"),
    *("host_memory_bandwidth", "architecture", "processors", "collective_processors"),
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
    return load_costs(name_or_path or ("cpu" if device == "cpu" else "h100"))


@takes(lambda: f"{taken(check_choice, allowed=known_machines())}, or a file")
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
    found = read_fields(f"{where}: ", record, readers, (*_REQUIRED, *required), passed_over)
    for number, protocol in enumerate(found.get("protocols", ())):
        if len(protocol.latencies) != len(found["links"]):
            problem = f"has {len(protocol.latencies)} of them for {len(found['links'])} links"
            at = f"{where}: protocols[{number}].latencies"
            raise config_error(at, list(protocol.latencies), problem, "give one for each link")
    return kind(**found)


# -------------------------------------------------------------------------------------------- reading what JSON holds


def read_fields(
    prefix: str,
    record: object,
    readers: Mapping[str, Reader],
    required: Collection[str] = (),
    passed_over: Collection[str] = (),
    problem: str = "is not a field",
) -> dict[str, Any]:
    given = check_mapping(prefix.rstrip(":. "), record)
    known = [*readers, *passed_over]
    for name, value in given.items():
        if name not in known:
            raise config_error(f"{prefix}{name}", value, problem, f"use some of {', '.join(known)}")
    for name in required:
        if name not in given:
            raise config_error(f"{prefix}{name}", None, "is missing", "add it")
    return {name: readers[name](f"{prefix}{name}", value) for name, value in given.items() if name in readers}


def _sequence(path: str, value: object) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise config_error(path, value, f"must be a list, not {type(value).__name__}", "write [...]")
    return value


def text(path: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise config_error(path, value, "is not a text", 'write "..."')
    return value


_positive = partial(check_real, positive=True)
count = partial(check_integer, low=1)
_count_or_none = partial(check_integer, low=0)


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
        check_share(f"{path}[{row}][1]", part)
    return table


def tables(path: str, value: object) -> dict[str, Table]:
    """By dtype."""
    found = {}
    for dtype, table in check_mapping(path, value).items():
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
    return {_dtype(path, dtype): _positive(f"{path}.{dtype}", x) for dtype, x in check_mapping(path, value).items()}


def _dtype(path: str, name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise config_error(f"{path}.{name}", name, "is not a dtype of torch", 'use names like "bfloat16"')
    return name


def _links(path: str, value: object) -> tuple[Link, ...]:
    found: list[Link] = []
    for row, record in enumerate(_sequence(path, value)):
        at = f"{path}[{row}]"
        link = Link(**read_fields(f"{at}.", record, _LINK, ("within", "bandwidth", "latency")))
        if found and (found[-1].within is None or (link.within is not None and link.within % found[-1].within)):
            problem = "does not hold whole blocks of the link before"
            raise config_error(f"{at}.within", link.within, problem, "sort them")
        found.append(link)
    if not found or found[-1].within is not None:
        raise config_error(path, value, "has no link of all ranks", 'give the last one "within": null')
    return tuple(found)


def _protocols(path: str, value: object) -> tuple[Protocol, ...]:
    return tuple(
        Protocol(**read_fields(f"{path}[{row}].", record, _PROTOCOL, ("name", "start_seconds", "latencies")))
        for row, record in enumerate(_sequence(path, value))
    )


def _latencies(path: str, value: object) -> tuple[float, ...]:
    return tuple(check_real(f"{path}[{level}]", latency) for level, latency in enumerate(_sequence(path, value)))


def _kinds(path: str, value: object) -> dict[str, tuple[float, float]]:
    readers = dict.fromkeys(COLLECTIVES, partial(_pair, entry=check_real))
    return read_fields(f"{path}.", value, readers, problem="is not a kind of collective")


_LINK: dict[str, Reader] = {
    "within": lambda path, value: None if value is None else count(path, value),
    "bandwidth": _positive,
    "latency": check_real,
    "fraction": check_share,
    "bandwidths": _table,
}
_PROTOCOL: dict[str, Reader] = {
    "name": text,
    "start_seconds": check_real,
    "latencies": _latencies,
    "fraction": check_share,
    "tree": check_boolean,
}
READERS: dict[str, Reader] = {
    "memory_bandwidth": _positive,
    "kernel_seconds": _positive,
    "rates": _rates,
    "links": _links,
    "memory_fraction": check_share,
    "product_starts": _starts,
    "rate_fractions": _fractions,
    "bandwidths": _table,
    "start_seconds": check_real,
    "protocols": _protocols,
    "collectives": _kinds,
    "cores": _count_or_none,
    "fill_entries": _count_or_none,
}
