"""The benchmark harnesses run, on sizes that say nothing about speed."""

import dataclasses
import importlib
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_muon.kernels import newton_schulz_list
from compile_muon.simulate.machine import load_machine

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


#: script -> its arguments, and whether its results are right; `{folder}` is an empty one
SCRIPTS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "newton_schulz": (
        "--device cpu --shapes wide experts --repeats 1 --seconds 0.001 --layers 1",
        lambda found: not found["failed"] and not found["wrong"] and all(row["seconds"] > 0 for row in found["rows"]),
    ),
    "first_step": (
        "--contenders 'torch.compile, AdamW' 'compile_muon, Muon' --repeats 1 --matrices 4",
        lambda found: all(sum(c["parts"].values()) < 1.05 * c["seconds"] for c in found["contenders"].values()),
    ),
    "train_step": (
        "--preset tiny --contenders ours-muon compute-only --ranks 1 --stages 3 --steps 1 --warmup 1 --repeats 1",
        lambda found: all(row["step_s"] > 0 and row["compile_cold_s"] > 0 for row in found["rows"]),
    ),
    "profile_step": (
        "--preset tiny --picture {folder}/timeline.svg --trace {folder}/trace.json",
        lambda found: found["ranges"]["step commit muon"] == found["ranges"]["frame0000.backward"] == 1,
    ),
    "ns_training": ("--seeds 1 --steps 1", lambda found: len(found["rows"]) == 12),
    "price": (
        "--models 1B --worlds 8 --layers 1",
        lambda found: all(0 < price["share"] < 1 for price in found["simulated"][0]["prices"]),
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_runs(script: str, tmp_path: Path) -> None:
    given, right = SCRIPTS[script]
    output = tmp_path / "result.json"
    arguments = shlex.split(given.format(folder=tmp_path))
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *arguments, "--json", str(output)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert right(json.loads(output.read_text()))


def test_float16_has_to_be_more_exact_than_bfloat16(benchmark) -> None:
    some = benchmark("orthogonalizers")
    case = some.single("square", 1, 96, 96)
    xs = case.matrices(torch.device("cpu"))
    oracle = some.Oracle(case, xs)
    for method in ("standard", "gram"):
        for dtype in (torch.float16, torch.bfloat16):
            assert oracle.complaint(newton_schulz_list(xs, method=method, dtype=dtype), dtype) is None
    rough = newton_schulz_list(xs, method="gram", dtype=torch.bfloat16)
    assert oracle.complaint(rough, torch.float16) is not None


def test_ratios_are_taken_within_a_round(benchmark) -> None:
    """A host that slows down threefold between two heats and within one leaves them as they are."""
    report = benchmark("report")
    speeds = {(1, 0): [1.0, 3.0, 1.0], (1, 1): [3.0, 3.0, 9.0], (3, 0): [1.0, 1.0, 1.0]}
    unit = {"ours-muon": 1.0, "ours-adamw": 0.8, "deepspeed-muon": 1.25, "compute-only": 0.5}
    records = [
        {"contender": name, "stage": -1 if name == "compute-only" else heat, "heat": heat, "repeat": repeat}
        | {"error": None, "first_step_s": 9.0, "losses": [2.0], "note": "", "peak_bytes": None}
        | {"socket_bytes_per_step": None, "counted_bytes_per_step": None}
        | {"step_s": [unit[name] * x for x in host], "cpu_s": [unit[name] * x for x in host]}
        for (heat, repeat), host in speeds.items()
        for name in unit
        if heat == 1 or name != "deepspeed-muon"
    ]
    # it fell out of the second heat at stage 1: that heat's rounds do not count for it
    records = [r | {"error": "ended"} if (r["contender"], r["repeat"]) == ("ours-adamw", 1) else r for r in records]
    verdicts = {
        verdict.text.split(" (")[0]: verdict.met for verdict in report.judge(report.summarize(records, 1), records)
    }
    assert verdicts == {
        "ours-muon / deepspeed-muon, stage 3: not measured": None,
        "ours-muon / deepspeed-muon, stage 1: 0.800": True,
        "ours-muon / ours-adamw, stage 1: 1.250": False,
        "ours-muon / ours-adamw, stage 3: 1.250": False,
        "the Muon contenders' last losses agree: within 0.00%": True,
    }
    assert (
        "ours-muon stage 3: +0.500 s over bare forward and backward, which is 0.500 of its step"
        in report.over_compute(records)
    )


def test_bars_of_a_link_are_beside_the_same_rounds_without(benchmark) -> None:
    report, train_step = benchmark("report"), benchmark("train_step")
    speeds = {
        "ours-muon": [5.0, 6.0], "ours-adamw": [4.0, 4.9], "fsdp2-adamw": [6.0, 8.0], "deepspeed-muon": [9.0, 12.5],
    }  # fmt: skip
    head = {"stage": 3, "heat": 3, "repeat": 0, "error": None, "first_step_s": 9.0, "losses": [2.0], "note": ""}
    head |= {"peak_bytes": None, "socket_bytes_per_step": 49e6, "counted_bytes_per_step": 49e6}
    both = ["unlimited", "160mbit"]  # 10 MB/s for each of two ranks: 4.9 s
    records = [
        record
        for name, (free, slow) in speeds.items()
        for record in train_step.by_link(
            head | {"contender": name, "step_s": [free, slow] * 3, "cpu_s": [1.0] * 6}, both
        )
    ]
    assert {record["link"]: record["step_s"] for record in records[:2]} == {
        "unlimited": [5.0] * 3,
        "160mbit": [6.0] * 3,
    }
    rows = report.summarize(records, 1)
    ordered = dict.fromkeys(row.contender for row in rows)
    assert [(row.contender, row.link) for row in rows] == [(name, link) for link in both for name in ordered]
    found = {v.text.split(" (")[0]: v.met for v in report.judge(rows, records, 2) if v.text.startswith("160mbit")}
    assert found == {
        "160mbit: ours-muon / deepspeed-muon, stage 3: 0.480": True,
        "160mbit: ours-muon / deepspeed-muon, stage 1: not measured": None,
        "160mbit: ours-muon / fsdp2-adamw, stage 3: 0.750": True,
        "160mbit: ours Muon minus AdamW, stage 3: 1.100 s, 1.10 of that without a limit": True,
        "160mbit: ours AdamW, stage 3: 1.000 of the larger of its bytes": True,
    }
    busy = [dataclasses.replace(row, cpu_s=3.0) for row in rows]
    for cores, floor in ((None, 4.9), (1, 6.0)):
        said = [verdict.text for verdict in report.judge(busy, records, 2, cores) if "ours AdamW" in verdict.text]
        assert said[0].startswith(f"160mbit: ours AdamW, stage 3: {4.9 / floor:.3f}"), "ranks share cores"


@pytest.mark.parametrize(
    ("script", "given", "said"),
    [
        ("train_step", "--preset tiny --links fast", "--links: 'fast' is no rate: give one as 1600mbit, or unlimited"),
        ("train_step", "--preset tiny --micro-batches 3", "does not divide a rank's 4 sequences"),
        ("simulator", "a b c --machine cpu h100", "--machine: 2 of them for 3 results; give one, or as many"),
        ("gpu", "--only nonsense", "'nonsense' is unknown; expected some of: right"),
    ],
)
def test_a_script_says_what_is_wrong(benchmark, monkeypatch, capsys, script, given, said) -> None:
    monkeypatch.setattr(sys, "argv", [script, *given.split()])
    with pytest.raises(SystemExit):
        benchmark(script).main()
    assert said in capsys.readouterr().err


class FakeGpu:
    """Tiles of a table of times; `wrong` are those whose result differs from a size on. Counts what it times."""

    processors = 4

    def __init__(self, wrong: dict[Any, int] | None = None, after: Callable[[int], object] = lambda timed: None):
        self.timed: list[tuple[str, Any, int]] = []
        self._wrong = wrong or {}
        self._after = after

    def complaint(self, kind: str, tile: Any, size: int) -> str | None:
        return "differs from torch" if size <= self._wrong.get(tile, 0) else None

    def milliseconds(self, kind: str, tile: Any, size: int) -> float:
        self.timed.append((kind, tile, size))
        self._after(len(self.timed))
        return size / tile.rows if size > 1024 else tile.rows  # large tiles for large matrices

    def cublas_milliseconds(self, size: int) -> float:
        return 32.0  # half the rate of tiles of 128 × 128, which take 64

    def list_milliseconds(self, tile: Any, matrices: int, size: int, *, summand: bool) -> float:
        tiles = matrices * (size // tile.rows) * (size // tile.cols) / self.processors
        return tiles * (size * 1e-6 + (0.005 if summand else 0.003))


@pytest.fixture
def tune(benchmark) -> Any:
    pytest.importorskip("triton", reason="Triton is not installed")
    return benchmark("tune_tiles")


def tiles_of(tune: Any) -> dict[str, list[Any]]:
    tiles = [tune.Tile(side, side, 64, 8, 3, 4) for side in (128, 64, 32)]
    return {kind: tiles for kind in tune.KINDS}


def tuned(tune: Any, gpu: FakeGpu, stop: Any = None) -> Any:
    tuning = tune.Tuning(gpu, tiles_of(tune), tune.Stop() if stop is None else stop, lambda text: None)
    tuning.run()
    return tuning


BEFORE = {
    "device": {"rate": 7.0, "solo": 0.5, "overhead": 1e-6, "launch": 1e-6},
    "product": [{"rows": 1}], "symmetric": [{"rows": 1}],
    "cublas": [{"rows": 128, "cols": 128, "rate": 1.2}, {"rows": 64, "cols": 64, "rate": 0.6}],
}  # fmt: skip


def test_tiles_that_failed_their_check_are_never_written(tune) -> None:
    large, middle, small = tiles_of(tune)["product"]
    gpu = FakeGpu(wrong={large: 8192, small: 512})  # one wrong everywhere; the fastest at 1024 wrong at 512 only
    tuning = tuned(tune, gpu)
    table = tuning.table("here", BEFORE)
    for kind in tune.KINDS:
        assert [tile["rows"] for tile in table[kind]] == [middle.rows]
    assert {tile for _, tile in tuning.rejected} == {large, small}
    assert not [entry for entry in gpu.timed if entry[1] == large or entry[1:] == (small, 512)]
    assert table["source"] == "here"


def test_measured_rates_replace_the_estimates_of_the_model(tune) -> None:
    table = tuned(tune, FakeGpu()).table("here", BEFORE)
    rate = 2 * 8192**3 / 4 / (8192 / 128 * 1e-3)  # of 128 × 128, a fourth of them on each of 4 processors
    between = {"between": pytest.approx(5e-6), "between_flattened": pytest.approx(3e-6)}
    assert table["device"] == BEFORE["device"] | {"rate": pytest.approx(rate, rel=1e-4)} | between
    assert [tile["rate"] for tile in table["cublas"]] == [2.0, 1.0]  # 32 ms instead of 64, and the ratio between them


def test_tuning_that_is_stopped_before_a_kind_is_complete_leaves_it_as_it_was(tune) -> None:
    stop = tune.Stop()
    gpu = FakeGpu(after=lambda timed: stop._ask(15, None) if timed == 4 else None)
    tuning = tuned(tune, gpu, stop)
    assert tuning.table("here", BEFORE | {"product": []}) is None, "no table without products"
    table = tuning.table("here", BEFORE)
    assert table["device"] == BEFORE["device"] and table["product"] == [{"rows": 1}]
    assert [tile["rows"] for tile in table["symmetric"]] == [128]
    assert tune.Stop(minutes=0) and not tune.Stop(minutes=1)


def test_a_tuned_table_is_read_back_and_the_others_stay(tune, tmp_path: Path) -> None:
    tuning, text = tuned(tune, FakeGpu()), tune._FILE.read_text()
    assert tune.formatted(json.loads(text)) == text
    file = tmp_path / "tiles.json"
    file.write_text(tune.formatted(json.loads(text) | {"sm_123": tuning.table("here", BEFORE)}))
    tables = tune.load_tables(file)
    assert {name: table for name, table in tables.items() if name != "sm_123"} == tune.load_tables()
    assert [tile.rows for tile in tables["sm_123"].product] == [128, 32]
    assert tables["sm_123"].product[0].rate == 1.0 and not tables["sm_123"].product[0].descriptors


def test_what_lies_between_tiles_is_fitted_at_the_rate_of_the_minute(benchmark, tune) -> None:
    model, table, machine = benchmark("list_model"), tune.load_tables()["sm_90"], load_machine("h200")
    rows, case = [], "1b, 20 matrices"
    copied = 6 * sum(k * width for k, width in model.CASES[case]) / (0.9 * 4.8e12)
    for method, dtype, rate in (("standard", "bfloat16", 5.0e12), ("auto", "float16", 4.8e12)):
        device = dataclasses.replace(table.device, list_rate=rate, between=3e-6, between_flattened=3e-6)
        shapes = [tuple(sorted(shape)) for shape in model.CASES[case]]
        listed = model.launched_for(shapes, method, dtype, folds=dtype == "float16")
        parts = model.by_part(listed, dataclasses.replace(table, device=device), device, 132)
        told = {"case": case, "method": method, "dtype": dtype, "sustained_tflops": rate * 132 * 1.005 / 1e12}
        rows += [told | {"way": "list", "ms": sum(parts.values()) + 1e3 * copied}, told | {"way": "single", "ms": 1e3}]
    fitted = model.fitted(rows, table, machine)
    assert fitted == {"list_rate": 4.8e12, "between": 3e-6, "between_flattened": 3e-6}


def test_the_driver_goes_on_and_names_what_failed(benchmark, tmp_path: Path, capsys) -> None:
    gpu, expected = benchmark("gpu"), benchmark("expected")

    def step(name: str, code: str, **settings: Any) -> Any:
        return gpu.Step(name, settings.pop("seconds", 60), "-", ("-c", code), **settings)

    write = (
        "import json, os, sys; open(sys.argv[1], 'w').write(json.dumps([os.environ['PYTHONPATH'], os.environ['X']]))"
    )
    slow = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('wrote what there is')));"
        "print('ready'); time.sleep(60)"
    )
    steps = [
        step("crash", "print('about to fail'); raise SystemExit(3)"),
        step("lacking", "", needs=("no_such_module",)),
        step("slow", slow, seconds=3),
        step("long", "", seconds=500),
        step("behind", "", after="crash", timed=True),
        step("why", "", if_failed="crash", timed=True),
        step("why-not", "", if_failed="why", timed=True),
        gpu.Step("last", 60, "-", ("-c", write, "{out}/{name}.json"), environment={"X": "1"}, tuned=True, after="why",
                 expected=(expected.Expected("letters", lambda found: len(found[1]), {"X1": (1, 1)}, ""),
                           expected.Expected("digits", lambda found: len(found[1]), {"X1": (2, 3)}, ""))),
    ]  # fmt: skip
    lines: list[str] = []
    folders = (tmp_path / "package", tmp_path / "tuned")
    driver = gpu.Driver(tmp_path, os.environ, *folders, lines.append, deadline=time.monotonic() + 400)
    outcomes = {outcome.name: outcome for outcome in driver.run(steps, {"device": "an X1"})}
    results = {name: outcome.result for name, outcome in outcomes.items()}
    assert results.pop("long") == "dropped", "it would not end within the part"
    assert {name: results.pop(name) for name in ("behind", "why", "why-not")} == {
        "behind": "skipped", "why": "ok", "why-not": "skipped"
    }  # fmt: skip
    assert results == {"crash": "failed", "lacking": "skipped", "slow": "timed out", "last": "ok"}
    assert "about to fail" in outcomes["crash"].last_lines
    assert "wrote what there is" in outcomes["slow"].last_lines and outcomes["slow"].seconds < 30
    path, x = json.loads((tmp_path / "last.json").read_text())
    assert path.split(os.pathsep)[0] == str(tmp_path / "tuned") and x == "1"
    report = json.loads((tmp_path / "steps.json").read_text())
    assert report["device"] == "an X1" and len(report["steps"]) == 8
    assert gpu.summarize(driver.outcomes, 8, tmp_path) == 1
    said = capsys.readouterr().out
    log = f"{os.path.relpath(tmp_path, gpu.ROOT)}/crash.log"
    assert f"failed: crash (status 3); log: {log}" in said and "timed out: slow" in said
    assert "skipped: lacking: no_such_module is not installed" in said and "2 of 8 steps are ok" in said
    assert "skipped: behind: crash has failed" in said
    assert re.search(r"dropped: long: (400|399) s were left, and it may take 500", said)
    assert "  last: letters: 1 (expected: 1 to 1)\n! last: digits: 1 (expected: 2 to 3)\n" in said
    assert gpu.summarize(driver.outcomes[7:], 1, tmp_path) == 0
    assert gpu.summarize(driver.outcomes[7:], 2, tmp_path) == 1, "interrupted"


