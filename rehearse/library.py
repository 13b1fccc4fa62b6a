"""Builds the library in place of CUDA's runtime, driver, cuBLAS and NCCL, and starts programs with it."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

__all__ = ["FOLDER", "LIBRARY", "build", "environment", "symbols_of", "under_it"]

SOURCE = Path(__file__).with_name("device.cpp")
FOLDER = Path(__file__).resolve().parents[1] / "build" / "rehearse"
LIBRARY = FOLDER / "libcuda.so.1"

#: NVIDIA's libraries whose symbols torch takes from ours
_SERVED = ("libcudart.so", "libcublas.so", "libcublasLt.so", "libnccl.so")


def symbols_of(listing: str) -> set[str]:
    """Return the symbol names in the output of ``nm -D``, without versions.

    >>> sorted(symbols_of("0000000000012 T cudaMalloc@@libcudart.so.13\\n      U cuInit\\n"))
    ['cuInit', 'cudaMalloc']
    """
    return {line.split()[-1].split("@")[0] for line in listing.splitlines() if line.split()}


def missing(wanted: Iterable[str], served: Iterable[str], source: str) -> list[str]:
    """Return the symbols that are needed and not defined in ``source``; stubs of them return success.

    ``wanted``: undefined symbols of torch's libraries and of Triton's launcher; ``served``: symbols of NVIDIA's
    libraries that ours replaces.
    """
    wanted = set(wanted)
    driver = {name for name in wanted if re.match(r"cu[A-Z]", name) and not name.startswith("cuFile")}
    defined = set(re.findall(r"\b((?:__)?(?:cuda|cu|nccl|cublas)[A-Za-z0-9_]+)\s*\(", source))
    return sorted(((wanted & set(served)) | driver | {"cuTensorMapEncodeIm2col"}) - defined)


def _nm(path: Path, which: str) -> set[str]:
    return symbols_of(subprocess.run(["nm", "-D", which, str(path)], capture_output=True, text=True).stdout)


def build() -> Path:
    """Build the library, once for each source and torch, and return its path."""
    if absent := [tool for tool in ("g++", "gcc", "nm") if shutil.which(tool) is None]:
        raise SystemExit(f"rehearse: needs {', '.join(absent)}: install a C++ compiler and binutils")
    site = Path(sysconfig.get_paths()["purelib"])
    nvidia = [path for name in _SERVED for path in site.glob(f"nvidia/*/lib/{name}.*")]
    if not nvidia:
        raise SystemExit('rehearse: torch is no CUDA build here; `make rehearse` installs one ("torch===2.13.0")')
    source = SOURCE.read_text() + SOURCE.with_name("ranks.hpp").read_text()
    stamp, key = FOLDER / "stamp", hashlib.sha256((source + str(site)).encode()).hexdigest()
    if LIBRARY.exists() and stamp.exists() and stamp.read_text() == key:
        return LIBRARY
    (FOLDER / "include").mkdir(parents=True, exist_ok=True)
    for name in ("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"):  # nccl.h includes them for types that are unused here
        (FOLDER / "include" / name).touch()
    undefined = set().union(*(_nm(path, "--undefined-only") for path in (site / "torch/lib").glob("*.so")))
    launcher = (site / "triton/backends/nvidia/driver.c").read_text()
    undefined |= set(re.findall(r"\b(cu[A-Z]\w+)\(", launcher))
    served = set().union(*(_nm(path, "--defined-only") for path in nvidia))
    stubs = FOLDER / "rest.c"
    visible = '__attribute__((visibility("default")))'
    stubs.write_text(
        "".join(f"{visible} int {name}() {{ return 0; }}\n" for name in missing(undefined, served, source))
    )
    # Triton's headers last: they may be of another CUDA version than torch's.
    folders = [
        SOURCE.parent,
        FOLDER / "include",
        *site.glob("nvidia/*/include"),
        site / "triton/backends/nvidia/include",
    ]
    include = [part for folder in folders for part in ("-I", str(folder))]
    subprocess.run(["gcc", "-c", "-fPIC", "-O1", str(stubs), "-o", str(stubs.with_suffix(".o"))], check=True)
    command = ["g++", "-std=c++17", "-shared", "-fPIC", "-O1", "-w", "-fno-strict-aliasing", *include, str(SOURCE)]
    command += [str(stubs.with_suffix(".o")), "-o", str(LIBRARY), "-Wl,-soname,libcuda.so.1", "-ldl"]
    subprocess.run(command, check=True)
    stamp.write_text(key)
    return LIBRARY


def environment() -> dict[str, str]:
    """Return the variables that a program with the library in place of CUDA's needs beside this process's."""
    return {
        "LD_PRELOAD": str(build()),
        "LD_LIBRARY_PATH": str(FOLDER),
        "TRITON_LIBCUDA_PATH": str(FOLDER),
        "TORCHINDUCTOR_CACHE_DIR": str(FOLDER / "inductor"),  # a cache apart: autotuning on this device means nothing
        "TRITON_CACHE_DIR": str(FOLDER / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        # The default workspaces of cuBLAS, 32 MiB a stream, are in no plan and would dominate a small model's memory.
        "CUBLAS_WORKSPACE_CONFIG": ":16:1",
        "CUBLASLT_WORKSPACE_SIZE": "16",
    }


def under_it() -> None:
    """Start this program again with the library in place of CUDA's, unless it runs with it."""
    if str(LIBRARY) not in os.environ.get("LD_PRELOAD", ""):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | environment())
