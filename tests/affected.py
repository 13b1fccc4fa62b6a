"""Which test files a change can break, by what they import and name: ``python tests/affected.py --since .ci/full``.

A test file is affected if it, a ``conftest.py`` of its folders, or what these reach has changed. A file reaches

- what it imports: in functions, too, and in code that it has as a string; not what it imports for types alone;
- what it names in a string: a file, a folder with all that is in it, a pattern, a module for ``importlib`` or ``-m``.
  Docstrings name nothing. The package is installed without the rest of the repository, so a string of it names only
  modules and data in its own folder;
- of a page or a shell script what its code imports and names.

``import compile_muon.passes.costs`` also runs the ``__init__.py`` of both packages, and all that these import. A change
of these two files counts. What they import counts only for a file that asks the package itself for something, else
every test of a kernel would reach the whole engine. This leaves out nothing but a package that cannot be imported any
more; it fails the default tests, which always run.
"""

import argparse
import ast
import re
import subprocess
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
#: folder of the repository -> the package that it is installed as
PACKAGES = {"compile_muon": "compile_muon", "passes": "compile_muon.passes", "kernels": "compile_muon.kernels"}
#: what every test depends on
EVERYTHING = {"pyproject.toml", "constraints.txt", "tests/conftest.py", "tests/affected.py", ".ci/run"}
#: extra of pyproject.toml that is large -> the module that its tests look for
EXTRAS = {"torchtitan": "torchtitan", "browser": "PyQt6"}

_STATEMENT = re.compile(r"^[ \t]*(?:from +([\w.]+) +import +\(?([\w, ]+)|import +([\w., ]+))", re.MULTILINE)
_CODE_OF_PAGES = re.compile(r"^ *```(?:python|bash)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SHELL = {"", ".sh", ".sbatch", ".yaml", ".yml"}
#: a path's beginning that is somewhere in the repository (__file__ and its parents); a part that a run alone knows
_HERE, _UNKNOWN = "~", "?"
#: methods of a path that list files -> what they put ahead of their argument
_LISTING: dict[str, list[str]] = {"glob": [], "rglob": ["**"], "iterdir": ["*"]}


@dataclass
class _References:
    """What a source refers to. ``imports``: ``(module, names)``, no names for ``import module``, None for the module
    alone; ``paths``: ends of paths, with patterns; ``words``: identifiers, and strings that are one; ``lazy``: of a
    package, name -> module that it imports once asked for the name; ``named``: paths that have a name in the module."""

    imports: set[tuple[str, tuple[str, ...] | None]] = field(default_factory=set)
    paths: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    lazy: dict[str, str] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)

    def add_code(self, text: str) -> None:
        """Statements, modules and paths of code, or of a command."""
        for source, names, modules in _STATEMENT.findall(text.replace(";", "\n")):
            self.imports |= {(module, ()) for module in re.findall(r"[\w.]+", modules)}
            self.imports |= {(source, tuple(re.findall(r"\w+", names)))} if source else set()
        self.imports |= {(module, ()) for module in re.findall(r"compile_muon(?:\.\w+)+", text)}
        self.imports |= {(f"{module}.__main__", ()) for module in re.findall(r"-m +([\w.]+)", text)}
        self.paths |= {token for token in re.findall(r"[\w.*/-]+", text) if "/" in token or "." in token[1:]}
        self.words |= {*re.findall(r"\w+", text)}


