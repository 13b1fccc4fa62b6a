"""Which tests a change can break: on small trees, in this repository, and beside what an import really brings in."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

affected = sys.modules["affected"]  # as conftest.py has it
ROOT = Path(__file__).resolve().parents[1]

TREE = {
    "compile_muon/__init__.py": """
from compile_muon.engine import run
_LATE = {"save": "compile_muon.late"}
def __getattr__(name): ...
""",
    "compile_muon/__main__.py": "def main():\n    from compile_muon.plan import plan",
    "compile_muon/plan.py": "",
    "compile_muon/engine.py": "from compile_muon.passes import PASSES",
    "compile_muon/late.py": "",
    "passes/__init__.py": "from .schedule import order",
    "passes/schedule.py": "",
    "passes/costs.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from compile_muon.late import save",
    "passes/tables.py": """
DATA = Path(__file__).with_name("data.json")
import_module(".own", __package__)
raise ValueError("see docs/page.md")
""",
    "passes/own.py": "",
    "passes/data.json": "{}",
    "benchmarks/speed.py": "from gpt import GPT",
    "benchmarks/gpt.py": "",
    "benchmarks/other.py": "",
    "benchmarks/reliability/__init__.py": "",
    "benchmarks/reliability/kills.py": "",
    "docs/page.md": "```python\nfrom compile_muon import late\n```\n`compile_muon/engine.py`",
    "docs/other.md": "",
    "tests/conftest.py": "",
    "tests/passes/helper.py": "import compile_muon.passes.schedule as schedule",
    "tests/passes/conftest.py": "from compile_muon.passes.costs import COSTS",
    "pyproject.toml": "",
}
HERE = "ROOT = Path(__file__).parents[2]\n"


@pytest.fixture
def reaches(tmp_path: Path) -> Callable[[str, str], bool]:
    """`reaches(source, changed)`: whether a test of this source, in tests/passes, is affected."""

    def asked(source: str, changed: str) -> bool:
        files = {**TREE, "tests/passes/test_it.py": source, "tests/test_else.py": ""}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        found = affected.Graph(tmp_path, [*files, changed]).affected([changed])
        assert "tests/test_else.py" not in found
        return found == ["tests/passes/test_it.py"]

    return asked


@pytest.mark.parametrize(
    ("source", "changed", "expected"),
    [
        ("from compile_muon.passes.costs import Costs", "passes/costs.py", True),
        ("from compile_muon.passes.costs import Costs", "passes/__init__.py", True),
        ("from compile_muon.passes.costs import Costs", "passes/schedule.py", False),
        ("from compile_muon.passes import costs", "passes/schedule.py", False),
        ("from compile_muon.passes import PASSES", "passes/schedule.py", True),
        ("import compile_muon.passes.costs", "passes/schedule.py", True),
        ("def test():\n    from compile_muon.engine import run", "passes/schedule.py", True),
        ("import compile_muon", "compile_muon/late.py", False),
        ("import compile_muon\ncompile_muon.save()", "compile_muon/late.py", True),
        ("from compile_muon.passes.costs import Costs", "compile_muon/late.py", False),
        ("from compile_muon.passes.tables import DATA", "passes/data.json", True),
        ("def test():\n    from compile_muon.passes.tables import DATA", "passes/data.json", True),
        ("from compile_muon.passes.tables import DATA", "passes/own.py", True),
        ("from compile_muon.passes.tables import DATA", "docs/page.md", False),
        ("from compile_muon.passes.gone import x", "passes/gone.py", True),
        ("from helper import schedule", "passes/schedule.py", True),
        ('CODE = """\nimport sys\nfrom compile_muon.engine import run\n"""', "compile_muon/engine.py", True),
        ('patch("compile_muon.engine.run")', "compile_muon/engine.py", True),
        ('"""See docs/page.md and compile_muon.late."""', "docs/page.md", False),
        (HERE + 'PAGE = ROOT / "docs" / "page.md"\nPAGE', "docs/page.md", True),
        (HERE + 'PAGE = ROOT / "docs" / "page.md"\nPAGE', "docs/other.md", False),
        (HERE + 'PAGE = ROOT / "docs" / "page.md"\nPAGE', "compile_muon/late.py", True),
        (HERE + 'DOCS = ROOT / "docs"\nDOCS / f"{name}.md"', "docs/other.md", True),
        (HERE + 'DOCS = ROOT / "docs"\nDOCS / "page.md"', "docs/other.md", False),
        (HERE + '(ROOT / "docs").rglob("*.md")', "docs/other.md", True),
        (HERE + 'ROOT.rglob("*.md")', "docs/other.md", True),
        (HERE + 'ROOT.rglob("*.json")', "docs/other.md", False),
        (HERE + 'for name in ("docs", "x"):\n    ROOT / name', "docs/other.md", True),
        (HERE + 'x["docs"] / 2', "docs/other.md", False),
        ('run([sys.executable, "benchmarks/speed.py", "--quick"])', "benchmarks/gpt.py", True),
        ('run([sys.executable, "benchmarks/speed.py", "--quick"])', "benchmarks/other.py", False),
        ('run("python -m compile_muon plan")', "compile_muon/plan.py", True),
        ('import_module(f"reliability.{name}")', "benchmarks/reliability/kills.py", True),
        (HERE + 'sys.path.insert(0, str(ROOT / "benchmarks"))\nimport speed', "benchmarks/gpt.py", True),
        (HERE + 'sys.path.insert(0, str(ROOT / "benchmarks"))\nimport speed', "benchmarks/other.py", False),
        ("def test(): ...", "passes/costs.py", True),
        ("def test(): ...", "tests/passes/conftest.py", True),
    ],
)
def test_a_test_reaches_what_it_imports_and_names(
    source: str, changed: str, expected: bool, reaches: Callable[[str, str], bool]
) -> None:
    assert reaches(source, changed) is expected


@pytest.fixture(scope="module")
def graph() -> Any:
    """Of this repository."""
    return affected.this_repository()


def test_a_pass_reaches_graphs_and_training_and_a_page_reaches_no_rank(graph: Any) -> None:
    schedule = graph.affected(["passes/lowering/schedule.py"])
    assert {"tests/passes/lowering/test_schedule.py", "tests/distributed/test_training.py"} <= {*schedule}
    assert not {test for test in schedule if test.startswith("tests/kernels/gpu/test_t")}
    page = graph.affected(["docs/how-to/planning.md"])
    assert "tests/test_docs.py" in page and not [test for test in page if test.startswith("tests/distributed/")]
    assert "tests/distributed/test_pipeline.py" in graph.affected(["docs/how-to/pipeline.md"])
    assert graph.affected(["pyproject.toml"]) == graph.tests and len(graph.tests) > 50
    assert len(graph.affected(["compile_muon/checkpoint/manifest.py"])) < len(graph.tests) / 2


def test_every_module_is_reached_by_some_test(graph: Any) -> None:
    reached = {
        file for test in graph.tests if test != "tests/compile_muon/test_packaging.py" for file in graph.reached(test)
    }
    assert not [file for file in graph.files if affected.module_of(file) and file not in reached]


def test_large_libraries_are_installed_where_their_tests_are_affected(graph: Any) -> None:
    assert graph.needs(graph.affected(["compile_muon/integrations/torchtitan.py"])) == ["torchtitan", "browser"]
    assert graph.needs(graph.affected(["benchmarks/results/price.json"])) == ["torchtitan", "browser"]
    assert graph.needs(["tests/distributed/test_torchtitan.py"]) == ["torchtitan"]
    assert graph.needs(["tests/passes/test_costs.py"]) == []


@pytest.mark.full
def test_all_that_an_import_brings_in_is_reached(graph: Any) -> None:
    """Beside Python itself: what is there once these files have been collected."""
    tests = [
        "tests/passes/test_costs.py",
        "tests/kernels/test_apply.py",
        "tests/compile_muon/simulate/test_machine.py",
        "tests/distributed/test_training.py",
    ]
    code = f"""
