"""The cost of a mesh: bytes that a rank sends per step over each axis, and bytes that it keeps, from the formulas.

    python benchmarks/mesh_bytes.py                       # an 8 B dense model, stage 3, on 8, 64 and 512 ranks
    python benchmarks/mesh_bytes.py --model 16b           # a 16 B mixture of experts
    python benchmarks/mesh_bytes.py --by purpose          # bytes by purpose instead of by axis
    python benchmarks/mesh_bytes.py --state-over all      # masters, gradients and state sharded over both axes
    python benchmarks/mesh_bytes.py --stage 2 --mesh 4x16 1x8x1x8

Weights, gradients and activations travel in bfloat16, Newton-Schulz runs in bfloat16, masters and state are float32.
One micro-batch a step, without recomputation; routers choose evenly. No model is built; benchmarks/MESHES.md has the
output.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from compile_muon.passes.formulas import OVER_ALL, bytes_by_axis

BFLOAT16, FLOAT32 = 2, 4


@dataclass(frozen=True)
class Weight:
    """A matrix, or a stack of one matrix for each expert."""

    rows: int  # of one matrix
    cols: int  # of one matrix
    cut: int | None = None  # the dim that tensor parallelism shards; None: every rank along ``tensor`` has the whole
    experts: int = 0  # of a stack; 0 for a matrix
    muon: bool = True  # else AdamW

    @property
    def numel(self) -> int:
        return self.rows * self.cols * max(self.experts, 1)


@dataclass(frozen=True)
class Model:
    """The matrices of a decoder, layer by layer; norms are left out."""

    hidden: int
    layers: tuple[tuple[Weight, ...], ...]
    tables: tuple[Weight, ...]  # embedding and head
    slots: int = 0  # routed experts of a token

    @property
    def weights(self) -> Iterator[Weight]:
        for layer in self.layers:
            yield from layer
        yield from self.tables


def mlp(hidden: int, inner: int) -> tuple[Weight, ...]:
    return Weight(inner, hidden, 0), Weight(inner, hidden, 0), Weight(hidden, inner, 1)  # gate, up, down


def tables(vocabulary: int, hidden: int) -> tuple[Weight, ...]:
    return (Weight(vocabulary, hidden, 0, muon=False),) * 2


_8B = (Weight(4096, 4096, 0), Weight(1024, 4096, 0), Weight(1024, 4096, 0), Weight(4096, 4096, 1), *mlp(4096, 14336))
#: multi-head latent attention of 16 heads: queries, latents of keys and values, keys and values of them, output
_MLA = (Weight(16 * 192, 2048, 0), Weight(512 + 64, 2048), Weight(16 * 256, 512, 0), Weight(2048, 16 * 128, 1))
#: 64 routed experts of 1408, two shared ones as one of 2816, the router
_EXPERTS = (Weight(2 * 1408, 2048, experts=64), Weight(2048, 1408, experts=64), *mlp(2048, 2 * 1408), Weight(64, 2048))

MODELS = {
    # Llama 3 8B
    "8b": Model(4096, (_8B,) * 32, tables(128256, 4096)),
    # Moonlight-16B-A3B: DeepSeek-V3's design, 27 layers, the first of them dense, 6 routed experts a token
    "16b": Model(2048, ((*_MLA, *mlp(2048, 11264)), *((*_MLA, *_EXPERTS),) * 26), tables(163840, 2048), slots=6),
}


@dataclass(frozen=True)
class Mesh:
    """A mesh: the number of ranks along each axis."""

    replicate: int
    shard: int
    expert: int = 1
    tensor: int = 1

    @staticmethod
    def of(text: str) -> Mesh:
        """Parse ``"8x64"``, replicas and shards, or ``"8x8x8"`` and ``"8x8x1x8"``, with experts and tensor slices."""
        return Mesh(*map(int, text.split("x")))

    def name(self, *axes: str) -> str:
        """Name the axes as metrics do; "" for one rank."""
        return "_".join(axis for axis in axes if getattr(self, axis) > 1)

    @cached_property
    def text(self) -> str:
        sizes = [f"{axis} {getattr(self, axis)}" for axis in ("replicate", "shard", "expert", "tensor")]
        return " x ".join(size for size in sizes if not size.endswith(" 1")) or "1"


@dataclass(frozen=True)
class Cost:
    """The bytes of the rank that has most."""

    kept: float  # bytes of master weights, gradients, optimizer state and resident weights
    layer: float  # bytes of the largest layer's weights, unsharded
    sent: Counter[tuple[str, str]]  # bytes per step by axis and purpose; the mean over ranks where they differ


def cost(model: Model, mesh: Mesh, stage: int, over: str = "shard", tokens: int = 8192) -> Cost:
    """Compute the cost of a step of one micro-batch, ``tokens`` a rank."""
    sent: Counter[tuple[str, str]] = Counter()
    kept_bytes = 0.0
    for weight in model.weights:
        kept_bytes += _kept(weight, mesh, stage, over)
        sent += _weight_traffic(weight, mesh, stage, over)
    pairs = 2 * len(model.layers) + 1  # attention and MLP of each layer; embedding and head
    mixtures = sum(any(weight.experts for weight in layer) for layer in model.layers)
    # Ranks along ``tensor`` all work on the tokens of all of them. A pair of column-wise and row-wise parallel matrices
    # takes an all-reduce of its output and one of its input's gradient; experts get tokens and send them back, twice.
    activations = 4 * tokens * mesh.tensor * model.hidden * BFLOAT16
    sent["tensor", "activations"] += round(pairs * activations * (mesh.tensor - 1) / mesh.tensor)
    dispatched = activations * max(model.slots, 1) * (mesh.expert - 1) / mesh.expert
    sent["expert", "dispatch"] += round(mixtures * dispatched)
    layer = max(sum(_here(weight, mesh).numel for weight in layer) for layer in model.layers)
    return Cost(kept_bytes, layer * BFLOAT16, sent)


def _here(weight: Weight, mesh: Mesh) -> Weight:
    """Return the part of a weight that a rank's model has, before sharding."""
    if weight.experts:
        return Weight(weight.rows, weight.cols, None, weight.experts // mesh.expert, weight.muon)
    rows = weight.rows // mesh.tensor if weight.cut == 0 else weight.rows
    cols = weight.cols // mesh.tensor if weight.cut == 1 else weight.cols
    return Weight(rows, cols, weight.cut, 0, weight.muon)


def _rows(weight: Weight, mesh: Mesh, over: str) -> tuple[int, int, int, bool]:
    """Return (rows or experts of a rank's part, elements of one, ranks that shard them, whether sharded twice)."""
    here = _here(weight, mesh)
    rows, row = (here.experts, here.rows * here.cols) if here.experts else (here.rows, here.cols)
    shards = mesh.shard if here.experts else mesh.shard * mesh.expert
    return rows, row, shards, over == "all" and mesh.replicate > 1 and shards > 1


def _padded(rows: int, shards: int, replicas: int = 1) -> int:
    """Return ``rows`` with padding: equally many for each shard, and for each of ``replicas`` that cut its slice."""
    return math.ceil(math.ceil(rows / shards) / replicas) * shards * replicas


def _kept(weight: Weight, mesh: Mesh, stage: int, over: str) -> float:
    rows, row, shards, over_all = _rows(weight, mesh, over)
    state = 1 if weight.muon else 2  # momentum; both of Adam's moments
    slices = _padded(rows, shards) / shards
    pieces = slices
    if over_all:
        ranks = shards * mesh.replicate
        pieces = _padded(rows, shards, mesh.replicate) / ranks
    nbytes = pieces * row * FLOAT32 * (2 + state)
    if stage < 3:
        return nbytes + rows * row * BFLOAT16
    return nbytes + (slices * row * BFLOAT16 if over_all else 0)


def _weight_traffic(weight: Weight, mesh: Mesh, stage: int, over: str) -> Counter[tuple[str, str]]:
    sent: Counter[tuple[str, str]] = Counter()
    rows, row, shards, over_all = _rows(weight, mesh, over)
    inner = ("shard",) if weight.experts else ("shard", "expert")
    names = {"shard": mesh.name(*inner), "replicate": "replicate"}
    # Slices are padded to a multiple of the ranks of ``shard``, their pieces to one of the ranks of ``replicate``.
    rows_over = {"shard": _padded(rows, shards)}
    size = {"shards": shards, "replicas": mesh.replicate}
    rows_over["replicate"] = _padded(rows, shards, mesh.replicate) if over_all else rows_over["shard"]

    def send(collective: str, purpose: str) -> None:
        for axis, padded in rows_over.items():
            nbytes_of = bytes_by_axis(collective, padded, row, **size, itemsize=BFLOAT16)
            sent[names[axis], purpose] += round(nbytes_of.get(axis, 0))

    # At stage 3 forward and backward gather, else the refresh.
    for collective in ["all_gather"] * (2 if stage == 3 else 1) + ["slice_gather"] * over_all:
        send(collective, "weights")
    send("reduce_scatter" + (OVER_ALL if over_all else ""), "gradients")
    if weight.muon:
        for axis, nbytes in _exchange(weight, mesh, over_all, rows, row, shards).items():
            sent[axis, "Muon"] += round(nbytes)
    return sent


def _exchange(weight: Weight, mesh: Mesh, over_all: bool, rows: int, row: int, shards: int) -> dict[str, float]:
    """Count the bytes of directions by axis: within a matrix's owner group, and within the replica groups."""
    joined = mesh.tensor > 1 and weight.cut is not None
    inner = () if weight.experts else ("shard", "expert")
    owning, holding = [*inner, *(["tensor"] * joined)], ["replicate", *(["tensor"] * (not joined))]
    copies = mesh.replicate * (1 if joined else mesh.tensor)
    if over_all:
        owning, holding = ["replicate", *owning], holding[1:]
        copies //= mesh.replicate
    if weight.experts:
        # A rank has whole experts; ranks with the same experts orthogonalize a part each, and exchange directions.
        nbytes_of = bytes_by_axis("local", rows, row, shards=shards, replicas=copies, itemsize=BFLOAT16)
    else:
        # The owner receives the whole matrix, from the ranks that shard its rows and from those of its tensor slices.
        whole = rows * row * (mesh.tensor if joined else 1)
        owner_group = shards * (mesh.tensor if joined else 1) * (mesh.replicate if over_all else 1)
        nbytes_of = bytes_by_axis("owner", whole, 1, shards=owner_group, replicas=copies, itemsize=BFLOAT16)
    names = {"shard": "all" if over_all and mesh.tensor == 1 else mesh.name(*owning), "replicate": mesh.name(*holding)}
    return {names[axis]: nbytes for axis, nbytes in nbytes_of.items()}


DEFAULT = {
    "8b": ["1x8", "1x4x1x2", "1x64", "8x8", "1x8x1x8", "1x512", "8x64", "64x8", "8x8x1x8"],
    "16b": ["1x8", "1x1x8", "1x64", "8x8", "1x8x8", "8x1x8", "64x8", "64x1x8", "8x8x8", "1x64x8"],
}
DEFAULT_OVER_ALL = {
    "8b": ["1x8", "1x64", "8x8", "1x512", "8x64", "64x8"],
    "16b": ["8x8", "8x1x8", "4x2x8", "64x8", "8x8x8"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(MODELS))
    parser.add_argument("--stage", type=int, default=3, choices=(1, 2, 3))
    help_mesh = "replicate x shard, and if you like x expert x tensor"
    parser.add_argument("--mesh", nargs="+", metavar="RxSxExT", help=help_mesh)
    parser.add_argument("--state-over", default="shard", choices=("shard", "all"), help="shard_state_over")
    parser.add_argument("--tokens", type=int, default=8192, help="of a rank and micro-batch; default 8192")
    parser.add_argument("--by", default="axis", choices=("axis", "purpose"))
    args = parser.parse_args()
    meshes = args.mesh or (DEFAULT_OVER_ALL if args.state_over == "all" else DEFAULT)[args.model]
    costs = {}
    for mesh in map(Mesh.of, meshes):
        costs[mesh] = cost(MODELS[args.model], mesh, args.stage, args.state_over, args.tokens)
    part = 0 if args.by == "axis" else 1
    columns = list(dict.fromkeys(key[part] for one in costs.values() for key, nbytes in one.sent.items() if nbytes))
    heads = [f"`{name}`" if args.by == "axis" else name for name in columns]
    first_columns = ["mesh", "kept, GiB", "a layer, GiB"]
    print(f"| {' | '.join([*first_columns, *(f'{head}, GB' for head in heads)])} |")
    print("|" + "---|" * (len(first_columns) + len(heads)))
    for mesh, one in costs.items():
        totals: Counter[str] = Counter()
        for key, nbytes in one.sent.items():
            totals[key[part]] += nbytes
        cells = [mesh.text, f"{one.kept / 2**30:.1f}", f"{one.layer / 2**30:.2f}"]
        print(f"| {' | '.join([*cells, *(f'{totals[name] / 1e9:.2f}' if totals[name] else '' for name in columns)])} |")


if __name__ == "__main__":
    main()
