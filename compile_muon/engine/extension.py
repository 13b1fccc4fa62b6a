"""Extensions: a feature is one object, whose hooks the core calls without knowing the feature.

    optimizer = MuonZero(model, extensions=[Averages()])

:func:`hooks_of` collects overridden hooks once, so a hook that none overrides costs nothing. Beside hooks an extension
may be a keeper of states that are not resident, and know other optimizers that decide over a step together with this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from compile_muon.engine.decision import Facts
from compile_muon.engine.dtensors import local_tensor
from compile_muon.errors import LedgerError, config_error
from compile_muon.passes import GraphPass

if TYPE_CHECKING:
    from compile_muon.engine.engine import Engine
    from compile_muon.engine.sharded_param import ShardedParam
    from compile_muon.engine.step_checks import StepChecks
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


_Bucketwise: TypeAlias = "Iterator[tuple[Sequence[ShardedParam], Sequence[MutableMapping[str, Tensor]]]]"
#: ``(parameters, request)`` -> some of the parameters at a time, and the states of each, to which writes are kept. A
#: momentum that its fetch has moved is not among them.
ProvideStates: TypeAlias = "Callable[[Sequence[ShardedParam], StateRequest], _Bucketwise]"


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

    def provide(
        self, sharded_params: Sequence[ShardedParam], what: StateRequest, step: int
    ) -> Iterator[tuple[Sequence[ShardedParam], Sequence[MutableMapping[str, Tensor]]]]:
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


class NormGroup:
    """The peers of an optimizer, such as those of other pipeline stages; here none. A subclass overrides the methods,
    whose results are equal on all peers."""

    alone = True  # no peers: ``confer`` need not be called

    def step(self, number: int) -> AbstractContextManager[None]:
        """Return the context of step ``number`` (from 1). If the step raises, waiting peers learn of it."""
        return nullcontext()

    def confer(self, facts: Facts) -> Facts:
        """Meet ahead of a decision; return ``facts`` with the gradient norm over all peers.

        Raises:
            LedgerError: a peer refuses the step, or is in another one.
            PeerError: a peer does not come.
        """
        return facts

    def confirm(self, *, wrong: bool) -> None:
        """Meet ahead of the first write, after directions were made; ``wrong``: some of this optimizer's are not
        finite. Raises as :meth:`confer`."""

    def here(self) -> str:
        """Return this optimizer's place among the peers, for an error; with a leading space."""
        return ""

    def elsewhere(self) -> str:
        """Return the peers that found a non-finite number, for an error; empty if there are none."""
        return ""


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
    peers: NormGroup = field(default_factory=NormGroup)  # none by default
    unrecorded: str | None = None  # why no step is in a CUDA graph; None if steps may be


