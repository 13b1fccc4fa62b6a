"""What gets installed, what an import costs, and which way the layers import."""

import ast
import graphlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
VERSION = re.findall(r'^__version__ = "(.*)"$', (ROOT / "compile_muon" / "__init__.py").read_text(), re.MULTILINE)[0]
LAYERS = {"compile_muon.kernels": ROOT / "kernels", "compile_muon.passes": ROOT / "passes"}
#: each module of ours, and its file
SOURCES = {
    ".".join((package, *path.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): path
    for package, folder in {**LAYERS, "compile_muon": ROOT / "compile_muon"}.items()
    for path in sorted(folder.rglob("*.py"))
}
MODULES = [module for module, path in SOURCES.items() if path.name != "__main__.py"]


def in_a_fresh_process(code: str, folder: Path) -> str:
    """Run `code` in its own interpreter; in a folder away from the checkout, only what is installed can be imported."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_every_module_imports_without_leaving_top_level_names(tmp_path: Path) -> None:
    code = f"""
import importlib, importlib.util, sys
for name in {MODULES!r}:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("triton", "torchtitan", "tyro"):  # what torchtitan brings
            raise
for name in ("passes", "kernels"):
    assert name not in sys.modules, name
    spec = importlib.util.find_spec(name)  # PyPI's own `kernels` may be installed
    assert spec is None or {str(ROOT)!r} not in str(spec.origin), f"{{name}} is importable at the top level"
"""
    in_a_fresh_process(code, tmp_path)


def test_the_entry_point_resolves_before_we_are_imported_and_importing_us_stays_lean(tmp_path: Path) -> None:
    code = """
import sys, torch, torch._dynamo
assert "muon_zero" in torch._dynamo.list_backends(exclude_tags=())
assert not any(name.startswith("compile_muon.") for name in sys.modules)
assert callable(torch._dynamo.lookup_backend("muon_zero"))
assert "compile_muon.backend" in sys.modules
import compile_muon
print(*{name.partition('.')[0] for name in sys.modules})
"""
    imported = set(in_a_fresh_process(code, tmp_path).split())
    assert "compile_muon" in imported
    assert not imported & {"matplotlib", "transformers", "deepspeed", "pytest", "hypothesis"}
    assert not imported & {"rich", "safetensors"}  # for whoever prints a summary, or saves a checkpoint


def test_these_tests_see_what_is_installed() -> None:
    """See tests/conftest.py."""
    assert not {Path(entry).resolve() for entry in sys.path} & {ROOT}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Path]:
    """Files of the sdist of a copy of this checkout, and the wheel that is built from it, as `python -m build` does."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed, so no wheel can be built without a download")
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, source)
    for name in ("compile_muon", "passes", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for folder, build in ((source, "build_sdist"), (target / f"compile_muon-{VERSION}", "build_wheel")):
        in_a_fresh_process(f"import setuptools.build_meta as backend; backend.{build}({str(target)!r})", folder)
        if build == "build_sdist":
            with tarfile.open(target / f"compile_muon-{VERSION}.tar.gz") as sdist:
                sdist.extractall(target, filter="data")
                files = {name.partition("/")[2] for name in sdist.getnames()}
    return files, target / f"compile_muon-{VERSION}-py3-none-any.whl"


@pytest.fixture(scope="module")
def wheel(built: tuple[set[str], Path]) -> zipfile.ZipFile:
    return zipfile.ZipFile(built[1])


def test_the_sdist_holds_what_builds_a_wheel_and_no_tests(built: tuple[set[str], Path]) -> None:
    files, _ = built
    assert {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "constraints.txt"} <= files
    assert not {name for name in files if name.startswith(("tests", "docs", "benchmarks", "build"))}


def test_the_version_is_written_in_one_place(wheel: zipfile.ZipFile) -> None:
    import compile_muon

    metadata = wheel.read(f"compile_muon-{VERSION}.dist-info/METADATA").decode()
    assert f"\nVersion: {compile_muon.__version__}\n" in metadata and compile_muon.__version__ == VERSION
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(
        rf"^## {re.escape(VERSION)}, \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )


def test_triton_is_an_extra_that_fits_torch(wheel: zipfile.ZipFile) -> None:
    """CUDA builds of torch bring theirs; constraints.txt has the version that the torch of the tests names."""
    metadata = wheel.read(f"compile_muon-{VERSION}.dist-info/METADATA").decode()
    named = re.findall(r"^Requires-Dist: triton(.*)$", metadata, re.MULTILINE)
    assert named and all('extra == "triton"' in rest and "platform_machine" in rest for rest in named)
    needed = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    named = {re.findall(r"[a-z]+", line.split()[1])[0] for line in needed}
    assert named == {"torch", "sympy", "rich", "safetensors", "numpy"}
    pins = dict(re.findall(r"^(torch|triton)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pins["torch"].startswith("2.13") and pins["triton"].startswith("3.7")


@pytest.mark.full
def test_the_wheel_trains_without_triton(built: tuple[set[str], Path], tmp_path: Path) -> None:
    """`tests/smoke.py` with nothing of ours but the wheel, unpacked, where `import triton` fails."""
    with zipfile.ZipFile(built[1]) as archive:
        archive.extractall(tmp_path / "wheel")
    code = f"""
import importlib.abc, importlib.util, runpy, sys
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else found(name, *rest)
sys.meta_path[:] = [Without(), *(f for f in sys.meta_path if "editable" not in str(f))]
sys.path.insert(0, {str(tmp_path / "wheel")!r})
runpy.run_path({str(ROOT / "tests" / "smoke.py")!r}, run_name="__main__")
assert "triton" not in sys.modules
import compile_muon
assert compile_muon.__file__.startswith({str(tmp_path)!r}), compile_muon.__file__
"""
    assert "fine" in in_a_fresh_process(code, tmp_path)


def test_the_wheel_holds_the_whole_package_and_nothing_beside_it(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"compile_muon"}
    assert {"compile_muon/py.typed", "compile_muon/kernels/gpu/tiles.json"} <= set(names)
    folder = "compile_muon/config/machines"
    machines = {f"{folder}/{path.name}" for path in (ROOT / folder).glob("*.json")}
    assert machines and machines <= set(names)
    sources = {str(path.relative_to(ROOT)).removeprefix("compile_muon/") for path in SOURCES.values()}
    # a new subpackage must be listed in pyproject
    assert sources == {name.removeprefix("compile_muon/") for name in names if name.endswith(".py")}


def test_the_wheel_declares_the_backend_and_the_license(wheel: zipfile.ZipFile) -> None:
    files = {Path(name).name: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "[torch_dynamo_backends]\nmuon_zero = compile_muon.backend:muon_zero" in files["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in files["METADATA"]
    assert "Apache License" in files["LICENSE"]


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """Of each file once for all tests that look at all files."""
    return tuple(ast.walk(ast.parse(source)))


@pytest.fixture(scope="module", autouse=True)
def forget_sources() -> Iterator[None]:
    yield
    nodes_of.cache_clear()


def imported_names(path: Path, module: str) -> Iterator[str]:
    """The absolute name of everything that a source file imports; `from a import b` gives `a.b`."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in nodes_of(path.read_text()):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module)))
            yield from (f"{source}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("layer", LAYERS)
def test_lower_layers_never_import_upper_ones(layer: str) -> None:
    allowed = tuple(LAYERS)[: 1 + (layer == "compile_muon.passes")]
    of_layer = {module: path for module, path in SOURCES.items() if f"{module}.".startswith(f"{layer}.")}
    assert of_layer
    assert not [
        (module, name)
        for module, path in of_layer.items()
        for name in imported_names(path, module)
        if name.partition(".")[0] in ("compile_muon", "passes", "kernels")
        and not any(f"{name}.".startswith(f"{prefix}.") for prefix in allowed)
    ]


def private_reaches(sources: Mapping[str, str]) -> list[str]:
    """Where a module names what another one keeps to itself: `x._name` and `from other import _name`. Names of modules,
    tensors and namedtuples are PyTorch's and Python's; `passes/torch_private.py` wraps PyTorch's."""

    def private(name: str) -> bool:
        return name.startswith("_") and not name.startswith("__")

    trees = {name: nodes_of(source) for name, source in sources.items()}
    owners: dict[str, set[str]] = {}
    for module, nodes in trees.items():
        for node in nodes:
            stored = isinstance(getattr(node, "ctx", None), ast.Store)
            name = getattr(node, "attr", "") or getattr(node, "id", "") if stored else getattr(node, "name", "")
            if isinstance(name, str) and private(name):
                owners.setdefault(name, set()).add(module)
    foreign = {*dir(nn.Module()), *dir(torch.Tensor), "_replace", "_timeout"}
    found = []
    for module, nodes in trees.items():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.level or str(node.module).startswith("compile_muon")):
                names = [alias.name for alias in node.names if private(alias.name)]
                found += [f"{module}:{node.lineno} imports {name}" for name in names]
            if isinstance(node, ast.Attribute) and private(node.attr) and node.attr not in foreign:
                base = ast.unparse(node.value).partition(".")[0]
                if base not in ("self", "cls", "torch", "dist") and module not in owners.get(node.attr, {module}):
                    found.append(f"{module}:{node.lineno} {ast.unparse(node)}")
    return found


def test_no_module_names_what_another_keeps_to_itself() -> None:
    assert not private_reaches({module: path.read_text() for module, path in SOURCES.items()})


#: what loops over extensions and names none, beside all of engine/
CORE = ("backend", "optimizer")
_FEATURES = {"qk", "muonclip", "logit", "logits", "attention", "attentions", "heads"}  # MuonClip
_FEATURES |= {"pipeline", "stages", "pipelinestages", "sequence", "sequences", "sharedsequences", "sequenceplan"}
_FEATURES |= {"offload", "offloaded", "disk", "nvme", "transaction"}
#: what users write and read of the optimizer, which hands it on
_PUBLIC = {"qk_clip", "qk_clip_alpha", "offload", "offload_param", "sequence_place"}


def named_features(source: str, public: Collection[str] = ()) -> list[str]:
    """Where code names a feature: an identifier, an import or a string that is no docstring."""
    nodes = nodes_of(source)
    documented = {n.value for n in nodes if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)}
    found = []
    for node in nodes:
        names = [getattr(node, field, None) for field in ("id", "attr", "name", "arg", "module", "asname")]
        if isinstance(node, ast.Constant) and node not in documented:
            names.append(node.value)
        for name in names:
            if isinstance(name, str) and name not in public and name != "Sequence":  # that of Python
                words = {word.lower() for word in re.split(r"[^A-Za-z]+", name.replace("Sequence[", "["))}
                modules = re.search(r"compile_muon\.(extensions|sequence|offload)", name)
                if words & _FEATURES or modules:
                    found.append(f"{getattr(node, 'lineno', 0)} {name}")
    return found


def test_the_core_names_no_feature() -> None:
    paths = [*(ROOT / "compile_muon/engine").glob("*.py"), *(ROOT / f"compile_muon/{name}.py" for name in CORE)]
    found = {
        str(path.relative_to(ROOT)): named_features(path.read_text(), _PUBLIC if path.stem == "optimizer" else ())
        for path in paths
    }
    assert not {path: names for path, names in found.items() if names}


@cache
def folder_of(name: str) -> str | None:
    """The folder, or the file beside folders, that a module of ours is in: ``compile_muon.planning``."""
    found = [module for module in MODULES if f"{name}.".startswith(f"{module}.")]
    return ".".join(max(found, key=len).split(".")[:2]) if found else None


def test_folders_import_one_way() -> None:
    """The planner is above: nothing but the command line imports it. What ranks know of each other is below."""
    graph: dict[str, set[str]] = {}  # folder -> the folders that it imports from, in functions as well
    for module, path in SOURCES.items():
        own = folder_of(module)
        if own is not None and path.name != "__main__.py":
            found = {folder_of(name) for name in imported_names(path, module)} - {own, None}
            graph.setdefault(own, set()).update(found)
    assert graph["compile_muon.agreement"] <= {"compile_muon.errors", "compile_muon.passes"}
    assert {"compile_muon.planning", "compile_muon.engine", "compile_muon.passes"} <= graph.keys()
    assert [name for name, targets in graph.items() if "compile_muon.planning" in targets] == []
    assert "compile_muon.planning" in {folder_of(n) for n in imported_names(ROOT / "compile_muon/__main__.py", "x")}
    graphlib.TopologicalSorter(graph).prepare()


def test_files_import_no_circle() -> None:
    """Not even for types: of two that need each other one knows the other by what it asks of it."""
    paths = {m: path for m, path in SOURCES.items() if path.name not in ("__init__.py", "__main__.py")}  # hand names on
    graph = {}
    for module, path in paths.items():
        names = [name for name in imported_names(path, module) if name.startswith("compile_muon")]
        targets = {name if name in paths else name.rpartition(".")[0] for name in names}
        graph[module] = targets & paths.keys()
        assert not [name for name in targets if f"{module}.".startswith(f"{name}.")], module  # what hands its names on
    assert sum(map(len, graph.values())) > 1000
    graphlib.TopologicalSorter(graph).prepare()


def test_the_map_of_folders_is_whole() -> None:
    """CONTRIBUTING.md has a line for each folder of the package, and none for one that is gone."""
    said = set(re.findall(r"^((?:kernels|passes|compile_muon)/\S*)  ", (ROOT / "CONTRIBUTING.md").read_text(), re.M))
    there = {f"{path.parent.relative_to(ROOT)}/" for path in SOURCES.values() if path.name == "__init__.py"}
    assert said == there


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_lint_checks_the_types_of_every_module() -> None:
    """mypy says that all is well of a package whose modules it does not find."""
    printed = subprocess.run(["make", "-n", "types"], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    (linked,) = (line.split() for line in printed.splitlines() if line.startswith("ln -s "))
    entries = {f"../../compile_muon/{path.name}" for path in (ROOT / "compile_muon").iterdir() if path.name[0] != "_"}
    assert entries | {"../../compile_muon/__init__.py"} | {"../../passes", "../../kernels"} <= set(linked)


def test_dir_lists_the_public_names_and_no_others() -> None:
    import compile_muon

    assert dir(compile_muon) == sorted([*compile_muon.__all__, "__version__"])
    assert all(getattr(compile_muon, name) for name in dir(compile_muon))
