"""Where ranks differ, and how it is said; with real ranks in tests/distributed/test_agreement.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch.distributed as dist

from compile_muon.agreement.compare import by_rank, compare, differing, ranks_named, worded

FACTS = {"lr": 0.1, "betas": (0.9, 0.95), "names": ["a", "b"]}


@pytest.mark.parametrize("world", [2, 3])
def test_the_odd_rank_is_found_wherever_it_is(world: int) -> None:
    for odd in range(world):
        for entry in FACTS:
            everyone: list[dict[str, Any]] = [dict(FACTS) for _ in range(world)]
            everyone[odd][entry] = None
            column = [FACTS[entry] if rank != odd else None for rank in range(world)]
            assert differing(everyone) == {entry: column}
            assert f"None on rank {odd}" in worded(differing(everyone))


def test_ranks_that_agree_differ_in_nothing() -> None:
    assert differing([FACTS, dict(reversed(FACTS.items()))]) == differing([]) == differing([{"x": math.nan}]) == {}


def test_one_process_sends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_gather_object", None)
    assert compare(FACTS, None) == {}


def test_of_many_ranks_and_values_few_are_named() -> None:
    assert ranks_named(range(8)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7"
    assert by_rank([*range(64), 63]).endswith("4 on rank 4 and 59 more")
    assert by_rank([1] + [0] * 999) == "1 on rank 0, 0 on ranks 1, 2, 3, 4, 5, 6, 7, 8, … (999 in all)"
    assert by_rank([3, 4, 3], [5, 7, 9]) == "4 on rank 7, 3 on ranks 5, 9"
