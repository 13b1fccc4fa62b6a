"""``muon_zero::newton_schulz``: Newton-Schulz of a list of matrices as one operator, opaque to compilers.

    newton_schulz(Tensor[] xs, float[] coefficients, str method, str dtype, float eps, float safety, int[] restarts,
                  str backend, int memory_limit, Tensor[] norms) -> Tensor[]

``xs``: [..., m, n] of floating dtypes on one device, any strides, unmodified. ``coefficients``: a, b, c of every step,
flat. ``method`` to ``memory_limit`` are the fields of ``call_plan.Plan``; ``memory_limit`` may also be ``AUTO_LIMIT``.
``norms``: row norms of each of ``xs``, [..., m] in float32, with which Triton's kernels read ``xs`` once less; or an
empty list. An infinite row norm makes its matrix NaN. Results are new contiguous tensors of the inputs' shapes in
``dtype``. The operator has no derivative. It is opaque so that Inductor neither fuses nor reassociates the steps:
inlined bfloat16 steps drift from eager ones by about 5e-3 after four steps.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .call_plan import AUTO_LIMIT, MEMORY_LIMIT, Plan
from .dispatch import DTYPES, chosen_form, orthogonalize
from .operations import gram_flops, standard_flops
from .reference import summed_in_float32

OpArguments = tuple[list[float], str, str, float, float, list[int], str, int, list[Tensor]]


@torch.library.custom_op("muon_zero::newton_schulz", mutates_args=())
def newton_schulz_op(
    xs: Sequence[Tensor],
    coefficients: Sequence[float],
    method: str,
    dtype: str,
    eps: float,
    safety: float,
    restarts: Sequence[int],
    backend: str,
    memory_limit: int,
    norms: Sequence[Tensor],
) -> list[Tensor]:
    """See the module's docstring."""
    values = (list(coefficients), method, dtype, eps, safety, list(restarts), backend, memory_limit, list(norms))
    plan = plan_of(values)
    with summed_in_float32(plan.dtype):
        return orthogonalize(xs, plan, norms)


def plan_of(values: OpArguments) -> Plan:
    """Return the plan that :func:`arguments` flattened into ``values``."""
    coefficients, method, dtype, eps, safety, restarts, backend, memory_limit, _ = values
    triples = zip(coefficients[0::3], coefficients[1::3], coefficients[2::3], strict=True)
    limit = MEMORY_LIMIT if memory_limit == AUTO_LIMIT else memory_limit
    return Plan(tuple(triples), method, DTYPES[dtype], eps, safety, tuple(restarts), backend, limit)


@newton_schulz_op.register_fake
def _(xs, coefficients, method, dtype, eps, safety, restarts, backend, memory_limit, norms):  # type: ignore[no-untyped-def]
    return [torch.empty(x.shape, dtype=DTYPES[dtype], device=x.device) for x in xs]


@newton_schulz_op.register_vmap
def _(info, in_dims, xs, *plan):  # type: ignore[no-untyped-def]
    """Prepend the mapped dimension to the batch dimensions; row norms are dropped, so the kernels compute them."""
    stacks = [x if dim is None else x.movedim(dim, 0) for x, dim in zip(xs, in_dims[0], strict=True)]
    return newton_schulz_op(stacks, *plan[:-1], []), [None if dim is None else 0 for dim in in_dims[0]]


@register_flop_formula(torch.ops.muon_zero.newton_schulz)
def newton_schulz_flops(xs_shapes: Sequence[Sequence[int]], *plan: Any, **_: Any) -> int:
    """Count dense matrix products only, as torch's flop_counter does for other operators."""
    steps, method, restarts = len(plan[0]) // 3, plan[1], len(plan[5])
    flops = 0
    for *batch, m, n in xs_shapes:
        k, l = sorted((m, n))  # noqa: E741
        gram = chosen_form(method, m, n, steps, restarts) == "gram"
        flops += math.prod(batch) * (gram_flops(k, l, steps, restarts) if gram else standard_flops(k, l, steps))
    return flops


def arguments(plan: Plan) -> OpArguments:
    """Flatten a plan into the operator's arguments after ``xs``; ``norms`` is empty."""
    flat = [value for triple in plan.steps for value in triple]
    name = str(plan.dtype).removeprefix("torch.")
    return flat, plan.method, name, plan.eps, plan.safety, list(plan.restarts), plan.backend, plan.memory_limit, []
