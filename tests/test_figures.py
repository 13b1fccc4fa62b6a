"""Numbers of the pages are those of benchmarks/results: `python docs/figures.py` renews them."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: figures of README that no results file has: versions, and sizes of models
KNOWN = {"2.11", "2.13", "2.15", "3.10", "3.11", "3.12", "3.6", "3.7", "0.19.8", "3.3", "1.01", "2.0"}


@pytest.fixture(scope="module")
def figures(docs_script: Any) -> Any:
    """docs/figures.py."""
    return docs_script("figures")


def test_every_claim_has_the_numbers_of_its_results(figures: Any) -> None:
    claims = figures.claims()
    assert sum(len(claim.numbers) for claim in claims) > 150
    wrong = {
        claim.text: f"{claim.page} says {found}, the results {claim.numbers}"
        for claim in claims
        if (found := claim.find((ROOT / claim.page).read_text()).groups()) != claim.numbers
    }
    assert not wrong, "python docs/figures.py renews them"


def test_every_figure_of_readme_is_a_claim(figures: Any) -> None:
    page = text = (ROOT / "README.md").read_text()
    for claim in figures.claims():
        if claim.page == "README.md":
            found = claim.find(page)
            for number in range(1, len(claim.numbers) + 1):
                text = text[: found.start(number)] + " " * len(found[number]) + text[found.end(number) :]
    left = re.sub(r"^```.*?^```|`[^`\n]+`|\]\([^)]*\)", "", text, flags=re.MULTILINE | re.DOTALL)
    figures_left = re.findall(r"(?<![\w.])\d+(?:\.\d+)+|(?<![\w.])\d[\d.]*(?= ?(?:%|ms\b|s\b))", left)
    assert not set(figures_left) - KNOWN


def test_tables_of_results_are_as_they_would_be_written(figures: Any) -> None:
    for (page, name), make in figures.TABLES.items():
        assert figures.table_of((ROOT / page).read_text(), name)[1] == make(), "python docs/figures.py renews it"


def test_a_wrong_number_is_found_and_renewed(figures: Any) -> None:
    claim = figures.Claim("page", "takes {} s, {} of it", ("0.5", "1,000"))
    page = "It takes 0.4\ns, 900 of it."
    with pytest.raises(ValueError, match="2 places read"):
        claim.find(page + page.replace("\n", " "))
    assert claim.find(page).groups() == ("0.4", "900")
    assert figures.renewed(page, [claim]) == "It takes 0.5\ns, 1,000 of it."