class Extension:
    """A feature of one optimizer. Each hook does nothing until it is overridden.

    Hooks run on every rank, in the order in which the optimizer has its extensions. A rank without rows of a parameter
    has an empty shard of it, so that all ranks make the same calls and meet in the same collectives.

    Attributes:
        engine: the optimizer's engine; set by :meth:`attach`.
        dynamo_passes: passes over Dynamo's graph of each frame that reads a parameter of the optimizer, ahead of
            :data:`~compile_muon.passes.DYNAMO_PASSES`.
        state_provider: keeps states that are not resident, see
            :class:`~compile_muon.engine.state_provider.StateProvider`. At most one extension has one.
        peers: other optimizers that decide with this one, see :class:`~compile_muon.engine.peers.NormGroup`. At most
            one extension has them.
        unrecorded: why a step is in no CUDA graph. Set it to None if :meth:`facts` and :meth:`after_commit` only launch
            kernels, on tensors that keep their addresses: a replayed graph calls no Python.
    """

    engine: Engine
    dynamo_passes: Sequence[GraphPass] = ()
    state_provider: StateProvider | None = None
    peers: NormGroup | None = None
    unrecorded: str | None = "an extension may ask the host"

    def attach(self, engine: Engine) -> None:
        """Take the engine of the optimizer, which has all its parts but state. Called once."""
        self.engine = engine

    # ------------------------------------------------------------------ frames

    def before_forward(self, groups: frozenset[str], integers: Sequence[Tensor]) -> None:
        """Run ahead of a compiled forward.

        Args:
            groups: names of the process groups of its collectives.
            integers: its tensor inputs that are not floating point, such as token ids.
        """

    def notify(self, sharded: ShardedParam, what: str, *facts: Any) -> None:
        """Receive ``facts`` that an op in a graph has found about a parameter.

        Args:
            what: kind of the facts, on which the op and its extension agree, see
                :meth:`~compile_muon.passes.language.holder.Holder.notify`.
        """

    def dropped(self, sharded: ShardedParam) -> None:
        """Drop what was noted of a parameter whose gradient is gone: after a step, and ahead of a backward that finds
        no ``.grad``."""

    # ------------------------------------------------------------------ a step, in this order

    def before_step(self) -> None:
        """Run at the beginning of a step, before it reads anything."""

    def check(self) -> None:
        """Raise if the step is forbidden. No collectives here.

        Raises:
            UnsupportedModelError: all ranks then raise it, once they have met.
        """

    def facts(self, checks: StepChecks) -> None:
        """Add numbers that decide over the step to the checks, with :meth:`~.StepChecks.add_wrong`, under the same
        names on all ranks. They are summed over the ranks with the other checks."""

    def why_not_finite(self) -> tuple[str, str] | None:
        """Return the cause of a non-finite step and the remedy; None if this feature is not the cause.

        Collective: all ranks of a refused step call it.
        """

    def after_commit(self, found_inf: Tensor | None) -> None:
        """Run after weights and states are written, before resident weights are gathered.

        Args:
            found_inf: 1.0 on the device if the step has written nothing; None if the host knows that it has written.
        """

    # ------------------------------------------------------------------ state

    def kept(self, sharded: ShardedParam, name: str) -> Tensor:
        """Return this rank's part of the state ``name`` that :meth:`state` began."""
        return local_tensor({**self.engine.step.optimizer.state[sharded.param]}[name])

    def state(self, sharded: ShardedParam) -> Mapping[str, Tensor]:
        """Return the initial states that this feature keeps of a trained parameter, by name in the optimizer's state.

        They are saved, loaded and resharded with the parameter. Names have no slash.

        Returns:
            Tensors of the shape of ``sharded.local``, of any dtype, in memory of their own; or 0-dim tensors, equal on
            all ranks. In ``optimizer.state`` they are DTensors where the parameter is one.
        """
        return {}

    def loaded(self) -> None:
        """Run after weights or states were written from outside."""

    # ------------------------------------------------------------------ what users read

    def metrics(self) -> Mapping[str, float]:
        """Return numbers of the latest step for :meth:`MuonZero.metrics`; NaN where unknown."""
        return {}

    def totals(self) -> Mapping[str, int]:
        """Return numbers since the start for :meth:`MuonZero.totals`."""
        return {}


def hooks_of(extensions: Sequence[Extension]) -> Hooks:
    """Return the overridden hooks of these extensions."""

    def own(hook: str) -> list[Any]:
        return [getattr(each, hook) for each in extensions if getattr(type(each), hook) is not getattr(Extension, hook)]

    calls: dict[str, Any] = {
        f.name: tuple(own(f.name)) for f in fields(Hooks) if callable(getattr(Extension, f.name, None))
    }
    providers = [each.state_provider for each in extensions]
    in_steps = [
        each
        for each, provider in zip(extensions, providers, strict=True)
        if provider or each.peers or {*own("facts"), *own("after_commit")}
    ]
    return Hooks(
        dynamo_passes=tuple(each for extension in extensions for each in extension.dynamo_passes),
        state_provider=next((provider for provider in providers if provider is not None), StateProvider()),
        peers=next((each.peers for each in extensions if each.peers is not None), NormGroup()),
        unrecorded=next((each.unrecorded for each in in_steps if each.unrecorded is not None), None),
        **calls,
    )


def check_extensions(extensions: Sequence[Extension]) -> None:
    """Raise ConfigError for the first user input that is no extension, or belongs to another optimizer."""
    for extension in extensions:
        if not isinstance(extension, Extension):
            remedy = "give objects of subclasses of it, extensions=[Average()]"
            raise config_error("extensions", extension, "is no compile_muon.Extension", remedy)
        if hasattr(extension, "engine"):
            name = type(extension).__name__
            raise config_error("extensions", name, "belongs to another optimizer", "make one for each optimizer")
