"""The slowdown of Newton–Schulz while a kernel holds some of a GPU's multiprocessors, as NCCL's kernels do.

    python benchmarks/contention.py --json contention.json

Programs of 16 warps with 128 KiB of shared memory each spin on a stream of high priority, so no tile finds a place
beside one. A fair slowdown is all / (all - held), about that of cuBLAS, whose blocks are short. A list is timed both in
one wave, as on a single rank, and in several waves, as beside other ranks (kernels/gpu/model.py).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import triton
import triton.language as tl
from lists import CASES
from triton.language.extra.cuda import globaltimer

from compile_muon.kernels import newton_schulz_list
from compile_muon.passes.torch_private import fake_group

HELD = (0, 8, 16, 32)
BESIDE_OTHERS = "in waves"  # the list as on several ranks
CALLS = 5
SIDE = 8192
#: shape of the two operands that fill shared memory, 64 KiB each
_ROWS, _DEPTH = 128, 256
_LIMIT_NS = 5_000_000_000  # so that no program spins for ever


@triton.jit
def hold(stop, x, out, limit, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Spin until ``stop`` is set, or for ``limit`` nanoseconds; the product only takes shared memory."""
    i, k = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    left = tl.load(x + i[:, None] * DEPTH + k[None, :])
    right = tl.load(x + k[:, None] * ROWS + i[None, :])
    tl.store(out + i[:, None] * ROWS + i[None, :], tl.dot(left, right))
    begin = globaltimer()
    while (tl.load(stop, volatile=True) == 0) & (globaltimer() - begin < limit):
        pass


class Holder:
    """A number of multiprocessors, held inside a ``with`` block."""

    def __init__(self, processors: int) -> None:
        self._processors = processors
        self._stop = torch.zeros(1, dtype=torch.int32, device="cuda")
        self._x = torch.zeros(_ROWS, _DEPTH, dtype=torch.float16, device="cuda")
        self._out = torch.zeros(_ROWS, _ROWS, device="cuda")
        self._holding, self._telling = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)

    def __enter__(self) -> None:
        self._stop.zero_()
        torch.cuda.synchronize()
        if self._processors:
            with torch.cuda.stream(self._holding):
                constants = {"ROWS": _ROWS, "DEPTH": _DEPTH, "num_warps": 16}
                hold[(self._processors,)](self._stop, self._x, self._out, _LIMIT_NS, **constants)

    def __exit__(self, *exception: object) -> None:
        with torch.cuda.stream(self._telling):
            self._stop.fill_(1)
        torch.cuda.synchronize()


def milliseconds(run: Callable[[], object], holder: Holder) -> float:
    """Return the milliseconds of a call while ``holder`` holds multiprocessors."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with holder:
        begin.record()
        for _ in range(CALLS):
            run()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / CALLS


def subjects() -> dict[str, Callable[[], object]]:
    xs = [torch.randn(shape, device="cuda").bfloat16() for shape in CASES["1b, 20 matrices"]]
    batch = torch.randn(20, 2048, 2048, device="cuda").bfloat16()
    a = torch.randn(SIDE, SIDE, device="cuda").bfloat16()
    return {
        "list of 20": lambda: newton_schulz_list(xs, backend="triton"),
        BESIDE_OTHERS: lambda: newton_schulz_list(xs, backend="triton"),
        "20 of one shape": lambda: newton_schulz_list([batch], backend="triton"),
        "cuBLAS": lambda: torch.mm(a, a),
    }


def times_of(run: Callable[[], object], held: Sequence[int], processors: int) -> Iterator[dict[str, float]]:
    """Yield a row for each number of held multiprocessors; "times" is relative to the first."""
    for _ in range(2):  # compiles, and fills the allocator's cache
        run()
    alone = 0.0
    for number in held:
        ms = milliseconds(run, Holder(number))
        alone = alone or ms
        yield {"held": number, "ms": ms, "times": ms / alone, "fair": processors / (processors - number)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held", type=int, nargs="+", default=HELD, help="multiprocessors; ahead 0, to compare with")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    processors = torch.cuda.get_device_properties("cuda").multi_processor_count
    rows = []
    for name, run in subjects().items():
        with fake_group(0, 2) if name == BESIDE_OTHERS else contextlib.nullcontext():
            for row in times_of(run, options.held, processors):
                rows.append({"what": name, **row})
                print(
                    f"{name:16} {row['held']:3} held: {row['ms']:8.3f} ms, {row['times']:.2f} times "
                    f"(fair: {row['fair']:.2f})",
                    flush=True,
                )
    if options.json:
        about = {"device": torch.cuda.get_device_name(), "processors": processors, "rows": rows}
        options.json.write_text(json.dumps(about, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
