"""Whole parameters for a while, at any ZeRO stage, to initialize, edit, read or save a sharded model."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compile_muon.agreement.compare import gather_objects
from compile_muon.engine.dtensors import local_tensor, ordinary_tensors, user_attributes
from compile_muon.engine.resident import buckets, start_refresh_by_owner
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import UnsupportedModelError
from compile_muon.model.readers import original_class, sharded_param_key, sharded_params_of
from compile_muon.model.sharding import broadcast
from compile_muon.passes.exchange.transfers import gather_pieces
from compile_muon.passes.fingerprint import fingerprint
from compile_muon.passes.language.spec import decode_dtype


@contextlib.contextmanager
def full_parameters(module: nn.Module, write: bool = False) -> Iterator[None]:
    """Hold every parameter inside ``module`` whole, plain and in master dtype: ``with full_parameters(module):``.

    Inside, the modules have their original classes and hold ordinary ``nn.Parameter`` under the usual names, tied ones
    still tied: init functions, ``module.apply``, edits in place, ``module.weight = nn.Parameter(new)``, eager forward,
    ``copy.deepcopy(module)`` and ``module.state_dict()`` (whole and plain) work as if nothing had been sharded. Only
    the parameters of ``module`` are gathered, so a large model can be treated module by module.

    With ``write=True`` the block's end broadcasts the values of the first rank, every rank keeps its rows, and the
    resident weights are refreshed. Modules may be taken out, moved, or put in without parameters, as PEFT's
    ``merge_and_unload()`` does. Without ``write`` nothing is written, and an edit is an error. An exception inside
    leaves everything as it was. Gradients of the sharded parameters and the optimizer's state are not touched;
    gradients that a backward inside leaves on the whole parameters are dropped with them.

    FSDP's ``summon_full_params`` writes by default, and each rank its own shard, so ranks that made different edits are
    left with a mixture. DeepSpeed's ``GatheredParameters(params, modifier_rank=0)`` broadcasts as this block does,
    takes parameters instead of a module, and drops edits where no rank is named. Both can leave values on the CPU or on
    one rank; this block cannot.

    Parameters that the user had cut before (experts, tensor slices) stay cut: they are the DTensors of then, of this
    rank's part.

    A block inside another over the same module changes nothing: the parameters are whole already, and the outer block
    decides whether edits are kept.

    Args:
        module: the model or any module in it; one without sharded parameters is left alone.
        write: whether edits are kept; the same on every rank. Entering is collective, and so is leaving with ``write``.
    Raises:
        UnsupportedModelError: a parameter was edited without ``write``; its shape, dtype, device or requires_grad
            changed; a parameter was added, removed or untied, or a module with parameters added. The sharded model is
            as before then.
    """
    snapshots = [ModuleSnapshot(path, inner) for path, inner in module.named_modules()]
    sharded_params = list(dict.fromkeys(a for snapshot in snapshots for a in snapshot.sharded_params.values()))
    for sharded in sharded_params:
        if sharded.name in sharded.ledger.unsharded:
            raise UnsupportedModelError(
                f"{sharded.name}: is whole already in an outer full_parameters block, over another module it is tied "
                "to; enter one block over a module that holds both"
            )
    with ordinary_tensors():
        gathered = gather_whole(sharded_params)
        params: dict[ShardedParam, Any] = {a: _parameter(a, gathered[a]) for a in sharded_params}
    fingerprints = [] if write else _fingerprints(sharded_params, params)
    for snapshot in snapshots:
        snapshot.open(params)
    for sharded in sharded_params:
        sharded.ledger.unsharded.add(sharded.name)
    try:
        yield
        problems = [problem for snapshot in snapshots for problem in snapshot.problems()] + _came(snapshots)
        for snapshot in snapshots:
            # Tied modules write one key; `_untied` reports those that hold different parameters by now.
            parameters = snapshot.module.__dict__["_parameters"]
            params |= {sharded: parameters.get(name) for name, sharded in snapshot.sharded_params.items()}
        problems = problems or _untied(snapshots, params)
    finally:
        children = [dict(snapshot.module._modules) for snapshot in snapshots]
        for snapshot in snapshots:
            snapshot.close()
        for sharded in sharded_params:
            sharded.ledger.unsharded.discard(sharded.name)
    if write:
        problems = _of_all_ranks(sharded_params, problems)
    elif not problems:
        problems = [
            f"{sharded.name}: was edited in a full_parameters block without write=True"
            for sharded, before, after in zip(
                sharded_params, fingerprints, _fingerprints(sharded_params, params), strict=True
            )
            if before != after
        ]
    if problems:
        raise UnsupportedModelError("; ".join(problems[:3]) + "; nothing was written")
    if write:
        for snapshot, new_children in zip(snapshots, children, strict=True):
            snapshot.module._modules.clear()
            snapshot.module._modules.update(new_children)
        _write(sharded_params, params)


class ModuleSnapshot:
    """The class, parameters and children of a module before a full_parameters block, to put back at its end."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.prefix = f"{path}." if path else ""
        self.module, self.cls = module, type(module)
        self.parameters, self.children = dict(module.__dict__["_parameters"]), dict(module._modules)
        self.sharded_params = sharded_params_of(module)
        self.trained = {name: sharded.param.requires_grad for name, sharded in self.sharded_params.items()}
        self.dtypes: dict[str, torch.dtype] = {}  # of the whole parameters that `open` put in

    def open(self, unsharded: dict[ShardedParam, Any]) -> None:
        """Put whole parameters into the module; `unsharded`: by sharded parameter."""
        self.module.__class__ = original_class(self.cls)
        for name, sharded in self.sharded_params.items():
            del self.module.__dict__[sharded_param_key(name)]
            self.module.__dict__["_parameters"][name] = unsharded[sharded]
            self.dtypes[name] = unsharded[sharded].dtype

    def close(self) -> None:
        """Restore the class, parameters and children."""
        self.module._modules.clear()
        self.module._modules.update(self.children)
        self.module.__class__ = self.cls
        if not self.sharded_params:
            return
        self.module.__dict__["_parameters"].clear()
        self.module.__dict__["_parameters"].update(self.parameters)
        for name, sharded in self.sharded_params.items():
            self.module.__dict__[sharded_param_key(name)] = sharded

    def problems(self, among: Container[ShardedParam] | None = None) -> list[str]:
        """List changes that cannot be written back; `among`: the parameters to check, None for all."""
        parameters = self.module.__dict__["_parameters"]
        added = [name for name in parameters if name not in self.parameters and parameters[name] is not None]
        problems = [f"{self.prefix}{name}: was added; add it before MuonZero" for name in added]
        for name, sharded in self.sharded_params.items():
            problem = self._problem(name, sharded, parameters.get(name))
            if problem and (among is None or sharded in among):
                problems.append(f"{self.prefix}{name}: {problem}")
        return problems

    def rearranged(self) -> list[str]:
        """List the child modules that were added, taken out or replaced."""
        modules = self.module._modules
        return [
            f"{self.prefix}{name}: a module was added, removed or replaced"
            for name in {**self.children, **modules}
            if self.children.get(name) is not modules.get(name)
        ]

    def _problem(self, name: str, sharded: ShardedParam, param: Tensor | None) -> str | None:
        spec = sharded.spec
        if not isinstance(param, nn.Parameter):
            return "was removed; remove it before MuonZero"
        if tuple(param.shape) not in (spec.layout.unsharded_shape, spec.layout.shape):
            return (
                f"its shape changed from {list(spec.layout.unsharded_shape)} to {list(param.shape)}; change it before "
                "MuonZero"
            )
        if param.dtype is not self.dtypes[name]:
            return f"its dtype changed from {str(self.dtypes[name]).removeprefix('torch.')} to {param.dtype}"
        if param.device != sharded.graph_scalars.device:
            return f"its device changed from {sharded.graph_scalars.device} to {param.device}"
        # A new nn.Parameter requires a gradient by default: in place of a frozen one that is no request to train it.
        if param.requires_grad != self.trained[name] and self.trained[name]:
            return "requires_grad changed; set it before MuonZero"
        return None