def test_every_step_of_the_driver_names_files_that_are_there(benchmark, tmp_path: Path) -> None:
    gpu = benchmark("gpu")
    assert len({step.name for step in gpu.STEPS}) == len(gpu.STEPS)
    steps = {step.name: step for step in gpu.STEPS}
    for name, part in gpu.PARTS.items():
        # But for the last one, and what runs where another failed, all have their time if none takes less than it may.
        chosen = [steps[step] for step in part.steps if not steps[step].if_failed]
        assert 180 < sum(step.seconds for step in chosen[:-1]) <= part.seconds <= 570, f"part {name}"
    assert all(step.after in ("", *steps) and step.if_failed in ("", *steps) for step in gpu.STEPS)
    for step in gpu.STEPS:
        if "compile_muon" in step.command:
            continue
        scripts = [argument for argument in step.command if argument.startswith(("benchmarks/", "examples/", "tests/"))]
        for file, _, test in (script.partition("::") for script in scripts):
            assert (gpu.ROOT / file).exists(), f"{step.name}: {file}"
            assert not test or f"def {test}(" in (gpu.ROOT / file).read_text(), f"{step.name}: {test}"
        assert scripts, step.name
    package = gpu.lay_out(tmp_path / "p", copy_kernels=True) / "compile_muon"
    assert (package / "__init__.py").samefile(gpu.ROOT / "compile_muon" / "__init__.py")
    assert (package / "passes").samefile(gpu.ROOT / "passes")
    (backend,) = importlib.metadata.distributions(name="compile_muon", path=[str(package.parent)])
    assert [(e.name, e.value) for e in backend.entry_points] == [("muon_zero", "compile_muon.backend:muon_zero")]
    tiles = package / "kernels" / "gpu" / "tiles.json"
    assert tiles.read_text() and not tiles.samefile(gpu.ROOT / "kernels" / "gpu" / "tiles.json")


