"""The directions of a step: taken from backward, or made here of gradients scaled to the limit.

Methods may project gradients ahead of Newton-Schulz: combine them with the weight and row states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.engine.decision import Decision
from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.gradient import Speculation
from compile_muon.engine.hooks import MASTER, ProvideStates, StateRequest
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import states_at_owner
from compile_muon.engine.step_checks import StepChecks, directions_not_finite
from compile_muon.engine.trained import OptimizerState
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.language.spec import decode_dtype
from compile_muon.passes.methods import MatrixMethod, Piece, matrix_method
from compile_muon.passes.torch_private import group_named


@dataclass(frozen=True)
class Directions:
    """The directions of all matrices with a gradient, and results of making them."""

    tensors: dict[str, Tensor]  # by name, each of its shard's shape in the dtype of Newton-Schulz
    states: dict[str, Sequence[Tensor]] = field(default_factory=dict)  # new states at owners, by name
    projected: dict[str, ProjectedGrad] = field(default_factory=dict)  # of matrices whose methods project gradients
    traffic: Traffic = field(default_factory=Traffic)  # sent for the directions made here
    # The fetch of the offloaded momentum that each direction was made of.
    fetches: Mapping[ShardedParam, int] = field(default_factory=dict)


def make(
    trained: OptimizerState, checks: StepChecks, used: Mapping[str, Speculation], decision: Decision, norm: Tensor
) -> Directions:
    """Make the directions that the decision asks for, all in one step graph, without waiting, beside those ``used`` of
    backward. Their finiteness joins the checks.

    Gradients are first scaled in place where ``norm``, of all gradients, 0-dim fp32, is over the limit (as
    ``clip_grad_norm_`` does).
    """
    if decision.clip:
        _clip(trained, norm)
    directions = {name: speculation.direction for name, speculation in used.items()}
    sharded_params = [sharded for sharded in trained.muon if sharded.name in decision.make]
    if not sharded_params:
        return Directions(directions, fetches=_fetches(trained, used))
    grads = [a.local_grad if a.grad is not None else torch.zeros_like(a.local) for a in sharded_params]
    with trained.ledger.range("step directions", payload=len(sharded_params)):
        # Copies of offloaded states live on the device only while directions are made.
        owner_states = {
            place: [
                state.to(trained.device, non_blocking=True)
                for state in states_at_owner(sharded, trained.optimizer.state[sharded.param])
            ]
            for place, sharded in enumerate(sharded_params)
            if sharded.owners
        }
        projected = project(trained, sharded_params, grads)
        grads = [
            projected[sharded.name].gradient if sharded.name in projected else grad
            for sharded, grad in zip(sharded_params, grads, strict=True)
        ]
        results, states, traffic = trained.step_graphs.orthogonalize(
            sharded_params, grads, owner_states, trained.ledger.options
        )
    flags = directions_not_finite([sharded.now for sharded in sharded_params], results)
    checks.add("direction", [sharded.name for sharded in sharded_params], flags)
    with_gradient = [place for place, sharded in enumerate(sharded_params) if sharded.grad is not None]
    directions |= {sharded_params[place].name: results[place] for place in with_gradient}
    new_states: dict[str, Sequence[Tensor]] = {
        sharded_params[place].name: states[place] for place in with_gradient if place in states
    }
    return Directions(directions, new_states, projected, traffic, _fetches(trained, used))


def _fetches(trained: OptimizerState, used: Mapping[str, Speculation]) -> Mapping[ShardedParam, int]:
    """Return for each direction which fetch of the offloaded momentum it was made of: the latest, if made here."""
    if trained.state_provider.all_resident:
        return {}
    muon = [sharded for sharded in trained.muon if sharded.grad is not None]
    return {a: used[a.name].fetches if a.name in used else a.fetches for a in muon}


def _clip(trained: OptimizerState, norm: Tensor) -> None:
    """Scale all gradients by torch's ``limit / (norm + 1e-6)`` where that is under 1, without waiting."""
    limit = trained.config.zero.gradient_clipping
    gradients = [a.local_grad for a in (*trained.muon, *trained.rest) if a.grad is not None]
    if limit is None or not gradients:
        return
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    # A non-finite norm: the step will be refused, and leaves gradients as they are.
    torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), factor, torch.ones_like(factor)))


# -------------------------------------------------------------------------------------------------- projected gradients


@dataclass(frozen=True)
class ProjectedGrad:
    """The projected gradient of a shard."""

    gradient: Tensor  # like the shard, in the dtype of states
    sums: Sequence[Tensor | None]  # of each part, over whole rows; None without ``project_sums``


