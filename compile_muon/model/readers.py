"""Modules of a sharded model read whole weights, and their shards are guarded against ``nn.Module``.

The class of each module is swapped for a subclass, the stand-in. Its ``forward`` notes that the model is inside a
forward (:mod:`compile_muon.engine.forwards`). A property takes the place of each sharded parameter: it returns the
whole weight inside a forward and in compiled code, and the parameter elsewhere. The stand-in also overrides the methods
of ``nn.Module`` that replace, cast or load parameters: they either keep the shards or raise.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_muon.engine.dtensors import like_parameter, ordinary_tensors, user_attributes
from compile_muon.engine.forwards import Forwards
from compile_muon.engine.local import local_of
from compile_muon.engine.resident import keep_fresh
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import UnsupportedModelError
from compile_muon.passes.eager_traffic import traffic_of_gather
from compile_muon.passes.language.spec import decode_dtype, encode_dtype
from compile_muon.passes.markers import UNSHARD
from compile_muon.passes.torch_private import BEFORE_2_13, compiled_as_frame, never_a_frame, outside_transforms

_PREFIX = "_muon_zero_"
_OF_PYTORCH = ("_is_param", "_dynamo_", "__")
_LOADING = "_loading_whole_tensors"
_ORIGINAL = "_unsharded_class"
#: attribute of each module: the model's :class:`Forwards`
_FORWARDS = "_forwards_under_way"
#: methods of Transformers and timm that replace or add parameters
_REBUILDING = ["add_adapter", "prune_heads", "reset_classifier"]
_REBUILDING += ["resize_position_embeddings", "resize_token_embeddings"]


def sharded_param_key(name: str) -> str:
    """Return the key of a module's ``__dict__`` that holds its :class:`ShardedParam` of ``name``."""
    return _PREFIX + name


def sharded_params_of(module: nn.Module) -> dict[str, ShardedParam]:
    """Return the sharded parameters of ``module``, without those of its submodules, by local name."""
    return {key.removeprefix(_PREFIX): value for key, value in vars(module).items() if key.startswith(_PREFIX)}


def original_class(cls: type) -> type:
    """Return the class that a module had before its parameters were sharded."""
    return cls.__dict__.get(_ORIGINAL, cls)


# ------------------------------------------------------------------------------------------- errors


def _replaced(sharded: ShardedParam, how: str, value: object = None) -> UnsupportedModelError:
    """Return the error for a parameter that is deleted, or replaced by ``value``."""
    fits = isinstance(value, Tensor) and value.shape == sharded.spec.layout.unsharded_shape
    write = "write to it inside `with compile_muon.full_parameters(module, write=True):`, or " if fits else ""
    return UnsupportedModelError(
        f"{sharded.name}: is sharded and cannot be {how}; {write}change the model before MuonZero shards it"
    )


def _moved(name: str, what: str, before: object, after: object) -> UnsupportedModelError:
    if what == "dtype":
        remedy = f"cast the model before MuonZero shards it, or keep {before} shards and set param_dtype='{after}'"
    else:
        remedy = f"{'move' if what == 'device' else 'change'} the model before MuonZero shards it"
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


def check_kind(sharded: ShardedParam, tensor: Tensor) -> None:
    """Raise UnsupportedModelError if ``tensor``, a new local shard, has another dtype, device or shape than the old."""
    for what, before, after in (
        ("dtype", sharded.spec.dtype, encode_dtype(tensor.dtype)),
        ("device", sharded.graph_scalars.device, tensor.device),
        ("shape", list(sharded.spec.layout.local_shape), list(tensor.shape)),
    ):
        if before != after:
            raise _moved(sharded.name, what, before, after)


# ------------------------------------------------------------------------------------------ reading


def _given(sharded: ShardedParam, other: Tensor) -> Tensor:
    """Return ``other``, which ``torch.func.functional_call`` put in the parameter's place, whole in compute dtype."""
    if tuple(other.shape) != sharded.spec.layout.unsharded_shape:
        raise UnsupportedModelError(
            f"{sharded.name}: functional_call gives it a tensor of shape {list(other.shape)}; give a whole one, "
            f"{list(sharded.spec.layout.unsharded_shape)}, plain or a DTensor"
        )
    unsharded = other
    if isinstance(other, DTensor) and sharded.placed is None:
        if torch.compiler.is_compiling():
            torch._dynamo.graph_break()  # Dynamo would take the gradient of full_tensor() for equal on all ranks
        unsharded = other.full_tensor()
    return unsharded.to(decode_dtype(sharded.spec.compute_dtype))