def test_a_curve_reaches_a_loss_between_its_points(benchmark) -> None:
    convergence = benchmark("convergence")
    muon = [[0, 0.0, 6.0], [10, 2.0, 4.0], [20, 4.0, 3.0], [30, 6.0, 3.5], [40, 8.0, 2.0]]
    assert convergence.reached(muon, 3.25) == [17.5, 3.5], "the first time"
    assert convergence.reached(muon, 1.9) is None
    adamw = [[tokens, seconds / 2, loss + 1.25] for tokens, seconds, loss in muon]
    runs = [{"seed": 5, "algorithm": name, "curve": of} for name, of in (("AdamW", adamw), ("Muon", muon))]
    (row,) = convergence.compare(runs, 4)
    assert row == {"seed": 5, "adamw": 3.25, "muon": 2.0, "tokens": 17.5 / 40, "seconds": 3.5 / 4, "step": 2.0}
    (row,) = convergence.compare([runs[0] | {"curve": adamw[:3]}, runs[1]], 4)
    assert row == {"seed": 5, "adamw": None, "muon": 2.0, "tokens": None, "seconds": None, "step": None}, "it diverged"


def test_the_page_has_the_tables_of_the_curves(benchmark) -> None:
    convergence = benchmark("convergence")
    record = json.loads((BENCHMARKS / "results" / "convergence_small.json").read_text())
    rows = convergence.compare(record["runs"], record["preset"]["points"])
    assert rows == record["rows"] and len(rows) == 2
    page = (BENCHMARKS.parent / "docs" / "reference" / "benchmarks.md").read_text()
    assert convergence.tables(record) in page and f"`{record['command']}`" in page


