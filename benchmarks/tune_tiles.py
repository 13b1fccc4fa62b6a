"""Time candidate tiles of the two matrix-product kernels and write this GPU's table into kernels/gpu/tiles.json.

    python benchmarks/tune_tiles.py                     # prints the table it would write
    python benchmarks/tune_tiles.py --write             # and writes it
    python benchmarks/tune_tiles.py --minutes 5         # and takes no longer than that
    python benchmarks/tune_tiles.py --lists             # by launches for lists, as steps have them, not for one matrix

Candidates are compiled first, in as many processes as there are cores. A candidate is out if it spills, does not fit,
or its result differs from torch's. A tile is kept if it is the fastest at some size; the table lists kept tiles from
the largest to the smallest, each with its rate at the largest size. Measured rates of a multiprocessor, ours and
cuBLAS's, replace the model's estimates, and so does the time between two tiles of a list, with a summand and without:
equally many tiles of two depths are timed, and the line through both is extended to depth 0. The model's other numbers
stay as they are in the file. With --lists the time between two tiles is taken out of their rates.

After SIGINT, SIGTERM or --minutes the table is made from the sizes at which all candidates were timed, the largest
first; numbers without a measurement stay as they are in the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import multiprocessing
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Protocol

import torch
from orthogonalizers import worst_block
from rich.console import Console
from torch import Tensor
from turns import seconds

from compile_muon.kernels.gpu.arena import Layout, Matrices
from compile_muon.kernels.gpu.grouped_product import grouped_product
from compile_muon.kernels.gpu.grouped_symmetric import grouped_symmetric
from compile_muon.kernels.gpu.launch import Launch
from compile_muon.kernels.gpu.model import Tile, busiest
from compile_muon.kernels.gpu.operands import empty_matrices
from compile_muon.kernels.gpu.product import product
from compile_muon.kernels.gpu.symmetric import symmetric_product
from compile_muon.kernels.gpu.tiles import load_tables

_FILE = Path(__file__).parents[1] / "kernels" / "gpu" / "tiles.json"
KINDS = ("symmetric", "product")
#: size -> matrices of it in a launch; a tile's rate is that at the first, the largest size
SQUARES = {8192: 1, 4096: 1, 2048: 1, 1024: 1, 512: 1}
IN_LISTS = {4096: 8, 2048: 20, 1024: 64}
LISTS = ((8, 4096), (128, 1024))  # (matrices, size): equally many tiles, the first of four times the depth


def candidates(capability: tuple[int, int]) -> Iterator[Tile]:
    """Yield tiles known to do well in Triton's matrix products, with the features of the architecture."""
    descriptors = capability >= (9, 0)
    depths = (64, 128) if descriptors else (32, 64)
    shapes = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64))
    for (rows, cols), depth, stages, warps in itertools.product(shapes, depths, (3, 4, 5), (4, 8)):
        if rows * cols // (warps * 32) > 256 or (rows + cols) * depth * stages * 2 > 220 * 1024:
            continue
        tile = Tile(rows, cols, depth, 8, stages, warps, descriptors=descriptors)
        yield tile
        if capability[0] >= 10:
            yield dataclasses.replace(tile, specialize=True)


def shaped(kind: str, tiles: Iterable[Tile]) -> list[Tile]:
    """Keep the tiles that `kind` can take: those of a symmetric result are squares, or two side by side."""
    return [tile for tile in tiles if kind == "product" or tile.cols in (tile.rows, 2 * tile.rows)]


