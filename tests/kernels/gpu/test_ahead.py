"""Every launch of every tile table compiles for its architecture, spills nothing and fits its shared memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from compile_muon.kernels.gpu.ahead import SHARED_PER_BLOCK, Resources, launches  # noqa: E402
from compile_muon.kernels.gpu.tiles import load_tables  # noqa: E402

ARCHITECTURES = list(SHARED_PER_BLOCK)


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, list[Resources]]:
    """Compiled in one process an architecture: Triton takes one active driver."""
    folder = tmp_path_factory.mktemp("ahead")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    started = {
        name: subprocess.Popen(
            [sys.executable, "-m", "compile_muon.kernels.gpu.ahead", name, "--json", str(folder / name)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )
        for name in ARCHITECTURES
    }  # fmt: skip
    output = {name: process.communicate(timeout=800)[0] for name, process in started.items()}
    missing = {name: output[name][-4000:] for name in ARCHITECTURES if not (folder / name).exists()}
    assert not missing, missing
    kernels = {name: json.loads((folder / name).read_text())["kernels"] for name in ARCHITECTURES}
    return {
        name: [Resources(**k | {"instructions": tuple(k["instructions"])}) for k in kernels[name]]
        for name in ARCHITECTURES
    }


def test_tables_are_of_the_architectures_that_are_compiled_for():
    assert set(load_tables()) == set(ARCHITECTURES)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nothing_spills_and_shared_memory_fits(architecture, reports):
    report = reports[architecture]
    assert {r.launch for r in report} == {name for name, _ in launches(architecture)}
    assert not [(r.launch, r.problem) for r in report if r.problem]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_products_use_the_matrix_instructions_of_their_architecture(architecture, reports):
    wanted = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}[architecture]
    loads = "TMA" if architecture != "sm_80" else "cp.async"
    products = [r for r in reports[architecture] if "×" in r.launch]
    assert len(products) > 10
    assert not [(r.launch, r.instructions) for r in products if wanted not in r.instructions]
    # Rows of odd pitch on sm_80 are no multiple of 16 bytes and load one element at a time.
    aligned = [r for r in products if architecture != "sm_80" or "[2, 256, 512]" in r.launch]
    assert not [(r.launch, r.instructions) for r in aligned if loads not in r.instructions]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_results_are_stored_16_bytes_at_a_time(architecture, reports):
    """Masks that differ from entry to entry, on the diagonal say, would split every store."""
    narrow = [r.launch for r in reports[architecture] if "2-byte stores" in r.instructions]
    assert all("[2, 77, 91]" in launch for launch in narrow), narrow
    assert narrow  # no multiple of 16 bytes: so they are found where they are


def test_a_problem_is_told():
    fine = Resources("sm_90", "x", 128, 0, 0, 1024, ())
    assert fine.problem is None
    assert "spills" in (Resources("sm_90", "x", 255, 16, 0, 1024, ()).problem or "")
    assert "shared" in (Resources("sm_80", "x", 128, 0, 0, 200_000, ()).problem or "")
