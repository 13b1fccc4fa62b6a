"""What torchrun gives a rank, for libraries that read it: the harness starts its ranks without."""

import contextlib
import os
from collections.abc import Iterator
from unittest import mock

from support.reference import world_and_rank


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The environment of a rank; what a library adds to it is gone afterwards."""
    world, rank = world_and_rank()
    given = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "tests"}
    with mock.patch.dict(os.environ, {name: str(value) for name, value in given.items()} if world > 1 else {}):
        yield


@contextlib.contextmanager
def accelerated() -> Iterator[None]:
    """The same, and none of Accelerate's singletons left behind."""
    from accelerate.state import AcceleratorState, GradientState

    def forget() -> None:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()

    with launched():
        forget()
        try:
            yield
        finally:
            forget()
