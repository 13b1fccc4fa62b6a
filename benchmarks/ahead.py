"""Every launch of every tile table, compiled ahead of time: registers, spills, shared memory. Needs no GPU.

    python benchmarks/ahead.py [sm_80 sm_90 sm_100] [--dtypes bfloat16 float16] [--json FILE]

Ends with status 1 if a kernel spills registers or asks for more shared memory than a block has.
"""

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.table import Table as Picture
from triton.backends.compiler import GPUTarget

from compile_muon.kernels import Averages
from compile_muon.kernels.gpu import apply, fingerprint, momentum, normalize
from compile_muon.kernels.gpu.arena import Layout
from compile_muon.kernels.gpu.grouped_product import grouped_product
from compile_muon.kernels.gpu.grouped_symmetric import grouped_symmetric
from compile_muon.kernels.gpu.jobs import NoDevice
from compile_muon.kernels.gpu.launch import Launch, noting
from compile_muon.kernels.gpu.model import Tile
from compile_muon.kernels.gpu.operands import empty_matrices
from compile_muon.kernels.gpu.product import product
from compile_muon.kernels.gpu.symmetric import symmetric_product
from compile_muon.kernels.gpu.tiles import Table, load_tables
from compile_muon.passes.fingerprint import FORMULA

__all__ = ["SHARED_PER_BLOCK", "Resources", "launches", "measure"]

# Bytes a block may ask for: CUDA C++ Programming Guide, table of compute capabilities.
SHARED_PER_BLOCK = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}

#: dtypes of the products
HALVES = ("bfloat16", "float16")

# Patterns in the PTX: matrix instructions by generation, ways to load tiles, and results stored one by one.
_INSTRUCTIONS = {
    "mma": r"\bmma\.sync",
    "wgmma": r"\bwgmma\.mma_async",
    "tcgen05": r"\btcgen05\.mma",
    "TMA": r"\bcp\.async\.bulk\.tensor",
    "cp.async": r"\bcp\.async\.cg",
    "2-byte stores": r"\bst\.global\.b16",
    "max.NaN": r"\bmax\.NaN\.f32",
}


@dataclass(frozen=True)
class Resources:
    """The resources of a compiled kernel."""

    architecture: str
    launch: str  # name of the launch
    registers: int  # of a thread
    stack: int  # bytes of a thread
    local: int  # bytes of local memory of a thread
    shared: int  # bytes of a block
    barriers: int  # BAR instructions of the machine code
    size: int  # instructions of the machine code
    loop: int  # instructions of the shortest loop; 0 without one
    instructions: tuple[str, ...]  # kinds of _INSTRUCTIONS found in the PTX

    def resident(self, warps: int) -> int:
        """Return the number of blocks of ``warps`` warps that a multiprocessor holds, at least 1."""
        # 65536 registers, allocated in units of 8 a thread; each block costs a KiB of shared memory of its own.
        by_registers = 65536 // (-(-self.registers // 8) * 8 * 32 * warps)
        by_memory = (SHARED_PER_BLOCK[self.architecture] + 1024) // (self.shared + 1024)
        return max(1, min(by_registers, by_memory))

    @property
    def problem(self) -> str | None:
        if self.stack or self.local:
            return f"spills: {self.stack} bytes of stack, {self.local} of local memory"
        if self.shared > SHARED_PER_BLOCK[self.architecture]:
            return f"{self.shared} bytes of shared memory, the architecture has {SHARED_PER_BLOCK[self.architecture]}"
        return None