import sys, pytest
assert pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", *{tests!r}]) == 0
print("FILES", *{{getattr(module, "__file__", None) for module in [*sys.modules.values()]}}, sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    there = {Path(file) for file in done.stdout.partition("FILES\n")[2].splitlines()}
    ours = {file.relative_to(ROOT).as_posix() for file in there if file.is_relative_to(ROOT)} & {*graph.files}
    assert len(ours) > 150
    assert not ours - {file for test in tests for file in graph.reached(test, executed=True)} - affected.EVERYTHING


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., list[str]]:
    """`repository("commit", ...)`: git in a new one, with a first commit."""

    def git(*arguments: str) -> list[str]:
        own = ["-c", "user.name=x", "-c", "user.email=x@x"]
        command = ["git", "-C", str(tmp_path), *own, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    (tmp_path / ".ci").mkdir()
    for name in ("kept.py", "edited.py", "renamed.py"):
        (tmp_path / name).write_text(f"# {name}\n" * 9)
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "first")
    return git


def test_what_differs_from_a_commit(tmp_path: Path, repository: Callable[..., list[str]]) -> None:
    (first,) = repository("rev-parse", "HEAD")
    assert affected.changed_since(first, tmp_path) == set()
    repository("mv", "renamed.py", "new.py")
    repository("commit", "-qm", "second")
    (tmp_path / "edited.py").write_text("")
    (tmp_path / "with a blank.py").write_text("")
    changed = {"edited.py", "renamed.py", "new.py", "with a blank.py"}
    assert affected.changed_since(first, tmp_path) == changed
    (tmp_path / ".ci/full").write_text(f"{first}\n")
    assert affected.changed_since(".ci/full", tmp_path) == changed | {".ci/full"}
    assert affected.changed_since("1" * 40, tmp_path) is None  # a clone without the history


