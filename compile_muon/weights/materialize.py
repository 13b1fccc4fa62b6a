"""Values for a model that was built on the meta device, once it is sharded: read, or initialized module by module.

No rank ever holds the whole model: reading gives each its rows, and initializing makes the tensors of one module whole
at a time, runs the model's own code on them and keeps the rows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from compile_muon.engine.resident import start_refresh_by_owner
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import UnsupportedModelError, config_error, listed
from compile_muon.files.tensor_folder import reader_of
from compile_muon.model.full_parameters import ModuleSnapshot, gather_whole
from compile_muon.model.readers import sharded_params_of
from compile_muon.weights.full import check_alike, shared_params
from compile_muon.weights.pretrained import load_folder, tied_names
from compile_muon.weights.wire import Entry, Wire

Init = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class Values:
    """The source of a model's values."""

    meta: bool  # whether the model is on the meta device
    weights: str | os.PathLike | None  # a folder
    init: Init | None  # of one module's own parameters and buffers
    # Of the parameters before they are sharded, in which ``init`` draws the numbers it always draws.
    dtypes: Mapping[str, torch.dtype]

    @staticmethod
    def of(model: nn.Module, weights: str | os.PathLike | None, init: Callable[..., Any] | None) -> Values | None:
        """Check the source, by errors that name the argument or the buffer; None where the model has its values."""
        if weights is None and init is None:
            return None
        owner = getattr(init, "__self__", None)
        if isinstance(owner, nn.Module) and getattr(init, "__name__", "") in ("init_weights", "initialize_weights"):
            if (per_module := _hugging_face(owner)) is None:
                remedy = "give a function of one module, f(module), as nn.Module.apply takes it"
                raise config_error("init", init, "initializes all of a model at once", remedy)
            init = per_module
        meta = any(param.is_meta for param in model.parameters())
        if init is not None and not meta:
            raise config_error("init", init, "the model has values already", "build it under torch.device('meta')")
        if weights is not None:
            reader_of(Path(os.path.abspath(weights)))
            if meta and init is None:
                init = _hugging_face(model)
            lost = [f"{path}.{name}".lstrip(".") for path, m in model.named_modules() for name in _passing(m)]
            if lost and init is None:
                raise UnsupportedModelError(
                    f"{listed(lost)}: a buffer that is not persistent, so in no folder, and on the meta device; "
                    "give init=f as well, where f(module) computes it, or register it as persistent"
                )
        return Values(meta, weights, init, {name: param.dtype for name, param in model.named_parameters()})

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Give every parameter and buffer of the sharded ``model`` its values; collective. An ``init`` that does more
        than that is an UnsupportedModelError."""
        needing = [module for module in model.modules() if _passing(module)]
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[name] = torch.empty_like(buffer, device=device)
        if self.init is not None and self.meta:
            _initialize(model, self.init, device, None if self.weights is None else needing, self.dtypes)
        if self.weights is not None:
            load_folder(model, self.weights, strict=True, adapters=False)


def _hugging_face(model: nn.Module) -> Init | None:
    """Find what a Hugging Face model does to each module; of a model inside it, that model's own."""
    owners: dict[int, Any] = {}
    for outer in model.modules():  # outer ones come first
        if callable(getattr(outer, "_init_weights", None)):
            owners |= {id(inner): outer for inner in outer.modules()}
    if id(model) not in owners:
        return None
    return lambda module: owners.get(id(module), model)._init_weights(module)


def _passing(module: nn.Module) -> list[str]:
    """Name the module's own buffers on the meta device that are not persistent."""
    names = module._non_persistent_buffers_set
    return [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta and name in names]


