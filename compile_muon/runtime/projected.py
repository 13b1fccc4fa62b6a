"""Gradients as their methods average them: seen beside the weight and what is kept of rows, ahead of Newton-Schulz."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.passes.methods import Piece, matrix_method
from compile_muon.passes.spec import decode_dtype
from compile_muon.passes.torch_private import group_named
from compile_muon.runtime.sharded_param import ShardedParam
from compile_muon.runtime.shards import local_tensor

__all__ = ["Projected", "over_whole_rows", "project"]


@dataclass(frozen=True)
class Projected:
    """What stands for the gradient of a shard.

    Args:
        gradient: like the shard, in the dtype of states.
        sums: of each part of the shard, over whole rows; None where the method asks for none.
    """

    gradient: Tensor
    sums: Sequence[Tensor | None]


def over_whole_rows(own: Sequence[tuple[ShardedParam, Tensor | None]]) -> None:
    """Have sums over this rank's columns be sums over whole rows, in place: one all-reduce for all that share a group,
    where ranks have parts of the same rows."""
    shared: dict[str, list[Tensor]] = {}
    for sharded, sums in own:
        if sums is not None and sharded.spec.cut_in_columns:
            shared.setdefault(sharded.spec.layout.tensor.group, []).append(sums)
    for group, several in shared.items():
        joined = torch.cat([x.reshape(-1) for x in several])
        dist.all_reduce(joined, group=group_named(group))
        for x, whole in zip(several, joined.split([x.numel() for x in several]), strict=True):
            x.copy_(whole.view(x.shape))


def project(
    sharded_params: Sequence[ShardedParam], grads: Sequence[Tensor], states: Mapping[Tensor, Mapping[str, Tensor]]
) -> dict[str, Projected]:
    """Of those whose methods ask for it, by name; nothing is modified. The weight is the one that gradients are of.

    Args:
        sharded_params: of matrices, the same on every rank.
        grads: of their shards, zeros where there is none.
        states: the optimizer's, by parameter; those of rows are beside it.
    """
    found: dict[str, Projected] = {}
    pieces: list[tuple[ShardedParam, Tensor, Piece]] = []
    for sharded, grad in zip(sharded_params, grads, strict=True):
        method = matrix_method(sharded.spec.muon_settings.method)
        if method.project is None:
            continue
        slots, dtype = states[sharded.param], decode_dtype(sharded.spec.state_dtype)
        wide = torch.promote_types(dtype, torch.float32)
        grad, weight = (x.to(grad.device, wide).contiguous() for x in (grad, sharded.local.detach()))
        result = torch.empty_like(grad, dtype=dtype)
        rows = {s.name: local_tensor(slots[s.name]).to(grad.device) for s in method.states if s.each == "row"}
        own = []
        for part in sharded.now.parts:
            gradient, near = part.of(grad), part.of(weight)
            sums = None if method.project_sums is None else method.project_sums(gradient, near)
            kept = {name: part.of_rows(state) for name, state in rows.items()}
            piece = Piece(gradient, near, gradient, kept, sums, {}, part.rows, part.cols)
            pieces.append((sharded, part.of(result), piece))
            own.append(sums)
        found[sharded.name] = Projected(result, own)
    over_whole_rows([(sharded, piece.sums) for sharded, _, piece in pieces])
    for sharded, result, piece in pieces:
        hook = matrix_method(sharded.spec.muon_settings.method).project
        assert hook is not None
        result.copy_(hook(piece))
    return found
