"""Positions of ranks: every one is somebody's, and they go back in order."""

import pytest
import torch

from compile_muon.passes.sequence.place import Place

LAYOUTS = [(size, ring) for size in range(1, 9) for ring in range(1, size + 1) if size % ring == 0]


@pytest.mark.parametrize(("size", "ring"), LAYOUTS)
def test_ranks_have_all_positions_once(size: int, ring: int) -> None:
    places = [Place(size, index, "", ring) for index in range(size)]
    for length in (1, 5, 24, 37):
        x = torch.arange(1, length + 1)[None]
        parts = [place.cut(x) for place in places]
        assert {part.shape[1] for part in parts} == {places[0].local(length)}
        assert torch.equal(places[0].in_order(torch.cat(parts, 1))[:, :length], x)
        for group, members in enumerate(_groups(parts, ring)):
            of_group = places[0].positions_of_group(group).take(places[0].pad(x), 1)
            assert torch.equal(torch.cat(members, 1), of_group)


def _groups(parts: list[torch.Tensor], ring: int) -> list[list[torch.Tensor]]:
    heads = len(parts) // ring
    return [parts[first : first + heads] for first in range(0, len(parts), heads)]


@pytest.mark.parametrize("ring", [2, 3, 4])
def test_under_a_causal_mask_groups_have_the_same_to_do(ring: int) -> None:
    length = 4 * ring
    seen = [
        sum(p + 1 for p in Place(ring, index, "", ring).cut(torch.arange(length)[None])[0]) for index in range(ring)
    ]
    assert len({int(each) for each in seen}) == 1


def test_neighbors_have_the_same_heads() -> None:
    assert [Place(6, index, "", 3).neighbors for index in range(6)] == [(4, 2), (5, 3), (0, 4), (1, 5), (2, 0), (3, 1)]