def launches(architecture: str, dtypes: Sequence[str] = HALVES) -> Iterator[tuple[str, Launch]]:
    """Yield named launches: each tile of the table with and without a summand, and the elementwise kernels."""
    table = load_tables()[architecture]
    for dtype in (getattr(torch, name) for name in dtypes):
        # Multiples of 16, which have kernels of their own in Triton, and odd sizes.
        for k, l in ((256, 512), (77, 91)):  # noqa: E741
            x, y = _matrices(k, l, dtype), _matrices(k, l, dtype)
            A, B = _matrices(k, k, dtype), _matrices(k, k, dtype)
            about = f"{_name(dtype)} [2, {k}, {l}]"
            for tile in table.symmetric:
                place = f"{about} {tile.rows}×{tile.cols}×{tile.depth}"
                yield f"XXᵀ {place}", symmetric_product(x, None, B, tile)
                yield f"bA + cA² {place}", symmetric_product(A, A, B, tile, plus=A, alpha=2.0, beta=-4.0)
                launch = symmetric_product(A, A, B, tile, plus=A, alpha=2.0, beta=-4.0, gamma=3.0)
                yield f"aI + bA + cA² {place}", launch
            for tile in table.product:
                place = f"{about} {tile.rows}×{tile.cols}×{tile.depth}"
                yield f"QX {place}", product(A, x, y, tile)
                yield f"aX + BX {place}", product(A, x, y, tile, plus=x, beta=3.0)
            tall = torch.empty(2, l, k, dtype=dtype).mT
            yield f"aX + BX transposed {place}", product(A, x, tall, table.product[0], plus=x, beta=3.0)
        yield from _grouped(table, dtype)
    yield from _elementwise()


def _grouped(table: Table, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Yield the grouped launches; a kernel reads sizes from a table, so one variant serves all."""
    layout = Layout(((2, 256, 512), (2, 77, 91)))
    x, A = (layout.new(dtype, torch.device("cpu"), square=square) for square in (False, True))

    def named(product: str, tile: Tile) -> str:
        return f"{product} grouped {_name(dtype)} {tile.rows}×{tile.cols}×{tile.depth}"

    for tile in table.symmetric:
        yield named("XXᵀ", tile), grouped_symmetric(x, x, A, tile, 1)
        launch = grouped_symmetric(A, A, A, tile, 1, plus=A, alpha=2.0, beta=-4.0)
        yield named("bA + cA²", tile), launch
        launch = grouped_symmetric(A, A, A, tile, 1, plus=A, alpha=2.0, beta=-4.0, gamma=3.0)
        yield named("aI + bA + cA²", tile), launch
        yield named("RF", tile), grouped_symmetric(A, A, A, tile, 1)
    for tile in table.product:
        yield named("QX", tile), grouped_product(A, x, x, tile, 1)
        yield named("aX + BX", tile), grouped_product(A, x, x, tile, 1, plus=x, beta=3.0)
        yield named("aQ + ZQ", tile), grouped_product(A, A, A, tile, 1, plus=A, beta=3.0)
        yield named("FQ", tile), grouped_product(A, A, A, tile, 1)


def _elementwise() -> Iterator[tuple[str, Launch]]:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.empty(2, 256, 512, dtype=dtype)
        for wide in (x, torch.empty(2, 512, 256, dtype=dtype).mT):
            turned = "" if wide is x else " transposed"
            partials = torch.empty(2, 2, normalize.MOST_PARTIALS)
            out = _matrices(256, 512, torch.bfloat16)
            yield f"norms {_name(dtype)}{turned}", normalize.partial_norms(wide, partials)
            yield f"divide {_name(dtype)}{turned}", normalize.divide(wide, partials, out, eps=1e-7, safety=1.0)
        flat = torch.empty(4096, dtype=dtype)
        half = torch.empty(4096, dtype=torch.bfloat16)
        for about, params, updates in (("", flat, half), (" unaligned", flat[1:], half[1:])):
            with noting(params.device) as launched:
                apply.apply_updates(
                    [params], [updates], lr=torch.empty(()), weight_decay=0.1, scales=[1.0],
                    averages=Averages([params], [params], 0.05), found_inf=torch.empty(()),
                )  # fmt: skip
            yield f"apply {_name(dtype)}{about}", launched[0]
    yield from _examined()


def _examined() -> Iterator[tuple[str, Launch]]:
    """Yield launches that sum rows: gradients cast or not, alone or added to those of ``.grad``; odd rows, too."""
    for given, columns in itertools.product((torch.bfloat16, torch.float32), (512, 515)):
        integers = torch.empty(256 * columns, dtype=getattr(torch, f"int{8 * given.itemsize}"), device="meta")
        with noting(torch.device("cuda")) as launched:
            fingerprint.examine([(integers, columns)], given, **FORMULA)
        yield f"examine {_name(given)} [256, {columns}]" + " unaligned" * (columns % 16 > 0), launched[0]
        grads = [torch.empty(256, columns, dtype=given, device="meta")]
        wide = [torch.empty(256, columns, device="meta")]
        for carried in ([], wide):
            with noting(torch.device("cuda")) as launched:
                momentum.momentum_updates(
                    grads, wide, [torch.empty(2, device="meta")], carried, nesterov=True, dtype=torch.bfloat16,
                    wide=torch.float32, **FORMULA,
                )  # fmt: skip
            about = f"momentum {_name(given)} [256, {columns}]" + " added" * bool(carried)
            yield about + " unaligned" * (columns % 16 > 0), launched[0]


def _matrices(rows: int, cols: int, dtype: torch.dtype) -> torch.Tensor:
    return empty_matrices(2, rows, cols, like=torch.empty(0), dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def measure(architecture: str, name: str, launch: Launch) -> Resources:
    """Compile a launch for ``architecture``; replaces Triton's active driver, so this process can launch nothing."""
    triton.runtime.driver.set_active(NoDevice(GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)))
    compiled = launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.constants)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", cubin.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        command = [triton.knobs.nvidia.nvdisasm.path, cubin.name]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}
    size, loops = _counted(code)
    found = tuple(kind for kind, pattern in _INSTRUCTIONS.items() if re.search(pattern, compiled.asm["ptx"]))
    return Resources(
        architecture,
        name,
        registers=used["REG"],
        stack=used["STACK"],
        local=used["LOCAL"],
        shared=int(compiled.metadata.shared),
        barriers=len(re.findall(r"\bBAR\b", code)),
        size=size,
        loop=min(loops, default=0),
        instructions=found,
    )


