"""Builds the site: lays out the pages and the package under build/site_source, and runs Zensical on them.

Pages lie in the site as in the repository. Their links are relative and name files, as a code host wants them, and some
lead to examples and sources. The site has no address to send a reader to, so each such file becomes a page of it.
"""

from __future__ import annotations

import html
import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site_source"
SITE = ROOT / "build" / "site"
#: pages outside docs/ to begin with; what they link to follows
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/NOTES.md", "benchmarks/MESHES.md")
#: where the version is written
VERSION = "compile_muon/__init__.py"
#: what is copied as it is rather than shown in a page
COPIED = {".png", ".svg", ".json"}

#: where pages lie in the site that lie elsewhere in the repository: README is no landing page
MOVED = {"docs/index.md": "index.md", "README.md": "overview.md"}
#: the page of tables of settings, each of which is an anchor and a page for the search
SETTINGS = "docs/reference/configuration.md"

_LINK = re.compile(r'(\]\(|<a href="|<img src=")([^)"\s]+)([)"])')
_FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2`*$\n*", re.MULTILINE | re.DOTALL)
#: a row of them: names, and what is said of them
_SETTING = re.compile(r"^\| (`[a-z][\w.]*`(?:, `[a-z][\w.]*`)*) \|(.*)\|$", re.MULTILINE)
#: what makes of text a drawing or a table
_COLUMNS = re.compile(r"\S {2,}\S|[─│▼]")
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml"}


def main() -> int:
    """Build, strictly; the exit status."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    _lay_out_package(SOURCE / "package" / "compile_muon")
    _lay_out_pages(SOURCE / "pages")
    written = re.search(r'^__version__ = "(.*)"$', (ROOT / VERSION).read_text(encoding="utf-8"), re.MULTILINE)
    if written is None:
        raise ValueError(f"{VERSION} has no __version__")
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--strict",
        "--clean",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
    ]
    status = subprocess.run(command, env=os.environ | {"SITE_NAME": f"compile_muon {written[1]}"}).returncode
    if status == 0:
        _index(settings((ROOT / SETTINGS).read_text(encoding="utf-8")))
    return status


def _index(found: dict[str, str]) -> None:
    """Have the search find settings by their names, ahead of the sections that speak of them."""
    index = json.loads((SITE / "search.json").read_text(encoding="utf-8"))
    where = SETTINGS.replace(".md", ".html")
    above = ("Reference", "Configuration")
    items = [
        {"location": f"{where}#{name}", "level": 2, "title": name, "text": said, "path": [*above, name], "tags": []}
        for name, said in found.items()
    ]
    # Titles, paths and texts that match count; of items that match alike the first is shown first.
    index["items"] = items + index["items"]
    (SITE / "search.json").write_text(json.dumps(index), encoding="utf-8")
    (SITE / "search.js").write_text(f"var __index = {json.dumps(index)};", encoding="utf-8")  # for pages on a disk


def settings(text: str) -> dict[str, str]:
    """What the tables of a page say of each setting, as HTML; its first row counts.

    >>> settings("| `lr`, `eps` | `0.1` | [a rate](b.md) |")
    {'lr': '<code>0.1</code> a rate', 'eps': '<code>0.1</code> a rate'}
    """
    found: dict[str, str] = {}
    for names, cells in _SETTING.findall(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(cell.strip() for cell in cells.split("|")))
        said = re.sub(r"`([^`]*)`", r"<code>\1</code>", html.escape(words.strip(), quote=False))
        for name in re.findall(r"`([^`]*)`", names):
            found.setdefault(name, said)
    return found


def with_anchors(text: str) -> str:
    """The page with an anchor at each setting, where it stands first; names break where their parts end."""
    waiting = set(settings(text))

    def name(found: re.Match[str]) -> str:
        if found[1] not in waiting:
            return found.group()
        waiting.remove(found[1])
        parts = [part if len(part) <= 20 else part.replace("_", "_<wbr>") for part in found[1].split(".")]
        return f'<code id="{found[1]}">{".<wbr>".join(parts).replace("_", "&#95;")}</code>'

    return _SETTING.sub(lambda row: f"| {re.sub('`([^`]*)`', name, row[1])} |{row[2]}|", text)


def _lay_out_package(package: Path) -> None:
    """As it is installed, for mkdocstrings, which reads sources, follows no links and imports nothing."""
    for source, there in (("compile_muon", package), ("passes", package / "passes"), ("kernels", package / "kernels")):
        shutil.copytree(ROOT / source, there, ignore=shutil.ignore_patterns("__pycache__"))


def _lay_out_pages(folder: Path) -> None:
    """All pages, and what they link to in the repository."""
    shutil.copytree(ROOT / "docs" / "assets", folder / "docs" / "assets")
    waiting = [*PAGES, *(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        there = folder / site_path(path)
        there.parent.mkdir(parents=True, exist_ok=True)
        if Path(path).suffix in COPIED:
            shutil.copyfile(ROOT / path, there)
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        if not path.endswith(".md"):
            there.write_text(_named(path, _shown(path, text), "search: {exclude: true}\n"), encoding="utf-8")
            continue
        laid = page(path, with_anchors(text) if path == SETTINGS else text)
        there.write_text(_named(path, laid), encoding="utf-8")
        new = [target for target in targets(path, text) if target not in seen and (ROOT / target).is_file()]
        seen.update(new)
        waiting += new


def page(path: str, text: str) -> str:
    """Return the page with links that lead to pages of the site, without what only a code host draws."""
    here = posixpath.dirname(path)

    def point(found: re.Match[str]) -> str:
        before, link, after = found.groups()
        target, mark, anchor = link.partition("#")
        if "://" in link or not target:
            return found.group()
        there = site_path(posixpath.normpath(posixpath.join(here, target)))
        target = posixpath.relpath(there, posixpath.dirname(site_path(path)) or ".")
        if before != "](":  # HTML, whose links nobody turns into those of the built page
            target = re.sub(r"\.md$", ".html", target)
        return f"{before}{target}{mark}{anchor}{after}"

    return outside_fences(_FENCE.sub(_fence, text), lambda part: _LINK.sub(point, part))


def site_path(path: str) -> str:
    """Where a file of the repository is in the site, or a link to it leads.

    >>> site_path("docs/why/ledger.md"), site_path("examples/train_gpt.py"), site_path("README.md")
    ('docs/why/ledger.md', 'examples/train_gpt.py.md', 'overview.md')
    """
    if path in MOVED:
        return MOVED[path]
    return path if Path(path).suffix in COPIED | {".md"} else f"{path}.md"


def targets(path: str, text: str) -> list[str]:
    """Files of the repository that a page links to, relative to its root."""
    found: list[str] = []

    def note(part: str) -> str:
        for _, link, _ in _LINK.findall(part):
            if "://" not in link and not link.startswith("#"):
                found.append(posixpath.normpath(posixpath.join(posixpath.dirname(path), link.partition("#")[0])))
        return part

    outside_fences(text, note)
    return list(dict.fromkeys(found))


def outside_fences(text: str, change: Callable[[str], str]) -> str:
    """The page with ``change`` applied to what is not code."""
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [change(text[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, change(text[end:])])


def _named(path: str, text: str, more: str = "") -> str:
    """A page that names its file, for the link to edit it."""
    return f"---\nsource: {json.dumps(path)}\n{more}---\n\n{text}"


def _shown(path: str, text: str) -> str:
    """A page with a file in it."""
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n~~~~~~{{.{language}}}\n{text}\n~~~~~~\n"


def _fence(found: re.Match[str]) -> str:
    """Sentences in a fence may wrap. A diagram of Mermaid needs its script, and has a twin in text."""
    fence = found.group()
    if fence.startswith("```mermaid"):
        return ""
    return fence if _COLUMNS.search(fence) else fence.replace("```text", "```{.text .wraps}", 1)


if __name__ == "__main__":
    sys.exit(main())
