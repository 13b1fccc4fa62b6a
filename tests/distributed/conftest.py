"""The ranks that all distributed tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# --import-mode=importlib leaves sys.path alone; these helpers are shared by the files here and by the ranks.
sys.path.insert(0, str(Path(__file__).parent))

from support.harness import Ranks, RanksOf, single_process  # noqa: E402


@pytest.fixture(scope="session")
def ranks() -> Iterator[RanksOf]:
    """``ranks(world)``: processes started once per world size and session; world 1 is this process."""
    started: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        if world not in started:
            started[world] = single_process() if world == 1 else Ranks(world)
        return started[world]

    yield of
    for group in started.values():
        group.close()
