"""From an ``nn.Module`` to sharded parameters behind unshard markers.

Each parameter becomes a DTensor, ``Shard(0)`` over the data-parallel mesh (uneven and empty shards allowed), and its
module's class is swapped for a subclass whose property of the same name reads the full weight through the ``unshard``
marker. ``_parameters`` still holds the shard, so ``parameters()``, ``state_dict()`` and checkpoints see DTensors under
the names they had.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from compile_muon.config.settings import Config
from compile_muon.errors import ConfigError, UnsupportedModelError, config_error
from compile_muon.kernels import resolve_coefficients, resolve_dtype, resolve_method
from compile_muon.model.assignment import Assignment
from compile_muon.passes.costs import choose_exchange
from compile_muon.passes.markers import UNSHARD
from compile_muon.passes.spec import MuonSpec, ParamSpec, encode_dtype
from compile_muon.runtime.ledger import Ledger, ParamState

__all__ = ["describe", "resolve_mesh", "shard_model"]


def resolve_mesh(
    mesh: DeviceMesh | None, process_group: dist.ProcessGroup | None, device: torch.device
) -> DeviceMesh | None:
    """The 1-D data-parallel mesh, or None for a single process.

    Raises:
        ConfigError: a mesh that is not 1-D, both arguments, or several processes without a process group.
    """
    if mesh is not None and process_group is not None:
        raise config_error("process_group", process_group, "contradicts mesh", "give one of the two")
    if mesh is not None:
        if mesh.ndim != 1:
            remedy = "pass its data-parallel dimension, mesh['dp']"
            raise config_error("mesh", mesh, f"has {mesh.ndim} dimensions", remedy)
        return mesh if mesh.size() > 1 else None
    if process_group is not None:
        found = DeviceMesh.from_group(process_group, device.type)
        return found if found.size() > 1 else None
    if dist.is_available() and dist.is_initialized():
        world = dist.get_world_size()
        return init_device_mesh(device.type, (world,)) if world > 1 else None
    world_text = os.environ.get("WORLD_SIZE", "1")
    if world_text not in ("", "0", "1"):
        raise config_error(
            "WORLD_SIZE", world_text, "says several processes, but there is no process group",
            "call torch.distributed.init_process_group() first",
        )  # fmt: skip
    return None


def _muon_spec(assignment: Assignment, config: Config, device: torch.device, world: int, stage: int) -> MuonSpec | None:
    if assignment.algorithm != "muon" or assignment.matrix is None:
        return None
    batch, rows, cols = assignment.matrix
    ns = config.muon.ns
    try:
        chosen = resolve_coefficients(ns.coefficients, ns.steps)
        dtype = resolve_dtype(ns.dtype, device, chosen, ns.method)
        method = resolve_method(ns.method, rows, cols, dtype, chosen)
    except ValueError as error:
        # The kernels name their arguments as we do, less the prefix.
        raise ConfigError(re.sub(r"\b(coefficients|dtype|method|steps)(?==)", r"ns_\1", str(error))) from error
    if world == 1 or (batch > 1 and stage > 0):
        exchange = "local"  # whole matrices already: one process, or experts sharded by expert
    elif config.zero.exchange == "auto":
        exchange = choose_exchange(rows, cols, world=world, steps=len(chosen.steps), itemsize=dtype.itemsize)
    else:
        exchange = config.zero.exchange
    return MuonSpec(
        batch=batch,
        rows=rows,
        cols=cols,
        nesterov=config.muon.nesterov,
        method=method,
        coefficients=tuple(value for triple in chosen.steps for value in triple),
        safety=chosen.safety,
        restarts=chosen.gram_restarts(dtype),
        dtype=encode_dtype(dtype),
        eps=ns.eps,
        exchange=exchange,
    )


def _gather(mesh: DeviceMesh) -> str:
    # PyTorch's Gloo corrupts the heap when two functional all-gathers, or one and a reduction, end at the same time:
    # its threads write the name of the last collective without a lock, and this name is too long for the string itself.
    backends = dict(entry.split(":") for entry in dist.get_backend_config(mesh.get_group()).split(","))
    return "all_to_all" if backends.get(mesh.device_type) == "gloo" else "all_gather"


def describe(param: Tensor, assignment: Assignment, config: Config, mesh: DeviceMesh | None) -> ParamSpec:
    """Static facts of one parameter under this configuration."""
    world = 1 if mesh is None else mesh.size()
    stage = config.zero.stage
    compute = config.zero.param_dtype if config.zero.param_dtype and param.is_floating_point() else param.dtype
    return ParamSpec(
        shape=tuple(param.shape),
        world=world,
        rank=0 if mesh is None else mesh.get_local_rank(),
        group="" if mesh is None else mesh.get_group().group_name,
        stage=stage,
        dtype=encode_dtype(param.dtype),
        compute_dtype=encode_dtype(compute),
        reduce_dtype=encode_dtype(config.zero.reduce_dtype or compute),
        muon=_muon_spec(assignment, config, param.device, world, stage),
        gather="all_gather" if mesh is None else _gather(mesh),
    )


def _same_everywhere(named: Iterable[tuple[str, Tensor]], mesh: DeviceMesh) -> None:
    """Ranks that disagree on names or shapes would hang later; say so now."""
    text = "\n".join(f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in named)
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    mine = torch.tensor([digest], dtype=torch.int64, device=mesh.device_type)
    everyone = [torch.empty_like(mine) for _ in range(mesh.size())]
    dist.all_gather(everyone, mine, group=mesh.get_group())
    differing = [rank for rank, other in enumerate(everyone) if not torch.equal(other, everyone[0])]
    if differing:
        raise UnsupportedModelError(
            f"ranks {differing} built a model with other parameter names, shapes or requires_grad than rank 0; "
            "build the same model on every rank"
        )


def _broadcast(model: nn.Module, mesh: DeviceMesh) -> None:
    """Every rank starts from rank 0's parameters and buffers, as in DDP."""
    group = mesh.get_group()
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, source, group=group)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def _split(param: nn.Parameter, spec: ParamSpec, mesh: DeviceMesh | None) -> tuple[nn.Parameter, Tensor | None]:
    """The parameter users see from now on, and the resident replica (stages 1 and 2)."""
    whole = param.detach().contiguous()
    if mesh is None or spec.stage == 0:
        return param, None
    replica = None
    local = whole
    if spec.sharded:
        start, stop = spec.shard_rows(spec.rank)
        # Where dtypes agree the shard is a view of the replica: the replica costs nothing on this rank's rows.
        shared = spec.replicated_weight and spec.compute_dtype == spec.dtype
        local = whole[start:stop] if shared else whole[start:stop].clone()
        if spec.replicated_weight:
            replica = whole if shared else whole.to(getattr(torch, spec.compute_dtype))
    placement = Shard(0) if spec.sharded else Replicate()
    distributed = DTensor.from_local(
        local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()
    )
    new = nn.Parameter(distributed, requires_grad=param.requires_grad)
    # Attributes users put on the parameter (use_muon, tags of other libraries) stay on it.
    for key, value in vars(param).items():
        setattr(new, key, value)
    return new, replica


