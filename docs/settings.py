"""Tables of settings, from the code that reads them: `python docs/settings.py` renews them.

A page has a comment `<!-- settings: NAME -->`, a table, and `<!-- end of settings -->`. What a setting means is its
entry in the docstring of the dataclass that has it; which values it takes its check says; the default is the field's.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from compile_muon import MuonZero
from compile_muon.config import (
    ARGUMENTS,
    AdamWConfig,
    CompileConfig,
    Config,
    ExpertParallelConfig,
    MeshConfig,
    MuonConfig,
    NSConfig,
    OffloadConfig,
    ScheduleConfig,
    SequenceParallelConfig,
    ZeroConfig,
)
from compile_muon.config.checked import Checked
from compile_muon.config.groups import setting_of
from compile_muon.config.lr_schedule import SCHEDULES
from compile_muon.config.vocabulary import KEYS
from compile_muon.passes.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("docs/reference/configuration.md", "docs/how-to/offload.md")
END = "<!-- end of settings -->"
_BLOCK = re.compile(rf"(<!-- settings: ([\w -]+) -->\n\n).*?({END})", re.DOTALL)
_ENTRY = re.compile(r"^ {4}(\w+(?:, \w+)*): (.*(?:\n {8}.*)*)", re.MULTILINE)

#: name, default, values and meaning of a setting
Row = tuple[str, str, str, str]


# ------------------------------------------------------------------------------------------- what the code says of them


def meanings(kind: type) -> dict[str, str]:
    """The entries of a docstring, those that it inherits among them; what a class says itself counts."""
    found: dict[str, str] = {}
    for each in kind.__mro__:
        for names, text in _ENTRY.findall(inspect.cleandoc(each.__dict__.get("__doc__") or "")):
            for name in names.split(", "):
                found.setdefault(name, " ".join(text.split()))
    return found


def markdown(text: str, page: str, names: dict[str, str]) -> str:
    """A text of a docstring as a cell; the word ahead of a page in parentheses leads to the page.

    Args:
        page: that it is for, from which links lead.
        names: of fields, as the table has them.
    """

    def link(found: re.Match[str]) -> str:
        path, anchor = found["path"], found["anchor"] or ""
        there = "" if path == page else os.path.relpath(path, os.path.dirname(page))
        return f"[{found['word'] or Path(path).stem.replace('-', ' ')}]({there}{anchor})"

    def code(found: re.Match[str]) -> str:
        return f"`{names.get(found[1], found[1])}`"

    text = re.sub(r":\w+:`~?\.?([^`]+)`", lambda found: f"``{found[1].rpartition('.')[2]}``", text)
    text = re.sub(r"``[^`]+``|\"\w*\"", lambda found: found[0] if found[0][0] == "`" else f"``{found[0]}``", text)
    text = re.sub(r"``([^`]+)``", code, text)
    place = r"(?P<path>docs/[\w/-]+\.md)(?P<anchor>#[\w-]+)?"
    text = re.sub(rf"(?P<word>\S+) \({place}\)", link, text)
    text = re.sub(rf"(?P<word>)(?<![\w/]){place}", link, text)
    return text.removesuffix(".").replace("|", "\\|")


def rows(kind: type[Checked], page: str, say: Callable[[Any], str], name: Callable[[str], str]) -> Iterator[Row]:
    """Those of one dataclass, in the order of its fields, without what is a dataclass itself.

    Args:
        say: writes a default.
        name: of a field in the table.
    """
    said = meanings(kind)
    names = {f.name: name(f.name) for f in fields(kind)}
    for f in fields(kind):
        if isinstance(f.default, Checked) or "values" not in f.metadata:
            continue
        values = markdown(f.metadata["values"](), page, {})
        default = "has to be given" if f.metadata["needed"] else say(f.default)
        yield names[f.name], default, values, markdown(said[f.name], page, names)


def python(value: object) -> str:
    """A default as Python has it."""
    return as_json(value) if isinstance(value, str | float) else f"`{value!r}`"


def as_json(value: object) -> str:
    """A default as JSON has it."""
    return f"`{value:g}`" if isinstance(value, float) else f"`{json.dumps(value)}`"


# ------------------------------------------------------------------------------------------------------- the tables


def arguments(page: str, *kinds: type[Checked], more: tuple[str, ...] = ()) -> list[Row]:
    """Arguments of MuonZero that are fields of these dataclasses, and ``more``, which its own docstring describes."""
    found = []
    for kind in kinds:
        own = {field: argument for argument, (owner, field) in ARGUMENTS.items() if owner is kind}
        found += [row for row in rows(kind, page, python, lambda name, own=own: own.get(name, "")) if row[0]]
    said, signature = meanings(MuonZero), inspect.signature(MuonZero.__init__).parameters
    for name in more:
        found.append((name, python(signature[name].default), "", markdown(said[name], page, {})))
    return found


def places() -> list[Row]:
    """Keys of a config that are arguments under another name, or in another place than optimizer.params."""
    found = []
    for key, argument in KEYS.items():
        if argument in ARGUMENTS and argument != "rates" and key != f"optimizer.params.{argument}":
            owner, field = ARGUMENTS[argument]
            found.append((key, as_json(owner.__dataclass_fields__[field].default), "", f"`{argument}`"))
    return found


def keys(page: str, **kinds: type[Checked]) -> list[Row]:
    """Keys of sections that are dataclasses."""
    return [row for path, kind in kinds.items() for row in rows(kind, page, as_json, lambda n, p=path: f"{p}.{n}")]


def schedules(page: str) -> list[Row]:
    """Parameters of DeepSpeed's schedules; of one that several have, what the first says."""
    heads = [kind.rate_key for kind in SCHEDULES.values() if kind.rate_key]
    text = markdown(meanings(ScheduleConfig)["rate_key"], page, {})
    found = {name: (name, "", "", text) for name in heads}
    for kind in SCHEDULES.values():
        for row in rows(kind, page, as_json, str):
            if found.setdefault(row[0], row)[:3] != row[:3]:
                raise ValueError(f"{kind.__name__}.{row[0]} has another default or range than in another schedule")
    return list(found.values())


