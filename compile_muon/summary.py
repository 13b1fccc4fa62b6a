"""What ``optimizer.summary()`` tells: one row per parameter, and totals."""

from __future__ import annotations

import io
import math
import shutil
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compile_muon.config import Config
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.folding import folded
from compile_muon.kernels.operations import standard_flops
from compile_muon.mesh import Mesh
from compile_muon.model.assignment import Assignment
from compile_muon.passes.exchange.shares import shares
from compile_muon.passes.formulas import OVER_ALL, bytes_by_axis
from compile_muon.passes.language.spec import ParamSpec, decode_dtype

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Row", "Summary", "summarize"]


@dataclass(frozen=True)
class Row:
    """One parameter.

    Args:
        name, shape, algorithm, reason: as assigned.
        decays: whether the weight decay of its parameter group is not 0.
        exchange: strategy of the update of matrices, "-" otherwise.
        bytes_sent: bytes a rank sends per step for its Newton-Schulz, on average over the ranks, by axis of the mesh
            (formula).
        multiply_adds: Newton-Schulz work over all its matrices, once (formula).
    """

    name: str
    shape: tuple[int, ...]
    algorithm: str
    reason: str
    decays: bool
    exchange: str
    bytes_sent: dict[str, float]
    multiply_adds: float

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Summary:
    """Printable with ``print`` and with rich.

    Args:
        rows: one per parameter, in model order.
        stage, world_size: ZeRO stage and ranks.
        axes: name and size of each, where there are several.
        outside: why ``step()`` is in no CUDA graph, with ``compile.cuda_graphs``; None if it is, or without.
        launched: in which phases of methods it is in none, likewise, where else it is.
        update: "backward" where backward may carry the update, else "step".
    """

    rows: tuple[Row, ...]
    stage: int
    world_size: int
    update: str
    axes: tuple[tuple[str, int], ...] = ()
    outside: str | None = None
    launched: str | None = None

    def _count(self, *, matrices: bool) -> int:
        trained = [row for row in self.rows if row.algorithm != "frozen"]
        return sum(row.numel for row in trained if (row.exchange != "-") == matrices)

    @property
    def muon_parameters(self) -> int:
        """Elements that Muon, or another method of matrices, updates."""
        return self._count(matrices=True)

    @property
    def adamw_parameters(self) -> int:
        """Elements that AdamW, or what is in its place, updates."""
        return self._count(matrices=False)

    def __rich__(self) -> Table:
        from rich.table import Table

        axes = f" ({' x '.join(f'{name} {size}' for name, size in self.axes)})" if self.axes else ""
        table = Table(
            title=f"MuonZero: stage {self.stage}, world {self.world_size}{axes}, update in {self.update}; "
            f"Muon {self.muon_parameters:,}, AdamW {self.adamw_parameters:,} elements",
            caption=self._caption(),
        )
        for column in ("parameter", "shape", "algorithm", "exchange", "bytes sent/step", "multiply-adds", "reason"):
            table.add_column(column, overflow="fold")
        for name, cells in folded((row.name, self._cells(row)) for row in self.rows):
            table.add_row(name, *cells)
        return table

    def _caption(self) -> str | None:
        if self.outside is not None:
            return f"step() is in no CUDA graph: {self.outside}"
        if self.launched is not None:
            return f"step() is in no CUDA graph in phases {self.launched}, which ask libraries that wait for the host"
        return None

    def _cells(self, row: Row) -> tuple[str, ...]:
        shape = "x".join(map(str, row.shape)) or "scalar"
        sent = [f"{sent:,.0f}" + (f" {axis}" if self.axes else "") for axis, sent in row.bytes_sent.items()]
        numbers = (", ".join(sent) or "0", f"{row.multiply_adds:,.0f}") if row.exchange != "-" else ("-", "-")
        decay = "" if row.decays or row.algorithm == "frozen" else ", no decay"
        return shape, row.algorithm + decay, row.exchange, *numbers, row.reason

    def __str__(self) -> str:
        from rich import box
        from rich.console import Console

        buffer, table = io.StringIO(), self.__rich__()
        plain = "utf" not in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()  # where print() would fail
        if plain:
            table.box = box.ASCII
        Console(file=buffer, width=_width(), no_color=True).print(table)
        text = buffer.getvalue()
        return text.replace("…", "-").replace("×", "x") if plain else text


