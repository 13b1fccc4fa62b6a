"""Sharding of an ``nn.Module``: parameters become shards behind unshard markers.

On several ranks each parameter becomes a DTensor over all axes of the mesh: ``Shard(0)`` over its shard axis, or over
both data-parallel axes (uneven and empty shards allowed), or ``Replicate()`` at stage 0. Inside forward its module
reads the full weight through the ``unshard`` marker (:mod:`compile_muon.model.readers`). ``_parameters`` holds the
parameter, so ``parameters()``, ``state_dict()`` and checkpoints see DTensors under unchanged names.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor

from compile_muon.config import Config
from compile_muon.config.machine import costs_for
from compile_muon.engine.dtensor_parameter import ShardedParameter, carry_hooks, sharded_parameter
from compile_muon.engine.dtensors import contiguous_stride, has_memory, local_tensor, user_attributes
from compile_muon.engine.ledger import Ledger
from compile_muon.engine.other_holders import make_stale
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import owners_of
from compile_muon.errors import OffloadError, listed, warn_user
from compile_muon.mesh import Mesh, Role
from compile_muon.model.assignment import Assignment
from compile_muon.model.param_spec import describe
from compile_muon.model.readers import install_readers
from compile_muon.model.setup_agreement import agree
from compile_muon.passes.language.layout import Layout
from compile_muon.passes.language.spec import ParamSpec, decode_dtype
from compile_muon.passes.torch_private import group_named

if TYPE_CHECKING:
    from compile_muon.experts.plan import ExpertPlan


def broadcast(local: Tensor, layout: Layout) -> None:
    """Broadcast a parameter, or this rank's part under tensor or expert parallelism, in place, from the first rank that
    has the same part; collective."""
    # Ranks along `tensor` hold different slices, or else copies, which must become equal too.
    axes = [layout.everyone] if layout.tensor_parallel else [layout.everyone, layout.tensor]
    _spread(local, [group_named(axis.group) for axis in axes if not axis.alone])


@torch.no_grad()
def _spread(tensor: Tensor, groups: list[dist.ProcessGroup]) -> None:
    if not has_memory(tensor):
        return
    whole = tensor.detach().contiguous()  # collectives take no strided tensors
    for group in groups:
        dist.broadcast(whole, dist.get_global_rank(group, 0), group=group)
    if whole.data_ptr() != tensor.data_ptr():
        tensor.copy_(whole)


def _view_alone(rows: Tensor) -> Tensor:
    """Return the same memory as a storage of its own, from the first element of ``rows`` to their last.

    torch 2.13 takes a DTensor whose shard starts inside a storage (its data pointer is not null) for an ordinary
    tensor; ``torch.save`` and ``copy.deepcopy`` then fail. And a saved shard would carry the whole resident weight.
    """
    if not rows.numel():
        return rows.clone()
    if not has_memory(rows):
        return rows.detach()
    # DLPack does not know every dtype, so the rows pass through it as bytes.
    return torch.from_dlpack(rows.reshape(-1).view(torch.uint8)).view(rows.dtype).view(rows.shape)


def _cut(rows: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a copy of these rows in memory of its own; rows on the meta device give memory without values."""
    return torch.empty_like(rows, dtype=dtype, device=device) if rows.is_meta else rows.to(dtype, copy=True)


def _split(
    param: nn.Parameter, spec: ParamSpec, mesh: Mesh | None, role: Role, device: torch.device
) -> tuple[nn.Parameter, Tensor | None]:
    """Return the sharded parameter, and the resident weight (or this rank's part of it), None without one. A parameter
    on the meta device gets memory on ``device`` for this rank's part, without values."""
    layout, dtype = spec.layout, decode_dtype(spec.dtype)
    whole = local_tensor(param).detach().contiguous()  # under tensor or expert parallelism, this rank's part
    if param.is_meta and not layout.gathered:
        whole = torch.empty_like(whole, device=device)
    if mesh is None:
        if not param.is_meta and role.placed is None and param.dtype is dtype and not spec.on_host:
            return param, None
        whole = whole.to(dtype)
        return _like(param, on_host(whole) if spec.on_host else whole), None
    resident = None
    if not layout.sharded:
        local = whole.to(dtype)
    else:
        rows, first = layout.local_rows, 0
        compute = decode_dtype(spec.compute_dtype)
        # Where dtypes agree the shard is a view of the resident weight, so this rank's rows are stored once.
        shared = layout.resident and spec.compute_dtype == spec.dtype
        if layout.replicated_weight:
            resident = whole.to(compute)
        elif layout.resident:
            first, stop = layout.shard_rows(layout.shard.index)
            resident = _cut(whole[first:stop], compute, device)
        if shared:
            assert resident is not None
            local = _view_alone(resident[rows.start - first : rows.stop - first])
        else:
            local = _cut(whole[rows], dtype, device)
    if spec.on_host:
        local = on_host(local)
    distributed = DTensor.from_local(
        local,
        mesh.device_mesh(role),
        mesh.placements(layout, role),
        run_check=False,
        shape=torch.Size(layout.unsharded_shape),
        stride=contiguous_stride(layout.unsharded_shape),
    )
    return _like(param, distributed), resident


