"""Whole parameters for a while, at any ZeRO stage: initialize, operate on, read or save what is sharded."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from compile_muon.engine.dtensors import local_tensor, ordinary_tensors, user_attributes
from compile_muon.engine.resident import buckets, start_refresh_by_owner
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import UnsupportedModelError
from compile_muon.model.readers import original_class, sharded_param_key, sharded_params_of
from compile_muon.passes.exchange.transfers import gather_pieces
from compile_muon.passes.fingerprint import fingerprint
from compile_muon.passes.language.spec import decode_dtype

__all__ = ["Held", "full_parameters", "gather_whole"]

_c10d = torch.ops._c10d_functional


@contextlib.contextmanager
def full_parameters(module: nn.Module, write: bool = False) -> Iterator[None]:
    """``with full_parameters(module):`` every parameter inside ``module`` is whole, plain and in master dtype.

    Inside, the modules have their original classes and hold ordinary ``nn.Parameter`` under the usual names, tied ones
    still tied: init functions, ``module.apply``, edits in place, ``module.weight = nn.Parameter(new)``, eager forward,
    ``copy.deepcopy(module)`` and ``module.state_dict()`` (whole and plain) work as if nothing had been sharded. Only
    the parameters of ``module`` are gathered, so a large model can be treated module by module.

    On leaving with ``write=True`` the values of the first rank count: they are broadcast, every rank keeps its rows,
    and the resident weights are refreshed. Modules may then be taken out, moved, or put in without parameters, as
    PEFT's ``merge_and_unload()`` does. Without it nothing is written, and an edit is an error. An exception inside
    leaves everything as it was. Gradients of the sharded parameters and the optimizer's state are not touched;
    gradients that a backward inside leaves on the whole parameters are dropped with them.

    FSDP's ``summon_full_params`` writes by default, and each rank its own shard, so ranks that made different edits are
    left with a mixture. DeepSpeed's ``GatheredParameters(params, modifier_rank=0)`` broadcasts as we do, takes
    parameters instead of a module, and drops edits where no rank is named. Both can leave values on the CPU or on one
    rank; we cannot.

    What the user had cut before, experts or tensor slices, stays cut: such a parameter is the DTensor that it was then,
    of this rank's part.

    A block inside another over the same module changes nothing: the parameters are whole already, and the outer block
    decides whether edits are kept.

    Args:
        module: the model or any module in it; one without sharded parameters is left alone.
        write: whether edits are kept. The same on every rank: entering is collective, and so is leaving then.
    Raises:
        UnsupportedModelError: a parameter was edited without ``write``; its shape, dtype, device or requires_grad
            changed; a parameter was added, removed or untied, or a module with parameters added. The sharded model is
            as before then.
    """
    held = [Held(path, inner) for path, inner in module.named_modules()]
    sharded_params = list({id(sharded): sharded for each in held for sharded in each.sharded_params.values()}.values())
    for sharded in sharded_params:
        if sharded.name in sharded.ledger.whole:
            raise UnsupportedModelError(
                f"{sharded.name}: is whole already in an outer full_parameters block, over another module it is tied "
                "to; enter one block over a module that holds both"
            )
    with ordinary_tensors():
        gathered = gather_whole(sharded_params)
        whole: dict[int, Any] = {id(sharded): _parameter(sharded, gathered[id(sharded)]) for sharded in sharded_params}
    before = None if write else _fingerprints(sharded_params, whole)
    for each in held:
        each.open(whole)
    for sharded in sharded_params:
        sharded.ledger.whole.add(sharded.name)
    try:
        yield
        problems = [problem for each in held for problem in each.problems()] + _came(held)
        for each in held:
            # Whoever replaced one of several tied parameters replaced all: problems() saw to it.
            whole |= {
                id(sharded): each.module.__dict__["_parameters"].get(name)
                for name, sharded in each.sharded_params.items()
            }
        problems = problems or _untied(held, whole)
    finally:
        children = [dict(each.module._modules) for each in held]
        for each in held:
            each.close()
        for sharded in sharded_params:
            sharded.ledger.whole.discard(sharded.name)
    if write:
        problems = _of_all_ranks(sharded_params, problems)
    elif not problems:
        problems = _edited(sharded_params, before, _fingerprints(sharded_params, whole))
    if problems:
        raise UnsupportedModelError("; ".join(problems[:3]) + "; nothing was written")
    if write:
        for each, now in zip(held, children, strict=True):
            each.module._modules.clear()
            each.module._modules.update(now)
        _write(sharded_params, whole)


class Held:
    """A module as it was before: its class, and what it held; and the dtypes that it was then given."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.prefix = f"{path}." if path else ""
        self.module, self.cls = module, type(module)
        self.parameters, self.children = dict(module.__dict__["_parameters"]), dict(module._modules)
        self.sharded_params = sharded_params_of(module)
        self.trained = {name: sharded.param.requires_grad for name, sharded in self.sharded_params.items()}
        self.dtypes: dict[str, torch.dtype] = {}

    def open(self, whole: dict[int, Any]) -> None:
        """Let the module hold whole parameters."""
        self.module.__class__ = original_class(self.cls)
        for name, sharded in self.sharded_params.items():
            del self.module.__dict__[sharded_param_key(name)]
            self.module.__dict__["_parameters"][name] = whole[id(sharded)]
            self.dtypes[name] = whole[id(sharded)].dtype

    def close(self) -> None:
        """Everything as before."""
        self.module._modules.clear()
        self.module._modules.update(self.children)
        self.module.__class__ = self.cls
        if not self.sharded_params:
            return
        self.module.__dict__["_parameters"].clear()
        self.module.__dict__["_parameters"].update(self.parameters)
        for name, sharded in self.sharded_params.items():
            self.module.__dict__[sharded_param_key(name)] = sharded

    def problems(self, among: Container[int] | None = None) -> list[str]:
        """What happened inside that cannot be written back.

        Args:
            among: ids of the sharded parameters that are looked at; default: all.
        """
        now = self.module.__dict__["_parameters"]
        added = [name for name in now if name not in self.parameters and now[name] is not None]
        found = [f"{self.prefix}{name}: was added; add it before MuonZero" for name in added]
        for name, sharded in self.sharded_params.items():
            problem = self._problem(name, sharded, now.get(name))
            if problem and (among is None or id(sharded) in among):
                found.append(f"{self.prefix}{name}: {problem}")
        return found

    def rearranged(self) -> list[str]:
        """Modules that were added, taken out or replaced."""
        now = self.module._modules
        return [
            f"{self.prefix}{name}: a module was added, removed or replaced"
            for name in {**self.children, **now}
            if self.children.get(name) is not now.get(name)
        ]

    def _problem(self, name: str, sharded: ShardedParam, param: Tensor | None) -> str | None:
        spec = sharded.spec
        if not isinstance(param, nn.Parameter):
            return "was removed; remove it before MuonZero"
        if tuple(param.shape) not in (spec.layout.whole, spec.layout.shape):
            return f"its shape changed from {list(spec.layout.whole)} to {list(param.shape)}; change it before MuonZero"
        if param.dtype is not self.dtypes[name]:
            return f"its dtype changed from {str(self.dtypes[name]).removeprefix('torch.')} to {param.dtype}"
        if param.device != sharded.hyper.device:
            return f"its device changed from {sharded.hyper.device} to {param.device}"
        # A new Parameter requires a gradient unless told otherwise, which says nothing about what its maker wants.
        if param.requires_grad != self.trained[name] and self.trained[name]:
            return "requires_grad changed; set it before MuonZero"
        return None


