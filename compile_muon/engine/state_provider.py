"""What a step and its graphs ask of whoever keeps states that may not be resident."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from compile_muon.errors import LedgerError

if TYPE_CHECKING:
    from compile_muon.engine.sharded_param import ShardedParam
    from compile_muon.passes.language.spec import ParamSpec

__all__ = ["GRADIENT", "MASTER", "ROWS", "WEIGHT", "ProvideStates", "StateProvider", "StateRequest"]

#: the state that is a master weight, of parameters that are rounded copies of one
MASTER = "master_weight"
#: beside the states of a parameter whose step the host computes: what it writes, and along what
WEIGHT, GRADIENT = "weight", "gradient"
#: beside states that are provided by rows: these rows of the parameter, whose gradient is ``GRADIENT`` then
ROWS = "rows"


class StateRequest(Enum):
    """What of parameters a step asks for.

    Attributes:
        STATES: momenta and what methods keep.
        STATES_MASTERS_READ: the same, and master weights to be read only.
        MASTERS: master weights, to be written.
        MASTERS_READ: master weights, to be read only, ahead of the commit.
        ALL: states and master weights, to be written.
    """

    STATES = "states"
    STATES_MASTERS_READ = "states, and masters to be read"
    MASTERS = "masters"
    MASTERS_READ = "masters to be read"
    ALL = "all"


_Bucketwise: TypeAlias = "Iterator[tuple[Sequence[ShardedParam], Sequence[MutableMapping[str, Tensor]]]]"
#: parameters, what of them -> some of them after the other, each with its states: what is written to these is kept. The
#: momentum is one of them, but where it was moved already.
ProvideStates: TypeAlias = "Callable[[Sequence[ShardedParam], StateRequest], _Bucketwise]"


class StateProvider:
    """All states are resident. A subclass keeps some of them, and provides them.

    Attributes:
        all_resident: whether nothing is kept here, so that nobody need ask.
        places: the states that are kept here, by names of parameter and state: in which folder a file has it, None in
            memory.
        bytes_off_device: of this rank's state that is not on the device.
        bytes_in_buffers: of the device that buckets of it take turns in.
    """

    all_resident = True
    places: Mapping[str, Mapping[str, Path | None]] = MappingProxyType({})
    bytes_off_device = bytes_in_buffers = 0

    def reserve(self, specs: Mapping[str, ParamSpec], owners: Mapping[str, tuple[int, ...]]) -> None:
        """Make room for what will be kept here, ahead of the first change of the model; on every rank.

        Args:
            specs: of all parameters, by name.
            owners: of the matrices of those with states at owners, by name.
        """

    def keep_master(self, name: str, master: Tensor) -> None:
        """Begin with this master weight: what this rank's part of the parameter was before it was rounded."""

    def fetch(self, sharded: ShardedParam, grad: Tensor, out: Tensor) -> Tensor:
        """Write the momentum of a parameter to ``out``; a direction is made of it and ``grad``."""
        raise LedgerError(f"{sharded.name}: its momentum is kept by the optimizer of the model that this is a copy of")

    def provide(
        self, sharded_params: Sequence[ShardedParam], what: StateRequest, step: int
    ) -> Iterator[tuple[Sequence[ShardedParam], Sequence[MutableMapping[str, Tensor]]]]:
        """The states of these parameters, some after the other; what is written to them is kept.

        Those whose step the host computes have ``GRADIENT`` among them, and ``WEIGHT`` without a master weight, all in
        host memory. They are not provided where the step is skipped.

        States of one parameter that are larger than a buffer come some rows after the other, where a method works
        element by element: with ``ROWS`` and ``GRADIENT`` of the same rows.

        Args:
            sharded_params: in any order.
            what: of them. The block that is given master weights to write writes to the parameters too: they are put
                back if the step fails.
            step: which one.
        """
        yield from ()

    def writing(
        self, fetches: Mapping[ShardedParam, int], found_inf: Tensor | None
    ) -> AbstractContextManager[Callable[[], None]]:
        """Around all that a step writes to states: on every rank all of it is kept, or nothing. Gradients are final.

        What it gives is called ahead of what takes all ranks: no disk has failed until now, or it raises on all.

        Args:
            fetches: of momenta that were fetched, which one a direction that the step uses is made of. Those that were
                moved toward the gradient then are kept, and not provided.
            found_inf: 1.0 on the device for a step that writes nothing; None if the host knows that it does.
        """
        return nullcontext(lambda: None)

    def wrong(self, sharded: ShardedParam, label: str) -> Tensor | None:
        """Whether what is kept of a state is not finite (``[]``, not 0 if so), as known since it was written; None if
        it is not kept here."""
        return None

    def own(self) -> None:
        """What users put into the optimizer's state, as they may, becomes what is kept."""
