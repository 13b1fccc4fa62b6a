"""The site as Chromium shows it from a disk, page by page, on a wide screen and on a narrow one."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"
#: setting to search for, and the page's anchor that comes first
SETTINGS = {
    "zero_optimization.stage": "zero_optimization.stage",
    "checks": "checks",
    "momentum": "momentum",  # a heading and many sentences of other pages, too
    "update": "update",
    "muon_lr": "optimizer.params.muon_lr",
}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(find_spec("zensical") is None, reason="Zensical is not installed (the extra docs)"),
    pytest.mark.skipif(find_spec("PyQt6") is None, reason="PyQt6-WebEngine is not installed (the extra browser)"),
]


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """The site, built and opened."""
    subprocess.run([sys.executable, str(ROOT / "docs" / "build_site.py")], check=True, timeout=300)
    command = [sys.executable, str(Path(__file__).with_name("browser.py")), str(SITE)]
    ran = subprocess.run(command, input="\n".join(SETTINGS), capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture
def pages(shown: dict[str, Any]) -> dict[str, Any]:
    return shown["pages"]


def faults(pages: dict[str, Any], *names: str) -> dict[str, Any]:
    """What of a page should be empty and is not."""
    return {f"{path}: {name}": page[name] for path, page in pages.items() for name in names if page[name]}


def test_every_page_is_there(pages: dict[str, Any]) -> None:
    listed = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    navigation = re.findall(r"^ +- (?:[\w ]+: )?(\S+)\.md$", listed, re.MULTILINE)
    assert len(navigation) > 30
    assert {f"{page}.html" for page in navigation} <= pages.keys()


def test_nothing_is_wider_than_the_screen(pages: dict[str, Any]) -> None:
    for width in ("1280", "420"):
        assert not faults({path: page[width] for path, page in pages.items()}, "overflow", "wide")


def test_no_page_asks_another_host_or_complains(shown: dict[str, Any], pages: dict[str, Any]) -> None:
    assert len(shown["requests"]) > len(pages)
    assert {urlsplit(url).scheme for url in shown["requests"]} <= {"file", "data", "blob"}
    assert not faults(pages, "said", "images")


def test_every_link_within_the_site_lands(pages: dict[str, Any]) -> None:
    lost, landed = [], 0
    for path, page in pages.items():
        for link in page["links"]:
            url = urlsplit(link)
            if url.scheme != "file" or link in page["edit"]:
                continue
            there = Path(unquote(url.path))
            name = there.relative_to(SITE).as_posix()
            if not there.is_file() or (url.fragment and unquote(url.fragment) not in pages[name]["ids"]):
                lost.append(f"{path}: {link}")
            landed += bool(url.fragment)
    assert not lost and landed > 500


def test_a_page_has_its_version_its_source_and_its_neighbours(pages: dict[str, Any]) -> None:
    source = (ROOT / "compile_muon" / "__init__.py").read_text(encoding="utf-8")
    version = re.search(r'^__version__ = "(.*)"$', source, re.MULTILINE)
    for path, page in pages.items():
        assert page["header"] == f"compile_muon {version[1]}", path
        (edit,) = page["edit"]
        assert Path(unquote(urlsplit(edit).path)).is_file(), edit
        assert page["code"] == page["copies"], path
    assert sum(page["code"] for page in pages.values()) > 200
    assert pages["docs/how-to/peft.html"]["neighbours"] == ["accelerate.html", "lightning.html"]


def test_a_name_stands_once_and_no_table_has_an_empty_head(pages: dict[str, Any]) -> None:
    assert not faults(pages, "empty")
    for path, page in pages.items():
        assert len(page["ids"]) == len(set(page["ids"])), path
    symbols = [symbol.split(".") for symbol in pages["docs/reference/api.html"]["symbols"]]
    assert len(symbols) > 40
    assert not [symbol for symbol in symbols if symbol[-1] == symbol[-2]]  # a module, and a function of its name


def test_a_click_makes_it_dark(shown: dict[str, Any]) -> None:
    assert sorted(shown["colors"]) == ["default", "slate"]


def test_a_search_on_a_disk_finds_settings(shown: dict[str, Any]) -> None:
    for word, anchor in SETTINGS.items():
        assert shown["found"][word].endswith(f"/docs/reference/configuration.html?h={word}#{anchor}")
