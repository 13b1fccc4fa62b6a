"""An NCCL that lets several ranks share a GPU: version 2.30 or later; earlier ones say "Duplicate GPU detected".

    python benchmarks/shared_nccl.py make FOLDER          # FOLDER/libnccl.so.2.xz, some 25 MB; takes pip and readelf
    python benchmarks/shared_nccl.py make FOLDER 90 100   # with machine code for other GPUs than sm_90
    python benchmarks/shared_nccl.py check                # the environment's own, or that of NCCL_LIBRARY

`make gpu` takes the library that NCCL_LIBRARY names, packed or not, or the environment's own if it is new enough.
`make` packs the library that pip downloads, its machine code for other GPUs overwritten with zeros, small enough to be
carried to a machine without a network.
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = "nvidia-nccl-cu13>=2.30"
LEAST = (2, 30)
_NAME = "libnccl.so.2"

# Asks the library whose functions torch calls for its version: a preloaded one, though torch may map its own, too; else
# a mapped one; else torch itself, which may contain NCCL.
_PROBE = """
import ctypes, re, torch
code, mapped = ctypes.c_int(), re.findall(r"(/\\S*libnccl\\S*)", open("/proc/self/maps").read())
for library in [None, *mapped]:
    if hasattr(ctypes.CDLL(library), "ncclGetVersion"):
        ctypes.CDLL(library).ncclGetVersion(ctypes.byref(code))
        print(code.value // 10000, code.value // 100 % 100, code.value % 100)
        break
else:
    print(*torch.cuda.nccl.version())
"""


def unpacked(library: Path, folder: Path) -> Path:
    """Return a library that can be loaded: ``library`` itself, or the content of an ``.xz`` in ``folder``."""
    if library.suffix != ".xz":
        return library
    target = folder / _NAME
    folder.mkdir(parents=True, exist_ok=True)
    with lzma.open(library) as packed, open(target, "wb") as out:
        shutil.copyfileobj(packed, out)
    return target


def preloaded(environment: Mapping[str, str], folder: Path) -> dict[str, str] | str:
    """Return the variables that processes need beside ``environment`` to share a GPU over NCCL, or why they cannot."""
    more: dict[str, str] = {}
    if library := environment.get("NCCL_LIBRARY"):
        if not Path(library).is_file():
            return f"NCCL_LIBRARY={library}: there is no such file; `python benchmarks/shared_nccl.py make` makes one"
        before = environment.get("LD_PRELOAD", "").split()
        more["LD_PRELOAD"] = " ".join([str(unpacked(Path(library), folder).resolve()), *before])
    probe = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, env={**environment, **more})
    if probe.returncode:
        return f"no NCCL: {(probe.stderr.strip().splitlines() or ['?'])[-1]}"
    version = tuple(int(word) for word in probe.stdout.split())
    if version < LEAST:
        return (
            f"NCCL {'.'.join(map(str, version))} has one rank on a GPU, {'.'.join(map(str, LEAST))} may have several: "
            "name a library in NCCL_LIBRARY (benchmarks/shared_nccl.py)"
        )
    return more


# --- making one -------------------------------------------------------------------------------------------------------


def downloaded(folder: Path) -> Path:
    """Download NCCL's wheel by pip, and unpack its library into ``folder``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    platforms = ("manylinux_2_18_x86_64", "manylinux2014_x86_64")
    command += [str(folder), *(f"--platform={name}" for name in platforms), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return Path(zipfile.ZipFile(wheel).extract(f"nvidia/nccl/lib/{_NAME}", folder))


def fat_entries(data: bytearray, start: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (start, bytes, kind, architecture) of each payload of a section of fat binaries; kind 2 is machine code."""
    at = start
    while at < start + size:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != 0xBA55ED50:
            at += 8
            continue
        entry, at = at + header, at + header + length
        while entry < at:
            kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
            yield entry + entry_header, payload, kind, struct.unpack_from("<I", data, entry + 28)[0]
            entry += entry_header + payload


def only_for(data: bytearray, sections: str, architectures: set[int]) -> int:
    """Overwrite other GPUs' machine code in a library with zeros; ``sections`` is the list of ``readelf -SW``.

    Return the bytes of machine code that are left.
    """

    def section(name: str) -> tuple[int, int]:
        line = re.search(rf"\] {re.escape(name)}\s+\S+\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)", sections)
        return (int(line[1], 16), int(line[2], 16)) if line else (0, 0)

    start, size = section("__nv_relfatbin")  # used for linking on a device only
    data[start : start + size] = bytes(size)
    code_bytes = 0
    for begin, length, kind, architecture in list(fat_entries(data, *section(".nv_fatbin"))):
        if kind == 2 and architecture in architectures:
            code_bytes += length
        else:
            data[begin : begin + length] = bytes(length)
    return code_bytes


def make(folder: Path, architectures: set[int]) -> Path:
    """Download NCCL, keep its machine code for these GPUs, and pack the library into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        library = downloaded(Path(place))
        data = bytearray(library.read_bytes())
        listing = subprocess.run(["readelf", "-SW", str(library)], capture_output=True, text=True, check=True).stdout
    if not only_for(data, listing, architectures):
        raise SystemExit(f"this NCCL has no machine code for {sorted(architectures)}")
    target = folder / f"{_NAME}.xz"
    with lzma.open(target, "wb", preset=6) as out:
        out.write(data)
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="a small library, to be carried along")
    making.add_argument("folder", type=Path)
    making.add_argument("architectures", type=int, nargs="*", default=[90], metavar="ARCH", help="90 for sm_90")
    commands.add_parser("check", help="whether several ranks may share a GPU here")
    options = parser.parse_args()
    if options.command == "make":
        target = make(options.folder, set(options.architectures))
        print(f"{target}: {target.stat().st_size / 1e6:.0f} MB")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        variables = preloaded(os.environ, Path(folder))
    print(variables if isinstance(variables, str) else "several ranks may share a GPU")
    return int(isinstance(variables, str))


if __name__ == "__main__":
    sys.exit(main())
