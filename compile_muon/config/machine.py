"""The setting ``machine``: a machine by its name, out of ``machines/`` or from a JSON file, and what it costs there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
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
from compile_muon.kernels.gpu.tiles import load_tables
from compile_muon.passes.costs import COLLECTIVES, Costs, Link, Protocol, Table

__all__ = ["READERS", "check_machine", "costs_for", "known_machines", "load_as", "load_costs", "read_machine"]

_FOLDER = Path(__file__).parent / "machines"
#: fields that a file must have, though :class:`Costs` has defaults for them
_REQUIRED = ("memory_bandwidth", "kernel_seconds", "rates", "links")

_DEVICES = ("cuda", "cpu")
#: what the host does of a step
_HOST = ("graph", "parameter", "collective", "byte", "kernel", "product", "copy", "newton_schulz")

Reader = Callable[[str, object], Any]
C = TypeVar("C", bound=Costs)


def known_machines() -> list[str]:
    """Names that the setting takes."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def _read_record(name_or_path: str | os.PathLike, field: str) -> object:
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


def load_as(kind: type[C], name_or_path: str | os.PathLike, field: str) -> C:
    """A machine by its name, or from a JSON file; arguments and errors as of :func:`read_machine` and of its file."""
    return read_machine(kind, _read_record(name_or_path, field), f"{field} {os.fspath(name_or_path)}")


def load_costs(name_or_path: str | os.PathLike, field: str = "machine") -> Costs:
    """What a machine costs; see :func:`load_as`."""
    return load_as(Costs, name_or_path, field)


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


def read_machine(kind: type[C], record: object, where: str = "machine") -> C:
    """A dataclass of what the file of a machine holds; optional fields may be left out.

    Args:
        kind: :class:`Costs`, or one that has more; what only others have is not looked at.
        where: how the user calls the file.
    Raises:
        ConfigError: naming the first field that is unknown, missing, of a wrong type or out of range.
    """
    own = {field.name for field in fields(kind)}
    readers = {name: reader for name, reader in READERS.items() if name in own}
    passed_over = [name for name in READERS if name not in own]
    found = _fields(f"{where}: ", record, readers, (*_REQUIRED, *_without_default(kind)), passed_over)
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


def _without_default(kind: type) -> list[str]:
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


def _or_none(reader: Reader) -> Reader:
    return lambda path, value: None if value is None else reader(path, value)


def _sequence(path: str, value: object) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise config_error(path, value, f"must be a list, not {type(value).__name__}", "write [...]")
    return value


def _text(path: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise config_error(path, value, "is not a text", 'write "..."')
    return value


_positive = partial(check_real, positive=True)
_count = partial(check_integer, low=1)
_natural = partial(check_integer, low=0)


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


def _tables(path: str, value: object) -> dict[str, Table]:
    """By dtype."""
    found = {}
    for dtype, table in check_mapping(path, value).items():
        found[_dtype(path, dtype)] = _table(f"{path}.{dtype}", table)
        if not found[dtype]:
            raise config_error(f"{path}.{dtype}", table, "is empty", "give at least one pair, or leave it out")
    return found


def _rates(path: str, value: object) -> dict[str, Table]:
    found = _tables(path, value)
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
        link = Link(**_fields(f"{at}.", record, _LINK, _without_default(Link)))
        if found and (found[-1].within is None or (link.within is not None and link.within % found[-1].within)):
            problem = "does not hold whole blocks of the link before"
            raise config_error(f"{at}.within", link.within, problem, "sort them")
        found.append(link)
    if not found or found[-1].within is not None:
        raise config_error(path, value, "has no link of all ranks", 'give the last one "within": null')
    return tuple(found)


def _protocols(path: str, value: object) -> tuple[Protocol, ...]:
    return tuple(
        Protocol(**_fields(f"{path}[{row}].", record, _PROTOCOL, _without_default(Protocol)))
        for row, record in enumerate(_sequence(path, value))
    )


def _latencies(path: str, value: object) -> tuple[float, ...]:
    return tuple(check_real(f"{path}[{level}]", latency) for level, latency in enumerate(_sequence(path, value)))


def _kinds(path: str, value: object) -> dict[str, tuple[float, float]]:
    readers = dict.fromkeys(COLLECTIVES, partial(_pair, entry=check_real))
    return _fields(f"{path}.", value, readers, problem="is not a kind of collective")


def _host(path: str, value: object) -> dict[str, float]:
    return _fields(f"{path}.", value, dict.fromkeys(_HOST, check_real), problem="is nothing that is known")


def _device(path: str, value: object) -> str:
    if value not in _DEVICES:
        raise config_error(path, value, "is not a device", f"use one of {', '.join(map(repr, _DEVICES))}")
    return str(value)


def _architecture(path: str, value: object) -> str:
    if value != "" and value not in load_tables():
        remedy = f"use one of {', '.join(load_tables())}, or leave it out"
        raise config_error(path, value, "is none that kernels/gpu/tiles.json has", remedy)
    return str(value)


def _sources(path: str, value: object) -> dict[str, str]:
    return {name: _text(f"{path}.{name}", said) for name, said in check_mapping(path, value).items()}


_LINK: dict[str, Reader] = {
    "within": _or_none(_count),
    "bandwidth": _positive,
    "latency": check_real,
    "fraction": check_share,
    "bandwidths": _table,
}
_PROTOCOL: dict[str, Reader] = {
    "name": _text,
    "start_seconds": check_real,
    "latencies": _latencies,
    "fraction": check_share,
    "tree": check_boolean,
}
#: of the planner's fields, and of those of :class:`Costs`
READERS: dict[str, Reader] = {
    "name": _text,
    "device": _device,
    "memory_bytes": _count,
    "attention_fraction": _or_none(check_share),
    "attention_rates": _tables,
    "function_seconds": check_real,
    "host_seconds": _host,
    "late_seconds": check_real,
    "host_bandwidth": check_real,
    "host_memory_bandwidth": check_real,
    "disk_bandwidth": check_real,
    "architecture": _architecture,
    "processors": _natural,
    "collective_processors": _natural,
    "sources": _sources,
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
    "cores": _natural,
    "fill_entries": _natural,
}
