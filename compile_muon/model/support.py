"""Checks of what compile_muon can shard and orthogonalize; the rest is refused by name before anything is changed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from compile_muon.engine.dtensors import has_memory, local_tensor
from compile_muon.errors import UnsupportedModelError
from compile_muon.model.readers import sharded_params_of

_TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_supported(model: nn.Module, *, meta: bool = False, dtensors: bool = False) -> None:
    """Refuse a model that cannot be trained; nothing is changed. ``meta`` allows parameters without memory, which will
    get some; ``dtensors`` allows DTensors, which :func:`compile_muon.model.roles.roles_of` has checked."""
    check_modules(model)
    if torch.is_inference_mode_enabled():
        raise UnsupportedModelError(
            "model: is sharded inside torch.inference_mode(), whose tensors nobody can train; call MuonZero outside of "
            "it, and enter it to evaluate"
        )
    parameters = dict(model.named_parameters())
    for name, param in parameters.items():
        _check_parameter(name, param, meta=meta, dtensors=dtensors)
    if meta and not all(param.is_meta for param in parameters.values()):
        real = next(name for name, param in parameters.items() if not param.is_meta)
        empty = next(name for name, param in parameters.items() if param.is_meta)
        raise UnsupportedModelError(
            f"{real}: has memory, and {empty} is on the meta device; build all of the model under torch.device('meta')"
        )
    _check_overlaps(parameters)


def check_is_module(model: object) -> None:
    """Refuse the arguments of other optimizers (parameters, groups of them, several modules), naming the right call."""
    if isinstance(model, nn.Module):
        return
    kind = f"is a {type(model).__name__}"
    call = "pass the module itself: MuonZero(model, lr=0.02), or initialize(model, config)"
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise UnsupportedModelError(f"model: is the class {model.__name__}; make one: MuonZero({model.__name__}(...))")
    # The first element tells what was meant. next() consumes it of a generator, but this function raises anyway.
    first: Any = model
    if isinstance(model, Iterable) and not isinstance(model, (str, bytes, torch.Tensor)):
        first = next(iter(model.values() if isinstance(model, Mapping) else model), None)
    first = first[1] if isinstance(first, tuple) and len(first) == 2 else first
    if isinstance(first, nn.Module):
        call = "pass one that holds them all: MuonZero(torch.nn.ModuleList([first, second]), ...)"
        raise UnsupportedModelError(f"model: {kind} of modules, which share one MuonZero; {call}")
    if isinstance(first, Mapping) or (isinstance(model, Mapping) and "params" in model):
        call = 'pass the module, and the groups beside: MuonZero(model, groups=[{"params": [...], "lr": 0.02}, ...])'
        more = 'a group\'s "method" is "muon" or "adamw"; left out, compile_muon chooses it for each parameter'
        raise UnsupportedModelError(f"model: {kind} of parameter groups, not an nn.Module; {call}; {more}")
    if isinstance(first, torch.Tensor):
        why = "it shards the model, and chooses by name and shape what Muon trains and what AdamW"
        raise UnsupportedModelError(f"model: {kind} of parameters, not an nn.Module; {call}: {why}")
    raise UnsupportedModelError(f"model: {kind}, not an nn.Module; {call}")


def check_modules(model: nn.Module) -> None:
    """Check modules alone, the part of :func:`check_supported` that needs no parameter."""
    check_is_module(model)
    wrappers = wrapper_types()
    for name, module in model.named_modules():
        where = name or "model"
        for sharded in sharded_params_of(module).values():
            if not sharded.ledger.stepped and not sharded.distributed:
                continue  # belongs to a copied module, whose parameters are whole
            raise UnsupportedModelError(
                f"{sharded.name}: is sharded by a MuonZero already; go on with that optimizer, or take a whole and "
                "plain copy.deepcopy(model) inside `with compile_muon.full_parameters(model):` and shard the copy"
            )
        if isinstance(module, wrappers):
            kind = type(module).__name__
            raise UnsupportedModelError(
                f"{where}: is already data-parallel ({kind}); pass the module before wrapping, compile_muon shards it"
            )
        if isinstance(module, nn.RNNBase):
            cell = {"LSTM": "nn.LSTMCell", "GRU": "nn.GRUCell"}.get(module.mode, "nn.RNNCell")
            raise UnsupportedModelError(
                f"{where}: {type(module).__name__} keeps its own references to its weights (_flat_weights), so they "
                f"cannot be sharded; build the recurrence from {cell}, or train it outside compile_muon"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            _check_embedding(f"{name + '.' if name else ''}weight", module)


def _check_embedding(name: str, module: nn.Embedding | nn.EmbeddingBag) -> None:
    if module.sparse and module.weight.requires_grad:
        raise UnsupportedModelError(f"{name}: has sparse gradients; build the embedding with sparse=False")
    if module.max_norm is not None:
        raise UnsupportedModelError(
            f"{name}: max_norm = {module.max_norm} rescales rows of the weight inside forward, those of a rank's own "
            "batch; build the embedding with max_norm=None, and rescale the parameter between steps"
        )


def wrapper_types() -> tuple[type, ...]:
    """Return the classes of modules that are data-parallel by themselves: DataParallel, DDP, FSDP and FSDP2."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    return nn.DataParallel, nn.parallel.DistributedDataParallel, FullyShardedDataParallel, FSDPModule