PICTURES = [path.name for path in sorted((BENCHMARKS / "results").glob("train_step_*.svg"))]


@pytest.mark.parametrize("name", [*PICTURES, "methods.svg"])
def test_a_picture_is_of_the_results_beside_it(benchmark, name: str, tmp_path: Path) -> None:
    """By its words and numbers: paths differ among versions of Matplotlib, in the last digit."""
    pytest.importorskip("matplotlib", reason="Matplotlib is not installed")
    kept, anew = BENCHMARKS / "results" / name, tmp_path / name
    draw = benchmark("methods" if name == "methods.svg" else "report").draw
    draw(json.loads(kept.with_suffix(".json").read_text()), anew)
    written = [re.findall(r"<text.*?>(.*?)</text>", path.read_text(), re.DOTALL) for path in (kept, anew)]
    assert written[0] == written[1] and len(written[0]) > 10
    again = tmp_path / "again.svg"
    draw(json.loads(kept.with_suffix(".json").read_text()), again)
    assert again.read_bytes() == anew.read_bytes()


def test_tables_of_meshes_are_what_the_formulas_give(benchmark, monkeypatch, capsys) -> None:
    tables, page = BENCHMARKS / "MESHES.md", BENCHMARKS.parent / "docs" / "how-to" / "meshes.md"
    commands = re.findall(r"`python benchmarks/mesh_bytes.py( [^`]*)`", page.read_text())
    assert len(commands) == 2
    given = [(page, command) for command in commands]
    given += [
        (tables, model + more) for model in ("", " --model 16b") for more in ("", " --by purpose", " --state-over all")
    ]
    for file, arguments in given:
        monkeypatch.setattr(sys, "argv", ["mesh_bytes.py", *arguments.split()])
        benchmark("mesh_bytes").main()
        assert capsys.readouterr().out in file.read_text(), (file, arguments)


