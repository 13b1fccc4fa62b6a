"""The doctor tells what is there, and its exit code whether that is enough."""

import io
import subprocess
import sys

import pytest
import torch
from rich.console import Console

from compile_muon import __main__ as cli
from compile_muon import doctor
from compile_muon.doctor import Check, Verdict


def test_this_environment_is_ready() -> None:
    done = subprocess.run([sys.executable, "-m", "compile_muon", "doctor"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.__version__ in done.stdout
    assert "muon_zero → compile_muon.backend" in done.stdout
    assert "gloo" in done.stdout


def test_without_a_command_it_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    assert "doctor" in capsys.readouterr().out


def test_an_unknown_command_is_an_error() -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["docter"])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("version", "verdict"),
    [
        ("2.10.1", Verdict.FAIL),
        ("1.13.0+cu117", Verdict.FAIL),
        ("2.11.0+cu128", Verdict.OK),
        ("2.13.0", Verdict.OK),
        ("2.14.0.dev20260101", Verdict.NOTE),
        ("3.0.0", Verdict.NOTE),
    ],
)
def test_torch_range(version: str, verdict: Verdict) -> None:
    found = doctor.check_torch(version)
    assert found.verdict is verdict
    assert bool(found.remedy) == (verdict is not Verdict.OK)


def test_python_range() -> None:
    assert doctor.check_python((3, 9, 18)).verdict is Verdict.FAIL
    assert doctor.check_python((3, 10, 0)).verdict is Verdict.OK


def test_a_missing_compiler_fails_and_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # monkeypatch would not put a config value back: it deletes what it finds no instance attribute for
    with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        found = doctor.check_compiler()
    assert found.verdict is Verdict.FAIL
    assert "CXX" in found.remedy


def test_an_unknown_backend_fails() -> None:
    assert doctor.check_entry_point("no_such_backend").verdict is Verdict.FAIL


def test_a_missing_package_fails() -> None:
    assert doctor.check_package("no_such_package").verdict is Verdict.FAIL


@pytest.mark.parametrize(("verdict", "code"), [(Verdict.OK, 0), (Verdict.NOTE, 0), (Verdict.FAIL, 1)])
def test_only_a_failure_makes_the_exit_code_one(monkeypatch: pytest.MonkeyPatch, verdict: Verdict, code: int) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: [Check("thing", "[found]", verdict, "do this")])
    text = io.StringIO()
    assert doctor.run(Console(file=text, width=100)) == code
    assert "[found]" in text.getvalue()  # brackets in a finding are text, not markup
    assert "do this" in text.getvalue()
    assert ("Not ready: thing" in text.getvalue()) == (code == 1)