class Stop:
    """True once a signal has come, or `minutes` from now are over; None for no limit."""

    def __init__(self, minutes: float | None = None):
        self._deadline = None if minutes is None else time.monotonic() + 60 * minutes
        self._asked = False

    def listen(self) -> None:
        """Let the first SIGINT or SIGTERM stop at the next tile, a second one at once."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = True
        signal.signal(number, signal.SIG_DFL)

    def __bool__(self) -> bool:
        return self._asked or (self._deadline is not None and time.monotonic() > self._deadline)


# --- compiling ahead --------------------------------------------------------------------------------------------------


def listed(kind: str, x: Matrices, out: Matrices, tile: Tile, processors: int) -> Launch:
    """Make the launch of out ← x x + x, of symmetric matrices of a list."""
    make = grouped_symmetric if kind == "symmetric" else grouped_product
    return make(x, x, out, tile.in_list, processors, plus=x, beta=1.0)


def problem_of(architecture: str, kind: str, tile: Tile, size: int, dtype: torch.dtype, in_list: bool) -> str | int:
    """Compile a launch into Triton's cache; return why the tile is out, or how many programs fit."""
    from ahead import measure

    def matrices() -> Tensor:
        return empty_matrices(1, size, size, like=torch.empty(0), dtype=dtype)

    def launch() -> Launch:
        if in_list:
            arenas = [Layout(((2, size, size),)).new(dtype, torch.device("cpu"), square=True) for _ in range(2)]
            return listed(kind, *arenas, tile, 1)
        make = symmetric_product if kind == "symmetric" else product
        return make(matrices(), matrices(), matrices(), tile, plus=matrices())

    try:
        resources = measure(architecture, "", launch())
        return resources.problem or resources.resident(tile.warps)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]


def compile_ahead(
    architecture: str, tiles: Mapping[str, list[Tile]], stop: Stop, workers: int, *, lists: bool = False
) -> tuple[dict[tuple[str, Tile], str], dict[tuple[str, Tile], int]]:
    """Compile all tiles; return those that are out, with the reason, and how many programs fit of the others.

    Tiles that ``stop`` leaves uncompiled are compiled when they are timed.
    """
    out: dict[tuple[str, Tile], str] = {}
    resident: dict[tuple[str, Tile], int] = {}
    # Sizes that are no multiple of 16, and float16, have kernels of their own, which the table serves, too.
    settings = [(size, dtype) for dtype in (torch.bfloat16, torch.float16) for size in ((512,) if lists else (512, 77))]
    # New interpreters, because they tell Triton that there is no GPU. Only this process handles interrupts.
    context, ignore = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(workers, context, initializer=signal.signal, initargs=ignore) as pool:
        waiting = {
            pool.submit(problem_of, architecture, kind, tile, *setting, lists): (kind, tile)
            for setting in settings
            for kind in tiles
            for tile in tiles[kind]
        }
        for future in as_completed(waiting):
            try:
                result = future.result()
            except BrokenExecutor:  # a compiler crashed its process: the other tiles are compiled when they are timed
                break
            candidate = waiting[future]
            if isinstance(result, str):
                out[candidate] = result
            else:
                resident[candidate] = min(result, resident.get(candidate, result))
            if stop:  # break, because as_completed never returns futures that the shutdown cancels
                pool.shutdown(wait=False, cancel_futures=True)
                break
    return out, resident


# --- timing -----------------------------------------------------------------------------------------------------------


class Device(Protocol):
    """A GPU as tuning needs it."""

    processors: int

    def complaint(self, kind: str, tile: Tile, size: int) -> str | None:
        """Return the complaint about a tile's result, or why it does not run; None if the result is right."""

    def milliseconds(self, kind: str, tile: Tile, size: int) -> float:
        """Time one launch on matrices of that size."""

    def cublas_milliseconds(self, size: int) -> float:
        """Time one whole product with a summand on matrices of that size, in cuBLAS."""

    def list_milliseconds(self, tile: Tile, matrices: int, size: int, *, summand: bool) -> float:
        """Time one launch of general products for a list."""