def _came(held: Sequence[Held]) -> list[str]:
    """Modules with parameters that nobody has sharded."""
    known = {id(each.module) for each in held}
    return [
        f"{each.prefix}{name}: a module with parameters was added; add it before MuonZero"
        for each in held
        for name, child in each.module._modules.items()
        if child is not None and id(child) not in known and next(child.parameters(), None) is not None
    ]


def _untied(held: Sequence[Held], whole: dict[int, Any]) -> list[str]:
    return [
        f"{each.prefix}{name}: is tied to {sharded.name}, but one of them was replaced alone"
        for each in held
        for name, sharded in each.sharded_params.items()
        if each.module.__dict__["_parameters"][name] is not whole[id(sharded)]
    ]


def _parameter(sharded: ShardedParam, full: Tensor) -> nn.Parameter:
    param = nn.Parameter(sharded.as_read(full), requires_grad=sharded.param.requires_grad)
    vars(param).update(user_attributes(sharded.param))
    return param


def _edited(sharded_params: Sequence[ShardedParam], before: Tensor | None, after: Tensor | None) -> list[str]:
    if before is None or after is None:
        return []
    return [
        f"{sharded.name}: was edited in a full_parameters block without write=True"
        for sharded, edited in zip(sharded_params, (before != after).tolist(), strict=True)
        if edited
    ]


