"""The table of ``optimizer.summary()``: one row a parameter, and totals."""

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


@dataclass(frozen=True)
class Row:
    """A row of the summary: one parameter."""

    name: str
    shape: tuple[int, ...]
    algorithm: str
    reason: str
    decays: bool  # the weight decay of its parameter group is not 0
    exchange: str  # strategy of the exchange for methods of matrices, "-" otherwise
    # Bytes a rank sends per step for Newton-Schulz, on average over the ranks, by mesh axis (formula).
    bytes_sent: dict[str, float]
    multiply_adds: float  # of Newton-Schulz over all its matrices, counted once for all ranks (formula)

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Summary:
    """Parameters by algorithm, exchange and cost; printable with ``print`` and with rich.

    Args:
        rows: one per parameter, in model order.
        stage, world_size: ZeRO stage and ranks.
        update: "backward" where backward may carry the update, else "step".
        axes: name and size of each mesh axis, where there are several.
        outside: why no ``step()`` is recorded as a CUDA graph under ``compile.cuda_graphs``; None if it is, or without.
        launched: phases of methods that run outside the CUDA graph of a recorded ``step()``; None likewise.
        kept: what each compiled frame keeps within ``compile.memory``, in words.
    """

    rows: tuple[Row, ...]
    stage: int
    world_size: int
    update: str
    axes: tuple[tuple[str, int], ...] = ()
    outside: str | None = None
    launched: str | None = None
    kept: tuple[str, ...] = ()

    def _count(self, *, matrices: bool) -> int:
        trained = [row for row in self.rows if row.algorithm != "frozen"]
        return sum(row.numel for row in trained if (row.exchange != "-") == matrices)

    @property
    def muon_parameters(self) -> int:
        """Elements that Muon, or another method of matrices, updates."""
        return self._count(matrices=True)

    @property
    def adamw_parameters(self) -> int:
        """Elements that AdamW, or the elementwise method in its place, updates."""
        return self._count(matrices=False)

    def __rich__(self) -> Table:
        from rich.table import Table

        axes = f" ({' x '.join(f'{name} {size}' for name, size in self.axes)})" if self.axes else ""
        table = Table(
            title=f"MuonZero: stage {self.stage}, world {self.world_size}{axes}, update in {self.update}; "
            f"Muon {self.muon_parameters:,}, AdamW {self.adamw_parameters:,} elements",
            caption="\n".join([*self.kept, *self._replayed()]) or None,
        )
        for column in ("parameter", "shape", "algorithm", "exchange", "bytes sent/step", "multiply-adds", "reason"):
            table.add_column(column, overflow="fold")
        for name, cells in folded((row.name, self._cells(row)) for row in self.rows):
            table.add_row(name, *cells)
        return table

    def _replayed(self) -> list[str]:
        if self.outside is not None:
            return [f"step() is in no CUDA graph: {self.outside}"]
        if self.launched is not None:
            return [f"step() is in no CUDA graph in phases {self.launched}, which ask libraries that wait for the host"]
        return []

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
        # Without UTF print() would raise on box characters.
        plain = "utf" not in (getattr(sys.stdout, "encoding", None) or "utf-8").lower()
        if plain:
            table.box = box.ASCII
        on_terminal = sys.stdout is not None and sys.stdout.isatty()
        width = max(60, shutil.get_terminal_size().columns) if on_terminal else 160
        Console(file=buffer, width=width, no_color=True).print(table)
        text = buffer.getvalue()
        return text.replace("…", "-").replace("×", "x") if plain else text


def _exchange_bytes(spec: ParamSpec) -> dict[str, float]:
    muon, layout = spec.muon, spec.layout
    if muon is None:
        return {}
    owner_group, replica_group, strategy = layout.owner_group, layout.replica_group, muon.exchange
    names = {"shard": owner_group.name, "replicate": replica_group.name, "all": owner_group.name}
    shards, replicas = owner_group.size, replica_group.size
    if owner_group.alone and strategy != "local":  # every rank already holds the whole gradient
        strategy = {"owner": "owner_whole"}.get(strategy, "local")
        names["all"] = replica_group.name
        shards, replicas = replica_group.size, 1
    elif layout.cut_twice:
        strategy += OVER_ALL
        shards, replicas = layout.shard.size, layout.replicate.size
        names |= {"shard": layout.shard.name, "replicate": layout.replicate.name}
    itemsize = decode_dtype(muon.dtype).itemsize
    bytes_of = bytes_by_axis(strategy, muon.rows, muon.cols, shards=shards, replicas=replicas, itemsize=itemsize)
    # A matrix that is whole on a rank stays there; only its direction is sent.
    sent_to_owners = [share for share in shares(spec) if share.whole_at is None]
    part = sum(map(math.prod, (n for share in sent_to_owners for n in share.matrices))) / (muon.rows * muon.cols)
    parts = {"all" if layout.cut_twice else "shard": part}
    return {names[axis]: parts.get(axis, muon.batch) * sent for axis, sent in bytes_of.items()}


def _row(sharded: ShardedParam, assignment: Assignment, *, decays: bool) -> Row:
    muon = sharded.spec.muon
    work = 0.0
    if muon is not None:
        flops = [n * standard_flops(min(shape), max(shape), muon.steps) for n, *shape in muon.matrices]
        work = sharded.spec.layout.expert.size * sum(flops) / 2
    return Row(
        name=sharded.name,
        shape=sharded.spec.layout.unsharded_shape,
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
    choice_lines: Sequence[str] = (),
) -> Summary:
    """Collect the rows of a sharded model. ``decayed``: names of parameters whose group has a weight decay;
    ``outside``, ``launched``: see :class:`Summary`; ``choice_lines``: its ``kept``."""
    names = () if mesh is None or len(mesh.names) == 1 else mesh.names
    return Summary(
        rows=tuple(_row(a, assignments[a.name], decays=a.name in decayed) for a in sharded_params),
        stage=config.zero.stage,
        world_size=1 if mesh is None else mesh.size,
        update="step" if config.zero.update == "step" else "backward",
        axes=tuple((name, mesh.axis(name).size) for name in names if mesh is not None),
        outside=outside if config.compile.cuda_graphs else None,
        launched=launched if config.compile.cuda_graphs else None,
        kept=tuple(choice_lines),
    )