def test_the_page_has_the_prices_as_they_were_planned(benchmark: Callable[[str], Any]) -> None:
    found = json.loads((BENCHMARKS / "results" / "price.json").read_text())
    page = (BENCHMARKS.parent / "docs" / "reference" / "benchmarks.md").read_text()
    assert benchmark("price").table(found["simulated"]) in page
    assert f"Measured: {found['measured']['share']:.1%}" in page.replace(" %", "%")
    assert benchmark("price").measured() == found["measured"]


def test_what_a_gpu_measured_is_adopted_and_a_rehearsal_is_not(benchmark, tmp_path: Path) -> None:
    adopt = benchmark("adopt")
    part, root = tmp_path / "lease", tmp_path / "root"
    for folder in (part, root / "benchmarks/results", root / "kernels/gpu", root / "compile_muon/config/machines"):
        folder.mkdir(parents=True)
    report = {"device": "NVIDIA H200", "nvidia-smi": "580", "rehearsed": True, "steps": []}
    steps = dict.fromkeys(("lists", "calibrate", "tune", "lists-tuned"), "ok") | {"step-8k": "failed"}
    report["steps"] = [{"name": name, "result": result} for name, result in steps.items()]

    def list_of(ms: float) -> dict[str, Any]:
        return {"rows": [{"case": "1b, 20 matrices", "method": "auto", "way": "list", "ms": ms}]}

    files = {"steps": report, "lists": list_of(11.0), "calibrate": {"name": "new"}, "step-8k": {}, "tiles": {}}
    for name, found in (files | {"lists-tuned": list_of(12.0)}).items():
        (part / f"{name}.json").write_text(json.dumps(found))
    (root / "kernels/gpu/tiles.json").write_text("{}")
    with pytest.raises(adopt.MuonZeroError, match="was rehearsed"):
        adopt.adopted(part, root)
    (part / "steps.json").write_text(json.dumps(report | {"rehearsed": False}))
    expected = ["benchmarks/results/h200_lists.json", "compile_muon/config/machines/h200.json"]
    assert adopt.adopted(part, root) == ("h200", expected)  # neither a step that failed, nor tiles that are slower
    assert json.loads((root / expected[1]).read_text()) == {"name": "new"}
    (part / "lists-tuned.json").write_text(json.dumps(list_of(10.0)))
    assert adopt.adopted(part, root) == ("h200", [*expected, "kernels/gpu/tiles.json"])