def _came(snapshots: Sequence[ModuleSnapshot]) -> list[str]:
    """List modules that came in with parameters, which are not sharded."""
    known_ids = {id(snapshot.module) for snapshot in snapshots}
    return [
        f"{snapshot.prefix}{name}: a module with parameters was added; add it before MuonZero"
        for snapshot in snapshots
        for name, child in snapshot.module._modules.items()
        if child is not None and id(child) not in known_ids and next(child.parameters(), None) is not None
    ]


def _untied(held: Sequence[ModuleSnapshot], unsharded: dict[ShardedParam, Any]) -> list[str]:
    return [
        f"{snapshot.prefix}{name}: is tied to {sharded.name}, but one of them was replaced alone"
        for snapshot in held
        for name, sharded in snapshot.sharded_params.items()
        if snapshot.module.__dict__["_parameters"][name] is not unsharded[sharded]
    ]


def _parameter(sharded: ShardedParam, full: Tensor) -> nn.Parameter:
    param = nn.Parameter(sharded.as_read(full), requires_grad=sharded.param.requires_grad)
    vars(param).update(user_attributes(sharded.param))
    return param


def _fingerprints(sharded_params: Sequence[ShardedParam], unsharded: dict[ShardedParam, Any]) -> list[int]:
    tensors = [local_tensor(unsharded[sharded]) for sharded in sharded_params]
    return fingerprint(tensors).tolist() if tensors else []


