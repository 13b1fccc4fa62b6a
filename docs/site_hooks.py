"""What the site adds to the pages: files of the repository that they link to, colors of code, roles in docstrings.

Links in the pages are relative and name files, as a code host wants them. Some leave docs/: to examples, sources, the
README. The site has no address to send a reader to, so each such file becomes a page of it, under ``repository/``.
"""

from __future__ import annotations

import posixpath
import re
import shutil
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority, get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

ROOT = Path(__file__).resolve().parents[1]
#: pages of the site that lie outside docs/, linked or not
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/NOTES.md", "benchmarks/MESHES.md")
#: where they and all other files of the repository go
PREFIX = "repository/"
#: files that are copied as they are rather than shown in a page
COPIED = {".png", ".svg", ".json"}

_LINK = re.compile(r'(\]\(|<a href=")([^)"\s]+)([)"])')
_FENCE = re.compile(r"^( *)(`{3,}).*?^\1\2`*$\n?", re.MULTILINE | re.DOTALL)
_LANGUAGES = {".py": "python", ".sh": "bash", ".sbatch": "bash", ".yaml": "yaml", ".toml": "toml"}
_log = get_plugin_logger("site_hooks")


@event_priority(100)  # ahead of mkdocstrings, which looks for the folder
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Lay the package out as it is installed, for mkdocstrings, which reads sources and imports nothing."""
    package = ROOT / "build" / "site_source" / "compile_muon"
    shutil.rmtree(package, ignore_errors=True)
    for source, there in (("compile_muon", package), ("passes", package / "passes"), ("kernels", package / "kernels")):
        shutil.copytree(ROOT / source, there, ignore=shutil.ignore_patterns("__pycache__"))  # griffe follows no links
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what the pages link to in the repository."""
    waiting = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    for path in PAGES:
        files.append(File.generated(config, PREFIX + path, content=(ROOT / path).read_text(encoding="utf-8")))
    while waiting:
        path = waiting.pop()
        for target in targets(path, (ROOT / path).read_text(encoding="utf-8")):
            if target in seen or target.startswith("docs/"):
                continue
            seen.add(target)
            if (ROOT / target).is_file():
                files.append(_shown(target, config))
    style = HtmlFormatter(style="default").get_style_defs(".highlight")
    files.append(File.generated(config, "assets/pygments.css", content=style))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the pages of the site, and leave out what only a code host draws."""
    here = page.file.src_uri
    path = here.removeprefix(PREFIX) if here.startswith(PREFIX) else f"docs/{here}"
    if here.startswith(PREFIX) and here.removeprefix(PREFIX) not in PAGES:
        return markdown  # a file in a fence

    def point(found: re.Match[str]) -> str:
        before, link, after = found.groups()
        target, mark, anchor = link.partition("#")
        if "://" in link or not target:
            return found.group()
        whole = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
        if not (ROOT / whole).is_file():
            _log.warning(f"{path} links to {target}, and there is no file {whole}")
            return found.group()
        there = site_uri(whole)
        if before != "](":  # HTML, whose links nobody turns into those of the built page
            there = re.sub(r"\.md$", ".html", there)
        return f"{before}{posixpath.relpath(there, posixpath.dirname(here) or '.')}{mark}{anchor}{after}"

    return outside_fences(_without_mermaid(markdown), lambda text: _LINK.sub(point, text))


def site_uri(path: str) -> str:
    """Where a file of the repository is in the site.

    >>> site_uri("docs/why/ledger.md"), site_uri("examples/train_gpt.py"), site_uri("CHANGELOG.md")
    ('why/ledger.md', 'repository/examples/train_gpt.py.md', 'repository/CHANGELOG.md')
    """
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if path in PAGES or Path(path).suffix in COPIED:
        return PREFIX + path
    return f"{PREFIX}{path}.md"


def targets(path: str, markdown: str) -> list[str]:
    """Files of the repository that a page links to, relative to its root."""
    found: list[str] = []

    def note(text: str) -> str:
        for _, link, _ in _LINK.findall(text):
            if "://" not in link and not link.startswith("#"):
                found.append(posixpath.normpath(posixpath.join(posixpath.dirname(path), link.partition("#")[0])))
        return text

    outside_fences(markdown, note)
    return found


def outside_fences(markdown: str, change: Any) -> str:
    """The page with ``change`` applied to what is not code."""
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def _shown(path: str, config: MkDocsConfig) -> File:
    if Path(path).suffix in COPIED:
        return File.generated(config, PREFIX + path, abs_src_path=str(ROOT / path))
    text = (ROOT / path).read_text(encoding="utf-8")
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return File.generated(config, site_uri(path), content=f"# {path}\n\n~~~~~~{{.{language}}}\n{text}\n~~~~~~\n")


def _without_mermaid(markdown: str) -> str:
    """Diagrams of Mermaid need its script; each has a twin in text."""
    return re.sub(r"^```mermaid\n.*?^```\n+", "", markdown, flags=re.MULTILINE | re.DOTALL)


class Roles(griffe.Extension):
    """Sphinx's roles in docstrings, :class:`Config`, as Markdown; as links to what the page on the API has."""

    _ROLE = re.compile(r":(?:attr|class|func|meth|mod):`~?([^`]+)`")

    def __init__(self) -> None:
        page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
        self.known = {name.rpartition(".")[2]: name for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = self._ROLE.sub(self._markdown, obj.docstring.value)

    def _markdown(self, found: re.Match[str]) -> str:
        known = self.known.get(found[1].removeprefix("compile_muon."))
        return f"`{found[1]}`" if known is None else f"[`{found[1]}`][{known}]"
