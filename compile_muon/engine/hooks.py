"""What extensions put into one optimizer: their overridden hooks, over which the core loops, the keeper of states that
are not resident, and other optimizers that decide over a step together with this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

from compile_muon.engine.decision import Facts
from compile_muon.errors import LedgerError
from compile_muon.passes import GraphPass

if TYPE_CHECKING:
    from compile_muon.engine.sharded_param import ShardedParam
    from compile_muon.passes.language.spec import ParamSpec

#: name of the master weight among the states of a parameter that is its rounded copy
MASTER = "master_weight"
#: weight and gradient, added to the states of a parameter whose step the host computes
WEIGHT, GRADIENT = "weight", "gradient"
#: rows of the parameter, added to states that are provided by rows; ``GRADIENT`` then has the same rows
ROWS = "rows"


class StateRequest(Enum):
    """The part of parameters' states that a step asks for."""

    STATES = "states"  # momenta and states of methods, to be written
    STATES_MASTERS_READ = "states, and masters to be read"
    MASTERS = "masters"  # master weights, to be written
    MASTERS_READ = "masters to be read"  # to be read, ahead of the commit
    ALL = "all"  # states and master weights, to be written


#: Some of the parameters at a time, and the states of each. The provider keeps what is written to them. A momentum that
#: its fetch has already moved is not among them.
Provided: TypeAlias = "Iterator[tuple[Sequence[ShardedParam], Sequence[MutableMapping[str, Tensor]]]]"
ProvideStates: TypeAlias = "Callable[[Sequence[ShardedParam], StateRequest], Provided]"


class StateProvider:
    """The keeper of states that are not resident. This one keeps none; a subclass keeps some."""

    all_resident = True  # this provider keeps no states
    # Kept states by names of parameter and state: the folder of their files, None in memory.
    places: Mapping[str, Mapping[str, Path | None]] = MappingProxyType({})
    # This rank's states off the device, and device buffers through which they pass.
    bytes_off_device = bytes_in_buffers = 0

    def reserve(self, specs: Mapping[str, ParamSpec], owners: Mapping[str, tuple[int, ...]]) -> None:
        """Allocate for the states of all parameters, by name, ahead of the first change of the model; on every rank.
        ``owners``: of matrices with states at owners."""

    def keep_master(self, name: str, master: Tensor) -> None:
        """Take the initial master weight of a parameter: this rank's part of it before rounding."""

    def fetch(self, sharded: ShardedParam, grad: Tensor, out: Tensor) -> Tensor:
        """Write the momentum to ``out``, for a direction of ``grad``; a subclass may move its own copy toward it."""
        raise LedgerError(f"{sharded.name}: its momentum is kept by the optimizer of the model that this is a copy of")

    def provide(self, sharded_params: Sequence[ShardedParam], what: StateRequest, step: int) -> Provided:
        """Yield the states of these parameters, some parameters at a time, for step number ``step``; writes to them are
        kept.

        Where the host computes the step of a parameter, the states are in host memory, with ``GRADIENT``, and
        ``WEIGHT`` if there is no master weight; in a skipped step they are not provided. Where states of one parameter
        exceed a buffer (elementwise methods), they come by rows, with ``ROWS`` and ``GRADIENT`` of the same rows. The
        caller may write the parameters with the masters that it gets; they are restored if the step fails.
        """
        yield from ()

    def writing(
        self, fetches: Mapping[ShardedParam, int], found_inf: Tensor | None
    ) -> AbstractContextManager[Callable[[], None]]:
        """Return the context of all writes of a step to states, with final gradients: on every rank all of them are
        kept, or none.

        It yields a function to call ahead of collectives, which raises on all ranks if a disk has failed on any.
        ``fetches``: by parameter, the number of the fetch that the used direction was made of. If this fetch moved the
        momentum toward the gradient, the moved copy is kept, and not provided. ``found_inf``: 1.0 on the device for a
        step that writes nothing; None if it does.
        """
        return nullcontext(lambda: None)

    def wrong(self, sharded: ShardedParam, label: str) -> Tensor | None:
        """Return whether a kept state was not finite when written, ``[]``, nonzero if so; None if the state is not kept
        here."""
        return None

    def own(self) -> None:
        """Copy states that users put into ``optimizer.state`` to the kept ones."""


class NormGroup(Protocol):
    """The peers of an optimizer, such as those of other pipeline stages. Results of the methods are equal on all
    peers."""

    def step(self, number: int) -> AbstractContextManager[None]:
        """Return the context of step ``number`` (from 1). If the step raises, waiting peers learn of it."""

    def confer(self, facts: Facts) -> Facts:
        """Meet ahead of a decision; return ``facts`` with the gradient norm over all peers.

        Raises:
            LedgerError: a peer refuses the step, or is in another one.
            PeerError: a peer does not come.
        """

    def confirm(self, *, wrong: bool) -> None:
        """Meet ahead of the first write, after directions were made; ``wrong``: some of this optimizer's are not
        finite. Raises as :meth:`confer`."""

    def here(self) -> str:
        """Return this optimizer's place among the peers, for an error; with a leading space."""

    def elsewhere(self) -> str:
        """Return the peers that found a non-finite number, for an error; empty if there are none."""


@dataclass(frozen=True, eq=False)
class Hooks:
    """The overridden hooks, by name of the method of :class:`~compile_muon.engine.extension.Extension`."""

    dynamo_passes: tuple[GraphPass, ...] = ()  # of all extensions
    before_forward: tuple[Callable[[frozenset[str], Sequence[Tensor]], None], ...] = ()
    notify: tuple[Callable[..., None], ...] = ()
    dropped: tuple[Callable[[ShardedParam], None], ...] = ()
    before_step: tuple[Callable[[], None], ...] = ()
    check: tuple[Callable[[], None], ...] = ()
    facts: tuple[Callable[..., None], ...] = ()
    why_not_finite: tuple[Callable[[], tuple[str, str] | None], ...] = ()
    after_commit: tuple[Callable[[Tensor | None], None], ...] = ()
    state: tuple[Callable[[ShardedParam], Mapping[str, Tensor]], ...] = ()
    loaded: tuple[Callable[[], None], ...] = ()
    metrics: tuple[Callable[[], Mapping[str, float]], ...] = ()
    totals: tuple[Callable[[], Mapping[str, int]], ...] = ()
    state_provider: StateProvider = field(default_factory=StateProvider)  # by default all states are resident
    peers: NormGroup | None = None
    unrecorded: str | None = None  # why no step is in a CUDA graph; None if steps may be
