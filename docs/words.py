"""The check of docstrings that `make lint` runs: each begins with a verb, or with a noun that names its subject.

python docs/words.py            # the docstrings that begin with a pronoun; status 1 if there are too many
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("compile_muon", "passes", "kernels", "rehearse", "benchmarks")
#: share of docstrings that may have no subject
MOST = 0.04
#: first words that stand for something that was never named
PRONOUN = re.compile(
    r"(As|Either|Here|It|Its|Nothing|Of|Others|So|Such|That|Their|Theirs|There|They|Those|What|Whatever|Which|Who|Whoever"
    r"|Whose|(This|These) (is|are|was|were))\b"
)
#: (file, name) of docstrings whose first word is no pronoun there
ALLOWED: frozenset[tuple[str, str]] = frozenset()


def docstrings(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Yield the name, line and docstring of each class and function of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield node.name, node.lineno, docstring


def without_subject(root: Path) -> tuple[list[str], int]:
    """Return the docstrings that begin with a pronoun, by place and first line, and the number of all docstrings."""
    places, total = [], 0
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        for name, line, docstring in docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            total += 1
            if PRONOUN.match(docstring) and (file, name) not in ALLOWED:
                places.append(f"{file}:{line}: {name}: {docstring.splitlines()[0]}")
    return places, total


def main() -> int:
    places, total = without_subject(ROOT)
    share = len(places) / total
    print(*places, sep="\n")
    print(f"{len(places)} of {total} docstrings begin with a pronoun: {share:.1%}, at most {MOST:.0%}")
    return int(share > MOST)


if __name__ == "__main__":
    sys.exit(main())
