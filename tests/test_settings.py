"""Tables of settings are those of the code: `python docs/settings.py` renews them."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from compile_muon import config
from compile_muon.config import accept
from compile_muon.config.checked import Checked, setting
from compile_muon.config.lr_schedule import SCHEDULES
from compile_muon.passes.methods import METHODS

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def settings(docs_script: Any) -> Any:
    """docs/settings.py."""
    return docs_script("settings")


@dataclasses.dataclass(frozen=True)
class Some(Checked):
    """Settings of a test.

    Attributes:
        size: of (docs/how-to/methods.md#part) it, where ``wide`` and "word"
            end here.
        wide: none.
    """

    size: int | None = setting(3, accept.integer, low=1, none=True)
    wide: bool = setting(False, accept.boolean)


@pytest.mark.parametrize("page", ["docs/reference/configuration.md", "docs/how-to/offload.md"])
def test_tables_are_what_the_code_says(settings: Any, page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert settings.renewed(text, page) == text, "python docs/settings.py renews it"


PREFIXES = {
    config.CompileConfig: "compile.",
    config.MeshConfig: "mesh.",
    config.ExpertParallelConfig: "expert_parallel.",
    config.SequenceParallelConfig: "sequence_parallel.",
}


def test_every_setting_is_in_a_table(settings: Any) -> None:
    told = {row[0] for page in settings.PAGES for _, made in settings.tables(page).values() for row in made}
    kinds = {kind for name in config.__all__ if isinstance(kind := getattr(config, name), type)} | {*SCHEDULES.values()}
    arguments = {(owner, field): argument for argument, (owner, field) in config.ARGUMENTS.items()}
    missing = {
        f"{kind.__name__}.{f.name}"
        for kind in kinds
        if issubclass(kind, Checked) and kind is not config.CompileOptions
        for f in dataclasses.fields(kind)
        if not isinstance(f.default, Checked)
        and arguments.get((kind, f.name), PREFIXES.get(kind, "") + f.name) not in told
    }
    assert missing == {"Config.algorithm", "Config.scheduler"}  # optimizer.type, and a section of its own


def test_a_row_is_made_of_field_check_and_docstring(settings: Any) -> None:
    made = list(settings.rows(Some, "docs/reference/machines.md", settings.as_json, lambda name: f"own_{name}"))
    link = "../how-to/methods.md#part"
    assert made == [
        ("own_size", "`3`", "an integer from 1, or None", f"[of]({link}) it, where `own_wide` and `\"word\"` end here"),
        ("own_wide", "`false`", "a boolean", "none"),
    ]  # fmt: skip


def test_a_changed_description_is_found(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    page = settings.PAGES[0]
    text = (ROOT / page).read_text(encoding="utf-8")
    doc = config.MuonConfig.__doc__
    monkeypatch.setattr(config.MuonConfig, "__doc__", re.sub("rate of Muon", "speed of Muon", doc))
    assert settings.renewed(text, page) != text


def test_a_setting_without_a_description_is_an_error(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Some, "__doc__", "Settings of a test.\n\nAttributes:\n    size: of it.\n")
    with pytest.raises(KeyError, match="wide"):
        list(settings.rows(Some, "docs/how-to/offload.md", settings.as_json, str))


def test_a_page_without_one_of_its_tables_is_an_error(settings: Any) -> None:
    with pytest.raises(ValueError, match="has tables of , where offload belong"):
        settings.renewed("# A page\n", "docs/how-to/offload.md")


def test_every_rate_that_not_all_methods_have_is_in_the_table(settings: Any) -> None:
    page = settings.PAGES[0]
    told = {row[0] for row in settings.tables(page)["rates of methods"][1]}
    arguments = {field for _, field in config.ARGUMENTS.values()} | {"step"}
    assert {rate.name for method in METHODS for rate in method.rates} - arguments <= told
