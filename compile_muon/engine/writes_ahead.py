"""Ahead-of-time compilation of the kernels that write weights, in Inductor's workers while it compiles backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from compile_muon.engine.commit import Matrices
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.trained import OptimizerState
from compile_muon.kernels import Averages, muon_apply
from compile_muon.passes.ahead import compile_launches
from compile_muon.passes.language.spec import decode_dtype
from compile_muon.passes.methods import MatrixMethod

if TYPE_CHECKING:
    from compile_muon.kernels.gpu.launch import Launch


def compile_writes(trained: OptimizerState) -> None:
    """Start to compile the kernels of :func:`launches_of_writes`; without workers, the first launch compiles."""
    if trained.device.type == "cuda":
        compile_launches(trained.device, lambda: list(launches_of_writes(trained, trained.device)))


def launches_of_writes(trained: OptimizerState, device: torch.device) -> Iterator[Launch]:
    """Yield a launch on ``device`` of each kernel that ``commit_weights`` may start. Each comes for aligned and for
    unaligned memory, since the address of a direction depends on its exchange."""
    from compile_muon.kernels.gpu.launch import noting

    for group in trained.optimizer.param_groups:
        method = trained.method(group)
        sharded_params = [trained.sharded_params[param] for param in group["params"]]
        matrices = Matrices(method, group, {}, lambda rows, cols: 1.0) if isinstance(method, MatrixMethod) else None
        if not sharded_params or matrices is None or not matrices.plain:
            continue
        moved = matrices.joint and trained.state_provider.all_resident
        device_rates: tuple[float | Tensor, ...] = torch.empty(3, dtype=torch.float64, device="meta").unbind()
        # CUDA graphs read rates from tensors.
        for rates in [device_rates] if isinstance(group["lr"], Tensor) else [(0.0, 0.0, 0.0), device_rates]:
            with noting(device) as launches:
                _write(sharded_params, *rates, moved=moved, later=trained.ledger.checks_later)
            for launch in launches:
                yield launch
                yield replace(launch, constants=launch.constants | {"WIDE": False})


def _write(
    sharded_params: Sequence[ShardedParam],
    lr: float | Tensor,
    weight_decay: float | Tensor,
    weight: float | Tensor,
    *,
    moved: bool,
    later: bool,
) -> None:
    """Write meta tensors as ``commit_weights`` does on CUDA: momenta too if ``moved``, ``found_inf`` if ``later``."""

    def like(sharded: ShardedParam, dtype: torch.dtype) -> Tensor:
        return torch.empty_like(sharded.local, dtype=dtype, device="meta")

    weights = [like(a, decode_dtype(a.spec.state_dtype if a.spec.master else a.spec.dtype)) for a in sharded_params]
    directions = [like(a, decode_dtype(a.spec.muon_settings.dtype)) for a in sharded_params]
    momenta = [like(a, a.momentum.dtype) for a in sharded_params]
    averages = Averages(momenta, [like(a, decode_dtype(a.spec.dtype)) for a in sharded_params], weight)
    muon_apply(
        weights, directions, lr=lr, weight_decay=weight_decay, scale=1.0,
        averages=averages if moved else None, found_inf=torch.empty((), device="meta") if later else None,
    )  # fmt: skip
