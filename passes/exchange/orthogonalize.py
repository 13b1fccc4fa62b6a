"""Gather ahead of Newton-Schulz, scatter behind it.

``orthogonalize_group`` is the Muon direction of many parameters at once: momentum, the exchange that brings whole
matrices together, Newton-Schulz, and the exchange that brings each rank's rows back. Routing is static: splits and
owners follow from the specs, so nothing is negotiated at run time. One file a strategy:

========== ============================================= ===================== ==========================
strategy   bytes sent per rank, matrix of S bytes, W     Newton-Schulz work    used for
========== ============================================= ===================== ==========================
local      0                                             each matrix once      world 1, expert stacks
owner      2 S (W-1) / W**2 (all-to-all there and back)  each matrix once      the rule
========== ============================================= ===================== ==========================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from ..language.holder import FETCH
from ..language.spec import ParamSpec, decode_dtype
from ..methods import matrix_method
from ..momentum import Updated, takes, updates_of
from ..record import Alike, call
from .local import local
from .matrices import MethodInputs, wire_dtype
from .owner import owner

__all__ = ["STRATEGIES", "hops", "orthogonalize_group", "route"]

_Strategy = Callable[[Sequence[Tensor], Sequence[ParamSpec], Sequence[int], Sequence[MethodInputs]], list[Tensor]]

#: what ``MuonSpec.exchange`` names: (updates, specs, owners, inputs) -> directions
STRATEGIES: dict[str, _Strategy] = {"local": local, "owner": owner}


def route(spec: ParamSpec) -> tuple[object, ...]:
    """What parameters must agree on to share one exchange."""
    muon = spec.muon_settings
    layout = spec.layout
    ranks = (layout.company, layout.owner_group, layout.replica_group, layout.joined)
    return (muon.exchange, muon.method, muon.phase, repr(ranks), *map(repr, muon.kernel_settings))


def hops(spec: ParamSpec) -> int:
    """Collectives of an exchange, one behind the other."""
    layout = spec.layout
    shared = not layout.replica_group.alone
    return shared + (2 * (not layout.owner_group.alone) if spec.muon_settings.exchange == "owner" else 0)


def orthogonalize_group(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    hypers: Sequence[Tensor],
    specs: Sequence[ParamSpec],
    owners: Sequence[int],
    states: Sequence[Sequence[Tensor]] | None = None,
    updated: list[Updated | None] | None = None,
    carried: Mapping[int, Tensor] = MappingProxyType({}),
    alike: Alike = call,
) -> list[Tensor]:
    """Muon directions of many parameters.

    Args:
        grads: averaged gradient of each shard, ``spec.layout.local_shape``, ``spec.dtype``.
        momenta: EMA of the gradients before these, same shapes, ``spec.state_dtype``; empty where it is fetched.
        hypers: per parameter an fp32 tensor ``(1 - momentum, momentum, ...)``, then what its method is given.
        specs: static facts, of one :func:`route`; all with ``muon`` set.
        owners: of each share, as :func:`assign_owners` gives them; read where the strategy is ``owner``.
        states: that this rank owns of each parameter, ``[count, a, b]``, in the order of :func:`~.owned.owned`.
        updated: filled with what else is known of each gradient, None where :func:`~..momentum.takes` refuses it. What
            it takes may come in a narrower dtype than ``spec.dtype``.
        carried: what some of these, by number, are added to.
        alike: calls what is done with each parameter by itself.
    Returns:
        One direction per gradient, ``spec.layout.local_shape``, in the dtype of Newton-Schulz (``spec.muon.dtype``),
        contiguous; behind them the new states of each parameter, like ``states``.
        Inputs are not modified: the momentum is the optimizer's to commit.
    Raises:
        ValueError: a parameter without ``muon``.
    """
    made = _by_operator(grads, momenta, hypers, specs, carried)
    updates = []
    for i, (grad, momentum, hyper, spec) in enumerate(zip(grads, momenta, hypers, specs, strict=True)):
        if i in made:
            updates.append(made[i].update)
            continue
        updates.append(alike((_update, spec), partial(_update, spec), [grad, momentum, hyper]))
    if updated is not None:
        updated += [made.get(i) for i in range(len(grads))]
    inputs = [
        MethodInputs(hyper, spec.muon_settings, own, made[i].norms if i in made else None)
        for i, (hyper, spec, own) in enumerate(zip(hypers, specs, states or [()] * len(specs), strict=True))
    ]
    directions = STRATEGIES[specs[0].muon_settings.exchange](updates, specs, owners, inputs)
    return [*directions, *(new for each in inputs for new in each.made)]


def _update(spec: ParamSpec, grad: Tensor, momentum: Tensor, hyper: Tensor) -> Tensor:
    """What is orthogonalized of one parameter."""
    muon = spec.muon_settings
    grad = grad.to(decode_dtype(spec.state_dtype))
    if muon.fetched:
        momentum = FETCH(momentum, grad)
    update = matrix_method(muon.method).update
    return update(grad, momentum, (hyper[0], hyper[1]), muon.nesterov, wire_dtype(muon))


def _by_operator(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    hypers: Sequence[Tensor],
    specs: Sequence[ParamSpec],
    carried: Mapping[int, Tensor],
) -> dict[int, Updated]:
    """By number of the parameter, of those that one operator updates."""
    groups: dict[tuple[torch.dtype, torch.dtype, bool, torch.dtype, torch.dtype, bool], list[int]] = {}
    for i, (grad, momentum, spec) in enumerate(zip(grads, momenta, specs, strict=True)):
        if takes(grad, momentum, spec):
            muon = spec.muon_settings
            kind = (grad.dtype, momentum.dtype, muon.nesterov, wire_dtype(muon), decode_dtype(spec.dtype), i in carried)
            groups.setdefault(kind, []).append(i)
    made: dict[int, Updated] = {}
    for (_, _, nesterov, dtype, wide, _), chosen in groups.items():
        own, kept, rates = ([each[i] for i in chosen] for each in (grads, momenta, hypers))
        held = [carried[i] for i in chosen if i in carried]
        made |= zip(chosen, updates_of(own, kept, rates, held, nesterov, dtype, wide), strict=True)
    return made
