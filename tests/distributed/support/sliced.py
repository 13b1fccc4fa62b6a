"""Models whose weights other axes than data parallelism cut: slices of tensors, experts, and both."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from support.odd import STEPS, Odd, loss
from support.reference import DEVICE, hidden_matrices, train


def data(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, 16, (3, 8), generator=generator)


class Sliced(nn.Module):
    """What parallelize_module cuts: by columns, by rows, unevenly, not at all; and a table."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 13)
        self.down = nn.Linear(13, 8)
        self.narrow = nn.Linear(8, 3, bias=False)  # fewer rows than ranks
        self.widen = nn.Linear(3, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.calibrate = nn.Linear(16, 16)  # no DTensor: a copy on every rank

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        h = h + self.down(torch.relu(self.up(self.norm(h))))
        h = h + self.widen(self.narrow(h).tanh())
        logits = self.head(h)
        return logits + self.calibrate(logits)


PLAN: dict[str, Any] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "narrow": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    "widen": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    # of a mixture
    "dense": ColwiseParallel(use_local_output=False),
    "back": RowwiseParallel(),
}


class Experts(nn.Module):
    """Every token through every expert of a group of ranks, weighted: what dispatch does, without its sizes."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(8, count)
        self.up = nn.Parameter(torch.randn(count, 8, 6) / 3)
        self.bias = nn.Parameter(torch.randn(count, 6) / 3)
        self.down = nn.Parameter(torch.randn(count, 6, 8) / 3)
        self.mesh: DeviceMesh | None = None

    def spread(self, mesh: DeviceMesh, marked: bool) -> None:
        """Keep this rank's experts, as DTensors or as plain tensors with a mark."""
        self.mesh = mesh
        for name in ("up", "bias", "down"):
            own = getattr(self, name).detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            param = nn.Parameter(own if marked else DTensor.from_local(own, mesh, [Shard(0)]))
            if marked:
                param.mesh = mesh
            setattr(self, name, param)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        up, bias, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.bias, self.down))
        mesh = self.mesh
        if mesh is not None:
            x, weights = (collectives.all_gather_tensor_autograd(t, 0, mesh.get_group()) for t in (x, weights))
            weights = weights[..., mesh.get_local_rank() * up.shape[0] :][..., : up.shape[0]]
        hidden = torch.relu(torch.einsum("bth,ehi->beti", x, up) + bias[:, None])
        y = torch.einsum("beti,eih,bte->bth", hidden, down, weights)
        return y if mesh is None else collectives.reduce_scatter_tensor_autograd(y, "sum", 0, mesh.get_group())


class Mixture(nn.Module):
    """A dense part and two layers of experts."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(Experts(count) for _ in range(2))
        self.dense = nn.Linear(8, 5)
        self.back = nn.Linear(5, 8, bias=False)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h + self.back(self.dense(h).tanh()))


class Both(Sliced):
    """Tensor slices, then experts on the same tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 8, bias=False)
        self.layers = nn.ModuleList([Experts(4)])
        self.out = nn.Linear(8, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        return logits + self.out(self.layers[0](self.into(logits)))


def model_of(kind: str, count: int = 4) -> nn.Module:
    """A model by a word."""
    torch.manual_seed(0)
    return Mixture(count) if kind == "mixture" else {"odd": Odd, "sliced": Sliced, "both": Both}[kind]()


def on_mesh(sizes: dict[str, int] | None) -> DeviceMesh | None:
    """By the names of axes, in the order in which MuonZero wants them."""
    return sizes and init_device_mesh(DEVICE.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def spread(model: Any, mesh: DeviceMesh | None, marked: bool = False) -> None:
    """Keep the parts of a model that this rank has."""
    names = () if mesh is None else mesh.mesh_dim_names
    if "tensor" in names:
        tied = model.head.weight is model.embedding.weight
        own = ("dense", "back") if isinstance(model, Mixture) else tuple(PLAN)[:-2]
        parallelize_module(model, mesh["tensor"], {name: PLAN[name] for name in own})
        if tied:  # which parallelize_module undoes
            model.head.weight = model.embedding.weight
    for layer in model.layers if "expert" in names else ():
        layer.spread(mesh["expert"], marked)


def train_on_mesh(
    kind: str, sizes: dict[str, int], count: int = 4, marked: bool = False, tied: bool = False, **settings: Any
) -> None:
    """Train a model beside the whole one, on a mesh with axes of these sizes. ``count``: of experts. ``marked``:
    experts are plain tensors with a mark. ``tied``: the table is the head."""
    model = model_of(kind, count)
    if tied:
        model.head.weight = model.embedding.weight
    whole, mesh = copy.deepcopy(model), on_mesh(sizes)
    spread(model, mesh, marked)
    matrices = hidden_matrices(whole, exclude=("embedding", "head", "bias"), stacks=(".up", ".down"))
    matrices = {name: view for name, view in matrices.items() if name != "out.weight"}  # the last one is the head
    sharing = sizes.get("tensor", 1)
    train(
        model, matrices, loss, data, steps=STEPS, unsharded=whole, sharing=sharing, mesh=mesh, **settings
    ).check()  # fmt: skip
