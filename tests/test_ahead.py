"""Every launch of every tile table compiles for its architecture, spills nothing and fits its shared memory."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

from compile_muon.kernels.gpu.tiles import load_tables  # noqa: E402

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "ahead.py"
sys.path.insert(0, str(SCRIPT.parent))
try:
    from ahead import HALVES, SHARED_PER_BLOCK, Resources, launches
finally:
    sys.path.remove(str(SCRIPT.parent))

ARCHITECTURES = list(SHARED_PER_BLOCK)
#: All take four minutes of two cores: whenever kernels or tables change (-m campaign).
CHOSEN = [
    pytest.param("sm_90", HALVES[:1], marks=pytest.mark.full),
    *(pytest.param(name, HALVES, marks=pytest.mark.campaign) for name in ARCHITECTURES),
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> Callable[[str, tuple[str, ...]], list[Resources]]:
    """Compiled in a process of its own for each architecture: Triton takes one active driver."""

    @functools.cache
    def compiled(name: str, dtypes: tuple[str, ...], *only: str) -> list[Resources]:
        path = tmp_path_factory.mktemp("ahead") / name
        command = [sys.executable, SCRIPT, name, "--dtypes", *dtypes, "--json", path, "--only", *(only or ("",))]
        environment = os.environ | {"TRITON_INTERPRET": "0"}
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=800)
        assert path.exists(), (ran.stdout + ran.stderr)[-4000:]
        kernels = json.loads(path.read_text())["kernels"]
        return [Resources(**kernel | {"instructions": tuple(kernel["instructions"])}) for kernel in kernels]

    return compiled


def test_tables_are_of_the_architectures_that_are_compiled_for():
    assert set(load_tables()) == set(ARCHITECTURES)


@pytest.mark.full
def test_one_launch_of_each_kind_compiles(reports):
    names = ("XXᵀ bfloat16 [2, 256, 512] 128×256×64", "QX grouped bfloat16 64×64×128", "divide bfloat16")
    report = reports("sm_90", HALVES[:1], *names)
    assert {name for name in names for r in report if r.launch.startswith(name)} == set(names)
    assert not [(r.launch, r.problem) for r in report if r.problem]
    assert all({"wgmma", "TMA"} <= set(r.instructions) for r in report if "×" in r.launch)
    # Without it the maximum of NaN and a number is the number, which the interpreter does not show.
    assert all("max.NaN" in r.instructions for r in report if r.launch.startswith("divide"))


@pytest.mark.full
def test_what_is_summed_of_rows_stays_in_its_thread(reports):
    """Loops that add up across threads, with products of 64 bits, took 514 to 915 instructions and 979 to 1021."""
    report = reports("sm_90", HALVES[:1], "momentum", "examine")
    assert len(report) == 12 and not [(r.launch, r.problem) for r in report if r.problem]
    most = {"momentum": 490, "momentum unaligned": 650, "examine": 210, "examine unaligned": 280}
    kinds = {r.launch: r.launch.split()[0] + " unaligned" * r.launch.endswith("unaligned") for r in report}
    assert not [(r.launch, r.loop) for r in report if not 0 < r.loop <= most[kinds[r.launch]]]


@pytest.mark.parametrize(("architecture", "dtypes"), CHOSEN)
def test_nothing_spills_and_shared_memory_fits(architecture, dtypes, reports):
    report = reports(architecture, dtypes)
    assert {r.launch for r in report} == {name for name, _ in launches(architecture, dtypes)}
    assert not [(r.launch, r.problem) for r in report if r.problem]


@pytest.mark.parametrize(("architecture", "dtypes"), CHOSEN)
def test_products_use_the_matrix_instructions_of_their_architecture(architecture, dtypes, reports):
    wanted = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05"}[architecture]
    loads = "TMA" if architecture != "sm_80" else "cp.async"
    products = [r for r in reports(architecture, dtypes) if "×" in r.launch]
    assert len(products) > 10
    assert not [(r.launch, r.instructions) for r in products if wanted not in r.instructions]
    # Rows of odd pitch on sm_80 are no multiple of 16 bytes and load one element at a time.
    aligned = [r for r in products if architecture != "sm_80" or "[2, 77, 91]" not in r.launch]
    assert not [(r.launch, r.instructions) for r in aligned if loads not in r.instructions]


@pytest.mark.parametrize(("architecture", "dtypes"), CHOSEN)
def test_results_are_stored_16_bytes_at_a_time(architecture, dtypes, reports):
    """Masks that differ from entry to entry, on the diagonal say, would split every store."""
    narrow = [r.launch for r in reports(architecture, dtypes) if "2-byte stores" in r.instructions]
    assert all("[2, 77, 91]" in launch or launch.endswith(" unaligned") for launch in narrow), narrow
    assert narrow  # no multiple of 16 bytes: so they are found where they are


@pytest.mark.parametrize(("architecture", "dtypes"), [case for case in CHOSEN if case.values[0] == "sm_90"])
def test_the_symmetric_kernel_ends_lightly(architecture, dtypes, reports):
    """It took 246 to 249 registers, 76 barriers and 8,152 instructions while every tile was mirrored in registers."""
    large = [
        r
        for r in reports(architecture, dtypes)
        if r.launch.startswith(("XXᵀ", "bA", "aI", "RF")) and "128×256×64" in r.launch
    ]
    lists = [r for r in large if " grouped " in r.launch]
    assert len(lists) == 4 * len(dtypes) and len(large) == 10 * len(dtypes)
    assert not [r for r in large if r not in lists and (r.registers > 190 or r.barriers > 30 or r.size > 5400)], large
    # Twice the code: loops for tiles of the whole and of half the width.
    assert not [r for r in lists if r.registers > 210 or r.barriers > 80 or r.size > 9800], lists
    # An odd size, too, is stored through descriptors.
    assert not [r.launch for r in large if "2-byte stores" in r.instructions]


@pytest.mark.parametrize(("architecture", "dtypes"), CHOSEN)
def test_tiles_have_the_stages_and_neighbours_they_claim(architecture, dtypes, reports):
    """Shared memory tells how many stages there are; the model counts on as many blocks beside each other."""
    table = load_tables()[architecture]
    for kernel, tiles in (("XXᵀ", table.symmetric), ("QX", table.product)):
        for tile in tiles:
            launch = f"{kernel} bfloat16 [2, 256, 512] {tile.rows}×{tile.cols}×{tile.depth}"
            (found,) = [r for r in reports(architecture, dtypes) if r.launch == launch]
            stage = 2 * (tile.rows + tile.cols) * tile.depth
            # Without descriptors the last stage goes from registers straight into the product.
            stages = tile.stages if tile.descriptors else tile.stages - 1
            assert 0 <= found.shared - stages * stage < 1024, (launch, found.shared, stage)
            assert tile.resident <= found.resident(tile.warps), launch


@pytest.mark.parametrize(("architecture", "dtypes"), CHOSEN)
def test_a_multiprocessor_holds_the_programs_of_a_grouped_launch(architecture, dtypes, reports):
    """So that all are resident."""
    table = load_tables()[architecture]
    grouped = [r for r in reports(architecture, dtypes) if " grouped " in r.launch]
    assert len(grouped) == len(dtypes) * 4 * (len(table.symmetric) + len(table.product))
    for kernels, tiles in ((("XXᵀ", "bA", "aI", "RF"), table.symmetric), (("QX", "aX", "aQ", "FQ"), table.product)):
        for tile in tiles:
            name = f"{tile.rows}×{tile.cols}×{tile.depth}"
            found = [r for r in grouped if r.launch.startswith(kernels) and r.launch.split()[-1] == name]
            assert found and all(tile.in_list.resident <= r.resident(tile.warps) for r in found), (name, found)


def test_a_problem_is_told():
    fine = Resources("sm_90", "x", 128, 0, 0, 1024, 3, 999, 0, ())
    assert fine.problem is None
    assert "spills" in (Resources("sm_90", "x", 255, 16, 0, 1024, 3, 999, 0, ()).problem or "")
    assert "shared" in (Resources("sm_80", "x", 128, 0, 0, 200_000, 3, 999, 0, ()).problem or "")
