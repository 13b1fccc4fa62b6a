"""What is known of states that are not on the device: of all rows of one, and of the fetch that a step uses."""

from typing import Any, NamedTuple

import pytest
import torch

from compile_muon.offload.not_finite import NotFinite

CPU = torch.device("cpu")


class Sharded(NamedTuple):
    """Of a parameter, what is looked at."""

    fetches: int = 0
    name: str = "w"


def sharded(fetches: int = 0) -> Any:
    return Sharded(fetches)


@pytest.mark.parametrize("wrong", [0, 1])
def test_a_state_that_comes_in_rows_is_looked_at_in_all_of_them(wrong: int) -> None:
    known, rows = NotFinite({"w": {"exp_avg": "moment"}}, CPU), torch.zeros(2, 3)
    rows[wrong] = torch.nan
    for number, row in enumerate(rows):
        known.look([sharded()], [{"exp_avg": row}], more=number > 0)
    flag = known.of(sharded(), "moment")
    assert flag is not None and flag != 0
    known.look([sharded()], [{"exp_avg": torch.zeros(3)}], more=False)
    assert known.of(sharded(), "moment") == 0


def test_a_momentum_is_kept_of_the_fetch_that_the_step_uses() -> None:
    known = NotFinite({"w": {"momentum_buffer": "momentum"}}, CPU)
    for used, kept in ((1, False), (2, True)):
        known.moved(own := sharded(2), torch.ones(()))
        assert known.kept({own: used}) == ([own] if kept else [])
        assert known.of(own, "momentum") == kept