def rates_of_methods(page: str) -> list[Row]:
    """Rates that methods alone have; of several that say the same of one, in one row."""
    found: dict[Row, list[str]] = {}
    for method in METHODS:
        for rate in method.rates:
            if rate.meaning:
                row = rate.name, as_json(rate.default), setting_of(rate)["values"](), markdown(rate.meaning, page, {})
                found.setdefault(row, []).append(f'`"{method.name}"`')
    few = 4  # a row of more is one of nearly all
    return [
        (*row[:3], row[3] if len(methods) > few else f"{', '.join(methods)}: {row[3]}")
        for row, methods in found.items()
    ]


def tables(page: str) -> dict[str, tuple[str, list[Row]]]:
    """Of one page: name -> what the first column is called, and rows."""
    if page == "docs/how-to/offload.md":
        return {"offload": ("field of `offload_optimizer`", list(rows(OffloadConfig, page, as_json, str)))}
    objects = ("mesh", "norm_group", "weights", "init", "extensions")
    return {
        "parameters": ("argument", arguments(page, MuonConfig, AdamWConfig, Config)),
        "Newton-Schulz": ("argument", arguments(page, NSConfig)),
        "sharding and the step": ("argument", arguments(page, ZeroConfig)),
        "objects": ("argument", arguments(page, more=objects)),
        "keys of arguments": ("key", places()),
        "keys of sections": (
            "key",
            keys(
                page, compile=CompileConfig, mesh=MeshConfig, expert_parallel=ExpertParallelConfig,
                sequence_parallel=SequenceParallelConfig,
            ),
        ),
        "rates of methods": ("rate", rates_of_methods(page)),
        "schedules": ("parameter", schedules(page)),
    }  # fmt: skip


def written(head: str, made: list[Row]) -> str:
    """A table; a column that has nothing is left out."""
    columns = [(head, [f"`{row[0]}`" for row in made])]
    columns += [
        (title, [row[number] for row in made])
        for number, title in enumerate(("default", "values", "meaning"), 1)
        if any(row[number] for row in made)
    ]
    lines = [[title for title, _ in columns], ["---"] * len(columns)]
    lines += [list(cells) for cells in zip(*(cells for _, cells in columns), strict=True)]
    return "".join(f"|{'|'.join(cells)}|\n" if cells[0] == "---" else f"| {' | '.join(cells)} |\n" for cells in lines)


def renewed(text: str, page: str) -> str:
    """The page with its tables as the code has them.

    Raises:
        ValueError: it lacks one, or has one that is not known.
    """
    made = tables(page)
    there = [name for _, name, _ in _BLOCK.findall(text)]
    if sorted(there) != sorted(made):
        raise ValueError(f"{page} has tables of {', '.join(there)}, where {', '.join(made)} belong")
    return _BLOCK.sub(lambda found: found[1] + written(*made[found[2]]) + "\n" + found[3], text)


def main() -> int:
    """Renew the pages."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(renewed(path.read_text(encoding="utf-8"), page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