def _note_attributes(sharded: ShardedParam) -> dict[str, Any]:
    """Return attributes that users set on the parameter (``weight.quant_state``), which the whole weight gets too."""
    all_attributes = user_attributes(sharded.param)
    attributes = {tag: value for tag, value in all_attributes.items() if not tag.startswith(_OF_PYTORCH)}
    public = tuple(tag for tag in attributes if not tag.startswith("_"))  # marks that libraries leave change no forward
    if public != sharded.tags:
        sharded.tags = public
    return attributes


def _reader(name: str, alone: bool) -> property:
    """Return the property by which a module reads a sharded parameter; ``alone``: this rank holds whole weights."""
    key = sharded_param_key(name)

    def read(module: nn.Module) -> Tensor:
        sharded: ShardedParam = module.__dict__[key]
        # Dynamo of torch 2.11 takes is_exporting() for true in every frame.
        if not (BEFORE_2_13 and torch.compiler.is_dynamo_compiling()) and torch.compiler.is_exporting():
            raise _stays_here(module, "exported by torch.export")
        # Comparing the two tensors would be a guard in Python for each weight. On one rank the frame reads the module's
        # tensor instead, and the frame's callable notices a replaced one.
        if alone and torch.compiler.is_compiling():
            param: Any = module._parameters[name]
        else:
            param = module.__dict__["_parameters"][name]
            if not torch.compiler.is_compiling() and not sharded.ledger.forwards.inside:
                _note_attributes(sharded)
                return param
            if param is not sharded.param:
                return _given(sharded, param)
        if torch.compiler.is_compiling():
            shard = param.to_local() if isinstance(param, DTensor) else param
            unsharded = UNSHARD(shard, sharded.momentum, sharded.graph_scalars, sharded.resident, sharded.text)
            if sharded.placed is not None:  # tested here: Dynamo would trace a call for each weight
                unsharded = sharded.as_read(unsharded)
            for tag in sharded.tags:
                if hasattr(param, tag):
                    setattr(unsharded, tag, getattr(param, tag))
            return unsharded
        if torch.jit.is_tracing():
            raise _stays_here(module, "traced by torch.jit")
        ledger = sharded.ledger
        evaluates = not torch.is_grad_enabled()
        with ledger.status.at("an eager read", "", [sharded.name]), ordinary_tensors(), outside_transforms():
            shard = local_of(param) if sharded.distributed else param
            check_kind(sharded, shard)
            if sharded.spec.layout.gathered:
                ledger.status.change(ledger.phase(evaluates=evaluates))
            keep_fresh(sharded)
            sharded.watch()
            unsharded = UNSHARD(shard, sharded.momentum, sharded.graph_scalars, sharded.resident, sharded.text)
            if sharded.spec.layout.gathered:
                ledger.count(traffic_of_gather(sharded.text))
                ledger.frame_log.note("forward", "", [sharded.name])
            ledger.forwards.note(sharded.name, unsharded)
            unsharded = sharded.as_read(unsharded)
            vars(unsharded).update(_note_attributes(sharded))
            return unsharded

    # Frames inline the read; called from eager code it is not worth a frame of its own.
    never_a_frame(read)
    return property(read)


# --------------------------------------------------------------------------------------- inside a forward


def _inside(cls: type, name: str) -> Callable[..., Any]:
    """Wrap the method ``name`` of ``cls`` for its stand-in: while it runs, the model is inside a forward."""
    method = getattr(cls, name)

    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return getattr(cls, name)(self, *args, **kwargs)
        with self.__dict__[_FORWARDS]:
            return getattr(cls, name)(self, *args, **kwargs)

    # The same frames are compiled as without the wrapper. Dynamo skips code of torch.nn's own modules and compiles
    # their caller, which is `run` here: it needs a code object of its own.
    if compiled_as_frame(method):
        never_a_frame(run, below=False)
    else:
        run.__code__ = run.__code__.replace(co_name=name)
    return functools.wraps(method)(run)


def _keeps_tokens(model: Any, new_num_tokens: Any = None, pad_to_multiple_of: Any = None, *_: Any, **__: Any) -> bool:
    """Return whether Transformers' ``resize_token_embeddings`` with these arguments keeps the size of the tables."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    rows, multiple = [len(table.weight) for table in tables if table is not None], pad_to_multiple_of or 1
    padded = math.ceil((new_num_tokens or rows[0]) / multiple) * multiple
    return new_num_tokens is pad_to_multiple_of is None or {*rows} == {padded}


def _rebuilding(cls: type, name: str) -> Callable[..., Any]:
    """Return the stand-in's method ``name``, one of ``_REBUILDING``: it raises unless it keeps the size."""

    @functools.wraps(getattr(cls, name))
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Scripts that load a tokenizer ask for the size that the tables have.
        if name == "resize_token_embeddings" and _keeps_tokens(self, *args, **kwargs):
            return getattr(cls, name)(self, *args, **kwargs)
        raise UnsupportedModelError(
            f"{name}: gives a sharded model other parameters; call it before MuonZero shards the model"
        )

    return run