@torch.no_grad()
def _initialize(
    model: nn.Module, init: Init, device: torch.device, only: list[nn.Module] | None, dtypes: Mapping[str, torch.dtype]
) -> None:
    """Call ``init`` for each module, or those of ``only``, with whole tensors of it alone, in ``dtypes``."""
    # Not by the names of state_dict(), which hooks of a model may change.
    sharded_params, group = shared_params(model)
    status = sharded_params[0].ledger.status
    wire = Wire(group, device, status)
    paths = {id(module): path for path, module in model.named_modules()}
    tied = tied_names(model)
    done: set[ShardedParam] = set()
    order: list[nn.Module] = []
    nn.Module.apply(model, order.append)  # children first
    modules = [m for m in dict.fromkeys(order) if only is None or any(m is each for each in only)]
    with status.at("the initialization of the model"):
        buffers = {f"{paths[id(m)]}.{n}": b for m in modules for n, b in m._buffers.items() if b is not None}
        check_alike(buffers, group)
        for module in modules:
            prefix = f"{paths[id(module)]}."
            values = _run(module, init, paths, device, dtypes)
            names = {sharded: prefix + name for name, sharded in sharded_params_of(module).items()}
            for sharded, value in values:
                # Hugging Face ties after it has initialized: what will be another's does not count.
                name = names.get(sharded, "").lstrip(".")
                if sharded in done and name and any(re.search(pattern, name) for pattern in tied):
                    continue
                done.add(sharded)
                wire.deal(Entry(sharded.param, sharded), value if wire.rank == 0 else None)
            for buffer in module._buffers.values():
                if buffer is not None:
                    wire.deal(Entry(buffer, None), buffer if wire.rank == 0 else None)
        start_refresh_by_owner(sharded_params)


class _Edits(TorchDispatchMode):
    """Notes which of some tensors on the meta device are written to, through ``.data`` and views too."""

    def __init__(self, tensors: Mapping[ShardedParam, Tensor]) -> None:
        super().__init__()
        self._keys = {tensor.untyped_storage()._cdata: key for key, tensor in tensors.items()}
        self.edited: set[ShardedParam] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            storages = [x.untyped_storage()._cdata for x in args if isinstance(x, Tensor) and x.is_meta]
            self.edited |= {self._keys[storage] for storage in storages if storage in self._keys}
        return func(*args, **(kwargs or {}))


def _run(
    module: nn.Module, init: Init, paths: dict[int, str], device: torch.device, dtypes: Mapping[str, torch.dtype]
) -> list[tuple[ShardedParam, Tensor]]:
    """Return whole values of the parameters that ``init(module)`` initializes, mostly those of ``module`` itself.

    Parameters of the modules inside it are on the meta device meanwhile. One that is written to after all (GPT-2's
    attention initializes its ``c_proj.weight`` anew) is made whole too, and ``init`` run again on the same random
    numbers.
    """
    snapshots = [ModuleSnapshot(paths[id(inner)], inner) for inner in module.modules()]
    sharded_params = dict.fromkeys(a for snapshot in snapshots for a in snapshot.sharded_params.values())
    direct_params = set(snapshots[0].sharded_params.values())
    whole_params = set(direct_params)
    begun = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    while True:
        # In the same order on every rank, which a set has not.
        others = [sharded for sharded in sharded_params if sharded in whole_params - direct_params]
        gathered = gather_whole([sharded for sharded in others if not sharded.spec.layout.model_parallel])
        gathered |= {a: cast(Any, a.param).full_tensor().detach() for a in others if a.spec.layout.model_parallel}
        unsharded: dict[ShardedParam, Any] = {}
        for sharded in sharded_params:
            shape, dtype = sharded.spec.layout.unsharded_shape, dtypes.get(sharded.name, sharded.param.dtype)
            empty = torch.empty(
                shape, dtype=dtype, device=device if sharded in whole_params - gathered.keys() else "meta"
            )
            values = gathered[sharded].to(dtype) if sharded in gathered else empty
            unsharded[sharded] = nn.Parameter(values, requires_grad=sharded.param.requires_grad)
        edits = _Edits({key: value.detach() for key, value in unsharded.items() if key not in whole_params})
        for snapshot in snapshots:
            snapshot.open(unsharded)
        try:
            with edits:
                init(module)
            problems = [
                problem
                for snapshot in snapshots
                for problem in (*snapshot.rearranged(), *snapshot.problems(whole_params))
            ]
            now = {
                a: snapshot.module._parameters.get(name)
                for snapshot in snapshots
                for name, a in snapshot.sharded_params.items()
            }
        finally:
            for snapshot in snapshots:
                snapshot.close()
        edits.edited |= {key for key, value in now.items() if key not in whole_params and value is not unsharded[key]}
        if not edits.edited:
            break
        whole_params |= edits.edited
        torch.set_rng_state(begun[0])
        if begun[1] is not None:
            torch.cuda.set_rng_state(begun[1], device)
    if problems:
        raise UnsupportedModelError("init: " + listed(problems))
    return [(a, value.detach()) for a, value in now.items() if a in whole_params and value is not None]