class Gpu:
    def __init__(self) -> None:
        self.processors = torch.cuda.get_device_properties("cuda").multi_processor_count
        self._size = 0
        self._x = self._out = torch.empty(0)  # [matrices, size, size]
        self._exact = torch.empty(0)

    def _hold(self, size: int) -> None:
        """Make the symmetric operand of a size, and x x + x for its last matrix in float64, by torch."""
        if size == self._size:
            return
        self._size, (self._x, self._out) = size, self._operands(size)
        x = torch.randn(self._x.shape, device="cuda")
        self._x.copy_(x + x.mT)
        wide = self._x[-1].double()
        self._exact = wide @ wide + wide

    def _operands(self, size: int) -> tuple[Tensor, Tensor]:
        x = torch.empty(1, size, size, device="cuda", dtype=torch.bfloat16)
        return x, empty_matrices(1, size, size, like=x, dtype=x.dtype)

    def _launch(self, kind: str, tile: Tile, size: int) -> Callable[[], None]:
        self._hold(size)
        make = symmetric_product if kind == "symmetric" else product
        return make(self._x, self._x, self._out, tile, plus=self._x, beta=1.0).run

    def complaint(self, kind: str, tile: Tile, size: int) -> str | None:
        run = self._launch(kind, tile, size)
        self._out.fill_(float("nan"))  # shows entries that are not written
        try:
            run()
            torch.cuda.synchronize()
        except Exception as error:  # out of registers or shared memory: not a candidate here
            return f"{type(error).__name__}: {error}".splitlines()[0]
        worst, limit = worst_block(self._out[-1], self._exact), 4 * torch.finfo(torch.bfloat16).eps
        if worst > limit:
            return f"differs from torch by {worst:.2g} in a block, bound {limit:.2g}"
        return None

    def milliseconds(self, kind: str, tile: Tile, size: int) -> float:
        return _bench(self._launch(kind, tile, size))

    def cublas_milliseconds(self, size: int) -> float:
        self._hold(size)
        return _bench(lambda: torch.baddbmm(self._x, self._x, self._x))

    def list_milliseconds(self, tile: Tile, matrices: int, size: int, *, summand: bool) -> float:
        layout, device = Layout(((matrices, size, size),)), torch.device("cuda")
        x, out = (layout.new(torch.float16, device, square=True) for _ in range(2))
        assert x.flat is not None
        x.flat.normal_()
        plus = x if summand else None
        return _bench(grouped_product(x, x, out, tile.in_list, self.processors, plus=plus, beta=1.0).run)


class Lists(Gpu):
    """A GPU that times launches for a list: `IN_LISTS` matrices of a size."""

    def _operands(self, size: int) -> tuple[Tensor, Tensor]:
        layout = Layout(((IN_LISTS[size], size, size),))
        self._arenas = [layout.new(torch.bfloat16, torch.device("cuda"), square=True) for _ in range(2)]
        x, out = (arena.views[0] for arena in self._arenas)
        return x, out

    def _launch(self, kind: str, tile: Tile, size: int) -> Callable[[], None]:
        self._hold(size)
        return listed(kind, *self._arenas, tile, self.processors).run


def _bench(run: Callable[[], object]) -> float:
    """Return the milliseconds of a launch at the clock of a card that works: back to back, behind as many to settle.

    With pauses between launches an H100 makes 798 TFLOP/s where a step has 650 to 690.
    """
    device = torch.device("cuda")
    run()
    seconds(run, device, 0.05)
    return 1e3 * seconds(run, device, 0.05)