def over_whole_rows(part_sums: Sequence[tuple[ShardedParam, int, Tensor | None]]) -> None:
    """Turn sums over this rank's columns into sums over whole rows, in place: one all-reduce per group where ranks hold
    columns of the same rows. ``part_sums``: parameter, number of the part, and its sums ``[n, r, k]``."""
    by_param: dict[ShardedParam, list[tuple[int, Tensor]]] = {}
    for sharded, place, sums in part_sums:
        if sums is not None and sharded.spec.cut_in_columns:
            by_param.setdefault(sharded, []).append((place, sums))
    by_group: dict[str, list[Tensor]] = {}  # tensors to sum, by group
    copies: list[tuple[Tensor, Tensor]] = []
    for sharded, numbered_sums in by_param.items():
        view, summed = sharded.now.muon_settings.view, by_group.setdefault(sharded.spec.layout.tensor.group, [])
        if view is None or view.dim == 0:
            summed += [sums for _, sums in numbered_sums]
            continue
        # A view over columns leaves each rank other matrices, or parts of them: their sums meet by matrix number.
        all_matrices = numbered_sums[0][1].new_zeros(sharded.now.matrix_count, *numbered_sums[0][1].shape[1:])
        for place, sums in numbered_sums:
            first = sharded.now.parts[place].first
            copies.append((sums, all_matrices[first : first + len(sums)].add_(sums)))
        summed.append(all_matrices)
    for group, summed in by_group.items():
        flat = torch.cat([x.reshape(-1) for x in summed])
        dist.all_reduce(flat, group=group_named(group))
        for x, total in zip(summed, flat.split([x.numel() for x in summed]), strict=True):
            x.copy_(total.view(x.shape))
    for sums, total in copies:
        sums.copy_(total)


def exact_weights(
    provide: ProvideStates, sharded_params: Sequence[ShardedParam]
) -> Iterator[tuple[ShardedParam, Tensor]]:
    """Yield each parameter with the weight that a step will write: the shard, or the master weight that it is rounded
    from, which is valid until the next one is drawn."""
    yield from ((sharded, sharded.local.detach()) for sharded in sharded_params if not sharded.spec.master)
    rounded = [sharded for sharded in sharded_params if sharded.spec.master]
    for some, states in provide(rounded, StateRequest.MASTERS_READ) if rounded else ():
        yield from ((sharded, local_tensor(provided[MASTER])) for sharded, provided in zip(some, states, strict=True))


def project(
    trained: OptimizerState, sharded_params: Sequence[ShardedParam], grads: Sequence[Tensor]
) -> dict[str, ProjectedGrad]:
    """Return by name the projected gradients of those matrices whose methods project, computed with the weights the
    step will write. ``sharded_params`` is equal on all ranks; ``grads`` are zeros where a shard has none."""
    pairs = zip(sharded_params, grads, strict=True)
    grad_of = {a: grad.contiguous() for a, grad in pairs if _method(a).project is not None}
    projected_of = {
        a: ProjectedGrad(torch.empty_like(grad, dtype=decode_dtype(a.spec.state_dtype)), [])
        for a, grad in grad_of.items()
    }
    col_cut = [sharded for sharded in grad_of if sharded.spec.cut_in_columns]

    def write(sharded: ShardedParam, pieces: Sequence[Piece]) -> None:
        hook, projected = _method(sharded).project, projected_of[sharded]
        assert hook is not None
        for part, piece, sums in zip(sharded.now.parts, pieces, projected.sums, strict=True):
            part.of(projected.gradient).copy_(hook(replace(piece, sums=sums)))

    # Offloaded master weights share buffers, so a piece is used before the next weight is drawn.
    for sharded, weight in exact_weights(trained.provide, list(grad_of)):
        pieces, sums_of = _pieces(trained, sharded, grad_of[sharded], weight), _method(sharded).project_sums
        sums = [None if sums_of is None else sums_of(piece.grad, piece.weight) for piece in pieces]
        projected_of[sharded] = replace(projected_of[sharded], sums=sums)
        if sharded not in col_cut:
            write(sharded, pieces)
    over_whole_rows([(sharded, *numbered) for sharded in col_cut for numbered in enumerate(projected_of[sharded].sums)])
    for sharded, weight in exact_weights(trained.provide, col_cut):
        write(sharded, _pieces(trained, sharded, grad_of[sharded], weight))
    return {sharded.name: projected for sharded, projected in projected_of.items()}


def _method(sharded: ShardedParam) -> MatrixMethod:
    return matrix_method(sharded.spec.muon_settings.method)


def _pieces(trained: OptimizerState, sharded: ShardedParam, grad: Tensor, weight: Tensor) -> list[Piece]:
    """Return the pieces for ``project``, without sums."""
    slots, device = trained.optimizer.state[sharded.param], grad.device
    dtype = torch.promote_types(decode_dtype(sharded.spec.state_dtype), torch.float32)
    grad, weight = (x.to(device, dtype).contiguous() for x in (grad, weight))
    row_states = {s.name: local_tensor(slots[s.name]).to(device) for s in _method(sharded).states if s.each == "row"}
    pieces = []
    for part in sharded.now.parts:
        gradient, part_states = part.of(grad), {name: part.of_rows(state) for name, state in row_states.items()}
        pieces.append(Piece(gradient, part.of(weight), gradient, part_states, None, {}, part.rows, part.cols))
    return pieces