def _bound(forwards: Forwards, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a module's own ``forward`` so that the model is inside a forward while it runs eagerly."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(*args, **kwargs)
        with forwards:
            return method(*args, **kwargs)

    never_a_frame(run, below=False)
    return run


def forward_methods(model: nn.Module, *names: str) -> None:
    """Have methods of ``model`` read whole weights, as its ``forward`` does: ``model.encode(x)``.

    The counterpart of FSDP2's ``register_fsdp_forward_method``. Methods that ``forward`` calls need not be named;
    compiled code reads whole weights everywhere.

    Args:
        model: a sharded model, or a module of one.
        names: names of its methods.
    Raises:
        UnsupportedModelError: the model is not sharded, or has no such method.
    """
    cls = type(model)
    if _FORWARDS not in model.__dict__:
        raise UnsupportedModelError(f"{cls.__name__}: is not sharded; call forward_methods behind MuonZero")
    for name in names:
        if not callable(getattr(cls, name, None)):
            raise UnsupportedModelError(f"{name}: {cls.__name__} has no method of that name")
    body: dict[str, Any] = {name: _inside(cls, name) for name in names}
    model.__class__ = type(cls.__name__, (cls,), body | _likeness(original_class(cls)))


# ------------------------------------------------------------------------------------------ loading


def _as_parameter(sharded: ShardedParam, value: Tensor) -> Tensor:
    """Return ``value`` of a state dict as the parameter's kind of tensor: a whole one is cut without communication, a
    DTensor on another mesh gathered first, and one of a wrong shape left for torch to report."""
    param: Any = sharded.param
    if not isinstance(param, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    if isinstance(value, DTensor):
        if value.device_mesh == param.device_mesh:
            return value  # copy_ brings it into our placement
        value = value.full_tensor()
    if value.shape != param.shape:
        return value
    layout = sharded.spec.layout
    value = value[layout.part]
    if layout.sharded:
        value = value[layout.local_rows]
    rows = value.detach().to(sharded.local.device)
    return like_parameter(param, rows)


# ------------------------------------------------------------------------------------- the swapped class


class _StandIn(nn.Module):
    """Ahead of a module's own class in the bases of its stand-in: new modules, copies and pickles."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # type(module)(...) builds a new module, which is not sharded.
        return original_class(cls)(*args, **kwargs) if _ORIGINAL in vars(cls) else super().__new__(cls)

    def __copy__(self) -> nn.Module:
        reduction: Any = super().__reduce_ex__(4)
        new = object.__new__(type(self))
        new.__setstate__(dict(reduction[2]))
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        inherited = getattr(super(), "__deepcopy__", None)
        if inherited is not None:
            return inherited(memo)
        memo[id(self)] = new = object.__new__(type(self))
        with ordinary_tensors():
            new.__setstate__(copy.deepcopy(super().__reduce_ex__(4)[2], memo))
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduction: Any = super().__reduce_ex__(4)
        state = {name: value for name, value in reduction[2].items() if name != _FORWARDS}
        return reduction[0], (original_class(type(self)),), state


class _ShardedStandIn(_StandIn):
    """The same of a module with sharded parameters, whose shards it guards."""

    _sharded_names: ClassVar[tuple[str, ...]] = ()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._sharded_names:
            self._guard(name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in self._sharded_names:
            raise _replaced(sharded_params_of(self)[name], "deleted")
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in self._sharded_names:
            self._guard(name, param)
        elif param is not None and (param.requires_grad or not isinstance(param, nn.Parameter)):
            owner = next(iter(sharded_params_of(self).values())).name
            raise UnsupportedModelError(
                f"{name}: is added beside {owner}, which is sharded, and no optimizer would train it; add "
                "parameters before MuonZero shards the model, or build a new MuonZero over a new model"
            )
        else:
            super().register_parameter(name, param)

    def _guard(self, name: str, value: Any) -> None:
        """Handle an assignment to a sharded parameter: copy in ``load_state_dict(assign=True)``, else raise."""
        sharded = sharded_params_of(self)[name]
        if value is sharded.param:
            return
        if self.__dict__.get(_LOADING) and isinstance(value, Tensor):
            with torch.no_grad():
                sharded.param.copy_(value)
            return
        raise _replaced(sharded, "replaced", value)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load whole tensors, cut to shards; parameters keep their identity."""
        sharded_params = sharded_params_of(self)

        def cut(_: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
            for name, sharded in sharded_params.items():
                value = state_dict.get(prefix + name)
                if isinstance(value, Tensor):
                    # An inference tensor can neither be written to nor become a DTensor.
                    value = value.clone() if value.is_inference() else value
                    state_dict[prefix + name] = _as_parameter(sharded, value)

        # Registered last, so that it sees the keys that the module's other hooks have renamed.
        hook = self.register_load_state_dict_pre_hook(cut)
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        self.__dict__[_LOADING] = True
        torch.__future__.set_swap_module_params_on_conversion(False)
        try:
            super()._load_from_state_dict(*args)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)
            del self.__dict__[_LOADING]
            hook.remove()
        # The refresh is collective: all ranks are here, but not all need read a weight next.
        for sharded in sharded_params.values():
            keep_fresh(sharded, list(sharded_params.values()))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with ordinary_tensors():  # PyTorch detaches no DTensor inside inference_mode
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Let ``fn`` change values of sharded parameters, not dtype or device. Even where it changes nothing
        (``model.to(...)``), torch would replace a DTensor's local tensor, on which hooks and compiled graphs rely."""
        sharded_params = sharded_params_of(self)
        for sharded in sharded_params.values():
            shard = sharded.local.detach()
            with torch.no_grad():
                result = fn(shard)
                check_kind(sharded, result)
                if result is not shard and result.data_ptr() != shard.data_ptr():
                    sharded.param.copy_(like_parameter(sharded.param, result))
        params = self.__dict__["_parameters"]
        self.__dict__["_parameters"] = {name: param for name, param in params.items() if name not in sharded_params}
        try:
            super()._apply(fn, recurse)
        finally:
            params.update(self.__dict__["_parameters"])
            self.__dict__["_parameters"] = params
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _stays_here(self, "pickled (torch.save(model), spawned processes)")

    def __prepare_scriptable__(self) -> nn.Module:
        raise _stays_here(self, "compiled by torch.jit")


def _likeness(cls: type) -> dict[str, Any]:
    """Return the class attributes by which a stand-in passes for ``cls``."""
    return {_ORIGINAL: cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}


def _stand_in(cls: type, names: tuple[str, ...], alone: bool) -> type:
    """Return the stand-in of ``cls``: a subclass with its name, while whose ``forward`` runs the model is inside one,
    with a reader for each parameter of ``names``; ``alone``: this rank holds whole weights."""
    body: dict[str, Any] = {name: _rebuilding(cls, name) for name in _REBUILDING if hasattr(cls, name)}
    if isinstance(inspect.getattr_static(cls, "forward"), types.FunctionType):
        body["forward"] = _inside(cls, "forward")
    body |= {name: _reader(name, alone) for name in names} | _likeness(cls)
    if not names:
        return type(cls.__name__, (_StandIn, cls), body)
    return type(cls.__name__, (_ShardedStandIn, cls), body | {"_sharded_names": names})


class _NotUnderDDP:
    """The model's ``_ddp_params_and_buffers_to_ignore``, which DDP iterates over before it changes the model."""

    def __iter__(self) -> Iterator[str]:
        raise UnsupportedModelError(
            "DistributedDataParallel: the model is sharded by MuonZero, which averages gradients over the ranks; "
            "leave the wrapper out"
        )


def install_readers(model: nn.Module, sharded_params: Mapping[nn.Parameter, ShardedParam]) -> None:
    """Put sharded parameters into ``model`` in place of its own, by which they are keyed, and swap its classes."""
    model.__dict__["_ddp_params_and_buffers_to_ignore"] = _NotUnderDDP()
    forwards = next(iter(sharded_params.values())).ledger.forwards
    # Equal modules share a class, and so their compiled code.
    cache: dict[tuple[type, tuple[str, ...], bool], type] = {}
    for module in model.modules():
        module_params = {name: param for name, param in module._parameters.items() if param is not None}
        for name, param in module_params.items():
            module._parameters[name] = sharded_params[param].param
            module.__dict__[sharded_param_key(name)] = sharded_params[param]
            _note_attributes(sharded_params[param])
        layouts = [sharded_params[param].spec.layout for param in module_params.values()]
        alone = all(layout.everyone.alone and not layout.model_parallel for layout in layouts)
        key = (original_class(type(module)), tuple(module_params), alone)
        if not module_params and getattr(key[0], "forward", None) is nn.Module.forward:
            continue  # a container such as nn.ModuleList has no forward
        if key not in cache:
            cache[key] = _stand_in(*key)
        module.__dict__[_FORWARDS] = forwards
        if callable(method := module.__dict__.get("forward")):
            module.__dict__["forward"] = _bound(forwards, method)
        module.__class__ = cache[key]