def _check_parameter(name: str, param: nn.Parameter, *, meta: bool, dtensors: bool) -> None:
    def no(problem: str, remedy: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{name}: {problem}; {remedy}")

    if nn.parameter.is_lazy(param):
        raise no("is not initialized yet", "run one forward pass through the lazy module first")
    if param.is_meta and not meta:
        raise no(
            "is on the meta device",
            "say where its values come from, weights=folder (as save_pretrained writes it) or init=f with f(module) "
            "initializing a module's own parameters: memory is then given shard by shard",
        )
    if _is_dtensor(param) and not dtensors:
        raise no(
            "is a DTensor already (FSDP2, tensor parallel, or an earlier call of compile_muon)",
            "pass the model before it is sharded",
        )
    if is_traceable_wrapper_subclass(param) and not _is_dtensor(param):
        raise no(f"is a {type(param).__name__}, a tensor subclass that cannot be sliced", "unwrap it to a plain tensor")
    if param.layout is not torch.strided:
        raise no(f"is sparse ({param.layout})", "use to_dense()")
    if param.is_complex():
        raise no(f"is complex ({param.dtype})", "keep it as two real parameters (torch.view_as_real)")
    if local_tensor(param).is_inference():
        raise no("was made inside torch.inference_mode(), which autograd does not take", "build the model outside it")
    check_trainable(name, param)


def check_trainable(name: str, param: nn.Parameter) -> None:
    """Raise UnsupportedModelError if a parameter requires a gradient in a dtype that no optimizer takes."""
    if param.requires_grad and param.dtype not in _TRAINABLE_DTYPES:
        raise UnsupportedModelError(
            f"{name}: is trained in {param.dtype}; train it in float32 or bfloat16, or set requires_grad=False"
        )


def _is_dtensor(param: nn.Parameter) -> bool:
    return isinstance(param, DTensor) or isinstance(param.data, DTensor)


def _check_overlaps(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise if two parameters share memory: sharding would untie them silently."""
    local_tensors = {name: local_tensor(param) for name, param in parameters.items()}
    spans = sorted(
        (str(p.device), p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), name)
        for name, p in local_tensors.items()
        if p.numel() and p.is_contiguous() and has_memory(p)  # strided ones may interleave without sharing an element
    )
    for (device, _, end, name), (next_device, start, _, other) in itertools.pairwise(spans):
        if device == next_device and start < end:
            raise UnsupportedModelError(
                f"{other}: shares memory with {name} but is another Parameter; tie them as one object, "
                f"module_b.weight = module_a.weight, or clone one"
            )
