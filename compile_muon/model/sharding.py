"""From an ``nn.Module`` to sharded parameters behind unshard markers.

Each parameter becomes a DTensor, ``Shard(0)`` over the mesh's shard axis, or over both of its axes (uneven and empty
shards allowed), and its module reads the full weight through the ``unshard`` marker
(:mod:`compile_muon.model.readers`). ``_parameters`` still holds the shard, so ``parameters()``, ``state_dict()`` and
checkpoints see DTensors under the names they had.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_muon.config import Config
from compile_muon.model.agreement import agree
from compile_muon.model.assignment import Assignment
from compile_muon.model.layout import describe
from compile_muon.model.mesh import Mesh
from compile_muon.model.readers import install_readers
from compile_muon.passes.spec import ParamSpec
from compile_muon.runtime.account import Account
from compile_muon.runtime.handouts import Handouts
from compile_muon.runtime.ledger import Ledger
from compile_muon.runtime.shards import local_tensor

__all__ = ["shard_model"]


def _broadcast(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Every rank starts from rank 0's parameters and buffers, as in DDP."""
    source = dist.get_global_rank(group, 0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_meta:
                continue
            whole = tensor.detach().contiguous()
            dist.broadcast(whole, source, group=group)
            if whole.data_ptr() != tensor.data_ptr():
                tensor.copy_(whole)


def _view_alone(rows: Tensor) -> Tensor:
    """The same memory as a storage of its own, which starts at its first element and ends with its last.

    A DTensor whose shard starts in the middle of a storage has a data pointer that is not null; torch (2.13) takes it
    for an ordinary tensor then, and ``torch.save`` and ``copy.deepcopy`` fail on the storage it does not have. And a
    shard in a file would bring the whole replica with it.
    """
    if not rows.numel():
        return rows.clone()
    # As bytes: DLPack does not know every dtype.
    return torch.from_dlpack(rows.reshape(-1).view(torch.uint8)).view(rows.dtype).view(rows.shape)


def _cut(rows: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A copy of these rows in memory of its own; without values of those on the meta device."""
    return torch.empty_like(rows, dtype=dtype, device=device) if rows.is_meta else rows.to(dtype, copy=True)


def _split(
    param: nn.Parameter, spec: ParamSpec, mesh: Mesh | None, device: torch.device
) -> tuple[nn.Parameter, Tensor | None]:
    """The parameter users see from now on, and what is resident of the weight beside it.

    One on the meta device gets memory on ``device`` for what this rank will hold, and no values.
    """
    whole = param.detach().contiguous()
    if param.is_meta and not spec.layout.gathered:
        whole = torch.empty_like(whole, device=device)
    if mesh is None or spec.layout.stage == 0:
        if not param.is_meta:
            return param, None
        new = nn.Parameter(whole, requires_grad=param.requires_grad)
        vars(new).update(vars(param))
        return new, None
    layout = spec.layout
    replica = None
    local = whole
    if layout.sharded:
        rows, first = layout.local_rows, 0
        compute = getattr(torch, spec.compute_dtype)
        # Where dtypes agree the shard is a view of the replica: the replica costs nothing on this rank's rows.
        shared = layout.resident and spec.compute_dtype == spec.dtype
        if layout.replicated_weight:
            replica = whole if shared else whole.to(compute)
        elif layout.resident:
            first, stop = layout.shard_rows(layout.shard.index)
            replica = _cut(whole[first:stop], compute, device)
        if shared:
            assert replica is not None
            local = _view_alone(replica[rows.start - first : rows.stop - first])
        else:
            local = _cut(whole[rows], whole.dtype, device)
    placements = mesh.placements(spec.layout)
    distributed = DTensor.from_local(
        local, mesh.device_mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    new = nn.Parameter(distributed, requires_grad=param.requires_grad)
    # Attributes users put on the parameter (use_muon, tags of other libraries) stay on it.
    for key, value in vars(param).items():
        setattr(new, key, value)
    return new, replica


def shard_model(
    model: nn.Module,
    assignments: dict[str, Assignment],
    config: Config,
    mesh: Mesh | None,
    ledger: Ledger,
    hyper: Tensor,
) -> list[Account]:
    """Shard every parameter of ``model`` in place and put markers in front of it.

    Args:
        model: the module; all its parameters on one device, or on the meta device.
        assignments: algorithm per parameter name.
        config: resolved configuration.
        mesh: the ranks by axis, None for one process.
        ledger: where the parameters keep their accounts.
        hyper: the ``(1 - momentum, momentum)`` tensor of the optimizer; its device is the shards'.
    Returns:
        One account per parameter, in ``named_parameters()`` order.
    """
    named = dict(model.named_parameters())
    device = hyper.device
    specs = {name: describe(param, assignments[name], config, mesh, device) for name, param in named.items()}
    if mesh is not None:
        with ledger.place.at("the sharding of the model"):
            agree(model, config, specs, mesh, ledger.place.board)
            _broadcast(model, mesh.everyone)
    accounts: dict[nn.Parameter, Account] = {}
    handouts = Handouts()
    for name, param in named.items():
        spec = specs[name]
        new, replica = _split(param, spec, mesh, device)
        local = local_tensor(new).detach()
        momentum = torch.zeros_like(local) if spec.muon else local.new_empty(0)
        accounts[param] = Account(name, new, spec, momentum, hyper, replica, ledger, handouts)
    install_readers(model, accounts)
    return list(accounts.values())
