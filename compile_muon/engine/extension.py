"""Extensions: a feature is one object, whose hooks the core calls without knowing the feature.

    optimizer = MuonZero(model, extensions=[Averages()])

:func:`hooks_of` collects overridden hooks once, so a hook that none overrides costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.hooks import Hooks, NormGroup, StateProvider
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.step_checks import StepChecks
from compile_muon.errors import config_error
from compile_muon.passes import GraphPass

if TYPE_CHECKING:
    from compile_muon.engine.engine import Engine


class Extension:
    """A feature of one optimizer. Each hook does nothing until it is overridden.

    Hooks run on every rank, in the order in which the optimizer has its extensions. A rank without rows of a parameter
    has an empty shard of it, so that all ranks make the same calls and meet in the same collectives.

    Attributes:
        engine: the optimizer's engine; set by :meth:`attach`.
        dynamo_passes: passes over Dynamo's graph of each frame that reads a parameter of the optimizer, ahead of
            :data:`~compile_muon.passes.DYNAMO_PASSES`.
        state_provider: keeps states that are not resident, see
            :class:`~compile_muon.engine.hooks.StateProvider`. At most one extension has one.
        peers: other optimizers that decide with this one, see :class:`~compile_muon.engine.hooks.NormGroup`. At most
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

    def overrides(hook: str) -> list[Any]:
        return [
            getattr(extension, hook)
            for extension in extensions
            if getattr(type(extension), hook) is not getattr(Extension, hook)
        ]

    calls: dict[str, Any] = {
        f.name: tuple(overrides(f.name)) for f in fields(Hooks) if callable(getattr(Extension, f.name, None))
    }
    providers = [extension.state_provider for extension in extensions]
    in_steps = [
        extension
        for extension, provider in zip(extensions, providers, strict=True)
        if provider or extension.peers or {*overrides("facts"), *overrides("after_commit")}
    ]
    return Hooks(
        dynamo_passes=tuple(dynamo_pass for extension in extensions for dynamo_pass in extension.dynamo_passes),
        state_provider=next((provider for provider in providers if provider is not None), StateProvider()),
        peers=next((extension.peers for extension in extensions if extension.peers is not None), None),
        unrecorded=next((extension.unrecorded for extension in in_steps if extension.unrecorded is not None), None),
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