def _width() -> int:
    """Columns of the terminal, or those of a file of lines."""
    return max(60, shutil.get_terminal_size().columns) if sys.stdout is not None and sys.stdout.isatty() else 160


def _exchange_bytes(spec: ParamSpec) -> dict[str, float]:
    muon, layout = spec.muon, spec.layout
    if muon is None:
        return {}
    owning, replicas_of_it, strategy = layout.owner_group, layout.replica_group, muon.exchange
    names = {"shard": owning.name, "replicate": replicas_of_it.name, "all": owning.name}
    shards, replicas = owning.size, replicas_of_it.size
    if owning.alone and strategy != "local":  # every rank already holds the whole gradient
        strategy = {"owner": "owner_whole"}.get(strategy, "local")
        names["all"] = replicas_of_it.name
        shards, replicas = replicas_of_it.size, 1
    elif layout.cut_twice:
        strategy += OVER_ALL
        shards, replicas = layout.shard.size, layout.replicate.size
        names |= {"shard": layout.shard.name, "replicate": layout.replicate.name}
    itemsize = decode_dtype(muon.dtype).itemsize
    found = bytes_by_axis(strategy, muon.rows, muon.cols, shards=shards, replicas=replicas, itemsize=itemsize)
    # What lies whole on a rank stays there, and is only handed round.
    sent_to_owners = [share for share in shares(spec) if share.whole_at is None]
    part = sum(map(math.prod, (n for share in sent_to_owners for n in share.matrices))) / (muon.rows * muon.cols)
    parts = {"all" if layout.cut_twice else "shard": part}
    return {names[axis]: parts.get(axis, muon.batch) * sent for axis, sent in found.items()}


def _row(sharded: ShardedParam, assignment: Assignment, *, decays: bool) -> Row:
    muon = sharded.spec.muon
    work = 0.0
    if muon is not None:
        flops = [n * standard_flops(min(shape), max(shape), muon.steps) for n, *shape in muon.matrices]
        work = sharded.spec.layout.expert.size * sum(flops) / 2
    return Row(
        name=sharded.name,
        shape=sharded.spec.layout.whole,
        algorithm=assignment.algorithm,
        reason=assignment.reason,
        decays=decays,
        exchange="-" if muon is None else muon.exchange,
        bytes_sent=_exchange_bytes(sharded.spec),
        multiply_adds=work,
    )


def summarize(
    sharded_params: Sequence[ShardedParam],
    assignments: dict[str, Assignment],
    config: Config,
    mesh: Mesh | None,
    decayed: Collection[str],
    outside: str | None = None,
    launched: str | None = None,
) -> Summary:
    """Collect the rows of a sharded model.

    Args:
        decayed: names of parameters whose group has a weight decay.
        outside: why no step is recorded as a CUDA graph.
        launched: phases of methods whose steps are not, where others are.
    """
    names = () if mesh is None or len(mesh.names) == 1 else mesh.names
    return Summary(
        rows=tuple(_row(a, assignments[a.name], decays=a.name in decayed) for a in sharded_params),
        stage=config.zero.stage,
        world_size=1 if mesh is None else mesh.size,
        update="step" if config.zero.update == "step" else "backward",
        axes=tuple((name, mesh.axis(name).size) for name in names if mesh is not None),
        outside=outside if config.compile.cuda_graphs else None,
        launched=launched if config.compile.cuda_graphs else None,
    )