def _reader(name: str) -> property:
    """The property through which a module reads its full weight."""
    key = f"_muon_zero_{name}"

    def read(module: nn.Module) -> Tensor:
        state: ParamState = module.__dict__[key]
        if not torch.compiler.is_compiling():
            state.ledger.read_eagerly(state)
        param: Any = module._parameters[name]
        shard = param.to_local() if state.distributed else param
        return UNSHARD(shard, state.state, state.hyper, state.replica, state.text)

    return property(read)


def _swap_class(module: nn.Module, names: tuple[str, ...], cache: dict[tuple[type, tuple[str, ...]], type]) -> None:
    """Give ``module`` a subclass with one reader per name; equal modules share it, and so their compiled code."""
    key = (type(module), names)
    if key not in cache:
        cls = type(module)
        body: dict[str, Any] = {name: _reader(name) for name in names}
        body["__module__"] = cls.__module__
        body["__qualname__"] = cls.__qualname__
        cache[key] = type(cls.__name__, (cls,), body)
    module.__class__ = cache[key]


def shard_model(
    model: nn.Module,
    assignments: dict[str, Assignment],
    config: Config,
    mesh: DeviceMesh | None,
    ledger: Ledger,
    hyper: Callable[[torch.device], Tensor],
) -> list[ParamState]:
    """Shard every parameter of ``model`` in place and put markers in front of it.

    Args:
        model: the module; all its parameters on one device.
        assignments: algorithm per parameter name.
        config: resolved configuration.
        mesh: data-parallel mesh, None for one process.
        ledger: where the parameters keep their accounts.
        hyper: gives the ``(1 - momentum, momentum)`` tensor of a device.
    Returns:
        One state per parameter, in ``named_parameters()`` order.
    """
    named = dict(model.named_parameters())
    specs = {name: describe(param, assignments[name], config, mesh) for name, param in named.items()}
    if mesh is not None:
        _same_everywhere(named.items(), mesh)
        _broadcast(model, mesh)
    states: dict[nn.Parameter, ParamState] = {}
    for name, param in named.items():
        spec = specs[name]
        new, replica = _split(param, spec, mesh)
        local = new._local_tensor if isinstance(new, DTensor) else new
        momentum = torch.zeros_like(local) if spec.muon else local.new_empty(0)
        states[param] = ParamState(
            name=name, param=new, spec=spec, state=momentum.detach(), hyper=hyper(param.device), replica=replica,
            ledger=ledger, distributed=isinstance(new, DTensor),
        )  # fmt: skip
    cache: dict[tuple[type, tuple[str, ...]], type] = {}
    for module in model.modules():
        own = {name: param for name, param in module._parameters.items() if param is not None}
        for name, param in own.items():
            state = states[param]
            module._parameters[name] = state.param
            module.__dict__[f"_muon_zero_{name}"] = state
        if own:
            _swap_class(module, tuple(own), cache)
    return list(states.values())