class _Reader(ast.NodeVisitor):
    """Collects the references of a Python source; ``module`` is its name in the package, "" of a script."""

    def __init__(self, text: str, file: PurePosixPath, module: str) -> None:
        tree = ast.parse(text)
        self.module, self.file = module, file
        self.package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        self.lazy = any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body)
        self.found = _References()
        #: names of paths in the module: BENCHMARKS = ROOT / "benchmarks"
        self.named: dict[str, list[str]] = {}
        for node in tree.body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp | ast.Call | ast.Subscript):
                if isinstance(target := node.targets[0], ast.Name) and (parts := self.parts(node.value)):
                    self.named[target.id] = parts
        self.visit(tree)
        self.found.named = {name: "/".join(parts) for name, parts in self.named.items()}

    def parts(self, node: ast.AST) -> list[str]:
        """Of a path in the order in which they are joined, as far as they are known."""
        if isinstance(node, ast.Constant | ast.JoinedStr):
            text = _text(node)
            return [] if text is None else [text]
        if isinstance(node, ast.Name):
            return [_HERE] if node.id == "__file__" else self.named.get(node.id, [])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            return self.parts(node.left) + (self.parts(node.right) or [_UNKNOWN])
        if isinstance(node, ast.Attribute | ast.Subscript):  # .parent, .parents[1]
            return self._place(node.value)
        if not isinstance(node, ast.Call):
            return []
        given = [part for arg in node.args for part in self.parts(arg)]
        if not isinstance(node.func, ast.Attribute):  # Path(...), str(...)
            return self.parts(node.args[0]) if len(node.args) == 1 else []
        before, method = self.parts(node.func.value), node.func.attr
        if method == "resolve":
            return before
        if method in _LISTING:
            return [*before, *_LISTING[method], *given]
        return [*before[:-1], *given] if method == "with_name" else self._place(node.func.value)

    def _place(self, node: ast.AST) -> list[str]:
        """Of what is made of a path otherwise: that it is in the repository."""
        return [_HERE] if self.parts(node)[:1] == [_HERE] else []

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """A path counts as a whole, and not each of its parts."""
        self._path(node) if isinstance(node.op, ast.Div) else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if method == "syspath_prepend" or re.search(r"sys\.(path|modules)\b", ast.unparse(node.func)):
            return  # names no module of those that are found in it, nor brings one in
        self._path(node) if method in (*_LISTING, "with_name") else self.generic_visit(node)

    def _path(self, node: ast.AST) -> None:
        self.found.paths.add("/".join(self.parts(node)))

    def visit_Assign(self, node: ast.Assign) -> None:
        if node.col_offset == 0 and getattr(node.targets[0], "id", "") in self.named:
            return  # counts where it is used
        if node.col_offset == 0 and self.lazy and isinstance(node.value, ast.Dict):
            pairs = zip(node.value.keys, node.value.values, strict=True)
            self.found.lazy |= {_text(key) or "": _text(value) or "" for key, value in pairs}
            return
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        self.found.words.add(node.id)
        if node.id in self.named:
            self.found.paths.add("/".join(self.named[node.id]))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.found.words.add(node.attr)
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self.visit_Constant(node)
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                self.visit(value.value)

    def visit_Constant(self, node: ast.Constant | ast.JoinedStr) -> None:
        text = _text(node)
        if text is None:
            return
        if self.package and re.fullmatch(r"\.[\w.]+", text):  # import_module(".gpu.grouped", __package__)
            text = self.package + text
        if re.fullmatch(r"\w+(\.\w+)*(\.\*)?", text):
            self.found.words.add(text)
            self.found.paths.add(text)
            self.found.imports |= {(text, None)} if "." in text else set()
        elif self.module:
            self.found.paths.add(text)
        else:
            self.found.add_code(text)

    def visit_If(self, node: ast.If) -> None:
        for child in node.orelse if "TYPE_CHECKING" in ast.unparse(node.test) else ast.iter_child_nodes(node):
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        self.found.imports |= {(alias.name, None if alias.asname else ()) for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        parts = self.package.split(".")
        base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
        names = tuple(alias.name for alias in node.names)
        self.found.imports.add((".".join(filter(None, (base, node.module))), names))
        self.found.words |= {*names}


def _text(node: ast.AST | None) -> str | None:
    """Of a string; what an f-string puts in is a pattern."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


class Graph:
    """What each file of a repository reaches; ``files`` are paths from ``root``, and may have some that are gone."""

    def __init__(self, root: Path, files: Iterable[str]) -> None:
        self.files = sorted({*files})
        self.tests = [file for file in self.files if re.fullmatch(r"tests/(.*/)?test_\w+\.py", file)]
        self._modules = {name: file for file in self.files if (name := module_of(file))}
        #: folder -> the files anywhere in it
        self._inside: dict[str, list[str]] = defaultdict(list)
        for file in self.files:
            for folder in PurePosixPath(file).parents:
                self._inside[str(folder)].append(file)
        #: the last part of a path -> the files and folders that are called so
        self._called: dict[str, list[str]] = defaultdict(list)
        for path in (*self.files, *self._inside):
            self._called[path.rpartition("/")[2]].append(path)
        self._matching = cache(self._matching)
        sources = {file: _read(root / file, file) for file in self.files}
        self._words = {file: found.words for file, found in sources.items()}
        taken = {name for found in sources.values() for _, names in found.imports for name in names or ()}
        for found in sources.values():  # a path that others import counts where it comes from
            found.paths |= {found.named[name] for name in found.named.keys() & taken}
        self._lazy = {
            name: self._modules[module]
            for found in sources.values()
            for name, module in found.lazy.items()
            if module in self._modules
        }
        #: file -> the files that it refers to -> whether what those refer to counts as well
        self._edges = {file: self._resolved(file, found) for file, found in sources.items()}
        for file in self.files:
            if file.startswith("tests/"):
                own = {str(folder / "conftest.py") for folder in PurePosixPath(file).parents}
                self._edges[file] |= dict.fromkeys((own & sources.keys()) - EVERYTHING, True)

    def _resolved(self, file: str, found: _References) -> dict[str, bool]:
        edges: dict[str, bool] = defaultdict(bool)
        for module, names in found.imports:
            for target, follows in self._imported(file, module, names):
                edges[target] |= follows
        # Where a run puts in a part of a path, any word of the file may be that.
        loose = any(path.startswith(_HERE) and _UNKNOWN in path for path in found.paths)
        for path in found.paths if loose else [path for path in found.paths if not path.isidentifier()]:
            edges |= dict.fromkeys(self._named(file, path), True)
        if not module_of(file) or edges.get(self._modules.get("compile_muon", "")):
            edges |= {self._lazy[name]: True for name in found.words & self._lazy.keys()}
        return edges

    def _imported(self, file: str, module: str, names: tuple[str, ...] | None) -> Iterator[tuple[str, bool]]:
        if module.partition(".")[0] != "compile_muon":
            if not module_of(file):
                yield from ((target, True) for target in self._script(file, module, names or ()))
            return
        while module and module not in self._modules:  # an attribute, in a string
            module, _, attribute = module.rpartition(".")
            names = (attribute,)
        if not module:
            return
        parents = [module.rsplit(".", n)[0] for n in range(1, module.count(".") + 1)]
        # `import a.b` binds `a`, of which anything may be used.
        yield from ((self._modules[parent], names == ()) for parent in parents if parent in self._modules)
        inside = [f"{module}.{name}" for name in names or () if f"{module}.{name}" in self._modules]
        yield from ((self._modules[name], True) for name in inside)
        # Of a package that is asked for modules alone nothing else is used.
        yield self._modules[module], not inside or len(inside) < len(names or ())

    def _script(self, file: str, module: str, names: tuple[str, ...]) -> Iterator[str]:
        """Modules outside the package: beside the file, else wherever they are."""
        base, here = module.replace(".", "/"), PurePosixPath(file).parent
        if base.endswith("/*"):
            yield from (each for folder in self._ending(base[:-2]) for each in self._inside.get(folder, ()))
        for name in (base, *(f"{base}/{each}" for each in names)):
            ends = f"{name}.py", f"{name}/__init__.py"
            anywhere = [each for end in ends for each in self._ending(end) if not module_of(each)]
            yield from {str(here / end) for end in ends}.intersection(anywhere) or anywhere
            yield from self._ending(str(PurePosixPath(name).parent / "__init__.py")) if "/" in name else ()

    def _named(self, file: str, path: str) -> Iterable[str]:
        """The files that a path names: by itself, as a folder, or as a pattern."""
        end = re.sub(r"^(~/|\.\.?/)*", "", path).strip("/").rstrip(".")
        here = str(PurePosixPath(file).parent)
        # A pattern without a name counts below __file__, but for one that a run puts in.
        if not re.search(r"(^|/)[\w-]", end) and not (path.startswith(_HERE) and "*" in end and _UNKNOWN not in end):
            return ()
        if not module_of(file):
            return self._matching(end, here if path.startswith(_HERE) else "")
        data = [each for each in self._inside[here] if not each.endswith(".py")] if "." in end else ()
        return [each for each in data if _matches(each, end)]

    def _matching(self, end: str, here: str) -> list[str]:
        if "*" in end or _UNKNOWN in end:
            return [file for file in self.files if _matches(file, end)]
        paths = self._ending(end)
        if not re.search("[./]", end):  # one word: a folder, or a file without a suffix, at the top or around __file__
            around = [end, *(str(folder / end) for folder in (PurePosixPath(here) / "x").parents if here)]
            paths = [path for path in paths if path in around]
        return [file for path in paths for file in self._inside.get(path, [path])]

    def _ending(self, end: str) -> list[str]:
        """Files and folders whose path ends like this."""
        return [path for path in self._called.get(end.rpartition("/")[2], ()) if f"/{path}".endswith(f"/{end}")]

    def reached(self, start: str, *, executed: bool = False) -> dict[str, int]:
        """File -> how many steps ``start`` is away from it; ``executed``: also by what packages import that run because
        a module inside them is imported."""
        steps, pending, expanded = {start: 0}, deque([start]), {start}
        while pending:
            file = pending.popleft()
            for target, follows in self._edges.get(file, {}).items():
                steps.setdefault(target, steps[file] + 1)
                if (follows or executed) and target not in expanded:
                    expanded.add(target)
                    pending.append(target)
        return steps

    def affected(self, changed: Iterable[str]) -> list[str]:
        """The test files that a change of these files can break."""
        changed = {*changed}
        return self.tests if changed & EVERYTHING else [t for t in self.tests if changed & self.reached(t).keys()]

    def needs(self, tests: Iterable[str]) -> list[str]:
        """The extras of :data:`EXTRAS` that test files skip without, and so name."""
        words = {word for test in tests for word in self._words[test]}
        return [extra for extra, module in EXTRAS.items() if module in words]


def module_of(file: str) -> str:
    """The name of a module of the package; "" of another file."""
    path = PurePosixPath(file)
    if path.suffix != ".py" or path.parts[0] not in PACKAGES:
        return ""
    return ".".join((PACKAGES[path.parts[0]], *path.with_suffix("").parts[1:])).removesuffix(".__init__")


def _read(path: Path, file: str) -> _References:
    found = _References()
    # This file names all others, and no test but its own depends on them for that.
    if not path.is_file() or path.suffix not in {*_SHELL, ".py", ".md"} or path == Path(__file__):
        return found
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        return _Reader(text, PurePosixPath(file), module_of(file)).found
    for code in _CODE_OF_PAGES.findall(text) if path.suffix == ".md" else [text]:
        found.add_code(code)
    return found


def _matches(file: str, end: str) -> bool:
    """Whether a path ends like this; ``*`` and ``?`` are any text in a name, and ``**/`` any folders."""
    return _pattern(end).match(file) is not None


@cache
def _pattern(end: str) -> re.Pattern[str]:
    text = re.escape(end).replace(r"\*\*/", "(?:.*/)?").replace(r"\*", "[^/]*").replace(r"\?", "[^/]*")
    return re.compile(f"(?:.*/)?{text}$")


def _git(root: Path, *arguments: str) -> list[str]:
    """The lines or NUL-ended fields that git prints; none where it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return [part for part in re.split("[\0\n]", done.stdout) if part] if done.returncode == 0 else []


def this_repository(changed: Iterable[str] = (), root: Path = ROOT) -> Graph:
    """Of the files that git knows or would add, and of those that ``changed`` names."""
    files = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    return Graph(root, [*files, *changed])


def changed_since(commit: str, root: Path = ROOT) -> set[str] | None:
    """Files that differ from a commit (its name, or a file that has it), committed or not; None if history lacks it."""
    named = root / commit
    name = named.read_text().strip() if named.is_file() else commit
    if not _git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}"):
        return None
    changed = _git(root, "diff", "-z", "--name-only", "--no-renames", name, "--")
    return {*changed, *_git(root, "ls-files", "-z", "--others", "--exclude-standard")}


