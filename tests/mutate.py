"""Breaks a copy of the code on purpose, one fault of mutations.toml at a time, and says which default test notices.

    make mutate                                     # all of them
    make mutate MUTATE_ARGS="--only 'momenta'"      # those whose name or file has this
    make mutate MUTATE_ARGS="--write-hints"         # and note in mutations.toml which test it was
    make mutate MUTATE_ARGS="--second"              # and look for another test that does

The test that an entry names runs first. Only if it passes do all default tests run that the file can break, the nearest
first. A fault that no test notices makes the exit code 1.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from affected import PACKAGES, ROOT, Graph, this_repository

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

LIST = Path(__file__).with_name("mutations.toml")

# The package of the copy, ahead of the one that the environment below has.
_FINDER = """
import importlib.machinery, importlib.util, sys
_FOLDERS = {folders!r}
class Copy:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in _FOLDERS:
            init = _FOLDERS[name] + "/__init__.py"
            return importlib.util.spec_from_file_location(name, init, submodule_search_locations=[_FOLDERS[name]])
sys.meta_path.insert(0, Copy)
"""


@dataclass(frozen=True)
class Mutation:
    """One fault: a sentence ``name`` says what is wrong where ``after`` stands for ``before``, which the file has once;
    ``caught_by``, ``file::function``, is a default test that is known to fail."""

    name: str
    file: str
    before: str
    after: str
    caught_by: str

    def apply(self, text: str) -> str:
        """The file's text with the fault; a ValueError where ``before`` is not there, or several times."""
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: {self.file} has its `before` {count} times; update it")
        return text.replace(self.before, self.after)

    def problems(self, root: Path) -> Iterator[str]:
        """Why it cannot be tried."""
        path = root / self.file
        if not path.is_file():
            yield f"{self.name}: there is no {self.file}; update it"
            return
        try:
            ast.parse(self.apply(path.read_text(encoding="utf-8")))
        except (ValueError, SyntaxError) as error:
            yield str(error)
        if self.before == self.after:
            yield f"{self.name}: changes nothing"
        if not self.is_caught(root):
            yield f"{self.name}: there is no test {self.caught_by}; run with --write-hints"

    def is_caught(self, root: Path) -> bool:
        """Whether the test that is known to fail is still there."""
        test, _, function = self.caught_by.partition("::")
        return (root / test).is_file() and f"def {function}(" in (root / test).read_text(encoding="utf-8")


def mutations() -> list[Mutation]:
    """All of the list."""
    return [Mutation(**entry) for entry in tomllib.loads(LIST.read_text(encoding="utf-8"))["mutation"]]


def nearest_first(graph: Graph, file: str) -> list[str]:
    """The test files that a change of ``file`` can break: those in the folder that mirrors its own come first."""
    mirror = PurePosixPath("tests") / PurePosixPath(file).parent

    def distance(test: str) -> tuple[int, int, str]:
        common = os.path.commonpath([mirror, PurePosixPath(test).parent]).count("/")
        return -common, graph.reached(test)[file], test

    return sorted(graph.affected([file]), key=distance)


