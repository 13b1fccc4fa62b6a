"""`ParamSpec`: the static facts of a parameter that its markers carry: layout over the mesh, dtypes, method."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from compile_muon.config import Config
from compile_muon.errors import ConfigError, UnsupportedModelError
from compile_muon.kernels.call_plan import AUTO_LIMIT
from compile_muon.kernels.dispatch import chosen_form, symmetric_kernels
from compile_muon.kernels.newton_schulz import make_plan
from compile_muon.mesh import DENSE, Mesh, Role
from compile_muon.model.assignment import Assignment
from compile_muon.passes.language.layout import Layout
from compile_muon.passes.language.spec import MuonSpec, ParamSpec, encode_dtype, exchange_of
from compile_muon.passes.language.views import most_work
from compile_muon.passes.methods import matrix_method


def muon_spec(assignment: Assignment, config: Config, device: torch.device, layout: Layout) -> MuonSpec | None:
    """Return how a matrix of this layout is orthogonalized; None where no matrix method trains the parameter."""
    if assignment.matrix is None:
        return None
    batch, rows, cols = assignment.matrix
    if not layout.expert.alone:
        if len(layout.unsharded_shape) < 3:
            raise UnsupportedModelError(
                f"{assignment.name}: is cut over the axis expert, and shape {list(layout.unsharded_shape)} is one "
                "matrix, not a "
                "stack of them; set param.use_muon = False, or cut it over the axis tensor"
            )
        batch = layout.shape[0]
    ns, view = config.muon.ns, assignment.view
    largest = (rows, cols) if view is None else most_work(view.shapes(rows, cols))
    try:
        plan = make_plan(ns.method, ns.coefficients, ns.steps, ns.dtype, device, ns.eps, ns.backend)
    except ValueError as error:
        # Arguments of the kernels are our settings without the prefix `ns_`.
        raise ConfigError(re.sub(r"\b(backend|coefficients|dtype|method|steps)(?==)", r"ns_\1", str(error))) from error
    symmetric = plan.method == "auto" and symmetric_kernels(plan.dtype, device, ns.backend)
    orthogonalizes = matrix_method(assignment.algorithm).orthogonalizes
    return MuonSpec(
        batch=batch,
        rows=rows,
        cols=cols,
        nesterov=config.muon.nesterov,
        form=chosen_form(plan.method, *largest, len(plan.steps), len(plan.restarts), symmetric=symmetric),
        coefficients=tuple(value for triple in plan.steps for value in triple),
        safety=plan.safety,
        restarts=plan.restarts,
        dtype=encode_dtype(plan.dtype if orthogonalizes else torch.promote_types(plan.dtype, torch.float32)),
        eps=ns.eps,
        exchange=exchange_of(layout, batch, view),
        backend=ns.backend,
        memory_limit=AUTO_LIMIT if isinstance(ns.memory_limit, str) else ns.memory_limit,
        method=assignment.algorithm,
        view=view,
        fetched=assignment.fetched,
    )


def describe(
    param: Tensor, assignment: Assignment, config: Config, mesh: Mesh | None, device: torch.device, role: Role = DENSE
) -> ParamSpec:
    """Return the static facts of a parameter that is, or will be, on ``device``."""
    shape, stage = tuple(param.shape), config.zero.stage
    if role.expert and role.placed is None:  # a plain tensor marked as this rank's experts
        assert mesh is not None
        shape = (shape[0] * mesh.axis("expert").size, *shape[1:])
    layout = Layout(shape, stage) if mesh is None else mesh.layout(shape, stage, role)
    compute = config.zero.param_dtype if config.zero.param_dtype and param.is_floating_point() else param.dtype
    master = param.dtype
    if param.requires_grad:  # float32 at least by default; frozen parameters keep their dtype
        master = config.zero.master_dtype or torch.promote_types(param.dtype, torch.float32)
    offloaded = assignment.master_offloaded and compute.itemsize < master.itemsize
    return ParamSpec(
        layout,
        dtype=encode_dtype(compute if offloaded else master),
        compute_dtype=encode_dtype(compute),
        reduce_dtype=encode_dtype(config.zero.reduce_dtype or compute),
        muon=muon_spec(assignment, config, device, layout),
        master=encode_dtype(master) if offloaded else "",
        on_host=config.zero.offload_param is not None and layout.stage == 3,
    )
