"""The cells of the golden gate, and the lowered graphs of each, captured on one rank without the others."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from digests import Summary, summary
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import GraphModule

from compile_muon.backend import compile_frame
from compile_muon.config import FrameOptions, config_from_kwargs
from compile_muon.passes import PassContext
from compile_muon.passes.collectives import axis_of_group, collectives
from compile_muon.passes.torch_private import fake_mode_of, group_named
from compile_muon.planning.capture import captured, run_micro_batches, shard, simulated_job
from compile_muon.planning.recorder import Recorder

MIB = 2**20


class Uneven(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a scalar, a tie, a stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scale = nn.Embedding(17, 8), nn.Parameter(torch.tensor(1.5))
        self.tied, self.up, self.down = nn.Linear(8, 8, bias=False), nn.Linear(8, 3), nn.Linear(3, 8, bias=False)
        self.experts = nn.Parameter(torch.ones(3, 8, 8))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tied(self.embedding(tokens))
        return self.tied(self.down(torch.tanh(self.up(h))) + torch.einsum("btc,ecd->btd", h, self.experts)) * self.scale


class Deep(nn.Module):
    """Matrices of a mebibyte: several buckets of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 512)
        layers = (nn.Sequential(nn.Linear(512, 512, bias=False), nn.Tanh()) for _ in range(5))
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(512, 64, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


def sliced() -> nn.Module:
    """Columns and rows of matrices on the ranks along ``tensor``."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shard", "tensor"))
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 12), nn.Linear(12, 8, bias=False))
    return parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


_BATCHES: dict[Callable[[], nn.Module], Callable[[], Tensor]] = {
    Uneven: lambda: torch.zeros((2, 5), dtype=torch.int64),
    Deep: lambda: torch.zeros((2**10, 2**9), dtype=torch.int64),  # backward leaves room for Newton-Schulz
    sliced: lambda: torch.zeros(4, 8),
}


@dataclass(frozen=True)
class Cell:
    """A job of which one rank's graphs are stored. ``model``: makes the model. ``axes``: sizes of the mesh's axes, None
    for one of all ranks. ``backend``: of communication. ``options``: of torch.compile. ``settings``: of MuonZero."""

    world: int
    rank: int = 0
    model: Callable[[], nn.Module] = Uneven
    axes: Mapping[str, int] | None = None
    backend: str = "gloo"
    options: FrameOptions = FrameOptions(codegen="eager")
    settings: Mapping[str, Any] = field(default_factory=dict)


def _cell(world: int, rank: int = 0, /, **settings: Any) -> Cell:
    fields = {name: settings.pop(name) for name in ("model", "axes", "backend", "options") if name in settings}
    return Cell(world, rank, **fields, settings={"ns_dtype": "float32", **settings})


INDUCTOR, SAVING = FrameOptions(codegen="inductor"), FrameOptions(codegen="eager", reshard_after_forward=False)
HSDP = {"replicate": 2, "shard": 2}
TWO, THREE = {"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 3}
HALF = {"param_dtype": torch.bfloat16, "ns_dtype": "bfloat16"}
STEP = {"update": "step"}
#: settings of the world, the axes and the stage stand in the name
CELLS: dict[str, Cell] = {
    "stage 0, world 1, float16": _cell(1, stage=0, ns_dtype="float16"),
    "stage 2, world 1, offloaded": _cell(1, stage=2, offload="cpu", model=Deep),
    "stage 0, world 2, 2 micro-batches": _cell(2, 1, stage=0, **TWO),
    "stage 1, world 2, 3 micro-batches": _cell(2, 1, stage=1, **THREE),
    "stage 2, world 2, 2 micro-batches, Inductor": _cell(2, 0, stage=2, options=INDUCTOR, **TWO),
    "stage 3, world 2, bfloat16": _cell(2, 0, stage=3, **HALF),
    "stage 3, world 2, weights in host memory": _cell(2, 0, stage=3, offload_param="cpu", model=Deep),
    "stage 0, world 4, NCCL, bfloat16, casts saved": _cell(
        4, 3, stage=0, backend="nccl", options=SAVING, **{**HALF, "ns_dtype": "float16"}
    ),
    "stage 1, world 4, NCCL, 2 micro-batches, directions in step": _cell(4, 1, stage=1, backend="nccl", **TWO, **STEP),
    "stage 2, world 4, NCCL, bfloat16": _cell(4, 2, stage=2, backend="nccl", **HALF),
    "stage 3, world 4, NCCL, 2 micro-batches, Inductor": _cell(4, 0, stage=3, backend="nccl", options=INDUCTOR, **TWO),
    "stage 3, world 4, weights saved, ranges": _cell(4, 3, stage=3, options=replace(SAVING, nvtx=True)),
    "stage 2, world 4, heads": _cell(4, 1, stage=2, muon_views={"tied.weight": {"heads": 4}}),
    "stage 0, replicate 2 x shard 2": _cell(4, 1, stage=0, axes=HSDP),
    "stage 1, replicate 2 x shard 2, 2 micro-batches": _cell(4, 3, stage=1, axes=HSDP, **TWO),
    "stage 3, replicate 2 x shard 2, NCCL": _cell(4, 1, stage=3, axes=HSDP, backend="nccl"),
    "stage 3, replicate 2 x shard 2, state over all": _cell(
        4, 2, stage=3, axes=HSDP, shard_state_over="all", model=Deep
    ),
    "stage 2, shard 2 x tensor 2": _cell(4, 1, stage=2, axes={"shard": 2, "tensor": 2}, model=sliced),
    "stage 1, world 8, buckets": _cell(8, 7, stage=1, model=Deep),
    "stage 3, world 8, NCCL, buckets": _cell(8, 0, stage=3, model=Deep, backend="nccl"),
    "stage 3, replicate 4 x shard 2, NCCL, few exchanges at a time": _cell(
        8, 3, stage=3, model=Deep, axes={"replicate": 4, "shard": 2}, backend="nccl",
        options=FrameOptions(codegen="eager", exchange_bytes=MIB),
    ),
    "stage 3, world 64, NCCL, buckets": _cell(64, 63, stage=3, model=Deep, backend="nccl"),
    "stage 2, world 2, NorMuon, SOAP, Muown, MuonBP, Lion": _cell(
        2, 1, stage=2, method="normuon", auxiliary="lion", **STEP,
        groups={"up.weight": {"method": "soap"}, "down*": {"method": "muown"}, "tied*": {"method": "muonbp"}},
    ),
    "stage 1, world 4, AdaMuon, Dion2, MuonH, heavy ball": _cell(
        4, 2, stage=1, method="adamuon", **STEP,
        groups={"up.weight": {"method": "dion2"}, "down*": {"method": "muonh"}, "tied*": {"method": "heavy_ball"}},
    ),
}  # fmt: skip


def graphs_of(cell: Cell) -> dict[str, Summary]:
    """Summaries of every graph of a training step and of an evaluation, by name."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def model() -> nn.Module:
        if cell.model is sliced:  # DTensors need values
            return sliced()
        with mode:
            return cell.model()

    with simulated_job(cell.world, cell.rank):
        optimizer = shard(model(), config_from_kwargs(**cell.settings), axes=cell.axes, backend=cell.backend)
        batch = _BATCHES[cell.model]()
        visits = run_micro_batches(optimizer, (batch,), cell.options)
        inference = Recorder(fake_mode_of([sharded.local for sharded in optimizer.engine.params]))
        # Lightning, once imported, deep-copies what torch.compile is given. Of a function there is no copy; one of a
        # fake mode frees storages that are in use: copies of a StorageWeakRef each release the one reference.
        compiled = torch.compile(
            optimizer.engine.model, backend=lambda gm, inputs: compile_frame(gm, inputs, cell.options, inference)
        )
        with torch.no_grad():
            compiled(batch)
        torch.compiler.reset()
        graphs: dict[str, GraphModule] = {}
        for visit in (*visits, *inference.visits):
            same = graphs.setdefault(_title(visit.ctx), visit.played.gm)
            assert same is visit.played.gm, f"two graphs are called {_title(visit.ctx)}"
        trained = [sharded for sharded in optimizer.engine.params if sharded.param.grad is not None]
        ready = {sharded.name for sharded in trained if sharded.speculations.current is not None}
        step = captured(optimizer, [], trained, ready, cell.options).graphs
        graphs |= {
            f"step, {part.frame}": part.gm for part in step if part.frame != "checks" and len(part.gm.graph.nodes) > 1
        }
        axes = {axis for sharded in optimizer.engine.params for axis in sharded.spec.layout.axes}
        names = {group: axis.name for axis in axes for group in axis.groups}
        return {title: summary(gm, _groups(gm, names)) for title, gm in graphs.items()}


def _title(ctx: PassContext) -> str:
    """The title without the number of the frame, and without the digest of which gradients a request is for."""
    return re.sub(r"^\w+\.|_[0-9a-f]{6}$", "", ctx.title).replace(".", " ")


def _groups(gm: GraphModule, axes: Mapping[str, str]) -> dict[str, str]:
    """Labels of the process groups that a graph names: axis, purpose, size, and the ranks."""
    labels = {}
    for name in {node.args[-1] for node, _ in collectives(gm)}:
        ranks, description = dist.get_process_group_ranks(group_named(name)), axis_of_group(name).name
        axis = axes.get(name, description)
        purpose = "" if description in (axis, "other") else f"/{description}"
        labels[name] = f"{axis}{purpose}:{len(ranks)} {ranks}"
    return labels