def _like(param: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Make a parameter of these values; attributes that users set on ``param`` (use_muon, library tags) stay on it."""
    make: Callable[..., nn.Parameter] = sharded_parameter if isinstance(values, DTensor) else nn.Parameter
    new = make(values, requires_grad=param.requires_grad)
    vars(new).update(user_attributes(param))
    return new


def shard_model(
    model: nn.Module,
    assignments: dict[str, Assignment],
    config: Config,
    mesh: Mesh | None,
    roles: dict[str, Role],
    ledger: Ledger,
    all_graph_scalars: Mapping[str, Tensor],
    device: torch.device,
    spread: ExpertPlan | None = None,
) -> list[ShardedParam]:
    """Shard every parameter of ``model`` in place, put markers in front of it, and return the sharded parameters.

    Parameters are all on one device, or all on the meta device; the result is in ``named_parameters()`` order.
    ``all_graph_scalars``: fp32 ``(1 - momentum, momentum)`` by parameter name. ``spread`` moves experts to their ranks
    once all ranks agree.
    """
    named, provider = dict(model.named_parameters()), ledger.hooks.state_provider
    costs = costs_for(config.machine, device.type)
    specs = {n: describe(param, assignments[n], config, mesh, device, roles[n]) for n, param in named.items()}
    owners = owners_of(specs, ledger.costs)
    if mesh is not None:
        with ledger.status.at("the sharding of the model"):
            algorithms = {name: assignment.algorithm for name, assignment in assignments.items()}
            # Every check that one rank may fail comes ahead of the first change of the model.
            agree(model, config, costs, specs, algorithms, mesh, ledger.status.heartbeat)
            provider.reserve(specs, owners)
            if spread is not None:
                spread.apply(mesh.world_mesh["expert"])
                named = dict(model.named_parameters())
            for name, param in named.items():  # as DDP does
                broadcast(local_tensor(param), specs[name].layout)
            for buffer in model.buffers():
                _spread(buffer, [mesh.everyone])
    else:
        provider.reserve(specs, owners)
    sharded_params: dict[nn.Parameter, ShardedParam] = {}
    warned_names = set[str]()
    for name, param in named.items():
        spec = specs[name]
        if spec.master and not param.is_meta:
            whole = local_tensor(param).detach()
            provider.keep_master(name, whole[spec.layout.local_rows] if spec.layout.sharded else whole)
        new, resident = _split(param, spec, mesh, roles[name], device)
        if isinstance(new, ShardedParameter):
            new.origin = (name, warned_names)
            if mesh is not None:
                new.averaging = mesh.gradient_placements(roles[name]), spec.layout.divisor
        local, dtype = local_tensor(new).detach(), decode_dtype(spec.state_dtype)
        resident_momentum = spec.muon is not None and spec.muon.resident_momentum
        momentum = torch.zeros_like(local, dtype=dtype) if resident_momentum else local.new_empty(0, dtype=dtype)
        group = None if mesh is None else mesh.everyone
        sharded_params[param] = ShardedParam(
            name, new, spec, momentum, all_graph_scalars[name], resident, ledger, group, roles[name].placed,
            owners=owners.get(name, ()),
        )  # fmt: skip
        if new is not param:
            carry_hooks(param, new)
    install_readers(model, sharded_params)
    _drop_gradients(sharded_params)
    make_stale({sharded.name: param for param, sharded in sharded_params.items() if param is not sharded.param})
    return list(sharded_params.values())


def _drop_gradients(sharded_params: Mapping[nn.Parameter, ShardedParam]) -> None:
    """Drop gradients of a backward before sharding, with a warning; each rank's are of its own batch."""
    if names := [sharded.name for original, sharded in sharded_params.items() if original.grad is not None]:
        for sharded in sharded_params.values():
            sharded.param.grad = None
        warn_user(f"gradients of {listed(names)} from a backward before MuonZero are dropped; run backward after it")


# --------------------------------------------------------------------------------------------- weights in host memory


class _Pages:
    """Pinned host memory behind CUDA's array interface, so that torch wraps it as a tensor of the GPU.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html. Pages are registered with the driver at their
    exact size: torch's pinned memory comes in powers of two, half of it unused at worst.
    """

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        begin = self._memory.data_ptr()
        if error := int(torch.cuda.cudart().cudaHostRegister(begin, nbytes, 0)):
            raise OffloadError(
                f"offload_param = 'cpu': the driver cannot pin {nbytes:,} more bytes of host memory "
                f"(cudaError {error}); use more ranks, or leave it out"
            )
        weakref.finalize(self, _unpin, begin)
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (begin, False), "version": 3}


def _unpin(begin: int) -> None:
    """Unregister the pages once queued work no longer uses them."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(begin)


def on_host(values: Tensor) -> Tensor:
    """Return a copy of contiguous ``values`` in pinned host memory that still counts as a tensor of its GPU. CPU
    tensors, empty ones and fake ones (plans) come back as they are."""
    if not values.is_cuda or not values.numel() or isinstance(values, FakeTensor):
        return values
    # as_tensor keeps `_Pages` alive as long as the tensor; vLLM holds weights the same way ("UVA offloading").
    memory = torch.as_tensor(_Pages(values.nbytes), device=values.device)
    return memory.view(values.dtype).view(values.shape).copy_(values)
