"""Machine descriptions by name, out of this folder, or from a file."""

from __future__ import annotations

import json
import os
from pathlib import Path

from compile_muon.errors import config_error
from compile_muon.passes.errors import DescriptionError
from compile_muon.passes.machine import Machine

__all__ = ["check_machine", "known_machines", "load_machine", "machine_for"]

_FOLDER = Path(__file__).parent
#: by type of device, where no machine is named
_DEFAULTS = {"cuda": "h100", "cpu": "cpu"}


def known_machines() -> list[str]:
    """Names that :func:`load_machine` takes."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def load_machine(name_or_path: str | os.PathLike, field: str = "machine") -> Machine:
    """A machine by its name, or from a JSON file that `python -m compile_muon calibrate` wrote.

    A name is what has neither a folder nor a suffix.

    Args:
        field: how the user calls the setting.
    Raises:
        ConfigError: no such machine or file; a file that is not JSON; or naming the field that is wrong.
    """
    given = os.fspath(name_or_path)
    path = Path(given)
    if path.name == given and not path.suffix:
        path = _FOLDER / f"{given}.json"
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        remedy = (
            f"use {', '.join(known_machines())}, or a file that `python -m compile_muon calibrate --out FILE` wrote"
        )
        raise config_error(field, given, "is neither a known machine nor a file", remedy) from None
    except (OSError, ValueError) as error:  # a folder, bytes that are not text, text that is not JSON
        problem = f"cannot be read: {error}"
        raise config_error(field, given, problem, "measure again: `python -m compile_muon calibrate`") from None
    try:
        return Machine.from_json(record)
    except DescriptionError as error:
        raise config_error(f"{field} {given}: {error.field}", error.value, error.problem, error.remedy) from None


def machine_for(name_or_path: str | None, device: str) -> Machine:
    """The one that is named, else the one that decides for ranks on devices of this type."""
    return load_machine(name_or_path or _DEFAULTS.get(device, "h100"))


def check_machine(field: str, value: object) -> str:
    """The setting: a name or path of a machine that can be read."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise config_error(field, value, "is not the name or path of a machine", f"use one of {known_machines()}")
    load_machine(value, field)
    return os.fspath(value)