class Tuning:
    """The measurements so far, of the candidates `tiles` of each kind; `matrices` is `SQUARES` or `IN_LISTS`."""

    def __init__(
        self,
        device: Device,
        tiles: Mapping[str, list[Tile]],
        stop: Stop,
        say: Callable[[str], None],
        matrices: Mapping[int, int] = SQUARES,
    ):
        self._device = device
        self._sizes = tuple(matrices)
        self._result = (matrices[self._sizes[0]], *[self._sizes[0]] * 3)  # of the launch that gives a tile's rate
        self._in_lists = matrices is IN_LISTS
        self._tiles = {kind: list(tiles[kind]) for kind in KINDS}
        self._stop = stop
        self._say = say
        self._times: dict[tuple[str, int], dict[Tile, float]] = {}  # milliseconds, of complete sizes
        self._cublas: float | None = None  # milliseconds at the largest size
        self._between: dict[bool, float] = {}  # milliseconds between two tiles of a list, with a summand or without
        self.rejected: dict[tuple[str, Tile], str] = {}

    def run(self) -> None:
        for size in self._sizes:  # both kinds of a size, then the next: if stopped, both kinds have the largest sizes
            for kind in KINDS:
                times = self._time_all(kind, size)
                if times is None:
                    return
                # After all tiles of this size, because one that is wrong here is out at the other sizes, too.
                self._times[kind, size] = times
                if times:
                    winner = min(times, key=lambda tile: times[tile])
                    self._say(f"{kind} {size}: {times[winner]:.4f} ms, {winner}")
        self._cublas = self._device.cublas_milliseconds(self._sizes[0])
        for summand in (True, False):
            if self._stop or not self.kept()["product"]:
                return
            self._between[summand] = self._between_tiles(self.kept()["product"][0], summand=summand)

    def _between_tiles(self, tile: Tile, *, summand: bool) -> float:
        """Extrapolate a tile's milliseconds in a list to depth 0; the launch itself takes less than one tile."""
        (many, deep), (more, shallow) = LISTS
        long, short = (self._device.list_milliseconds(tile, b, size, summand=summand) for b, size in LISTS)
        _, tiles = busiest(tile.in_list, [(many, deep, deep, deep)], self._device.processors, triangle=False)
        return max(0.0, short - (long - short) * shallow / (deep - shallow)) / tiles

    def _time_all(self, kind: str, size: int) -> dict[Tile, float] | None:
        """Time every candidate with a right result; None if stopped before the last."""
        times = {}
        for tile in list(self._tiles[kind]):
            if self._stop:
                return None
            complaint = self._device.complaint(kind, tile, size)
            if complaint is None:
                times[tile] = self._device.milliseconds(kind, tile, size)
            else:
                self.rejected[kind, tile] = f"at {size}: {complaint}"
                self._tiles[kind].remove(tile)
                self._say(f"{kind} {tile} is out: {complaint}")
        return times

    def kept(self) -> dict[str, list[Tile]]:
        """Return for each kind the fastest tile of every complete size, with rates; [] for a kind without any."""
        return {kind: self._kept(kind) for kind in KINDS}

    def _kept(self, kind: str) -> list[Tile]:
        complete = [
            # A tile that is wrong at one size is out at all sizes, also where its result was right.
            {tile: ms for tile, ms in self._times[kind, size].items() if (kind, tile) not in self.rejected}
            for size in self._sizes
            if (kind, size) in self._times
        ]
        complete = [times for times in complete if times]
        winners = {min(times, key=lambda tile: times[tile]) for times in complete}
        distinct = sorted(winners, key=lambda tile: -tile.rows * tile.cols)
        # One tile for each number of entries: of two equally large ones neither loses by much, and the model chooses
        # by size.
        chosen = list({tile.rows * tile.cols: tile for tile in reversed(distinct)}.values())[::-1]
        if not chosen:
            return []
        rates = [self._rate(kind, tile, complete[0][tile]) for tile in chosen]
        return [
            dataclasses.replace(tile, rate=round(rate / max(rates), 3))
            for tile, rate in zip(chosen, rates, strict=True)
        ]

    def _rate(self, kind: str, tile: Tile, milliseconds: float) -> float:
        """Return a multiprocessor's operations a second at the largest size; time between tiles does not count."""
        tile = tile.in_list if self._in_lists else tile
        operations, tiles = busiest(tile, [self._result], self._device.processors, triangle=kind == "symmetric")
        between = tiles * self._between.get(True, 0.0) if self._in_lists else 0.0
        return 1e3 * operations / max(milliseconds - between, 0.1 * milliseconds)

    def table(self, source: str, before: Mapping) -> dict | None:
        """Make an entry of tiles.json, with unmeasured numbers of the entry `before`; None if a kind has no tiles."""
        kept = self.kept()
        tiles = {kind: [_plain(tile) for tile in kept[kind]] or before.get(kind, []) for kind in KINDS}
        if not any(kept.values()) or not all(tiles.values()):
            return None
        measured: dict[str, object] = {}
        if ("product", self._sizes[0]) in self._times and kept["product"]:
            times = self._times["product", self._sizes[0]]
            rates = {t: self._rate("product", t, ms) for t, ms in times.items() if ("product", t) not in self.rejected}
            fastest = max(rates.values())
            names = {True: "between", False: "between_flattened"}
            between = {names[summand]: round(ms / 1e3, 8) for summand, ms in self._between.items()}
            measured["device"] = before["device"] | {"rate": round(fastest, -9)} | between
            if self._cublas is not None:
                top = max(before["cublas"], key=lambda tile: tile["rate"])
                tile = Tile(top["rows"], top["cols"])
                operations, _ = busiest(tile, [self._result], self._device.processors, triangle=False)
                theirs = 1e3 * operations / self._cublas
                scale = theirs / fastest / top["rate"]
                cublas = [tile | {"rate": round(tile["rate"] * scale, 3)} for tile in before["cublas"]]
                measured["cublas"] = cublas
        unmeasured = [kind for kind in KINDS if not kept[kind]]
        old = [*unmeasured, *(name for name in ("device", "cublas") if name not in measured)]
        note = f"; not measured: {', '.join(old)}" if old else ""
        device, cublas = (measured.get(name, before[name]) for name in ("device", "cublas"))
        return {"source": source + note, "measured": not unmeasured, "device": device, **tiles, "cublas": cublas}


