"""Muon directions of many parameters: momentum, exchange of matrices, Newton-Schulz, exchange of directions.

The N ranks of an *owner group* hold the pieces of a matrix of S bytes; M *replicas* of the group hold the same pieces.
One of the N M ranks owns the matrix. An exchange sends, in this order: (1) *updates*, made of a rank's gradients and
momenta, to the owner, in the wire dtype; (2) *directions* back to the ranks, in the compute dtype, both by an
all-to-all within the owner's group; (3) directions from these ranks to their replicas, by one all-gather or all-to-all.
Momenta and states at owners never travel. Splits and owners follow from the specs, so that ranks negotiate nothing at
run time. One file a strategy; each matrix is orthogonalized once:

========== ======= ======================================== ========================================
strategy   sends   bytes a rank sends (see passes.formulas) used for
========== ======= ======================================== ========================================
local      3       S (M-1) / (N M)                          matrices whole on a rank: world 1, stacks
owner      1, 2, 3 S (M-1) / (N M) + 2 S (N-1) / (N**2 M)   the rule
========== ======= ======================================== ========================================
"""

from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from ..language.holder import FETCH
from ..language.spec import ParamSpec, decode_dtype
from ..methods import matrix_method
from ..momentum import Updated, supports, updates_of
from ..record import Alike, call
from .local import local
from .matrices import MethodInputs, wire_dtype
from .owner import owner


def route(spec: ParamSpec) -> tuple[object, ...]:
    """Return the key on which parameters must agree to share one exchange."""
    muon = spec.muon_settings
    layout = spec.layout
    ranks = (layout.redistribution_key, layout.owner_group, layout.replica_group, layout.tensor_parallel)
    return (muon.exchange, muon.method, muon.phase, repr(ranks), *map(repr, muon.kernel_settings))


def hops(spec: ParamSpec) -> int:
    """Number of successive collectives in an exchange."""
    layout = spec.layout
    shared = not layout.replica_group.alone
    return shared + (2 * (not layout.owner_group.alone) if spec.muon_settings.exchange == "owner" else 0)


def orthogonalize_group(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    all_graph_scalars: Sequence[Tensor],
    specs: Sequence[ParamSpec],
    owners: Sequence[int],
    states: Sequence[Sequence[Tensor]] | None = None,
    updated: list[Updated | None] | None = None,
    carried: Mapping[int, Tensor] = MappingProxyType({}),
    alike: Alike = call,
) -> list[Tensor]:
    """Return the Muon direction of each parameter, then the new states of each, like ``states``.

    Directions have ``spec.layout.local_shape``, in ``spec.muon.dtype``, contiguous. Inputs are not modified: the
    optimizer writes the momentum. ValueError for a parameter without ``muon``.

    - ``grads``: averaged gradients of the shards, ``spec.layout.local_shape``, ``spec.dtype``.
    - ``momenta``: averages of the gradients of earlier steps, same shapes, ``spec.state_dtype``; empty where offloaded.
    - ``all_graph_scalars``: of each parameter, in fp32, ``(1 - momentum, momentum)`` and the rates of its method.
    - ``specs``: of one :func:`route`. ``owners``: of each share, from :func:`~.owner.assign_owners`.
    - ``states``: that this rank owns of each parameter, ``[count, a, b]``, in the order of :func:`~.owned.owned`.
    - ``updated``: a list that receives the momentum operator's results for each gradient, None where
      :func:`~..momentum.supports` refuses it. Gradients that it takes may be narrower than ``spec.dtype``.
    - ``carried``: by index, the ``.grad`` of earlier backwards, to which the gradient is added.
    - ``alike``: calls a function; of equal ones a recorder traces the first, and copies its nodes
      (:data:`~..record.Alike`).
    """
    by_operator = _by_operator(grads, momenta, all_graph_scalars, specs, carried)
    updates = []
    for i, (grad, momentum, graph_scalars, spec) in enumerate(
        zip(grads, momenta, all_graph_scalars, specs, strict=True)
    ):
        if i in by_operator:
            updates.append(by_operator[i].update)
            continue
        updates.append(alike((_update, spec), partial(_update, spec), [grad, momentum, graph_scalars]))
    if updated is not None:
        updated += [by_operator.get(i) for i in range(len(grads))]
    inputs = [
        MethodInputs(graph_scalars, spec.muon_settings, owned, by_operator[i].norms if i in by_operator else None)
        for i, (graph_scalars, spec, owned) in enumerate(
            zip(all_graph_scalars, specs, states or [()] * len(specs), strict=True)
        )
    ]
    strategy = local if specs[0].muon_settings.exchange == "local" else owner
    directions = strategy(updates, specs, owners, inputs)
    return [*directions, *(state for of_parameter in inputs for state in of_parameter.new_states)]


def _update(spec: ParamSpec, grad: Tensor, momentum: Tensor, graph_scalars: Tensor) -> Tensor:
    """Return the update of one parameter that Newton-Schulz orthogonalizes, in the wire dtype."""
    muon = spec.muon_settings
    grad = grad.to(decode_dtype(spec.state_dtype))
    if muon.fetched:
        momentum = FETCH(momentum, grad)
    update = matrix_method(muon.method).update
    return update(grad, momentum, (graph_scalars[0], graph_scalars[1]), muon.nesterov, wire_dtype(muon))


def _by_operator(
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    all_graph_scalars: Sequence[Tensor],
    specs: Sequence[ParamSpec],
    carried: Mapping[int, Tensor],
) -> dict[int, Updated]:
    """Return, by index, the updates of those parameters that the fused momentum operator takes."""
    groups: dict[tuple[torch.dtype, torch.dtype, bool, torch.dtype, torch.dtype, bool], list[int]] = {}
    for i, (grad, momentum, spec) in enumerate(zip(grads, momenta, specs, strict=True)):
        if supports(grad, momentum, spec):
            muon = spec.muon_settings
            kind = (grad.dtype, momentum.dtype, muon.nesterov, wire_dtype(muon), decode_dtype(spec.dtype), i in carried)
            groups.setdefault(kind, []).append(i)
    updates: dict[int, Updated] = {}
    for (_, _, nesterov, dtype, wide, _), indices in groups.items():
        group_grads, group_momenta, group_graph_scalars = (
            [each[i] for i in indices] for each in (grads, momenta, all_graph_scalars)
        )
        group_carried = [carried[i] for i in indices if i in carried]
        updates |= zip(
            indices,
            updates_of(group_grads, group_momenta, group_graph_scalars, group_carried, nesterov, dtype, wide),
            strict=True,
        )
    return updates
