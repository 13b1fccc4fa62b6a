"""How a module reads its full weights, and what it does not let happen to its shards.

The class of a module with sharded parameters is swapped for a subclass of it, with one property per parameter and what
``nn.Module`` would otherwise do to the shards behind our back: replace them, cast them, load into them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_muon.agreement.status import READING
from compile_muon.engine.dtensor_parameter import of_frozen
from compile_muon.engine.dtensors import like_parameter, ordinary_tensors, user_attributes
from compile_muon.engine.gathered_copies import in_forward
from compile_muon.engine.local import local_of, of_trained
from compile_muon.engine.resident import keep_fresh
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import LedgerError, UnsupportedModelError
from compile_muon.passes.eager_traffic import traffic_of_gather
from compile_muon.passes.language.spec import decode_dtype, encode_dtype
from compile_muon.passes.markers import UNSHARD
from compile_muon.passes.torch_private import (
    BEFORE_2_13,
    never_a_frame,
    outside_transforms,
    transforming,
    untransformed,
)

__all__ = ["sharded_params_of", "check_kind", "install_readers", "original_class", "refuse_states_of_another"]

_PREFIX = "_muon_zero_"
_OF_PYTORCH = ("_is_param", "_dynamo_", "__")
_LOADING = "_loading_whole_tensors"
_ORIGINAL = "_unsharded_class"
_NOT_WHOLE = (
    "{name}: holds the rows of {owner} that it was saved by, and not the whole tensor; save on every rank, with "
    "compile_muon.save_pretrained, full_state_dict or a Checkpointer"
)
_REMEDY = "write to it inside `with compile_muon.full_parameters(module, write=True):`, or change the model before"


def sharded_param_key(name: str) -> str:
    """Where a module keeps its sharded parameter ``name``."""
    return _PREFIX + name


def sharded_params_of(module: nn.Module) -> dict[str, ShardedParam]:
    """The sharded parameters that ``module`` itself holds, by local name."""
    return {key.removeprefix(_PREFIX): value for key, value in vars(module).items() if key.startswith(_PREFIX)}


def original_class(cls: type) -> type:
    """The class a module had before its parameters were sharded."""
    return cls.__dict__.get(_ORIGINAL, cls)


# ------------------------------------------------------------------------------------------- errors


def _replaced(name: str, how: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name}: is sharded and cannot be {how}; {_REMEDY} MuonZero shards it")


def _moved(name: str, what: str, before: object, after: object) -> UnsupportedModelError:
    if what == "dtype":
        remedy = f"cast the model before MuonZero shards it, or keep {before} shards and set param_dtype='{after}'"
    else:
        remedy = "move the model before MuonZero shards it"
    return UnsupportedModelError(
        f"{name}: {what} changes from {before} to {after} after it was sharded, without its momentum, its resident "
        f"copy and the graphs compiled for it; {remedy}"
    )


def _stays_here(module: nn.Module, what: str) -> UnsupportedModelError:
    name = next(iter(sharded_params_of(module).values())).name
    return UnsupportedModelError(
        f"{name}: is sharded, and its module cannot be {what}; save weights with compile_muon.save_pretrained or "
        "full_state_dict and a whole run with a Checkpointer, or take copy.deepcopy(model) inside "
        "`with compile_muon.full_parameters(model):`, which is whole and plain"
    )


def _check_copies(sharded_params: Mapping[str, ShardedParam]) -> None:
    """Raise if a gathered copy of one of these was edited: what is saved or loaded now would not have it."""
    names = {sharded.name for sharded in sharded_params.values()}
    for gathered in {id(sharded.gathered): sharded.gathered for sharded in sharded_params.values()}.values():
        gathered.check(names, thoroughly=True)


def check_kind(sharded: ShardedParam, tensor: Tensor) -> None:
    """Raise if ``tensor``, which is to stand for the parameter, has another dtype or device than it was sharded with.

    Raises:
        UnsupportedModelError: naming the parameter and what changed.
    """
    dtype = decode_dtype(sharded.spec.dtype)
    if tensor.dtype is not dtype:
        raise _moved(sharded.name, "dtype", sharded.spec.dtype, encode_dtype(tensor.dtype))
    if tensor.device != sharded.hyper.device:
        raise _moved(sharded.name, "device", sharded.hyper.device, tensor.device)


# ------------------------------------------------------------------------------------------ reading


def _another(sharded: ShardedParam, other: Tensor) -> Tensor:
    """What a module reads where it holds ``other`` for a while: ``torch.func.functional_call``.

    It is whole on every rank, plain or a DTensor. Its gradient is averaged over the ranks as the parameter's, which it
    may be on its way to; a leaf's is the same on every rank then.

    Raises:
        UnsupportedModelError: it is no such tensor.
    """
    layout, dtype = sharded.spec.layout, decode_dtype(sharded.spec.compute_dtype)
    if tuple(other.shape) != layout.whole:
        raise UnsupportedModelError(
            f"{sharded.name}: functional_call gives it a tensor of shape {list(other.shape)}; give a whole one, "
            f"{list(layout.whole)}, plain or a DTensor"
        )
    if layout.parted or sharded.placed is not None:
        raise UnsupportedModelError(
            f"{sharded.name}: functional_call gives it another tensor, and this rank's model has only a part of it; "
            "write to the parameter, or leave expert and tensor parallelism out"
        )
    alone = layout.everyone.alone and layout.divisor == 1
    if torch.compiler.is_compiling() or not transforming():
        trained = other.requires_grad and torch.is_grad_enabled()
    elif isinstance(other, DTensor) or (untransformed(other).requires_grad and not alone):
        raise UnsupportedModelError(
            f"{sharded.name}: functional_call inside a torch.func transform gives it what autograd or a DTensor has "
            "yet to average; give whole tensors that require no gradient (`p.detach().full_tensor()`), or "
            "differentiate by torch.autograd.grad(create_graph=True)"
        )
    else:
        trained = False  # a transform's result is that of what this rank gives it
    if torch.compiler.is_compiling() and (isinstance(other, DTensor) or (trained and not alone)):
        torch._dynamo.graph_break()  # no backward graph of ours knows of its gradient
    whole = other.full_tensor() if isinstance(other, DTensor) else other
    if not trained or alone:
        return whole.to(dtype)
    spec = replace(sharded.spec, layout=replace(layout, stage=0), dtype=encode_dtype(whole.dtype), muon=None)
    nobodys = sharded.hyper.new_empty(0)
    return UNSHARD(whole, nobodys, sharded.hyper, None, replace(spec, master="", on_host=False).encode())


def _tagged(sharded: ShardedParam, whole: Tensor) -> Tensor:
    """``whole`` with the attributes that users set on the parameter: ``weight.quant_state``."""
    given = user_attributes(sharded.param)
    found = {tag: value for tag, value in given.items() if not tag.startswith(_OF_PYTORCH)}
    public = tuple(tag for tag in found if not tag.startswith("_"))  # marks that libraries leave change no forward
    if public != sharded.tags:
        sharded.tag(public)
    vars(whole).update(found)
    return whole


def _reader(name: str, alone: bool) -> property:
    """The property through which a module reads its full weight.

    Args:
        alone: the process has each weight whole. Then a compiled frame reads what the module holds, and the frame's
            callable notices another tensor there: comparing two tensors is a guard in Python for each weight.
    """
    key = sharded_param_key(name)

    def read(module: nn.Module) -> Tensor:
        sharded: ShardedParam = module.__dict__[key]
        if alone and torch.compiler.is_compiling():
            param: Any = module._parameters[name]
        else:
            param = module.__dict__["_parameters"][name]
            if param is not sharded.param:
                return _another(sharded, param)
        if torch.compiler.is_compiling():
            shard = param.to_local() if isinstance(param, DTensor) else param
            whole = UNSHARD(shard, sharded.momentum, sharded.hyper, sharded.resident, sharded.text)
            if sharded.placed is not None:  # asked here, since Dynamo would trace a call for each weight
                whole = sharded.as_read(whole)
            for tag in sharded.tags:
                if hasattr(param, tag):
                    setattr(whole, tag, getattr(param, tag))
            return whole
        if torch.jit.is_tracing():
            raise _stays_here(module, "traced by torch.jit")
        ledger = sharded.ledger
        inside, evaluates = in_forward(), not torch.is_grad_enabled()
        with ledger.status.at("an eager read", "", [sharded.name]), ordinary_tensors(), outside_transforms():
            shard = local_of(param) if sharded.distributed else param
            check_kind(sharded, shard)
            if sharded.spec.layout.gathered:
                ledger.status.change(ledger.phase(evaluates=evaluates) if inside else READING)
            keep_fresh(sharded)
            sharded.watch()
            whole = UNSHARD(shard, sharded.momentum, sharded.hyper, sharded.resident, sharded.text)
            if sharded.spec.layout.gathered:
                ledger.count(traffic_of_gather(sharded.text))
                ledger.frame_log.note("forward", "", [sharded.name])
            sharded.gathered.read(sharded.name, whole, inside=inside)
            if not inside:
                whole = of_frozen(whole, sharded.param)
                in_vain = partial(sharded.gathered.asked_in_vain, sharded.name)
                whole = whole if sharded.spec.layout.parted else of_trained(whole, sharded.param, in_vain)
            return _tagged(sharded, sharded.as_read(whole))

    # Inlined where a frame reads a weight; by itself, in eager code, it is none worth compiling.
    never_a_frame(read)
    return property(read)


class _InForward(dict[str, Any]):
    """``module._parameters`` inside an eager forward: what is taken by its name is whole, as an attribute is.

    Iteration gives what ``module.parameters()`` does outside: loops that clip may have a forward around them.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module.__dict__["_parameters"])
        self._module, self._ours = module, sharded_params_of(module).keys()

    def __getitem__(self, name: str) -> Any:
        return getattr(self._module, name) if name in self._ours else super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """As ``[]``."""
        return self[name] if name in self else default  # noqa: SIM401

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._module.__dict__["_parameters"][name] = value


