"""The directions that a decision asks for: taken from backward, or made here of gradients scaled to the limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compile_muon.engine.decision import Decision
from compile_muon.engine.facts import Begun
from compile_muon.engine.finite import directions_not_finite
from compile_muon.engine.owner_states import states_at_owner
from compile_muon.engine.projected import Projected, project
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.trained import Trained
from compile_muon.passes.collectives import Traffic

__all__ = ["Directions", "fetches_of", "make", "note"]


@dataclass(frozen=True)
class Directions:
    """What a step moves matrices along.

    Args:
        found: by name, each of its shard's shape in the dtype of Newton-Schulz.
        states: at owners, the new ones of each that has some here.
        projected: what stands for the gradients of those whose methods project them.
        traffic: what was sent for those made here.
    """

    found: dict[str, Tensor]
    states: dict[str, Sequence[Tensor]] = field(default_factory=dict)
    projected: dict[str, Projected] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=Traffic)


def make(trained: Trained, begun: Begun, decision: Decision, norm: Tensor) -> Directions:
    """Make what is to be made, all at once. Gradients whose norm is over the limit are scaled in place before, as
    ``clip_grad_norm_`` does. Nothing is waited for.

    Args:
        norm: of all gradients, 0-dim fp32 on the device.
    Returns:
        Of all matrices with a gradient; the checks are given which of those made here are not finite.
    """
    if decision.clip:
        _clip(trained, norm)
    found = {name: speculation.direction for name, speculation in begun.used(decision).items()}
    sharded_params = [sharded for sharded in trained.muon if sharded.name in decision.make]
    if not sharded_params:
        return Directions(found)
    grads = [a.local_grad if a.grad is not None else torch.zeros_like(a.local) for a in sharded_params]
    with trained.ledger.range("step directions", payload=len(sharded_params)):
        # Those that are offloaded come here for as long as directions are made.
        kept = {
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
            sharded_params, grads, kept, trained.ledger.options
        )
    wrong = directions_not_finite([sharded.now for sharded in sharded_params], results)
    begun.checks.add("direction", [sharded.name for sharded in sharded_params], wrong)
    graded = [place for place, sharded in enumerate(sharded_params) if sharded.grad is not None]
    found |= {sharded_params[place].name: results[place] for place in graded}
    new: dict[str, Sequence[Tensor]] = {
        sharded_params[place].name: states[place] for place in graded if place in states
    }
    return Directions(found, new, projected, traffic)


def _states(trained: Trained, sharded: ShardedParam) -> list[Tensor]:
    return states_at_owner(sharded, trained.optimizer.state[sharded.param])


def fetches_of(trained: Trained, begun: Begun, decision: Decision) -> Mapping[ShardedParam, int]:
    """Which fetch of the momentum each direction is made of, where they are fetched; of those made here, the latest."""
    if trained.state_provider.all_resident:
        return {}
    used = begun.used(decision)
    return {a: used[a.name].fetches if a.name in used else a.fetches for a in begun.muon}


def note(trained: Trained, begun: Begun, decision: Decision, *, clipped: bool) -> None:
    """Note in the parameters what has become of the directions of backward.

    Args:
        clipped: whether the norm was over the limit, as far as it is known.
    """
    for sharded in begun.candidates:
        if sharded.name in decision.use:
            sharded.speculations.used()
    trained.ledger.count(used=len(decision.use))
    reason = "clipped" if clipped else "edited"
    trained.ledger.discarded([sharded for sharded in begun.candidates if sharded.name not in decision.use], reason)
    for sharded in trained.muon:
        sharded.speculations.note_norm(under_limit=not clipped)


def _clip(trained: Trained, norm: Tensor) -> None:
    """Scale all gradients by torch's ``limit / (norm + 1e-6)`` where that is under 1; not waited for."""
    limit = trained.config.zero.gradient_clipping
    gradients = [a.local_grad for a in (*trained.muon, *trained.rest) if a.grad is not None]
    if limit is None or not gradients:
        return
    factor = (limit / (norm + 1e-6)).clamp(max=1.0)
    # A step that will be refused leaves gradients as they are.
    torch._foreach_mul_(gradients, torch.where(torch.isfinite(norm), factor, torch.ones_like(factor)))
