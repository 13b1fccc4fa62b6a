"""The settings ``offload`` (optimizer state in host memory or in a file) and ``offload_param`` (weights)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from compile_muon.config import accept
from compile_muon.config.checked import Checked, Mistakes, setting
from compile_muon.errors import ConfigError

#: DeepSpeed's keys about buffers that do not exist here
_NOT_READ = ("buffer_size", "max_in_cpu", "pipeline", "pipeline_read", "pipeline_write", "fast_init")


@accept.takes("a path")
def _check_path(field: str, value: object) -> str:
    return os.fspath(accept.folder(field, value))


@dataclass(frozen=True)
class OffloadConfig(Checked):
    """Placement of optimizer state between steps; names and meaning are DeepSpeed's ``offload_optimizer``.

    Attributes:
        device: "cpu" for host memory, "nvme" for a file; in a config also "none".
        nvme_path: folder on the disk; the file in it disappears with the process. "nvme" needs it.
        pin_memory: pinned host memory, from which a GPU copies without the CPU.
        buffer_count: how many buckets of state may be on the device, and in host memory for a disk.
        buffer_bytes: bytes of state in a bucket. Muon, AdamW and Lion split larger state of one parameter by rows;
            other matrix methods, masters of matrices, ``momentum_dtype`` and ``adamw_on`` need one larger bucket.
        ratio: share of the state that moves, by bytes.
        momentum: whether momenta move too; DeepSpeed calls False ``save_muon_momentum_buffer_in_memory``.
        masters: whether float32 weights move too, where the model computes in a lower dtype.
        adamw_on: where AdamW is computed; "cpu" takes moments in host memory
            (docs/how-to/offload.md#adamw-on-the-host).
    """

    device: str = setting("cpu", accept.choice, allowed=("cpu", "nvme"))
    nvme_path: str | None = setting(None, _check_path, none=True)
    pin_memory: bool = setting(True, accept.boolean)
    buffer_count: int = setting(4, accept.integer, low=2)
    buffer_bytes: int = setting(64 << 20, accept.integer, low=1)
    ratio: float = setting(1.0, accept.real, positive=True, most=1.0)
    momentum: bool = setting(True, accept.boolean)
    masters: bool = setting(False, accept.boolean)
    adamw_on: str = setting("device", accept.choice, allowed=("device", "cpu"))

    def contradictions(self) -> Iterator[ConfigError]:
        if self.device == "nvme" and self.nvme_path is None:
            problem = "is a file, and nvme_path says of no folder"
            yield self.contradiction("device", problem, 'give "nvme_path", or use "cpu"')


@accept.takes('"cpu", or fields of OffloadConfig')
def check_offload(field: str, value: object) -> OffloadConfig | None:
    """Accept an :class:`OffloadConfig`, a mapping of its fields, or its device."""
    if isinstance(value, OffloadConfig):
        return value
    section = accept.mapping(field, {"device": value} if isinstance(value, str) else value, '{"device": "cpu"}')
    section = _known(field, section, [f.name for f in fields(OffloadConfig)])
    if section.get("device", "none") in (None, "none"):
        return None
    mistakes = Mistakes()
    offload = OffloadConfig.read(section, mistakes, field)
    mistakes.raise_all()
    return offload


def _known(field: str, section: Mapping[Any, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return `section` without keys about buffers that do not exist here; refuse keys that are not among `names`."""
    entries = {key: entry for key, entry in section.items() if key not in _NOT_READ}
    for key, entry in entries.items():
        accept.known(f"{field}.{accept.key_name(key)}", entry, key, names, "a known key")
    return entries


@accept.takes('"cpu"')
def check_offload_param(field: str, value: object) -> str | None:
    """Accept the device, alone or in DeepSpeed's section. A GPU reads the memory, which is always pinned."""
    if not isinstance(value, Mapping):
        return accept.choice(field, value, allowed=("cpu",))
    device = _known(field, value, ("device", "pin_memory", "nvme_path", "buffer_count")).get("device", "none")
    return None if device in (None, "none") else accept.choice(field, device, allowed=("cpu",))
