"""No circle among modules: one that imports its importer can be read, tested and moved only together with it."""

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "compile_muon"
#: Folders of compile_muon in which no module may be part of a circle, through whatever folder it goes.
COVERED = ("config", "model", "runtime")


def modules(root: Path, package: str) -> dict[str, Path]:
    """Name -> file of every module under ``root``, but for the two layers below, which have a check of their own."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] not in ("passes", "kernels"):
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imported(path: Path, module: str) -> Iterator[str]:
    """Absolute names of what a file imports, in functions as well; `from a import b` gives `a.b`.

    What is imported for annotations alone, under `if TYPE_CHECKING:`, ties nothing at run time.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join((*above, *filter(None, [node.module])))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def circles(root: Path, package: str) -> list[set[str]]:
    """The modules of each circle, until there is none left."""
    known = modules(root, package)
    graph = {name: set() for name in known}
    for name, path in known.items():
        for target in imported(path, name):
            # `from package import thing` is about the package unless `thing` is a module of it
            target = target if target in known else target.rpartition(".")[0]
            if target in known and target != name:
                graph[name].add(target)
    found = []
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
            return found
        except graphlib.CycleError as error:
            circle = error.args[1]  # each imports the one before it
            found.append(set(circle))
            graph[circle[1]].discard(circle[0])


@pytest.mark.parametrize("folder", COVERED)
def test_no_module_of_the_folder_is_in_a_circle(folder):
    prefix = f"compile_muon.{folder}"
    assert any(name.startswith(prefix) for name in modules(ROOT, "compile_muon"))
    bad = [sorted(c) for c in circles(ROOT, "compile_muon") if any(f"{n}.".startswith(f"{prefix}.") for n in c)]
    assert not bad


def test_configuration_is_a_chain():
    """Each imports only what stands before it; what uses the folder takes its names from the package."""
    order = ["checks", "checked", "elsewhere", "compile_options", "groups", "lr_schedule", "machine", "offload"]
    order += ["settings", "sources", "foreign", "sections", "deepspeed", "convert"]
    known = modules(ROOT, "compile_muon")
    assert {f"compile_muon.config.{name}" for name in order} | {"compile_muon.config"} == {
        name for name in known if name.startswith("compile_muon.config")
    }
    for place, name in enumerate(order):
        module = f"compile_muon.config.{name}"
        inside = [i for i in imported(known[module], module) if i.startswith("compile_muon.config")]
        assert all(i.split(".")[2] in order[:place] for i in inside), (name, inside)


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        ({"a": "from p import b", "b": "import p.a"}, {"p.a", "p.b"}),
        ({"a": "from .b import x", "b": "def f():\n    from .a import y"}, {"p.a", "p.b"}),
        ({"a": "from . import x", "__init__": "from .a import x"}, {"p.a", "p"}),
        ({"a": "from p.b import x", "b": "from p.c import x", "c": "from p.a import x"}, {"p.a", "p.b", "p.c"}),
        ({"a": "from p.b import x", "b": "from p.c import x", "c": "import os", "__init__": "import p.a"}, None),
    ],
)
def test_the_search_finds_circles(tmp_path, sources, circle):
    for name, text in {"__init__": "", **sources}.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert circles(tmp_path, "p") == ([circle] if circle else [])
