"""``initialize``: from a config file to a sharded, compiled model and its optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from compile_muon.config import CompileConfig, Config, load_config
from compile_muon.config.groups import GroupConfig, named_groups
from compile_muon.engine import Extension
from compile_muon.launched import at_exit, begin_group
from compile_muon.model.support import check_is_module
from compile_muon.optimizer import MuonZero

M = TypeVar("M", bound=nn.Module)


def initialize(
    model: M,
    config: str | os.PathLike | Mapping[str, Any] | Config,
    *,
    groups: Mapping[str, Any] | Sequence[Any] | None = None,
    mesh: DeviceMesh | None = None,
    process_group: dist.ProcessGroup | None = None,
    norm_group: dist.ProcessGroup | DeviceMesh | None = None,
    weights: str | os.PathLike | None = None,
    init: Callable[..., Any] | None = None,
    extensions: Sequence[Extension] = (),
    dist_init_required: bool = True,
) -> tuple[M, MuonZero]:
    """Shard ``model`` in place, compile it in place if the config says so, and build its optimizer.

    Where torchrun, SLURM or an MPI started several ranks and the program has begun no process group, it begins here and
    ends with the program. On GPUs the model then moves to its rank's.

    Args:
        model: module with all parameters on one device; or, with ``weights`` or ``init``, on the meta device: memory is
            then given on the device of the ranks' process group, shard by shard.
        config: path of a JSON file, a mapping in DeepSpeed's vocabulary, or a :class:`Config`.
        groups: parameters with a method or rates of their own, as :class:`MuonZero` takes them; default: those of the
            config.
        mesh: one dimension, or some of ``("replicate", "shard", "expert", "tensor")`` in this order; default: the sizes
            of ``"mesh"`` and ``"expert_parallel"`` in the config, or one dimension.
        process_group: the data-parallel group, instead of ``mesh``.
        norm_group: one rank of each pipeline stage, this rank included, see :class:`MuonZero`.
        weights: a folder that :func:`compile_muon.load_pretrained` reads once the model is sharded.
        init: ``init(module)`` initializes the parameters and buffers that ``module`` holds itself; called as
            ``model.apply(init)`` would, with whole tensors of one module at a time, of which rank 0's values are kept.
            A Hugging Face model's ``_init_weights`` or ``init_weights`` will do. With ``weights``, only modules with
            buffers that no folder holds are initialized.
        extensions: the user's features, see :class:`MuonZero`.
        dist_init_required: False leaves the process group to the program, as trainers do.
    Returns:
        The same model object, and its :class:`MuonZero`.
    Raises:
        ConfigError, UnsupportedModelError: nothing is changed then.
        CheckpointError: ``weights`` do not fit; the model is sharded and has no values then.
    """
    check_is_module(model)
    resolved = load_config(config)
    if groups is not None:
        resolved = replace(resolved, groups=cast("tuple[GroupConfig, ...]", named_groups(groups, model)))
    device = begin_group() if dist_init_required else None
    if device is not None and device.type == "cuda" and not any(param.is_meta for param in model.parameters()):
        model.to(device)
    optimizer = MuonZero.from_config(
        model, resolved, mesh=mesh, process_group=process_group, norm_group=norm_group, weights=weights, init=init,
        extensions=extensions,
    )  # fmt: skip
    if resolved.compile.enabled:
        compile_in_place(model, resolved.compile)
    if device is not None and resolved.compile.cuda_graphs:
        at_exit(optimizer.release)  # the end of a group of NCCL waits for graphs that hold its calls
    return model, optimizer


def compile_in_place(module: nn.Module, settings: CompileConfig) -> None:
    """Call ``nn.Module.compile`` with our backend, which keeps the type and the ``state_dict`` keys."""
    from compile_muon.backend import muon_zero  # torch's lookup by name is not thread-safe

    compiled: dict[str, Any] = dict(
        backend=muon_zero,
        fullgraph=settings.fullgraph,
        dynamic=settings.dynamic,
        options=settings.options(),
    )
    if type(module).forward.__module__.startswith("torch."):
        # Dynamo skips frames in PyTorch's own files, so nothing of an nn.Sequential would be compiled. Private to
        # torch: `_compiled_call_impl` is the attribute that nn.Module.compile sets, `_call_impl` its uncompiled call.
        module._compiled_call_impl = torch.compile(_calling(module), **compiled)
    else:
        module.compile(**compiled)


def _calling(module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    # Dynamo limits recompilations by code object, so each model gets a code object of its own.
    call.__code__ = call.__code__.replace(co_name=f"call_{type(module).__name__}")
    return call
