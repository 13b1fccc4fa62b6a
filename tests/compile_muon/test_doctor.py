"""The doctor tells what is there, and its exit code whether that is enough."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

import compile_muon
from compile_muon import __main__ as cli
from compile_muon import doctor
from compile_muon.doctor import Check, Verdict, check_config

ROOT = Path(__file__).resolve().parents[2]


def test_this_environment_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said and "muon_zero → compile_muon.backend" in said and "gloo" in said


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [([], 0, "doctor"), (["docter"], 2, "docter"), (["--version"], 0, f"compile_muon {compile_muon.__version__}\n")],
)
def test_the_command_line(line: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found = cli.main(line)
    except SystemExit as stop:
        found = stop.code
    assert found == code and said in "".join(capsys.readouterr())


@pytest.mark.full
def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m compile_muon doctor | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.full
def test_what_is_missing_is_a_line_of_the_report() -> None:
    """A package that the commands need elsewhere must not keep the doctor from saying so."""
    code = "import sys; sys.modules['safetensors'] = None; from compile_muon.__main__ import main; main(['doctor'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "pip install safetensors" in done.stdout and "Not ready: safetensors" in done.stdout


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.10.1", Verdict.FAIL), ("1.13.0+cu117", Verdict.FAIL), ("2.11.0+cu128", Verdict.OK),
        ("2.13.0", Verdict.OK), ("2.15.1", Verdict.OK), ("2.16.0.dev20260101", Verdict.NOTE), ("3.0.0", Verdict.NOTE),
    ],
)  # fmt: skip
def test_torch_range(version: str, verdict: Verdict) -> None:
    found = doctor.check_torch(version)
    assert found.verdict is verdict
    assert bool(found.remedy) == (verdict is not Verdict.OK)


def test_versions_are_those_that_the_project_asks_for() -> None:
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={doctor.dotted(doctor.OLDEST_PYTHON)}"
    wanted = {re.split("[<>;]", line)[0]: line.partition(";")[0] for line in project["dependencies"]}
    assert wanted["torch"] == f"torch>={doctor.dotted(doctor.OLDEST_TORCH)}"
    for name, line in wanted.items():
        found = doctor.asked_of(name)
        assert sorted(found.split(",")) == sorted(line.removeprefix(name).split(",")), name
    assert {"sympy", "rich", "safetensors", "numpy"} <= {check.name for check in doctor.diagnose()}


def test_pages_name_the_same_versions_of_torch() -> None:
    """README, the policy and the limits name no torch beyond those that the doctor calls tested, and both ends."""
    ends = [doctor.OLDEST_TORCH, doctor.NEWEST_TESTED_TORCH]
    constrained = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert constrained
    for page, row in (
        ("README.md", r"^\| CPU, .*"),
        ("docs/reference/policy.md", r"^\| torch \|.*"),
        ("docs/reference/limits.md", r"^- torch .*"),
    ):
        rows = "\n".join(re.findall(row, (ROOT / page).read_text(), re.M))
        named = {tuple(map(int, version.split("."))) for version in re.findall(r"\b2\.\d\d\b", rows)}
        assert [min(named), max(named)] == ends, page
        assert page.endswith("limits.md") or tuple(map(int, constrained[1].split("."))) in named, page


@pytest.mark.parametrize(
    ("version", "fits"), [("0.8", True), ("0.8.0rc1", True), ("0.7.9", False), ("0.10", True), ("1.0", False)]
)
def test_a_package_out_of_range_fails_and_says_which_is_asked_for(
    version: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "asked_of", lambda name: ">=0.8,<1")
    other = type("Distribution", (), {"version": version, "read_text": lambda self, name: None})()
    monkeypatch.setattr(doctor.importlib.metadata, "distributions", lambda name: [other])
    found = doctor.check_package("safetensors")
    assert (found.verdict is Verdict.OK) == fits and found.found == version
    assert fits or found.remedy == "pip install 'safetensors>=0.8,<1'"


def test_a_missing_compiler_fails_and_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # monkeypatch would not put a config value back: it deletes what it finds no instance attribute for
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        found = doctor.check_compiler()
    assert found.verdict is Verdict.FAIL
    assert "CXX" in found.remedy


def test_what_is_too_old_or_absent_fails() -> None:
    assert doctor.check_python((3, 9, 18)).verdict is Verdict.FAIL
    assert doctor.check_python((3, 10, 0)).verdict is Verdict.OK
    assert doctor.check_entry_point("no_such_backend").verdict is Verdict.FAIL
    assert doctor.check_package("no_such_package").verdict is Verdict.FAIL


def test_what_a_build_left_in_a_checkout_is_no_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_over.py").touch()
    (tmp_path / "left_over.egg-info").mkdir()
    (tmp_path / "left_over.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: left_over\nVersion: 3.4\n")
    (tmp_path / "left_over.egg-info" / "SOURCES.txt").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor.check_package("left_over") == Check("left_over", "3.4")
    (tmp_path / "pyproject.toml").touch()
    assert doctor.check_package("left_over").verdict is Verdict.FAIL


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.OK, 0), (Verdict.NOTE, 0), (Verdict.FAIL, 1)])
def test_only_a_failure_makes_the_exit_code_one(monkeypatch: pytest.MonkeyPatch, verdict: Verdict, code: int) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: [Check("thing", "[found]", verdict, "do this")])
    text = io.StringIO()
    assert doctor.run(Console(file=text, width=100)) == code
    assert "[found]" in text.getvalue()  # brackets in a finding are text, not markup
    assert "do this" in text.getvalue()
    assert ("Not ready: thing" in text.getvalue()) == (code == 1)


@pytest.mark.parametrize(
    ("config", "world", "verdict", "said"),
    [
        ({"mesh": {"replicate": 2, "tensor": 2}, "expert_parallel": {"size": 4}}, 32, Verdict.OK,
         "stage 2 on 32 ranks: replicate 2 x shard 2 x expert 4 x tensor 2"),
        ({"zero_optimization": {"stage": 3}}, 1, Verdict.OK, "stage 3, one rank"),
        ({"mesh": {"replicate": 3}}, 4, Verdict.FAIL, "mesh = 'replicate 3 x shard -1': does not make up 4 ranks"),
        ({"expert_parallel": {"size": 3}}, 4, Verdict.FAIL, "expert_parallel.size = 3: does not divide the 4 ranks"),
        ({"mash": {}}, 1, Verdict.FAIL, "mash = {}: is not a known key; did you mean mesh?"),
        ({"steps_per_print": 5}, 2, Verdict.NOTE, "no effect here: steps_per_print"),
    ],
)  # fmt: skip
def test_a_config_and_the_axes_it_makes(tmp_path, config, world, verdict, said):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    found = check_config(path, world)
    assert found.verdict is verdict
    assert said in f"{found.found} {found.remedy}"


@pytest.mark.parametrize("world", ["0", "-1", "x", "1.5", ""])
def test_a_number_of_ranks_that_is_none_is_an_error(
    world: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments in (["doctor", "--world", world], ["calibrate", "--out", "x", "--ranks", world]):
        with pytest.raises(SystemExit) as caught:
            cli.main(arguments)
        assert caught.value.code == 2 and "is no number from 1 on" in capsys.readouterr().err
    if world:  # which says nothing
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(SystemExit):
            cli.main(["doctor"])
        assert cli.main([]) == 0  # other commands do not read it


def test_ctrl_c_ends_a_command_without_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("compile_muon.planning.command.run", interrupted)
    plan = ["plan", "m:f", "--config", "c", "--world", "1", "--machine", "h100", "--tokens", "8"]
    monkeypatch.setattr(sys, "argv", ["compile_muon", *plan])
    assert cli._to_the_end() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_terminal_without_our_characters_prints_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    def printing(*_: object, **__: object) -> int:
        Console().print(doctor.report([Check("name", "found \u2192 \u00fc", Verdict.NOTE, "remedy")]))
        print("\u4e2d")
        return 0

    monkeypatch.setattr(doctor, "run", printing)
    monkeypatch.setattr(sys, "argv", ["compile_muon", "doctor"])
    written = io.BytesIO()
    terminal = io.TextIOWrapper(written, encoding="ascii")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli._to_the_end() == 0
    print(compile_muon.MuonZero(torch.nn.Linear(4, 4)).summary())  # a summary, by itself
    terminal.flush()
    said = written.getvalue().decode("ascii")
    assert "found \\u2192" in said and "\\u4e2d" in said and "MuonZero: stage" in said