def _counted(code: str) -> tuple[int, list[int]]:
    """The instructions of disassembled code, and those of each loop."""
    size = 0
    labels: dict[str, int] = {}
    loops: list[int] = []
    # No instruction begins with a dot, as .byte lines of debug sections do.
    for label, instruction in re.findall(r"^\.(L_x_\d+):|/\*[0-9a-f]{4,5}\*/\s+([^.\s][^;]*)", code, re.MULTILINE):
        if label:
            labels[label] = size
            continue
        size += 1
        target = re.search(r"\bBRA\b.*`\(\.(L_x_\d+)\)", instruction)
        begin = labels.get(target[1], size) if target else size
        if begin < size - 1:  # not the branch to itself behind the end
            loops.append(size - begin)
    return size, loops


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=list(SHARED_PER_BLOCK), metavar="sm_80 sm_90 sm_100")
    parser.add_argument("--dtypes", nargs="+", choices=HALVES, default=HALVES, help="of the products")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="launches whose name has one of these")
    parser.add_argument("--json", type=Path, help="write the report to this file")
    options = parser.parse_args(argv)
    unknown = set(options.architectures) - set(SHARED_PER_BLOCK)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(SHARED_PER_BLOCK)}")
    report = [
        measure(name, *named)
        for name in options.architectures
        for named in launches(name, options.dtypes)
        if any(text in named[0] for text in options.only)
    ]
    picture = Picture(title=f"Triton {triton.__version__}")
    headings = ["", "launch", "registers", "stack", "local", "shared", "BAR", "size", "loop", "instructions", "problem"]
    for heading in headings:
        picture.add_column(heading)
    for r in report:
        numbers = (str(n) for n in (r.registers, r.stack, r.local, r.shared, r.barriers, r.size, r.loop))
        picture.add_row(r.architecture, r.launch, *numbers, " ".join(r.instructions), r.problem or "")
    Console(width=None if sys.stdout.isatty() else 160).print(picture)
    if options.json:
        contents = {"triton": triton.__version__, "kernels": [asdict(r) for r in report]}
        options.json.write_text(json.dumps(contents, indent=1) + "\n")
    return 1 if any(r.problem for r in report) else 0


if __name__ == "__main__":
    sys.exit(main())