def _plain(tile: Tile) -> dict:
    """Return a tile as in the file, without fields that are false or 0."""
    return {key: value for key, value in dataclasses.asdict(tile).items() if value}


_LISTS = (*KINDS, "cublas")


def formatted(tables: Mapping[str, Mapping]) -> str:
    """Format tables as JSON with a tile a line."""
    entries = []
    for name, table in tables.items():
        lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items() if key not in _LISTS]
        for kind in _LISTS:
            tiles = ",\n".join(f"      {json.dumps(tile)}" for tile in table[kind])
            lines.append(f"    {json.dumps(kind)}: [\n{tiles}\n    ]")
        entries.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(entries) + "\n}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, nargs="?", const=_FILE, metavar="FILE", help="change tiles.json, or FILE")
    parser.add_argument("--lists", action="store_true", help="time launches for lists")
    parser.add_argument("--minutes", type=float, help="stop after so many, compiling included")
    parser.add_argument("--candidates", type=int, help="of each kind, few to see that it works; default: all")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--json", type=Path, help="write the table alone into this file, too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    console = Console(width=None if sys.stdout.isatty() else 160)
    stop = Stop(options.minutes)
    stop.listen()
    capability = torch.cuda.get_device_capability()
    name = "sm_{}{}".format(*capability)

    def say(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=True)

    tiles = {kind: shaped(kind, candidates(capability))[: options.candidates] for kind in KINDS}
    say(f"{sum(map(len, tiles.values()))} candidates for {name}, compiled in {options.workers} processes")
    start = time.monotonic()
    residents = {}
    for lists in (False, True) if options.lists else (False,):
        out, residents[lists] = compile_ahead(name, tiles, stop, options.workers, lists=lists)
        for (kind, tile), problem in out.items():
            tiles[kind].remove(tile)
            say(f"{kind} {tile} is out: {problem}")

    def with_residents(kind: str, tile: Tile) -> Tile:
        one, several = (residents.get(lists, {}).get((kind, tile), 1 - lists) for lists in (False, True))
        return dataclasses.replace(tile, resident=one, resident_in_list=several if several != one else 0)

    tiles = {kind: [with_residents(kind, tile) for tile in tiles[kind]] for kind in KINDS}
    say(f"compiled in {time.monotonic() - start:.0f} s; {sum(map(len, tiles.values()))} are left")
    arguments = (Lists(), tiles, stop, say, IN_LISTS) if options.lists else (Gpu(), tiles, stop, say, SQUARES)
    tuning = Tuning(*arguments)
    tuning.run()
    if stop:
        say("stopped: what follows is what there is")
    file = options.write or _FILE
    tables = json.loads(file.read_text())
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    source = f"{torch.cuda.get_device_name()}, {datetime.date.today()}, {command}"
    table = tuning.table(source, tables.get(name, tables["sm_90"]))
    if table is None:
        say("[red]no size is complete: nothing to write[/red]")
        return 1
    say(formatted({name: table}))
    if options.json:
        options.json.write_text(formatted({name: table}))
    if options.write:
        file.write_text(formatted(tables | {name: table}))
        say(f"written: {', '.join(load_tables(file.resolve()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
