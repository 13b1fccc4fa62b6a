"""The suite itself: tests stand alone, a slow machine fails none, and the last lines say what was skipped for what."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import pytest, torch

def test_takes_time():
    pass

def test_compiles():
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))

@pytest.mark.parametrize("reason", ["needs a CUDA device", "Triton is not installed", "refused: unstable"])
def test_skips(reason):
    pytest.skip(reason)
"""


def suite(tests: Path, *options: str) -> tuple[int, str]:
    """Our settings and conftest.py over these tests, each of which is a long one."""
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "conftest", "-o", "cpu_limit=0"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *settings, *options, str(tests)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True, env=environment, timeout=600)
    return done.returncode, done.stdout


@pytest.mark.full
def test_seconds_fail_nothing_and_the_last_lines_tell(tmp_path: Path) -> None:
    tests = tmp_path / "test_made_up.py"
    tests.write_text(TESTS)
    code, said = suite(tests, "-o", "limit_work=0.001")
    assert code == 1 and "1 failed, 1 passed, 3 skipped" in said, said
    assert "1 frames compiled (at most 60): have it do less" in said, said
    assert "test_takes_time" in said.partition("longer than 0 s of CPU")[2], said
    assert "2 skipped for want of something" in said and "1 skipped because there is nothing to test" in said
    assert "     1 needs a CUDA device\n" in said and "     1 refused: unstable\n" in said


def imported(source: str) -> set[str]:
    """The last parts of the names of modules, and what is taken from them."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found |= {name.rpartition(".")[2] for name in names if name}
    return found


def test_no_test_imports_another() -> None:
    """What several share stands in ``distributed/support``, or beside a conftest.py that has its folder on the path."""
    assert imported("import a.b, c\nfrom d.e import f") == {"b", "c", "e", "f"}
    tests = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    assert "test_suite" in tests
    assert not {name: others for name, path in tests.items() if (others := imported(path.read_text()) & tests.keys())}
