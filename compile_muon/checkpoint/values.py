"""Python values as JSON and tensors: no pickle, so that a file can say what a value is, but run nothing.

Whatever JSON cannot tell apart or hold (tuples, keys that are no strings, inf and nan, huge numbers) is an object with
one reserved key.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor
from torch.distributed.tensor import DTensor

from compile_muon.errors import CheckpointError, shown
from compile_muon.files.disk import open_within, write_bytes
from compile_muon.files.tensors import is_storable, write_whole

_MARK = "!"
_PLAIN = 4096  # bits of a number that stands as it is


@dataclass
class Values:
    """Named values: of each its JSON, where a tensor is ``{"!": "tensor", "at": key}``, and its tensors by key, on the
    CPU, memory of their own. A key is a name and a number, for two paths may spell the same."""

    named: dict[str, tuple[Any, dict[str, Tensor]]] = field(default_factory=dict)

    def put(self, name: str, value: object) -> None:
        """Encode ``value`` under ``name``; a CheckpointError says where what is neither JSON nor a tensor is."""
        tensors: dict[str, Tensor] = {}
        self.named[name] = _encode(value, (name,), tensors), tensors

    def get(self, name: str) -> Any:
        """Decode the value put under ``name``, new objects each time; tensors are on the CPU."""
        try:
            return _decode(*self.named[name])
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{name}: is no value of a checkpoint ({type(error).__name__}: {error})") from error

    def under(self, prefix: str) -> dict[str, Any]:
        """Decode all values whose names begin with ``prefix``, by the rest of the name."""
        return {name.removeprefix(prefix): self.get(name) for name in self.named if name.startswith(prefix)}

    def __contains__(self, name: str) -> bool:
        return name in self.named

    def digests(self) -> dict[str, str]:
        """Map each name to a digest that is equal where values are, bit for bit."""
        digests = {}
        for name, (encoded, tensors) in self.named.items():
            text = json.dumps(encoded, sort_keys=True).encode()
            digests[name] = hashlib.sha256(len(text).to_bytes(8, "big") + text + save(tensors)).hexdigest()
        return digests

    def write(self, base: Path) -> list[Path]:
        """Write ``base.json``, and ``base.safetensors`` if there are tensors; return the files."""
        files = [base.with_suffix(".json")]
        encoded = {name: value for name, (value, _) in self.named.items()}
        write_bytes(files[0], json.dumps(encoded, allow_nan=False).encode())
        if tensors := {key: tensor for _, tensors in self.named.values() for key, tensor in tensors.items()}:
            files.append(base.with_suffix(".safetensors"))
            write_whole(files[1], tensors)
        return files

    @classmethod
    def read(cls, folder: Path, base: str, files: Container[str]) -> Values:
        """Read what :meth:`write` wrote as ``base`` in ``folder``, of which no others than ``files`` are opened."""
        name = f"{base}.json"
        try:
            with open_within(folder, name) as file:
                encoded = json.loads(file.read())
            tensors = defaultdict[str, dict[str, Tensor]](dict)
            if f"{base}.safetensors" in files:
                name = f"{base}.safetensors"
                with open_within(folder, name) as file:
                    for key, tensor in load(file.read()).items():
                        tensors[key.rpartition("/")[0]][key] = tensor
            if not isinstance(encoded, dict):
                raise ValueError(f"{base}.json: is no object")
            return cls({name: (value, tensors[name]) for name, value in encoded.items()})
        except CheckpointError:
            raise
        except Exception as error:  # SafetensorError is not an OSError
            raise CheckpointError(f"{folder / name}: {type(error).__name__}: {error}") from error


def _decode(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Decode a value, whose tensors are among ``tensors``."""
    if isinstance(encoded, list):
        return [_decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    kind = encoded.get(_MARK)
    if kind is None:
        return {key: _decode(item, tensors) for key, item in encoded.items()}
    if kind == "int":
        return int(encoded["value"], 16)
    if kind == "float":
        return float(encoded["value"])
    if kind == "tensor":
        return tensors[encoded["at"]].clone()
    if kind == "tuple":
        return tuple(_decode(item, tensors) for item in encoded["items"])
    pairs = {_decode(key, tensors): _decode(item, tensors) for key, item in encoded["items"]}
    return Counter(pairs) if kind == "counter" else pairs


def _encode(value: Any, where: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    """Encode ``value``, whose tensors join ``tensors``; ``where`` is the name and the path from there."""
    kind = type(value)
    if kind is int:  # the number of decimal digits that are read is limited
        return value if value.bit_length() < _PLAIN else {_MARK: "int", "value": hex(value)}
    if value is None or kind in (bool, str):
        return value
    if kind is float:
        return value if math.isfinite(value) else {_MARK: "float", "value": str(value)}
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and is_storable(value):
        key = f"{where[0]}/{len(tensors)}"
        tensors[key] = value.detach().to("cpu", copy=True).contiguous()
        return {_MARK: "tensor", "at": key}
    if kind in (list, tuple):
        items = [_encode(item, (*where, f"[{i}]"), tensors) for i, item in enumerate(value)]
        return items if kind is list else {_MARK: "tuple", "items": items}
    if kind in (dict, OrderedDict, defaultdict) and all(type(key) is str and key != _MARK for key in value):
        return {key: _encode(item, (*where, f".{key}"), tensors) for key, item in value.items()}
    if kind in (dict, OrderedDict, defaultdict, Counter):
        pairs = [
            [_encode(key, (*where, ", a key"), tensors), _encode(item, (*where, f"[{key!r}]"), tensors)]
            for key, item in value.items()
        ]
        return {_MARK: "counter" if kind is Counter else "dict", "items": pairs}
    what = f"{kind.__qualname__} ({value.layout}, {value.dtype})" if isinstance(value, Tensor) else kind.__qualname__
    raise CheckpointError(
        f"{''.join(where)} = {shown(value)}: a {what} is neither JSON nor a tensor that safetensors "
        "holds, and checkpoints hold nothing else; convert it, e.g. with float(), list(), full_tensor(), to_dense(), "
        "view_as_real() or torch.from_numpy()"
    )