def note_passed(commit: str, *, in_part: bool, root: Path = ROOT) -> str:
    """Have ``.ci/full`` name the commit that was checked out when the tests began, if all have passed and not only a
    part was run; returns what was done, or why nothing was."""
    missing = [extra for extra, module in EXTRAS.items() if find_spec(module) is None]
    edited = _git(root, "status", "-z", "--porcelain")
    if in_part:
        why = "PYTEST_ARGS chose what was run"
    elif missing:
        why = f"tests were skipped that need {' and '.join(missing)}; pip install -e '.[{','.join(missing)}]'"
    elif edited:
        why = f"{len(edited)} files are not as they were committed: {', '.join(each[3:] for each in edited[:3])}"
    elif not commit or _git(root, "rev-parse", "HEAD") != [commit]:
        why = "the commit is not the one at which the tests began"
    else:
        (root / ".ci" / "full").write_text(f"{commit}\n")
        return f".ci/full names {commit} now; commit it"
    return f".ci/full stays as it is: {why}"


def main() -> None:
    """Print the affected test files, or what they need."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("changed", nargs="*", help="files that have changed; all tests without any and without --since")
    parser.add_argument("--since", metavar="COMMIT", help="what differs from it, or from that in a file")
    parser.add_argument("--needs", action="store_true", help="print the large extras that the affected tests need")
    parser.add_argument("--passed", metavar="COMMIT", help="note in .ci/full that all tests have passed")
    parser.add_argument("--in-part", action="store_true", help="they were not all")
    given = parser.parse_args()
    if given.passed is not None:
        print(note_passed(given.passed, in_part=given.in_part))
        return
    changed = changed_since(given.since) if given.since else {*given.changed} or None
    graph = this_repository(changed or ())
    tests = graph.tests if changed is None else graph.affected({*changed, *given.changed})
    print(*(graph.needs(tests) if given.needs else tests), sep="\n")


if __name__ == "__main__":
    main()
