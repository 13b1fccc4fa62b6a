"""The static facts of a parameter that its markers carry: its layout over the mesh, dtypes, method."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from compile_muon.config import Config
from compile_muon.errors import ConfigError, UnsupportedModelError
from compile_muon.kernels import check_backend, resolve_coefficients, resolve_dtype, resolve_method
from compile_muon.model.assignment import Assignment
from compile_muon.model.mesh import DENSE, Mesh, Role
from compile_muon.passes.costs import OVER_ALL, choose_exchange, newton_schulz_seconds, start_bytes, weight_start_bytes
from compile_muon.passes.layout import Layout
from compile_muon.passes.machine import Machine
from compile_muon.passes.spec import MuonSpec, ParamSpec, encode_dtype

__all__ = ["describe"]


def _muon_spec(
    assignment: Assignment, config: Config, machine: Machine, device: torch.device, layout: Layout
) -> MuonSpec | None:
    if assignment.algorithm != "muon" or assignment.matrix is None:
        return None
    batch, rows, cols = assignment.matrix
    if not layout.expert.alone:
        if len(layout.whole) < 3:
            raise UnsupportedModelError(
                f"{assignment.name}: is cut over the axis expert, and shape {list(layout.whole)} is one matrix, not a "
                "stack of them; set param.use_muon = False, or cut it over the axis tensor"
            )
        batch = layout.shape[0]
    ns = config.muon.ns
    try:
        chosen = resolve_coefficients(ns.coefficients, ns.steps)
        dtype = resolve_dtype(ns.dtype, device, chosen, ns.method)
        method = resolve_method(ns.method, rows, cols, dtype, chosen)
        check_backend(ns.backend, dtype, device)
    except ValueError as error:
        # The kernels name their arguments as we do, less the prefix.
        raise ConfigError(re.sub(r"\b(backend|coefficients|dtype|method|steps)(?==)", r"ns_\1", str(error))) from error
    world = layout.owner_group.size * layout.replica_group.size
    apart = layout.sharded or not layout.expert.alone
    if world == 1 or (batch > 1 and apart and not layout.joined):
        exchange = "local"  # whole matrices already: one process, or experts where they live
    elif config.zero.exchange == "auto":
        replicas = (
            layout.replicate.size if layout.cut_twice else 1 if layout.owner_group.alone else layout.replica_group.size
        )
        exchange = choose_exchange(
            rows,
            cols,
            world=world,
            replicas=replicas,
            state_over_all=layout.cut_twice,
            steps=len(chosen.steps),
            dtype=encode_dtype(dtype),
            machine=machine,
        )
    else:
        exchange = config.zero.exchange
    restarts = chosen.gram_restarts(dtype)
    seconds = newton_schulz_seconds(
        machine.shared_by(layout.ranks),
        rows,
        cols,
        steps=len(chosen.steps),
        dtype=encode_dtype(dtype),
        restarts=len(restarts) if method == "gram" else None,
    )
    return MuonSpec(
        batch=batch,
        rows=rows,
        cols=cols,
        nesterov=config.muon.nesterov,
        method=method,
        coefficients=tuple(value for triple in chosen.steps for value in triple),
        safety=chosen.safety,
        restarts=restarts,
        dtype=encode_dtype(dtype),
        eps=ns.eps,
        exchange=exchange,
        backend=ns.backend,
        memory_limit=ns.memory_limit,
        start_bytes=_exchange_start(machine, layout),
        # To the nanosecond, which is less than the libraries of two machines can differ by.
        nanoseconds=round(seconds * 1e9),
    )


def _exchange_start(machine: Machine, layout: Layout) -> int:
    """``start_bytes`` of :class:`MuonSpec`: of handing directions round where that is done, else of the all-to-alls."""
    shared = machine.shared_by(layout.ranks)
    if layout.replica_group.alone:
        return start_bytes(shared, "all_to_all", range(layout.owner_group.size))
    kind = "all_to_all" if layout.pairwise else "all_gather"
    return start_bytes(
        shared, kind, range(0, layout.replica_group.size * layout.owner_group.size, layout.owner_group.size)
    )


def _starts(machine: Machine, layout: Layout) -> dict[str, int]:
    """``gather_start`` and ``reduce_start`` of :class:`ParamSpec`."""
    over_all = OVER_ALL if layout.cut_twice else ""
    # Ranks of a data-parallel axis have those of the axes of model parallelism between them.
    mesh = {
        "shards": layout.shard.size,
        "replicas": layout.replicate.size,
        "apart": layout.expert.size * layout.tensor.size,
    }
    kinds = {
        "shard": "all_to_all" if layout.pairwise else "reduce_scatter",
        "replicate": "all_reduce",
        "all": "all_reduce",
    }
    if layout.cut_twice:
        kinds["replicate"] = kinds["shard"]
    gathers = kinds | {"shard": "all_to_all" if layout.pairwise else "all_gather"}
    shared = machine.shared_by(layout.ranks)
    reduction = "reduce_scatter" + over_all if layout.sharded else "all_reduce"
    return {
        "gather_start": weight_start_bytes(shared, "all_gather", gathers, **mesh) if layout.sharded else 0,
        "reduce_start": weight_start_bytes(shared, reduction, kinds, **mesh),
    }


def _master_dtype(param: Tensor, config: Config) -> torch.dtype:
    """Of what is trained float32 at least, unless another one is asked for; what is frozen stays as it is."""
    if not param.requires_grad:
        return param.dtype
    return config.zero.master_dtype or torch.promote_types(param.dtype, torch.float32)


def describe(
    param: Tensor,
    assignment: Assignment,
    config: Config,
    machine: Machine,
    mesh: Mesh | None,
    device: torch.device,
    role: Role = DENSE,
) -> ParamSpec:
    """Static facts of one parameter, which is or will be on ``device``, under this configuration.

    Args:
        machine: that the cost model decides for, the same on every rank.

    Raises:
        ConfigError, UnsupportedModelError: Newton-Schulz cannot run so, or not on this parameter.
    """
    shape, stage = tuple(param.shape), config.zero.stage
    if role.expert and role.placed is None:  # marked: what a rank has is all it is
        assert mesh is not None
        shape = (shape[0] * mesh.axis("expert").size, *shape[1:])
    layout = Layout(shape, stage) if mesh is None else mesh.layout(shape, stage, role)
    compute = config.zero.param_dtype if config.zero.param_dtype and param.is_floating_point() else param.dtype
    return ParamSpec(
        layout,
        dtype=encode_dtype(_master_dtype(param, config)),
        compute_dtype=encode_dtype(compute),
        reduce_dtype=encode_dtype(config.zero.reduce_dtype or compute),
        muon=_muon_spec(assignment, config, machine, device, layout),
        **_starts(machine, layout),
    )
