"""The directions of a step: taken from backward, or made here of gradients scaled to the limit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compile_muon.engine.decision import Decision
from compile_muon.engine.gradient import Speculation
from compile_muon.engine.projected import ProjectedGrad, project
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import states_at_owner
from compile_muon.engine.step_checks import StepChecks, directions_not_finite
from compile_muon.engine.trained import OptimizerState
from compile_muon.passes.collectives import Traffic


@dataclass(frozen=True)
class Directions:
    """The directions of all matrices with a gradient, and results of making them."""

    tensors: dict[str, Tensor]  # by name, each of its shard's shape in the dtype of Newton-Schulz
    states: dict[str, Sequence[Tensor]] = field(default_factory=dict)  # new states at owners, by name
    projected: dict[str, ProjectedGrad] = field(default_factory=dict)  # of matrices whose methods project gradients
    traffic: Traffic = field(default_factory=Traffic)  # sent for the directions made here


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
        return Directions(directions)
    grads = [a.local_grad if a.grad is not None else torch.zeros_like(a.local) for a in sharded_params]
    with trained.ledger.range("step directions", payload=len(sharded_params)):
        # Copies of offloaded states live on the device only while directions are made.
        owner_states = {
            place: [state.to(trained.device, non_blocking=True) for state in _states(trained, sharded)]
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
    return Directions(directions, new_states, projected, traffic)


def _states(trained: OptimizerState, sharded: ShardedParam) -> list[Tensor]:
    """Return this rank's states at owners."""
    return states_at_owner(sharded, trained.optimizer.state[sharded.param])


def note(trained: OptimizerState, candidates: Collection[ShardedParam], decision: Decision, *, clipped: bool) -> None:
    """Record which directions of backward (``candidates``) were used or discarded. ``clipped``: the norm is known to be
    over the limit."""
    for sharded in candidates:
        if sharded.name in decision.use:
            sharded.speculations.used()
    trained.ledger.count(used=len(decision.use))
    reason = "clipped" if clipped else "edited"
    trained.ledger.discarded([sharded for sharded in candidates if sharded.name not in decision.use], reason)
    for sharded in trained.muon:
        sharded.speculations.note_norm(under_limit=not clipped)


def _clip(trained: OptimizerState, norm: Tensor) -> None:
    """Scale all gradients by torch's ``limit / (norm + 1e-6)`` where that is under 1, without waiting."""
    limit = trained.config.zero.gradient_clipping
    gradients = [a.local_grad for a in (*trained.muon, *trained.rest) if a.grad is not None]
    if limit is None or not gradients:
        return
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    # A non-finite norm: the step will be refused, and leaves gradients as they are.
    torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), factor, torch.ones_like(factor)))
