"""The setting ``machine``: costs of a machine, read from a file of ``machines/`` by name, or from a JSON file."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from compile_muon.config import accept
from compile_muon.errors import config_error
from compile_muon.kernels.gpu.tiles import load_tables
from compile_muon.passes.costs import COLLECTIVES, Costs, Link, Protocol, Table

_FOLDER = Path(__file__).parent / "machines"
#: fields that a file must have, although :class:`Costs` has defaults for them
_REQUIRED = ("memory_bandwidth", "kernel_seconds", "rates", "links")

Reader = Callable[[str, object], Any]
C = TypeVar("C", bound=Costs)

_positive = partial(accept.real, positive=True)
_share = partial(accept.real, positive=True, most=1.0)
_count = partial(accept.integer, low=1)
_natural = partial(accept.integer, low=0)


def known_machines() -> list[str]:
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_as(kind: type[C], name_or_path: str | os.PathLike, field: str) -> C:
    """Read a machine by its name, or from a JSON file that ``python -m compile_muon calibrate`` writes.

    A string without folder and suffix is a name. `kind` is as in :func:`read_machine`, `field` the setting as the user
    knows it. Raises a ConfigError if there is no such machine or file, or its content is wrong.
    """
    source = os.fspath(name_or_path)
    path = Path(source)
    if path.name == source and not path.suffix:
        path = _FOLDER / f"{source}.json"
    measure = "`python -m compile_muon calibrate --out FILE`"
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        remedy = f"use {', '.join(known_machines())}, or a file that {measure} wrote"
        raise config_error(field, source, "is neither a known machine nor a file", remedy) from None
    except (OSError, ValueError) as error:  # a folder, bytes that are not text, text that is not JSON
        raise config_error(field, source, f"cannot be read: {error}", f"measure again: {measure}") from None
    return read_machine(kind, record, f"{field} {source}")


def load_costs(name_or_path: str | os.PathLike, field: str = "machine") -> Costs:
    """Read the costs of a machine; see :func:`load_as`."""
    return load_as(Costs, name_or_path, field)


def costs_for(name_or_path: str | None, device: str) -> Costs:
    """Return the costs of the named machine; None stands for "cpu" on a `device` of type "cpu", else "h100"."""
    return load_costs(name_or_path or ("cpu" if device == "cpu" else "h100"))


@accept.takes(lambda: f"{accept.taken(accept.choice, allowed=known_machines())}, or a file")
def check_machine(field: str, value: object) -> str:
    """Accept the name or path of a machine whose file can be read."""
    path = os.fspath(accept.folder(field, value))
    load_costs(path, field)
    return path


def read_machine(kind: type[C], record: object, where: str = "machine") -> C:
    """Build a `kind` (:class:`Costs` or a subclass) from the content of a machine's file.

    Optional fields may be absent; fields that only other kinds have are skipped unread. `where` names the file to the
    user. Raises a ConfigError about the first field that is unknown, missing, of a wrong type or out of range.
    """
    kind_fields = {field.name for field in fields(kind)}
    readers = {name: reader if name in kind_fields else None for name, reader in READERS.items()}
    values = _fields(f"{where}: ", record, readers, (*_REQUIRED, *_without_default(kind)))
    for number, protocol in enumerate(values.get("protocols", ())):
        if len(protocol.latencies) != len(values["links"]):
            problem = f"has {len(protocol.latencies)} of them for {len(values['links'])} links"
            path = f"{where}: protocols[{number}].latencies"
            raise config_error(path, list(protocol.latencies), problem, "give one for each link")
    return kind(**values)


# -------------------------------------------------------------------------------------------- reading what JSON holds


def _fields(
    prefix: str, record: object, readers: Mapping[str, Reader | None], required: Collection[str] = ()
) -> dict[str, Any]:
    """Read the fields of `record`; a field whose reader is None is skipped."""
    entries = accept.mapping(prefix.rstrip(":. "), record)
    for name, value in entries.items():
        accept.known(f"{prefix}{name}", value, name, readers, "a field")
    for name in required:
        if name not in entries:
            raise accept.missing(f"{prefix}{name}")
    return {name: reader(f"{prefix}{name}", value) for name, value in entries.items() if (reader := readers[name])}


def _without_default(kind: type) -> list[str]:
    return [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]


def _record(kind: type, readers: Mapping[str, Reader], path: str, value: object) -> Any:
    return kind(**_fields(f"{path}.", value, readers, _without_default(kind)))


def _or_none(reader: Reader, path: str, value: object) -> Any:
    return None if value is None else reader(path, value)


def _list(entry: Reader, path: str, value: object) -> tuple[Any, ...]:
    rows = accept.of_type(path, value, Sequence, "a list", "write [...]")
    return tuple(entry(f"{path}[{row}]", each) for row, each in enumerate(rows))


def _pair(first: Reader, second: Reader, path: str, value: object) -> tuple[float, float]:
    pair = accept.two(path, value, "write [...] of two numbers")
    return first(f"{path}[0]", pair[0]), second(f"{path}[1]", pair[1])


def _table(path: str, value: object, entry: Reader = _positive) -> Table:
    table = _list(partial(_pair, _positive, entry), path, value)
    for row, ((low, _), (high, _)) in enumerate(zip(table, table[1:], strict=False)):
        if low >= high:
            raise config_error(f"{path}[{row + 1}]", high, f"comes after {low:g}", "sort by the first numbers")
    return table


def _filled(reader: Reader, path: str, value: object) -> Any:
    content = reader(path, value)
    if not content:
        raise config_error(path, value, "is empty", "give one at least, or leave it out")
    return content


def _by_dtype(entry: Reader, path: str, value: object) -> dict[str, Any]:
    for name in (entries := accept.mapping(path, value)):
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise config_error(f"{path}.{name}", name, "is not a dtype of torch", 'use names like "bfloat16"')
    return {name: entry(f"{path}.{name}", each) for name, each in entries.items()}


def _links(path: str, value: object) -> tuple[Link, ...]:
    links = _list(partial(_record, Link, _LINK), path, value)
    for row, (inner, link) in enumerate(zip(links, links[1:], strict=False), 1):
        if inner.within is None or (link.within is not None and link.within % inner.within):
            problem = "does not hold whole blocks of the link before"
            raise config_error(f"{path}[{row}].within", link.within, problem, "sort them")
    if not links or links[-1].within is not None:
        raise config_error(path, value, "has no link of all ranks", 'give the last one "within": null')
    return links


def _text(path: str, value: object) -> str:
    return cast(str, accept.of_type(path, value or None, str, "a text", 'write "..."'))


_tables = partial(_by_dtype, partial(_filled, _table))
_LINK: dict[str, Reader] = {
    "within": partial(_or_none, _count),
    "bandwidth": _positive,
    "latency": accept.real,
    "fraction": _share,
    "bandwidths": _table,
}
_PROTOCOL: dict[str, Reader] = {
    "name": _text,
    "start_seconds": accept.real,
    "latencies": partial(_list, accept.real),
    "fraction": _share,
    "tree": accept.boolean,
}
_KINDS: dict[str, Reader] = dict.fromkeys(COLLECTIVES, partial(_pair, accept.real, accept.real))
#: seconds of the host's work in a step, by kind of work
_HOST: dict[str, Reader] = dict.fromkeys(
    ("graph", "parameter", "collective", "byte", "kernel", "product", "copy", "newton_schulz"), accept.real
)


#: field -> reader, of the planner's machines and of :class:`Costs`
READERS: dict[str, Reader] = {
    "name": _text,
    "device": partial(accept.choice, allowed=("cuda", "cpu")),
    "architecture": lambda path, value: accept.choice(path, value, ("", *load_tables())),
    "memory_bytes": _count,
    "memory_fraction": _share,
    "attention_fraction": partial(_or_none, _share),
    "attention_rates": _tables,
    "rates": partial(_filled, _tables),
    "links": _links,
    "product_starts": partial(_by_dtype, _positive),
    "rate_fractions": partial(_table, entry=_share),
    "bandwidths": _table,
    "protocols": partial(_list, partial(_record, Protocol, _PROTOCOL)),
    "collectives": lambda path, value: _fields(f"{path}.", value, _KINDS),
    "host_seconds": lambda path, value: _fields(f"{path}.", value, _HOST),
    "sources": lambda path, value: {
        name: _text(f"{path}.{name}", said) for name, said in accept.mapping(path, value).items()
    },
    **dict.fromkeys(("memory_bandwidth", "kernel_seconds"), _positive),
    **dict.fromkeys(("processors", "collective_processors", "cores", "fill_entries"), _natural),
    **dict.fromkeys(("function_seconds", "late_seconds", "start_seconds"), accept.real),
    **dict.fromkeys(("host_bandwidth", "host_memory_bandwidth", "disk_bandwidth"), accept.real),
}
