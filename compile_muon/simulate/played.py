"""A lowered graph as a part of a simulated step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from compile_muon.passes.collectives import axis_of_group, collectives
from compile_muon.passes.language.layout import Axis
from compile_muon.passes.language.work import Category
from compile_muon.passes.pipeline import GraphKind, PassContext
from compile_muon.passes.torch_private import expected_size, group_named
from compile_muon.simulate.offload_transfers import Moves


@dataclass(frozen=True)
class SimulatedGraph:
    """A lowered graph and its role in the simulated step."""

    gm: GraphModule
    kind: GraphKind
    frame: str = "frame"  # name that forward and backward of a frame share
    user_outputs: int = 0  # of a forward graph: how many outputs are the model's; the others are saved for backward
    persistent: Sequence[
        int
    ] = ()  # of a forward graph: places among the outputs of weights that stay for later forwards
    again: bool = False  # a later forward graph, whose last inputs are the persistent weights
    drops: tuple[str, ...] = ()  # categories of memory freed ahead of the graph
    eager: bool = False  # not compiled: every node is its own kernel
    counted: bool = True  # its bytes are part of the traffic, as the optimizer counts its own
    finished_by_forward: bool = False  # its gathers are waited for by forward graphs of the next step
    # of a forward graph: node that waits for such a gather -> number of the gather
    awaits: Mapping[Node, int] = field(default_factory=dict)
    parameters: int | None = None  # parameters that the host handles on entry; None inside the call of another graph
    waits: bool = False  # the host waits for the device behind the graph
    replayed: bool = False  # a CUDA graph: the host launches it at once
    fused: bool = False  # of eager code: on GPUs one kernel runs everything between two moves, for all parameters
    moves: Mapping[Node, Moves] = field(default_factory=dict)  # moves of offloaded state ahead of each node

    @classmethod
    def of(cls, gm: GraphModule, ctx: PassContext) -> SimulatedGraph:
        """Return a graph that the lowering passes have run over, with the sizes of its trace."""
        return cls(_concrete(gm), ctx.kind, ctx.frame, ctx.user_outputs, ctx.persistent, ctx.again)

    @property
    def title(self) -> str:
        return f"{self.frame}.{self.kind.value}"


def _concrete(gm: GraphModule) -> GraphModule:
    """Return the graph with the sizes of its trace in place of symbolic ones.

    Arithmetic on symbolic sizes takes long, and a comparison guards the frame: it would be compiled anew for each size.
    """

    def symbolic(value: Any) -> bool:
        return isinstance(value, torch.SymInt) or (
            isinstance(value, Tensor)
            and any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
        )

    def concrete(value: Any) -> Any:
        if not symbolic(value):
            return value
        if isinstance(value, torch.SymInt):
            return expected_size(value)
        return value.new_empty_strided([*map(expected_size, value.shape)], [*map(expected_size, value.stride())])

    if not any(symbolic(leaf) for node in gm.graph.nodes for leaf in tree_leaves(node.meta.get("val"))):
        return gm
    gm = deepcopy(gm)
    for node in gm.graph.nodes:
        node.meta["val"] = tree_map(concrete, node.meta.get("val"))
    return gm


def groups_of(mesh_dims: Iterable[Axis], graphs: Sequence[SimulatedGraph]) -> dict[Axis, tuple[int, ...]]:
    """Return the ranks of each process group: of the parameters' mesh dimensions and of the model's own collectives."""
    axes = {served.group: served for axis in mesh_dims for served in map(axis.serving, Category)}
    for played in graphs:
        for node, _ in collectives(played.gm):
            axes.setdefault(node.args[-1], axis_of_group(node.args[-1]))
    return {axis: tuple(dist.get_process_group_ranks(group_named(name))) for name, axis in axes.items()}
