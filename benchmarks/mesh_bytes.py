"""What a mesh costs: bytes a rank sends per step over each axis, and what it keeps, from the formulas.

    python benchmarks/mesh_bytes.py                       # an 8 B dense model, stage 3, on 8, 64 and 512 ranks
    python benchmarks/mesh_bytes.py --model 16b           # a 16 B mixture of experts
    python benchmarks/mesh_bytes.py --by purpose          # what the bytes are for, instead of where they go
    python benchmarks/mesh_bytes.py --state-over all      # masters, gradients and optimizer state cut over both axes
    python benchmarks/mesh_bytes.py --stage 2 --mesh 4x16 1x8x1x8

Weights, gradients and activations travel in bfloat16, Newton-Schulz runs in bfloat16, masters and state are float32.
One micro-batch a step, without recomputation; routers choose evenly. No model is built; benchmarks/MESHES.md holds what
this prints.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from compile_muon.passes.formulas import OVER_ALL, activation_bytes, bytes_by_axis, padded_rows

BFLOAT16, FLOAT32 = 2, 4


@dataclass(frozen=True)
class Weight:
    """A matrix, or a stack of one matrix for each expert.

    Args:
        rows, cols: of a matrix.
        experts: of a stack; 0 for a matrix.
        cut: the dim that tensor parallelism cuts; None if every rank along ``tensor`` has all of it.
        muon: else AdamW.
    """

    rows: int
    cols: int
    cut: int | None = None
    experts: int = 0
    muon: bool = True

    @property
    def numel(self) -> int:
        return self.rows * self.cols * max(self.experts, 1)


@dataclass(frozen=True)
class Model:
    """Its matrices, layer by layer; norms are left out.

    Args:
        layers: of the decoder.
        tables: embedding and head.
        slots: routed experts of a token.
    """

    hidden: int
    layers: tuple[tuple[Weight, ...], ...]
    tables: tuple[Weight, ...]
    slots: int = 0

    @property
    def weights(self) -> Iterator[Weight]:
        for layer in self.layers:
            yield from layer
        yield from self.tables


def mlp(hidden: int, inner: int) -> tuple[Weight, ...]:
    """Gate, up and down."""
    return Weight(inner, hidden, 0), Weight(inner, hidden, 0), Weight(hidden, inner, 1)


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
    """Ranks along each axis."""

    replicate: int
    shard: int
    expert: int = 1
    tensor: int = 1

    @staticmethod
    def of(text: str) -> Mesh:
        """Of ``"8x64"``, replicas and shards, or ``"8x8x8"`` or ``"8x8x1x8"``, experts and tensor slices too."""
        return Mesh(*map(int, text.split("x")))

    def name(self, *axes: str) -> str:
        """As metrics have it; "" for one rank."""
        return "_".join(axis for axis in axes if getattr(self, axis) > 1)

    @cached_property
    def text(self) -> str:
        sizes = [f"{axis} {getattr(self, axis)}" for axis in ("replicate", "shard", "expert", "tensor")]
        return " x ".join(size for size in sizes if not size.endswith(" 1")) or "1"


@dataclass(frozen=True)
class Cost:
    """Of the rank that has most.

    Args:
        kept: bytes of master weights, gradients and optimizer state, and of resident weights.
        layer: bytes of the largest layer's weights, gathered.
        sent: bytes per step by axis and purpose, on average over the ranks where they are not the same.
    """

    kept: float
    layer: float
    sent: Counter[tuple[str, str]]


def cost(model: Model, mesh: Mesh, stage: int, over: str = "shard", tokens: int = 8192) -> Cost:
    """One micro-batch a step, of ``tokens`` a rank."""
    sent: Counter[tuple[str, str]] = Counter()
    kept = 0.0
    for weight in model.weights:
        kept += _kept(weight, mesh, stage, over)
        sent += _weight_traffic(weight, mesh, stage, over)
    pairs = 2 * len(model.layers) + 1  # attention and MLP of a layer; the embedding and the head
    mixtures = sum(any(weight.experts for weight in layer) for layer in model.layers)
    # Ranks along tensor work on the tokens of all of them together.
    size = {"tokens": tokens * mesh.tensor, "hidden": model.hidden, "itemsize": BFLOAT16}
    sent["tensor", "activations"] += round(pairs * activation_bytes("tensor_pair", ranks=mesh.tensor, **size))
    dispatched = activation_bytes("dispatch", ranks=mesh.expert, slots=max(model.slots, 1), **size)
    sent["expert", "dispatch"] += round(mixtures * dispatched)
    layer = max(sum(_here(weight, mesh).numel for weight in layer) for layer in model.layers)
    return Cost(kept, layer * BFLOAT16, sent)


def _here(weight: Weight, mesh: Mesh) -> Weight:
    """What of it a rank's model has."""
    if weight.experts:
        return Weight(weight.rows, weight.cols, None, weight.experts // mesh.expert, weight.muon)
    rows = weight.rows // mesh.tensor if weight.cut == 0 else weight.rows
    cols = weight.cols // mesh.tensor if weight.cut == 1 else weight.cols
    return Weight(rows, cols, weight.cut, 0, weight.muon)


def _rows(weight: Weight, mesh: Mesh, over: str) -> tuple[int, int, int, bool]:
    """Rows of what a rank's model has (experts of a stack), elements of one, ranks that cut them, and if cut twice."""
    here = _here(weight, mesh)
    rows, row = (here.experts, here.rows * here.cols) if here.experts else (here.rows, here.cols)
    shards = mesh.shard if here.experts else mesh.shard * mesh.expert
    return rows, row, shards, over == "all" and mesh.replicate > 1 and shards > 1


def _kept(weight: Weight, mesh: Mesh, stage: int, over: str) -> float:
    rows, row, shards, over_all = _rows(weight, mesh, over)
    state = 1 if weight.muon else 2  # momentum; both of Adam's moments
    slices = padded_rows(rows, shards=shards) / shards
    pieces = slices
    if over_all:
        ranks = shards * mesh.replicate
        pieces = padded_rows(rows, shards=shards, replicas=mesh.replicate, state_over_all=True) / ranks
    found = pieces * row * FLOAT32 * (2 + state)
    if stage < 3:
        return found + rows * row * BFLOAT16
    return found + (slices * row * BFLOAT16 if over_all else 0)


def _weight_traffic(weight: Weight, mesh: Mesh, stage: int, over: str) -> Counter[tuple[str, str]]:
    sent: Counter[tuple[str, str]] = Counter()
    rows, row, shards, over_all = _rows(weight, mesh, over)
    inner = ("shard",) if weight.experts else ("shard", "expert")
    names = {"shard": mesh.name(*inner), "replicate": "replicate"}
    # slices are padded to go over shard, and their pieces to go over replicate
    rows_over = {"shard": padded_rows(rows, shards=shards)}
    size = {"shards": shards, "replicas": mesh.replicate}
    rows_over["replicate"] = padded_rows(rows, **size, state_over_all=True) if over_all else rows_over["shard"]

    def send(collective: str, purpose: str) -> None:
        for axis, padded in rows_over.items():
            found = bytes_by_axis(collective, padded, row, **size, itemsize=BFLOAT16)
            sent[names[axis], purpose] += round(found.get(axis, 0))

    # forward and backward; or the refresh
    for collective in ["all_gather"] * (2 if stage == 3 else 1) + ["slice_gather"] * over_all:
        send(collective, "weights")
    send("reduce_scatter" + (OVER_ALL if over_all else ""), "gradients")
    if weight.muon:
        for axis, nbytes in _exchange(weight, mesh, over_all, rows, row, shards).items():
            sent[axis, "Muon"] += round(nbytes)
    return sent


def _exchange(weight: Weight, mesh: Mesh, over_all: bool, rows: int, row: int, shards: int) -> dict[str, float]:
    """Of directions: where the pieces of a matrix meet, and who else holds them."""
    joined = mesh.tensor > 1 and weight.cut is not None
    inner = () if weight.experts else ("shard", "expert")
    owning, holding = [*inner, *(["tensor"] * joined)], ["replicate", *(["tensor"] * (not joined))]
    copies = mesh.replicate * (1 if joined else mesh.tensor)
    if over_all:
        owning, holding = ["replicate", *owning], holding[1:]
        copies //= mesh.replicate
    if weight.experts:
        # Whole experts lie on a rank; ranks with the same ones do a part each, and hand these round.
        found = bytes_by_axis("local", rows, row, shards=shards, replicas=copies, itemsize=BFLOAT16)
    else:
        # The matrix meets as a whole, from ranks that cut it in rows, and in slices of it.
        whole = rows * row * (mesh.tensor if joined else 1)
        company = shards * (mesh.tensor if joined else 1) * (mesh.replicate if over_all else 1)
        found = bytes_by_axis("owner", whole, 1, shards=company, replicas=copies, itemsize=BFLOAT16)
    names = {"shard": "all" if over_all and mesh.tensor == 1 else mesh.name(*owning), "replicate": mesh.name(*holding)}
    return {names[axis]: nbytes for axis, nbytes in found.items()}


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
    found = {}
    for mesh in map(Mesh.of, meshes):
        found[mesh] = cost(MODELS[args.model], mesh, args.stage, args.state_over, args.tokens)
    which = 0 if args.by == "axis" else 1
    columns = list(dict.fromkeys(key[which] for each in found.values() for key, nbytes in each.sent.items() if nbytes))
    heads = [f"`{name}`" if args.by == "axis" else name for name in columns]
    kept = ["mesh", "kept, GiB", "a layer, GiB"]
    print(f"| {' | '.join([*kept, *(f'{head}, GB' for head in heads)])} |")
    print("|" + "---|" * (len(kept) + len(heads)))
    for mesh, each in found.items():
        totals: Counter[str] = Counter()
        for key, nbytes in each.sent.items():
            totals[key[which]] += nbytes
        cells = [mesh.text, f"{each.kept / 2**30:.1f}", f"{each.layer / 2**30:.2f}"]
        print(f"| {' | '.join([*cells, *(f'{totals[name] / 1e9:.2f}' if totals[name] else '' for name in columns)])} |")


if __name__ == "__main__":
    main()