# -------------------------------------------------------------------------------------- collectives


@torch.no_grad()
def gather_whole(sharded_params: Sequence[ShardedParam]) -> dict[ShardedParam, Tensor]:
    """Return the whole values in master dtype, by sharded parameter, each in memory of its own."""
    wholes: dict[ShardedParam, Tensor] = {}
    for bucket in buckets(sharded_params, lambda spec: spec.dtype):
        shards = [sharded.local.detach() for sharded in bucket]
        if not bucket[0].spec.layout.sharded:
            wholes |= {sharded: shard.clone() for sharded, shard in zip(bucket, shards, strict=True)}
            continue
        # `dtype`, the master's, and not `compute_dtype`.
        specs = [sharded.spec for sharded in bucket]
        for sharded, x in zip(bucket, gather_pieces(shards, specs, decode_dtype(specs[0].dtype)), strict=True):
            # safetensors refuses tensors that share a storage, as parts of a bucket do.
            wholes[sharded] = x if x.untyped_storage().nbytes() == x.nbytes else x.clone()
    return wholes


def _of_all_ranks(sharded_params: Sequence[ShardedParam], problems: list[str]) -> list[str]:
    """Return ``problems``, or that another rank has some: the broadcasts of a rank that writes alone never end."""
    groups = dict.fromkeys(sharded.group for sharded in sharded_params)
    refused = [refuses for group in groups for refuses in gather_objects(bool(problems), group)]
    if any(refused) and not problems:
        return ["full_parameters: was refused by another rank, whose own error says why"]
    return problems


@torch.no_grad()
def _write(sharded_params: Sequence[ShardedParam], values: dict[ShardedParam, Any]) -> None:
    """Broadcast the values of the first rank that has the same part of the model, and copy this rank's rows."""
    for sharded in sharded_params:
        layout = sharded.spec.layout
        full = local_tensor(values[sharded]).detach().clone(memory_format=torch.contiguous_format).view(layout.shape)
        broadcast(full, layout)
        sharded.local.detach().copy_(full[layout.local_rows] if layout.sharded else full)
    start_refresh_by_owner(sharded_params)