# Up to torch 2.12 Dynamo takes what `module.__dict__` has for the attribute of that name: a property that reads what it
# stands for would be traced without end.
_TABLE = "_parameters_held" if BEFORE_2_13 else "_parameters"


def _table(module: nn.Module) -> dict[str, Any]:
    """``module._parameters``, which compiled frames look into with each attribute that is no parameter's."""
    held: dict[str, Any] = module.__dict__[_TABLE]
    return held if torch.compiler.is_compiling() or not in_forward() else _InForward(module)


def _keep(module: nn.Module, held: dict[str, Any]) -> None:
    module.__dict__["_parameters"] = module.__dict__[_TABLE] = held


# ------------------------------------------------------------------------------------------ loading


def _other_shard(sharded: ShardedParam, value: Tensor) -> str | None:
    """Whose rows ``value`` of a state dict holds, if that is neither the whole nor what this rank has of it.

    A state dict that one rank saved has that rank's rows under the names of whole tensors. A DTensor brings the place
    it was saved at in its mesh (torch 2.13 takes mesh and rows for ours); of a plain tensor the shape tells.
    """
    if not isinstance(value, DTensor):
        return sharded.spec.layout.owner_of(tuple(value.shape))
    ours = isinstance(sharded.param, DTensor) and sharded.param.device_mesh == value.device_mesh
    owner_place = _place_of_another(value, gathered=not ours)
    return None if owner_place is None else f"rank {owner_place}"


