"""What goes wrong behind training is told once, as an error of ours."""

from __future__ import annotations

import pytest

from compile_muon import CheckpointError
from compile_muon.checkpoint.background import Background


@pytest.mark.parametrize(
    ("error", "said"),
    [(CheckpointError("rank 1: full"), "^rank 1: full"), (KeyError("x"), "was not written: KeyError: 'x'")],
)
def test_errors_wait_for_who_asks(error: Exception, said: str) -> None:
    def fail() -> None:
        raise error

    background = Background()
    background.wait()  # nothing was started
    background.start(fail)
    with pytest.raises(CheckpointError, match=said):
        background.wait()
    background.wait()
    done: list[int] = []
    background.start(lambda: done.append(1))
    background.wait()
    assert done == [1]