def test_a_full_run_is_noted_unless_it_was_none(
    tmp_path: Path, repository: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(affected, "find_spec", lambda name: name)
    (first,) = repository("rev-parse", "HEAD")

    def noted(commit: str = first, in_part: bool = False) -> str:
        said = affected.note_passed(commit, in_part=in_part, root=tmp_path)
        assert said.startswith(".ci/full stays as it is") or (tmp_path / ".ci/full").read_text() == f"{commit}\n"
        return said

    assert "PYTEST_ARGS" in noted(in_part=True)
    assert "not the one" in noted("1" * 40) and "not the one" in noted("")
    (tmp_path / "edited.py").write_text("")
    assert "1 files are not as they were committed: edited.py" in noted()
    repository("checkout", "edited.py")
    monkeypatch.setattr(affected, "find_spec", lambda name: None)
    assert "pip install -e '.[torchtitan,browser]'" in noted()
    assert not (tmp_path / ".ci/full").exists()
    monkeypatch.setattr(affected, "find_spec", lambda name: name)
    assert "names" in noted()


def test_full_tests_of_other_files_are_left_out_and_long_files_come_first(request: pytest.FixtureRequest) -> None:
    conftest: Any = request.config.pluginmanager.getplugin(str(ROOT / "tests" / "conftest.py"))
    left: list[Any] = []

    def item(file: str, *markers: str) -> Any:
        return SimpleNamespace(path=ROOT / "tests" / file, get_closest_marker=lambda name: name in markers or None)

    def selected(chosen: Any) -> list[Any]:
        hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
        found = [*items]
        conftest.pytest_collection_modifyitems(SimpleNamespace(stash={conftest._affected: chosen}, hook=hook), found)
        return found

    names = "kernels/a.py", "distributed/b.py", "distributed/c.py", "test_d.py"
    kernels, ranks, more, docs = items = [
        item(names[0], "full"),
        item(names[1], "full"),
        item(names[2]),
        item(names[3]),
    ]
    assert selected(None) == [docs, ranks, more, kernels] and not left
    assert selected(["tests/kernels/a.py"]) == [docs, more, kernels] and left == [ranks]
