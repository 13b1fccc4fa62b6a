"""Roles of parameters that a rank's model has only a part of: DTensors over the mesh axes `expert` and `tensor`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from compile_muon.config import ExpertParallelConfig
from compile_muon.errors import UnsupportedModelError, config_error
from compile_muon.mesh import DENSE, Mesh, Role
from compile_muon.passes.torch_private import group_named

if TYPE_CHECKING:
    from compile_muon.experts.plan import ExpertPlan

_REMEDY = "cut it over mesh['tensor'] or mesh['expert'] of the mesh that MuonZero is given"


def roles_of(model: nn.Module, mesh: Mesh | None) -> dict[str, Role]:
    """Return the role of every parameter by name; the model is not changed. Forward reads what is a DTensor now as one.
    ``param.mesh = mesh["expert"]`` on a plain tensor marks it as this rank's experts of a stack."""
    return {name: _role(name, param, mesh) for name, param in model.named_parameters()}


def planned_roles(
    model: nn.Module, mesh: Mesh | None, experts: ExpertParallelConfig
) -> tuple[dict[str, Role], ExpertPlan | None]:
    """Return :func:`roles_of` once a Transformers model's experts are spread, and the plan to spread them."""
    roles = roles_of(model, mesh)
    if mesh is not None and "tensor" in mesh.names and all(role.tensor_dim is None for role in roles.values()):
        problem = "has no parameter cut over it: its ranks would be copies that no gradient is averaged over"
        remedy = "cut the model by parallelize_module(model, mesh['tensor'], plan) first, or leave the axis out"
        raise config_error("mesh.tensor", mesh.axis("tensor").size, problem, remedy)
    if mesh is None or experts.size == 1:
        return roles, None
    try:
        from compile_muon.experts.plan import plan_experts
    except ImportError as error:
        problem = f"is for models of Transformers, which cannot be imported ({error})"
        remedy = (
            "pip install '.[transformers]' in compile_muon's checkout, or cut experts of your own over mesh['expert']"
        )
        raise config_error("expert_parallel.size", experts.size, problem, remedy) from None
    plan = plan_experts(model, experts.size, capacity_factor=experts.capacity_factor)
    stacks, expert_mesh = set(plan.parameters), mesh.world_mesh["expert"]
    for name, param in model.named_parameters():
        if name in stacks:
            roles[name] = Role(expert=True, placed=(expert_mesh, (Shard(0),), tuple(param.shape)))
    return roles, plan


def _role(name: str, param: Tensor, mesh: Mesh | None) -> Role:
    marked_mesh = getattr(param, "mesh", None)
    if isinstance(param, DTensor):
        if isinstance(marked_mesh, DeviceMesh):
            raise _no(name, f"is a DTensor on {_dims(param.device_mesh)} and marked with mesh = {_dims(marked_mesh)}")
        return _placed(name, param.device_mesh, tuple(param.placements), tuple(param.shape), mesh, reads=True)
    if isinstance(marked_mesh, DeviceMesh):
        size = marked_mesh.size()
        whole = (param.shape[0] * size, *param.shape[1:]) if param.ndim else ()
        role = _placed(name, marked_mesh, (Shard(0),), tuple(whole), mesh, reads=False)
        if size > 1 and not role.expert:
            raise _no(name, f"is marked with mesh = {_dims(marked_mesh)}, which is not the axis of experts")
        return role
    return DENSE


def _placed(
    name: str,
    placed: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    mesh: Mesh | None,
    *,
    reads: bool,
) -> Role:
    how = f"{placements} on {_dims(placed)}"
    cut_dims = [dim for dim in range(placed.ndim) if placed.size(dim) > 1]
    if len(cut_dims) > 1:
        axes = " and ".join(_axis_of(placed, dim, mesh) or _dims(placed) for dim in cut_dims)
        remedy = "give it one role: cut it over one axis alone"
        raise _no(name, f"is placed {how}, on two axes at once ({axes})", remedy)
    read_as = (placed, placements, shape) if reads else None
    if not cut_dims:
        return Role(placed=read_as)
    axis, placement = _axis_of(placed, cut_dims[0], mesh), placements[cut_dims[0]]
    if axis not in ("expert", "tensor"):
        ranks = "one rank" if mesh is None else " x ".join(f"{n} {mesh.axis(n).size}" for n in mesh.names)
        what = f"the axis {axis} of which MuonZero cuts itself" if axis else f"which is no axis of the mesh ({ranks})"
        raise _no(name, f"is placed {how}, {what}")
    if isinstance(placement, Replicate):
        return Role(placed=read_as)
    if type(placement) is not Shard:  # Partial, or _StridedShard as DTensor cuts fused matrices
        remedy = "cut it into contiguous parts, Shard(dim), and fused matrices (q, k and v, gate and up) apart"
        raise _no(name, f"is placed {how}: {placement} is neither Shard nor Replicate", remedy)
    dim = placement.dim % len(shape)
    if axis == "tensor":
        return Role(tensor_dim=dim, placed=read_as)
    size = placed.size(cut_dims[0])
    if dim != 0 or shape[0] % size:
        problem = f"is placed {how}: {shape[dim]} along dim {dim} are not {size} equal parts of a stack of experts"
        raise _no(name, problem, "cut dim 0, of a number of experts that the axis divides")
    return Role(expert=True, placed=read_as)


def _axis_of(placed: DeviceMesh, dim: int, mesh: Mesh | None) -> str:
    """Return the name of the mesh axis with the same ranks as dimension ``dim`` of ``placed``; "" if there is none."""
    if mesh is None:
        return ""
    ranks = dist.get_process_group_ranks(placed.get_group(dim))
    for name in mesh.names:
        if dist.get_process_group_ranks(group_named(mesh.axis(name).group)) == ranks:
            return name
    return ""


def _dims(placed: DeviceMesh) -> str:
    names: Mapping[int, str] = dict(enumerate(placed.mesh_dim_names or ()))
    return " x ".join(f"{names.get(dim, 'a dimension')} {placed.size(dim)}" for dim in range(placed.ndim))


def _no(name: str, problem: str, remedy: str = _REMEDY) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name}: {problem}; {remedy}")