class Copy:
    """The repository's ``files`` in an empty folder, with an environment that finds the package there."""

    def __init__(self, folder: Path, files: Collection[str]) -> None:
        self.root = folder / "copy"
        for file in files:
            target = self.root / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, target)
        for command in (["init", "-q"], ["add", "-A"]):  # tests ask git which files there are
            subprocess.run(["git", "-C", str(self.root), *command], check=True)
        environment = folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
        self.python = environment / "bin" / "python"
        (packages,) = (environment / "lib").glob("python*/site-packages")
        # Links to packages are not followed from here, so the checkout's own is not found.
        below = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
        (packages / "below.pth").write_text("\n".join(below))
        folders = {package: str(self.root / name) for name, package in PACKAGES.items()}
        (packages / "_copy.py").write_text(_FINDER.format(folders=folders))
        (packages / "copy.pth").write_text("import _copy\n")
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTEST_ADDOPTS": "",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),  # graphs of broken code stay out of the user's
        }
        self._written = int(time.time())

    @contextmanager
    def with_fault(self, mutation: Mutation) -> Iterator[None]:
        """The copy has the fault inside the block."""
        path = self.root / mutation.file
        whole = path.read_text(encoding="utf-8")
        self._write(path, mutation.apply(whole))
        try:
            yield
        finally:
            self._write(path, whole)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        self._written += 1  # Python takes compiled code for that of a file with the same size and second
        os.utime(path, (self._written, self._written))

    def failing(self, tests: Sequence[str], *options: str) -> list[str] | None:
        """The tests that fail, as ``file::function``; None if there are none to run."""
        said = ["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-o", "timeout=300"]
        command = [str(self.python), "-m", "pytest", *said, *options, *tests]
        done = subprocess.run(command, cwd=self.root, env=self._environment, capture_output=True, text=True)
        if done.returncode in (0, 5):
            return None if done.returncode else []
        found = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, re.MULTILINE)
        if not found:
            raise RuntimeError(f"pytest ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        return list(dict.fromkeys(found))


def catching(copy: Copy, graph: Graph, mutation: Mutation, *, skip: str = "") -> str | None:
    """The test that fails with the fault, other than ``skip``; None if none does."""
    hint = mutation.caught_by if mutation.is_caught(ROOT) else mutation.caught_by.partition("::")[0]
    if not skip and (ROOT / hint.partition("::")[0]).is_file() and (found := copy.failing([hint], "-x")):
        return found[0]
    tests = nearest_first(graph, mutation.file)
    options = ["-x", *(["--deselect", skip] if skip else [])]
    found = copy.failing(tests, *options) if tests else None
    return found[0] if found else None


def write_hint(mutation: Mutation, test: str) -> None:
    """Note in the list which test it was."""
    entries = LIST.read_text(encoding="utf-8").split("[[mutation]]")
    (own,) = (i for i, entry in enumerate(entries) if f"\nname = {json.dumps(mutation.name)}\n" in entry)
    entries[own] = re.sub(r"^caught_by = .*$", f"caught_by = {json.dumps(test)}", entries[own], flags=re.MULTILINE)
    LIST.write_text("[[mutation]]".join(entries), encoding="utf-8")


def main() -> int:
    """Try what was asked for; 1 if a fault survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", default="", help="a regular expression for names and files")
    parser.add_argument("--write-hints", action="store_true", help="note the tests that noticed in mutations.toml")
    parser.add_argument("--second", action="store_true", help="look for another test that notices; takes long")
    given = parser.parse_args()
    chosen = [m for m in mutations() if re.search(given.only, f"{m.name} {m.file}")]
    problems = [problem for mutation in chosen for problem in mutation.problems(ROOT)]
    if given.write_hints:  # a test that is gone is what it is for
        problems = [problem for problem in problems if "there is no test" not in problem]
    if problems or not chosen:
        print(*problems or [f"no mutation has {given.only!r} in its name or file"], sep="\n")
        return 1
    graph = this_repository()
    survived = []
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        copy = Copy(Path(folder), [file for file in graph.files if (ROOT / file).is_file()])
        if broken := copy.failing(sorted({m.caught_by for m in chosen if m.is_caught(ROOT)})):
            print("these fail without a fault, too:", *broken, sep="\n  ")
            return 1
        for number, mutation in enumerate(chosen, 1):
            began = time.monotonic()
            with copy.with_fault(mutation):
                test = catching(copy, graph, mutation)
                other = catching(copy, graph, mutation, skip=test) if test and given.second else ""
            print(f"{number:3}/{len(chosen)} {time.monotonic() - began:4.0f} s  {mutation.name}")
            print(f"{'':13} {f'caught by {test}' if test else 'SURVIVED'} ({mutation.file})")
            if given.second and test:
                print(f"{'':13} {f'and by {other}' if other else 'and by no other'}", flush=True)
            if test is None:
                survived.append(mutation)
            elif given.write_hints and test != mutation.caught_by:
                write_hint(mutation, test)
    print(f"{len(chosen) - len(survived)} of {len(chosen)} caught")
    for mutation in survived:
        print(f"SURVIVED: {mutation.name} ({mutation.file})")
    return bool(survived)


if __name__ == "__main__":
    sys.exit(main())
