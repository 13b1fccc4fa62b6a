"""Assembly of the parts of a :class:`~compile_muon.MuonZero` from a model and a configuration."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from compile_muon.agreement.heartbeat import backend_of
from compile_muon.agreement.status import RankStatus
from compile_muon.config import Config
from compile_muon.config.machine import costs_for
from compile_muon.engine import Engine, Extension
from compile_muon.engine.extension import check_extensions, hooks_of
from compile_muon.engine.ledger import Ledger
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import new_graph_scalars
from compile_muon.errors import listed, warn_user
from compile_muon.extensions.pipeline import PipelineStages
from compile_muon.extensions.qk_clip import MuonClip
from compile_muon.mesh import DataPlace, Mesh, resolve_mesh, target_device
from compile_muon.model.groups import Group, plan, warn_of_shared_rates, warn_of_unread
from compile_muon.model.ownership import Ownership
from compile_muon.model.roles import planned_roles
from compile_muon.model.sharding import shard_model
from compile_muon.model.support import check_modules, check_supported
from compile_muon.offload import OffloadedStates, with_fetches
from compile_muon.passes.methods import MatrixMethod
from compile_muon.sequence import SharedSequences, plan_sequence
from compile_muon.weights.materialize import Values
from compile_muon.weights.pretrained import saves_whole


def assemble(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh | Mesh | None,
    process_group: dist.ProcessGroup | None,
    norm_group: dist.ProcessGroup | DeviceMesh | None,
    weights: str | os.PathLike | None,
    init: Callable[..., Any] | None,
    extensions: Sequence[Extension],
) -> tuple[Engine, Sequence[Group]]:
    """Shard ``model`` in place; see :meth:`compile_muon.MuonZero.from_config` for arguments and errors.

    Returns:
        The engine without its ``step``, which needs the optimizer; and the groups of the trained parameters.
    """
    check_modules(model)
    check_extensions(extensions)
    values = Values.of(model, weights, init)
    meta = values is not None and values.meta
    model_device = next((param.device for param in model.parameters()), torch.device("cpu"))  # all share one device
    device = target_device(mesh, process_group) if meta else model_device
    zero, experts = config.zero, config.expert_parallel
    ranks = resolve_mesh(mesh, process_group, device, config)
    group = None if ranks is None else ranks.everyone
    roles, expert_plan = planned_roles(model, ranks, experts)
    sequence_plan = plan_sequence(model, config.sequence_parallel) if config.sequence_parallel.size > 1 else None
    check_supported(model, meta=meta, dtensors=ranks is not None)
    assignments, groups = plan(config, model, partial=norm_group is not None)
    # In a simulated group ("fake", for dry runs of large worlds) no other rank ever answers.
    compares = group is not None and backend_of(group, device) != "fake"
    offloaded = None
    if zero.offload is not None or config.muon.momentum_dtype is not None:
        offloaded = OffloadedStates(groups, config, assignments, model, group, device, compares=compares)
        assignments = with_fetches(config, assignments, offloaded.offloaded_names)
    stages = None
    if norm_group is not None:
        has_muon = config.algorithm == "adamw" or any(row.matrix for row in assignments.values())
        stages = PipelineStages.of(norm_group, group, device, zero, muon=has_muon)
    # Graphs read rates from tensors: one for the defaults, one for each configured group, and within these another one
    # for each matrix method whose graphs read more than the momentum.
    graph_scalars = torch.empty(2, dtype=torch.float32, device=device)
    all_graph_scalars, sharing = dict.fromkeys(assignments, graph_scalars), dict[tuple[object, ...], Tensor]()
    for param_group in groups:
        reads_rates = isinstance(param_group.method, MatrixMethod) and bool(param_group.method.graph_rates)
        if param_group.configured is not None or reads_rates:
            key = param_group.configured, param_group.method.name if reads_rates else ""
            tensor = sharing.setdefault(key, new_graph_scalars(param_group.method, device))
            all_graph_scalars |= dict.fromkeys(param_group.members, tensor)
    costs = costs_for(config.machine, device.type).shared_by(1 if ranks is None else ranks.size)
    ledger = Ledger(zero.gradient_accumulation_steps, zero.update, costs=costs, status=RankStatus(group, device))
    shared_sequences = None if sequence_plan is None else SharedSequences(sequence_plan, compares=compares)
    features: list[Extension] = [feature for feature in (stages, offloaded, shared_sequences) if feature is not None]
    ledger.hooks = hooks_of([*features, *extensions])
    sharded_params = shard_model(
        model, assignments, config, ranks, roles, ledger, all_graph_scalars, device, expert_plan
    )
    if shared_sequences is not None:
        assert ranks is not None
        shared_sequences.plan.apply(model, ranks.sequence, ranks.everyone, compares=compares)
    if config.muon.qk_clip is not None:
        part = DataPlace(0, 1) if ranks is None else ranks.sequence_place
        features.append(MuonClip(config.muon.qk_clip, config.muon.qk_clip_alpha, *part))
    features += extensions
    ledger.sharded_params, ledger.hooks = sharded_params, hooks_of(features)
    ledger.checks_later = zero.checks_read == "next_step" and ledger.hooks.peers is None
    if values is not None:
        values.fill(model, device)
    ownership = Ownership(model, sharded_params)
    engine = Engine(ledger, model, ownership, assignments, ranks, group, features, graph_scalars, compares)
    if ranks is not None:
        saves_whole(model)
    warn_of_half_masters([sharded for sharded in sharded_params if sharded.param.requires_grad])
    warn_of_shared_rates(config, groups)
    warn_of_unread(config, groups)
    if config.compile.cuda_graphs and device.type == "cpu":
        warn_user("compile.cuda_graphs = True: there are none on a CPU, and nothing is recorded; leave it out")
    return engine, groups


def warn_of_half_masters(trained: Sequence[ShardedParam]) -> None:
    """Warn once of parameters that are trained in half precision, without fp32 master weights."""
    half = [sharded for sharded in trained if sharded.spec.state_dtype in ("bfloat16", "float16")]
    if half:
        warn_user(
            f"master weights and optimizer state of {listed([sharded.name for sharded in half])} are "
            f"{half[0].spec.state_dtype} (master_dtype): small updates are rounded away; leave it out for float32"
        )