def _place_of_another(value: DTensor, *, gathered: bool = False) -> str | None:
    """The place in its mesh that a DTensor's rows belong to, if it is not this rank's: it was saved by another one.

    Args:
        gathered: whether it is going to be, by all ranks of its mesh; then all have the same answer, which is
            collective.
    """
    mesh = value.device_mesh
    if all(placement.is_replicate() for placement in value.placements):
        return None
    saved = mesh.get_coordinate()
    here = (mesh.mesh == (dist.get_rank() if dist.is_initialized() else 0)).nonzero().tolist()
    owner = f"{'?' if saved is None else ', '.join(map(str, saved))} of {mesh.size()}"
    try:
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim)]
    except RuntimeError:  # unpickled where there is no such group
        return owner
    if any(group.size() != mesh.size(dim) for dim, group in enumerate(groups)):
        return owner
    other = saved is None or here != [list(saved)]
    if gathered:  # nobody may do that alone
        flag = torch.tensor([other], dtype=torch.int32, device=mesh.device_type)
        for group in groups:
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
        other = bool(flag.item())
    return owner if other else None


def refuse_states_of_another(state_dict: Mapping[str, Any]) -> None:
    """Refuse an optimizer's state dict that another rank saved.

    Raises:
        LedgerError: it is one.
    """
    for slot, value in (pair for slots in state_dict["state"].values() for pair in slots.items()):
        if isinstance(value, DTensor) and (owner := _place_of_another(value)) is not None:
            raise LedgerError(
                f"{slot}: holds the rows of rank {owner} that it was saved by, and not this rank's; save with a "
                "Checkpointer, or load on each rank what it saved"
            )


