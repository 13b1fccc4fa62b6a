"""NCCL that lets several ranks share a GPU: from 2.30 on it does; earlier ones say "Duplicate GPU detected".

    python benchmarks/shared_nccl.py make FOLDER          # FOLDER/libnccl.so.2.xz, some 25 MB; takes pip and readelf
    python benchmarks/shared_nccl.py make FOLDER 90 100   # with machine code for other GPUs than sm_90
    python benchmarks/shared_nccl.py check                # the environment's own, or that of NCCL_LIBRARY

`make gpu` takes what NCCL_LIBRARY names, packed or not, or what the environment has if it is as new. A library that is
made here is what pip downloads, its machine code for other GPUs overwritten with zeros and the rest packed, so that it
can be carried to a machine without a network.
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

# By the word of the library whose functions torch calls: the one that is preloaded, though torch may map its own, too;
# else the one that is mapped; else that of torch, which has NCCL within itself.
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
    """The library that can be loaded: itself, or in ``folder`` what an ``.xz`` holds."""
    if library.suffix != ".xz":
        return library
    target = folder / _NAME
    folder.mkdir(parents=True, exist_ok=True)
    with lzma.open(library) as packed, open(target, "wb") as out:
        shutil.copyfileobj(packed, out)
    return target


def preloaded(environment: Mapping[str, str], folder: Path) -> dict[str, str] | str:
    """What the environment of processes needs beside ``environment``, so that several may share a GPU over NCCL; or why
    they cannot.

    Args:
        folder: for a library that is unpacked.
    """
    more: dict[str, str] = {}
    if given := environment.get("NCCL_LIBRARY"):
        if not Path(given).is_file():
            return f"NCCL_LIBRARY={given}: there is no such file; `python benchmarks/shared_nccl.py make` makes one"
        before = environment.get("LD_PRELOAD", "").split()
        more["LD_PRELOAD"] = " ".join([str(unpacked(Path(given), folder).resolve()), *before])
    done = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, text=True, env={**environment, **more})
    if done.returncode:
        return f"no NCCL: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    version = tuple(int(word) for word in done.stdout.split())
    if version < LEAST:
        return (
            f"NCCL {'.'.join(map(str, version))} has one rank on a GPU, {'.'.join(map(str, LEAST))} may have several: "
            "name a library in NCCL_LIBRARY (benchmarks/shared_nccl.py)"
        )
    return more


# --- making one -------------------------------------------------------------------------------------------------------


def downloaded(folder: Path) -> Path:
    """The library that pip has."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    platforms = ("manylinux_2_18_x86_64", "manylinux2014_x86_64")
    command += [str(folder), *(f"--platform={name}" for name in platforms), PACKAGE]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    return Path(zipfile.ZipFile(wheel).extract(f"nvidia/nccl/lib/{_NAME}", folder))


def fat_entries(data: bytearray, start: int, size: int) -> Iterator[tuple[int, int, int, int]]:
    """(start, bytes, kind, architecture) of each payload of a section of fat binaries; of kind 2 is machine code."""
    at = start
    while at < start + size:
        magic, _, header, length = struct.unpack_from("<IHHQ", data, at)
        if magic != 0xBA55ED50:
            at += 8
            continue
        entry, at = at + header, at + header + length
        while entry < at:
            kind, _, own, payload = struct.unpack_from("<HHIQ", data, entry)
            yield entry + own, payload, kind, struct.unpack_from("<I", data, entry + 28)[0]
            entry += own + payload


def only_for(data: bytearray, sections: str, architectures: set[int]) -> int:
    """Overwrite what other GPUs would run with zeros; bytes of what is left to run.

    Args:
        data: a shared library, changed in place.
        sections: of it, as ``readelf -SW`` lists them.
        architectures: 90 for sm_90.
    """

    def section(name: str) -> tuple[int, int]:
        found = re.search(rf"\] {re.escape(name)}\s+\S+\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)", sections)
        return (int(found[1], 16), int(found[2], 16)) if found else (0, 0)

    start, size = section("__nv_relfatbin")  # for linking on a device only
    data[start : start + size] = bytes(size)
    kept = 0
    for begin, length, kind, architecture in list(fat_entries(data, *section(".nv_fatbin"))):
        if kind == 2 and architecture in architectures:
            kept += length
        else:
            data[begin : begin + length] = bytes(length)
    return kept


def make(folder: Path, architectures: set[int]) -> Path:
    """The packed library in ``folder``.

    Raises:
        SystemExit: it has no machine code for these GPUs.
    """
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
        found = preloaded(os.environ, Path(folder))
    print(found if isinstance(found, str) else "several ranks may share a GPU")
    return int(isinstance(found, str))


if __name__ == "__main__":
    sys.exit(main())
