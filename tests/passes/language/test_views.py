"""Views against what they say, row by row."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compile_muon.passes.language.views import View, most_work

SAID: tuple[dict[str, Any], ...] = (
    {"heads": 4},
    {"heads": 12},
    {"split": [6, 3, 3]},
    {"split": [6, 4, 2], "heads": [3, 1, 2]},
    {"split": [6, 4, 2], "groups": 2},
    {"split": [4, 4, 4], "groups": 4, "heads": [4, 2, 1]},
    {"split": [6, 3, 3], "dim": 1},
    {"heads": 6, "dim": 1},
    {"split": [4, 4, 4], "groups": 2, "dim": 1},
)


def by_hand(split: list[int] | None = None, heads: Any = None, groups: int = 1, dim: int = 0) -> list[Tensor]:
    """Rows or columns of each matrix, of 12."""
    parts = split or [12]
    counts = heads if isinstance(heads, list) else [heads or 1] * len(parts)
    turns = torch.arange(12).view(groups, -1).split([part // groups for part in parts], 1)
    return [own for part, count in zip(turns, counts, strict=True) for own in part.flatten().chunk(count)]


@pytest.mark.parametrize("said", SAID)
def test_matrices_are_those_that_are_said(said: dict[str, Any]) -> None:
    view, dim = View.of(12, **said), said.get("dim", 0)
    matrix = torch.randn(12, 5) if dim == 0 else torch.randn(5, 12)
    parts = view.cut(matrix)
    found = [one for part in parts for one in part]
    expected = [matrix.index_select(dim, own) for own in by_hand(**said)]
    assert len(found) == len(expected) == view.count
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(view.join(parts), matrix)
    assert [(len(part), *part.shape[1:]) for part in parts] == list(view.shapes(*matrix.shape))
    assert [view.shape_of(i, *matrix.shape) for i in range(view.count)] == [tuple(x.shape) for x in expected]


@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("bounds", [(0, 12), (0, 4), (4, 8), (5, 7), (7, 12), (3, 3)])
def test_a_rank_finds_its_part_of_each_matrix(said: dict[str, Any], bounds: tuple[int, int]) -> None:
    view, dim = View.of(12, **said), said.get("dim", 0)
    numbers = torch.empty(12, dtype=torch.long)
    for number, own in enumerate(by_hand(**said)):
        numbers[own] = number
    piece = torch.arange(12).view(12, 1) if dim == 0 else torch.arange(12).view(1, 12)
    piece = piece.narrow(dim, bounds[0], bounds[1] - bounds[0])
    seen = []
    for segment in view.segments(*bounds):
        for number, part in enumerate(segment.of(piece), segment.first):
            assert all(numbers[i] == number for i in part.flatten())
            assert view.shape_of(number, 12, 12) == view.shape_of(segment.first, 12, 12)
            seen += part.flatten().tolist()
    assert sorted(seen) == list(range(*bounds))


def test_rows_that_are_whole_matrices() -> None:
    view = View.of(12, split=[6, 4, 2], heads=[3, 1, 2])
    cut = view.within(4, 10)
    assert cut is not None and cut.shapes(6, 5) == ((1, 2, 5), (1, 4, 5))
    assert view.within(4, 9) is None and view.within(3, 12) is None
    assert view.within(12, 12) == View(())
    assert View.of(12, heads=3, dim=1).within(0, 12) is None
    assert View.of(12, split=[6, 6], groups=2).within(0, 12) is None


def test_the_matrices_with_most_work() -> None:
    assert most_work(View.of(12, split=[8, 2, 2]).shapes(12, 5)) == (8, 5)
    assert most_work(View.of(12, split=[4, 4, 4]).shapes(12, 5)) == (4, 5)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        ({"split": [6, 5]}, "adds up to 11, not to the 12"),
        ({"heads": 5}, "12 rows are no whole number for each of 5 heads"),
        ({"split": [6, 6], "heads": [2]}, "not one number for each of 2 parts"),
        ({"split": [6, 6], "groups": 4}, "6 rows are no whole number for each of 4 groups"),
        ({"heads": 2, "dim": 2}, "must be 0 for rows or 1 for columns"),
        ({"heads": 2, "dim": True}, "dim = True: must be 0"),
        *(({"heads": n}, f"heads = {n!r}: must be a positive") for n in (0, -1, False, True, 2.0, "x")),
        *(({"split": [6, n]}, f"split = {n!r}: must be a positive") for n in (0, True, 6.0)),
        *(({"groups": n}, f"groups = {n!r}: must be a positive") for n in (0, True, 2.0)),
    ],
)
def test_what_does_not_fit(said: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        View.of(12, **said)