def _as_parameter(sharded: ShardedParam, value: Tensor) -> Tensor:
    """``value`` of a state dict as the kind of tensor the parameter is; a whole one is cut, which sends nothing.

    Args:
        value: whole and plain, or a DTensor; a shape that does not fit is left for torch to report.
    """
    param: Any = sharded.param
    if not isinstance(param, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        if value.device_mesh == param.device_mesh:
            return value  # copy_ brings it into our placement
        value = value.full_tensor()
    if param.ndim == 0 and value.shape == (1,):  # as torch does for scalars of old
        value = value[0]
    if value.shape != param.shape:
        return value
    layout = sharded.spec.layout
    value = value[layout.part]
    if layout.sharded:
        value = value[layout.local_rows]
    rows = value.detach().to(sharded.local.device)
    return like_parameter(param, rows)


def _load(cls: Any, module: nn.Module, args: tuple[Any, ...]) -> None:
    """``_load_from_state_dict`` of ``cls``, with whole tensors cut and ours kept where torch would replace them."""
    sharded_params = sharded_params_of(module)
    _check_copies(sharded_params)

    def cut(_: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, sharded in sharded_params.items():
            value = state_dict.get(prefix + name)
            if not isinstance(value, Tensor):
                continue
            value = value.clone() if value.is_inference() else value  # which nobody may change, nor make a DTensor of
            owner = _other_shard(sharded, value)
            if owner is None:
                state_dict[prefix + name] = _as_parameter(sharded, value)
                continue
            # Among the messages that torch raises at the end.
            rest[-1].append(_NOT_WHOLE.format(name=prefix + name, owner=owner))
            if isinstance(value, DTensor):
                state_dict[prefix + name] = sharded.param

    # The last of the module's hooks, so that it sees the keys as others have renamed them.
    hook = module.register_load_state_dict_pre_hook(cut)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    module.__dict__[_LOADING] = True
    torch.__future__.set_swap_module_params_on_conversion(False)
    try:
        super(cls, module)._load_from_state_dict(*args)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        del module.__dict__[_LOADING]
        hook.remove()
    # Here, where every rank is, and not where one of them happens to read a weight next.
    for sharded in sharded_params.values():
        keep_fresh(sharded, list(sharded_params.values()))


# ---------------------------------------------------------------------------------------- conversion


def _apply(cls: Any, module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool) -> None:
    """``_apply`` of ``cls``; to sharded parameters new values may come of it, and no other dtype or device.

    torch would exchange what is inside a DTensor, so that hooks and compiled graphs lose it, even where ``fn`` changes
    nothing: ``model.to(device)`` of a trainer.
    """
    sharded_params = sharded_params_of(module)
    for sharded in sharded_params.values():
        shard = sharded.local.detach()
        with torch.no_grad():
            result = fn(shard)
            check_kind(sharded, result)
            if result is not shard and result.shape == shard.shape and result.data_ptr() != shard.data_ptr():
                sharded.param.copy_(like_parameter(sharded.param, result))
    held = module.__dict__["_parameters"]
    module.__dict__["_parameters"] = {name: param for name, param in held.items() if name not in sharded_params}
    try:
        super(cls, module)._apply(fn, recurse)
    finally:
        held.update(module.__dict__["_parameters"])
        module.__dict__["_parameters"] = held


# ------------------------------------------------------------------------------------- the swapped class


def _guard(module: nn.Module, name: str, value: Any) -> None:
    """Something is assigned to the name of a sharded parameter."""
    sharded = sharded_params_of(module)[name]
    if value is sharded.param:
        return
    if sharded.gathered.gave(sharded.name, value):  # module.weight = module.weight
        return sharded.gathered.check({sharded.name}, thoroughly=True)
    if module.__dict__.get(_LOADING) and isinstance(value, Tensor):  # load_state_dict(assign=True)
        with torch.no_grad():
            sharded.param.copy_(value)
        return
    raise _replaced(sharded.name, "replaced")


def _put_back(module: nn.Module) -> None:
    """Parametrizations of old (weight_norm, prune) take a parameter out of the dictionary itself."""
    sharded_params = sharded_params_of(module)
    table = module.__dict__["_parameters"]
    missing = [name for name in sharded_params if name not in table]
    if missing:
        others = {name: param for name, param in table.items() if name not in sharded_params}
        table.clear()
        table.update({name: sharded.param for name, sharded in sharded_params.items()} | others)
        raise _replaced(sharded_params[missing[0]].name, "taken out of its module")


def _swapped(cls: type, names: tuple[str, ...], unseen: bool, alone: bool) -> type:
    """``cls`` with a reader for each of ``names``, and guards.

    Args:
        alone: as for :func:`_reader`.
        unseen: nothing tells whether a parameter is read past its reader, as it does of a shard.
    """

    def __new__(kind: type, *args: Any, **kwargs: Any) -> nn.Module:
        # type(module)(...) makes another model, which nobody has sharded.
        return cls(*args, **kwargs) if kind is swapped else super(swapped, kind).__new__(kind)

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:
        if name in names:
            _guard(self, name, value)
        else:
            super(swapped, self).__setattr__(name, value)

    def __delattr__(self: nn.Module, name: str) -> None:
        if name in names:
            raise _replaced(sharded_params_of(self)[name].name, "deleted")
        super(swapped, self).__delattr__(name)

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        _put_back(self)
        if name in names:
            _guard(self, name, param)
        elif param is not None and (param.requires_grad or not isinstance(param, nn.Parameter)):
            owner = next(iter(sharded_params_of(self).values())).name
            raise UnsupportedModelError(
                f"{name}: is added beside {owner}, which is sharded, and no optimizer would train it; add parameters "
                "before MuonZero shards the model, or build a new MuonZero over a new model"
            )
        else:
            super(swapped, self).register_parameter(name, param)

    def _load_from_state_dict(self: nn.Module, *args: Any) -> None:
        _load(swapped, self, args)

    def _save_to_state_dict(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        if not keep_vars:  # who wants the parameters themselves may not be about to save them, nor on all ranks
            _check_copies(sharded_params_of(self))
        with ordinary_tensors():  # PyTorch detaches no DTensor inside inference_mode
            super(swapped, self)._save_to_state_dict(destination, prefix, keep_vars)

    def apply_(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        _apply(swapped, self, fn, recurse)
        return self

    def __copy__(self: nn.Module) -> nn.Module:
        new = object.__new__(swapped)
        new.__setstate__(dict(super(swapped, self).__reduce_ex__(4)[2]))
        return new

    def __deepcopy__(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        inherited = getattr(super(swapped, self), "__deepcopy__", None)
        if inherited is not None:
            return inherited(memo)
        memo[id(self)] = new = object.__new__(swapped)
        with ordinary_tensors():
            new.__setstate__(copy.deepcopy(super(swapped, self).__reduce_ex__(4)[2], memo))
        return new

    def __reduce_ex__(self: nn.Module, protocol: Any) -> Any:
        raise _stays_here(self, "pickled (torch.save(model), spawned processes)")

    def __prepare_scriptable__(self: nn.Module) -> nn.Module:
        raise _stays_here(self, "compiled by torch.jit")

    body: dict[str, Any] = {name: _reader(name, alone) for name in names}
    if unseen:
        body["_parameters"] = property(_table, _keep)
    own: list[Any] = [__new__, __setattr__, __delattr__, register_parameter, _load_from_state_dict]
    own += [_save_to_state_dict, __copy__, __deepcopy__, __reduce_ex__, __prepare_scriptable__]
    body |= {function.__name__: function for function in own} | {"_apply": apply_}
    body |= {_ORIGINAL: cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    swapped: Any = type(cls.__name__, (cls,), body)
    return swapped


class _NotUnderDDP:
    """Stands where DDP looks for names to leave alone, before it does anything to the model."""

    def __iter__(self) -> Iterator[str]:
        raise UnsupportedModelError(
            "DistributedDataParallel: the model is sharded by MuonZero, which averages gradients over the ranks; "
            "leave the wrapper out"
        )


def install_readers(model: nn.Module, sharded_params: Mapping[nn.Parameter, ShardedParam]) -> None:
    """Put the sharded parameters into ``model``, and readers of the full weights in front of them.

    Args:
        sharded_params: by the parameter that the model still holds.
    """
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = _NotUnderDDP()
    # Equal modules share a class, and so their compiled code.
    cache: dict[tuple[type, tuple[str, ...], bool, bool], type] = {}
    for module in model.modules():
        own = {name: param for name, param in module._parameters.items() if param is not None}
        for name, param in own.items():
            module._parameters[name] = sharded_params[param].param
            module.__dict__[sharded_param_key(name)] = sharded_params[param]
            _tagged(sharded_params[param], torch.empty(0))
        if own:
            plain = (sharded_params[param] for param in own.values() if not sharded_params[param].distributed)
            unseen = any(not sharded.spec.layout.everyone.alone for sharded in plain)
            layouts = [sharded_params[param].spec.layout for param in own.values()]
            alone = all(layout.everyone.alone and not layout.parted for layout in layouts)
            key = (original_class(type(module)), tuple(own), unseen, alone)
            cache.setdefault(key, _swapped(*key))
            module.__class__ = cache[key]
            if unseen:
                _keep(module, module.__dict__["_parameters"])