def _fingerprints(sharded_params: Sequence[ShardedParam], whole: dict[int, Any]) -> Tensor | None:
    return fingerprint([local_tensor(whole[id(sharded)]) for sharded in sharded_params]) if sharded_params else None


# -------------------------------------------------------------------------------------- collectives


@torch.no_grad()
def gather_whole(sharded_params: Sequence[ShardedParam]) -> dict[int, Tensor]:
    """The whole values in master dtype, in memory of their own, by the id of the sharded parameter."""
    found: dict[int, Tensor] = {}
    for bucket in buckets(sharded_params, lambda spec: spec.dtype):
        shards = [sharded.local.detach() for sharded in bucket]
        if not bucket[0].spec.layout.sharded:
            found |= {id(sharded): shard.clone() for sharded, shard in zip(bucket, shards, strict=True)}
            continue
        # Master values, not what the model computes with.
        specs = [sharded.spec for sharded in bucket]
        wholes = gather_pieces(shards, specs, decode_dtype(specs[0].dtype))
        # safetensors takes no part of a bucket.
        alone = [x if x.untyped_storage().nbytes() == x.nbytes else x.clone() for x in wholes]
        found |= {id(sharded): whole for sharded, whole in zip(bucket, alone, strict=True)}
    return found


def _of_all_ranks(sharded_params: Sequence[ShardedParam], problems: list[str]) -> list[str]:
    """No rank writes where another does not: the others would wait for it."""
    axes = {axis.group: a.hyper.device for a in sharded_params for axis in a.spec.layout.axes}
    bad = False
    for group, device in axes.items():
        flag = torch.tensor([len(problems) > 0], dtype=torch.int32, device=device)
        bad = bool(_c10d.wait_tensor(_c10d.all_reduce(flag, "max", group))) or bad
    if bad and not problems:
        return ["full_parameters: was refused by another rank, whose own error says why"]
    return problems


@torch.no_grad()
def _write(sharded_params: Sequence[ShardedParam], values: dict[int, Any]) -> None:
    """The values of the first rank that has the same part of the model, into the shards of all."""
    # Slices and copies along tensor may share a gather, but not what crosses tensor.
    kinds = [
        [sharded for sharded in sharded_params if sharded.spec.layout.joined is joined] for joined in (True, False)
    ]
    for bucket in (found for kind in kinds for found in buckets(kind, lambda spec: spec.dtype)):
        parts = [local_tensor(values[id(sharded)]).detach() for sharded in bucket]
        layout = bucket[0].spec.layout
        axes = [axis for axis in (layout.everyone, *([] if layout.joined else [layout.tensor])) if not axis.alone]
        if axes:
            flat = torch.cat([part.reshape(-1) for part in parts])
            for axis in axes:
                flat = _c10d.wait_tensor(_c10d.broadcast(flat, 0, axis.group))
            parts = list(flat.split([part.numel() for part in parts]))
        for sharded, part in zip(bucket, parts, strict=True):
            layout = sharded.spec.layout
            full = part.view(layout.shape)
            if layout.sharded:
                full = full[layout.local_rows]
            sharded.local.detach().copy_(full)
    start_refresh_by_owner(sharded_params)
