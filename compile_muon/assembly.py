"""A model becomes accounts: what a :class:`~compile_muon.MuonZero` is made of, out of a model and a configuration."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from compile_muon.agreement.heartbeat import backend_of
from compile_muon.agreement.status import RankStatus
from compile_muon.config import Config
from compile_muon.errors import config_error, listed, warn_user
from compile_muon.model.assignment import Assignment, assign
from compile_muon.model.groups import Group, chosen_methods, plan_groups, warn_of_shared_rates
from compile_muon.model.mesh import Mesh, resolve_mesh, target_device
from compile_muon.model.ownership import Ownership
from compile_muon.model.roles import planned_roles
from compile_muon.model.sharding import shard_model
from compile_muon.model.support import check_modules, check_supported
from compile_muon.model.views import with_views
from compile_muon.offload import Home
from compile_muon.passes.methods import ElementMethod, MatrixMethod, matrix_method
from compile_muon.passes.spec import ParamSpec
from compile_muon.runtime.account import Account
from compile_muon.runtime.ledger import Ledger
from compile_muon.runtime.owner_states import deal_owners, owners_of
from compile_muon.runtime.pipeline_stages import PipelineStages
from compile_muon.runtime.shards import local_tensor, new_hyper
from compile_muon.sequence import plan_sequence
from compile_muon.sequence.plan import SequencePlan
from compile_muon.weights.materialize import Values
from compile_muon.weights.own_saving import saves_whole

__all__ = ["Assembled", "assemble", "warn_of_half_masters"]


@dataclass(frozen=True, eq=False)
class Assembled:
    """What the parts of an optimizer are.

    Args:
        mesh: of ranks, and ``group`` all of them; None for one process.
        stages: of a pipeline.
        sequence: what is cut where ranks share sequences.
        ledger: with the account of each parameter.
        ownership: of the model's parameters.
        assignments: why each parameter is trained as it is; ``groups`` of those that are.
        home: of states that are elsewhere, or kept in another dtype.
        hyper: ``[2]`` fp32, see :class:`~compile_muon.runtime.account.Account`.
        compares: whether there are other ranks to compare anything with.
    """

    config: Config
    mesh: Mesh | None
    group: dist.ProcessGroup | None
    stages: PipelineStages | None
    sequence: SequencePlan | None
    ledger: Ledger
    ownership: Ownership
    assignments: dict[str, Assignment]
    groups: Sequence[Group]
    home: Home | None
    hyper: Tensor
    compares: bool

    @property
    def trained(self) -> list[Account]:
        """Accounts of parameters that are not frozen."""
        return [account for account in self.ledger.accounts if account.param.requires_grad]


def assemble(
    model: nn.Module,
    config: Config,
    mesh: DeviceMesh | Mesh | None,
    process_group: dist.ProcessGroup | None,
    norm_group: dist.ProcessGroup | DeviceMesh | None,
    weights: str | os.PathLike | None,
    init: Callable[..., Any] | None,
) -> Assembled:
    """Shard ``model`` in place; see :meth:`compile_muon.MuonZero.from_config` for arguments and errors."""
    check_modules(model)
    values = Values.of(model, weights, init)
    meta = values is not None and values.meta
    here = next((param.device for param in model.parameters()), torch.device("cpu"))  # assign() requires it to be one
    device = target_device(mesh, process_group) if meta else here
    zero, experts = config.zero, config.expert_parallel
    ranks = resolve_mesh(
        mesh,
        process_group,
        device,
        config.mesh,
        experts=experts.size,
        sequence=config.sequence_parallel.size,
        state_over_all=zero.shard_state_over == "all" and zero.stage > 0,
        communicators=zero.communicators,
    )
    group = None if ranks is None else ranks.everyone
    roles, spread = planned_roles(model, ranks, experts)
    sequence = plan_sequence(model, config.sequence_parallel) if config.sequence_parallel.size > 1 else None
    check_supported(model, meta=meta, dtensors=ranks is not None)
    assignments = assign(
        model,
        config.muon_params,
        use_muon=config.algorithm == "muon",
        partial=norm_group is not None,
        chosen=chosen_methods(config, model),
        methods=(config.method, config.auxiliary),
    )
    assignments = with_views(config, assignments, model)
    groups = plan_groups(config, assignments, model)
    away = _states_away(config, groups, assignments, model)
    assignments = _with_fetches(config, assignments, away)
    stages = None
    if norm_group is not None:
        has_muon = config.algorithm == "adamw" or any(row.matrix for row in assignments.values())
        stages = PipelineStages.of(norm_group, group, device, zero, muon=has_muon)
    hyper = torch.empty(2, dtype=torch.float32, device=device)
    hypers, shared = dict.fromkeys(assignments, hyper), dict[tuple[object, ...], Tensor]()
    for each in groups:
        own = isinstance(each.method, MatrixMethod) and bool(each.method.given)
        if each.configured is not None or own:
            key = each.configured, each.method.name if own else ""
            tensor = shared.setdefault(key, new_hyper(each.method, device))
            hypers |= dict.fromkeys(each.members, tensor)
    # In a simulated group ("fake", for dry runs of large worlds) no other rank ever answers.
    compares = group is not None and backend_of(group, device) != "fake"
    ledger = Ledger(zero.gradient_accumulation_steps, zero.update)
    ledger.status = RankStatus(group, device)
    ledger.shares_sequences = sequence is not None
    ledger.check_batch = sequence.check_batch if sequence is not None and compares else None
    ledger.notes_logits = config.muon.qk_clip is not None
    ledger.checks_later = zero.checks_read == "next_step" and stages is None
    fake = next((p.fake_mode for p in map(local_tensor, model.parameters()) if isinstance(p, FakeTensor)), None)
    # Neither a disk nor another rank is in a plan.
    real = compares if group is not None else fake is None
    homes: list[Home] = []

    def reserve(specs: Mapping[str, ParamSpec]) -> None:
        if zero.offload is not None or config.muon.momentum_dtype is not None:
            members = {name for each in groups for name in each.members}
            owners = owners_of({name: spec for name, spec in specs.items() if name in members}, ledger.costs)
            homes.append(Home(specs, groups, config, away, group, device, real=real, fake=fake, owners=owners))

    ledger.accounts = shard_model(
        model, assignments, config, ranks, roles, ledger, hypers, device, spread, reserve,
        keep=lambda name, master: homes[0].keep_master(name, master),
    )  # fmt: skip
    if sequence is not None:
        assert ranks is not None
        sequence.apply(model, ranks.sequence, ranks.everyone, compares=compares)
        ledger.heads = ranks.sequence.index, ranks.sequence.size
    if trained := [account for account in ledger.accounts if account.param.requires_grad]:
        deal_owners(trained)
    if values is not None:
        values.fill(model, device)
    ownership = Ownership(model, ledger.accounts)
    made = Assembled(
        config, ranks, group, stages, sequence, ledger, ownership, assignments, groups, homes[0] if homes else None,
        hyper, compares,
    )  # fmt: skip
    if ranks is not None:
        saves_whole(model)
    warn_of_half_masters(made.trained)
    warn_of_shared_rates(config, groups)
    if config.compile.cuda_graphs and device.type == "cpu":
        warn_user("compile.cuda_graphs = True: there are none on a CPU, and nothing is recorded; leave it out")
    return made


def warn_of_half_masters(trained: Sequence[Account]) -> None:
    """Tell once that parameters in half precision are trained as they are."""
    half = [account for account in trained if account.spec.state_dtype in ("bfloat16", "float16")]
    if half:
        warn_user(
            f"master weights and optimizer state of {listed([account.name for account in half])} are "
            f"{half[0].spec.state_dtype} (master_dtype): small updates are rounded away; leave it out for float32"
        )


def _states_away(
    config: Config, groups: Sequence[Group], assignments: Mapping[str, Assignment], model: nn.Module
) -> frozenset[str]:
    """Parameters whose states are offloaded, the same on every rank.

    Where ``ratio`` keeps a part beside its parameters: a moment travels in and out once a step, a momentum in once
    more, so moments save more bytes for each that travels; of equals the largest go.
    """
    offload = config.zero.offload
    if offload is None:
        return frozenset()
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    candidates = []
    for group in groups:
        matrices = isinstance(group.method, MatrixMethod)
        momentum = isinstance(group.method, MatrixMethod) and group.method.keeps_momentum and offload.momentum
        slots = sum(state.each == "element" for state in group.method.states) + momentum
        slots += offload.masters
        for name in group.members:
            batch, *shape = assignments[name].matrix or (0, 0, 0)
            at_owners = batch * sum(math.prod(state.shape(*shape)) for state in group.method.states if state.at_owner)
            if size := slots * sizes[name] + at_owners:
                candidates.append((matrices, -size, name))
    left = offload.ratio * sum(-size for _, size, _ in candidates)
    chosen = []
    for _, size, name in sorted(candidates):
        if left <= 0:
            break
        chosen.append(name)
        left += size
    elements = {
        name: each.method.on_host for each in groups if isinstance(each.method, ElementMethod) for name in each.members
    }
    if offload.adamw_on == "cpu" and elements and not any(elements.get(name) for name in chosen):
        problem = "finds no moments of AdamW that are away"
        raise config_error("OffloadConfig.adamw_on", "cpu", problem, "raise ratio, or leave adamw_on out")
    return frozenset(chosen)


def _with_fetches(config: Config, assignments: Mapping[str, Assignment], away: frozenset[str]) -> dict[str, Assignment]:
    """The assignments, with those noted whose momentum graphs must fetch, or whose master weight is away."""
    compressed, offload = config.muon.momentum_dtype is not None, config.zero.offload
    moved, masters = (False, False) if offload is None else (offload.momentum, offload.masters)
    return {
        name: replace(
            row,
            fetched=row.matrix is not None
            and matrix_method(row.algorithm).keeps_momentum
            and (compressed or (moved and name in away)),
            master_away=masters and name in away,
        )
        for name, row in assignments.items()
    }
