"""A feature is an object: what it adds to an optimizer stands in one place, and the core only loops over hooks.

    optimizer = MuonZero(model, extensions=[Averages()])

Where no extension overrides a hook, the core loops over ``()``: :func:`hooks_of` asks for that once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import Tensor

from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.hooks import Hooks
from compile_muon.engine.peers import Peers
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import StateProvider
from compile_muon.engine.step_checks import StepChecks
from compile_muon.errors import config_error
from compile_muon.passes import GraphPass

if TYPE_CHECKING:
    from compile_muon.engine.engine import Engine

__all__ = ["Extension", "check_extensions", "hooks_of"]


class Extension:
    """A feature of one optimizer. Each hook does nothing until it is overridden.

    Hooks run on every rank; of several extensions in the order in which the optimizer has them. A rank that has no
    rows of a parameter has an empty shard of it, so that all ranks make the same calls, and meet in the same
    collectives.

    Attributes:
        engine: the optimizer at work; from :meth:`attach` on.
        dynamo_passes: for Dynamo's graph of each frame that reads a parameter of the optimizer, ahead of
            :data:`~compile_muon.passes.DYNAMO_PASSES`.
        state_provider: keeps states that are not resident, see
            :class:`~compile_muon.engine.state_provider.StateProvider`. One extension at most has one, and one has
            ``peers``.
        peers: other optimizers that decide with this one, see :class:`~compile_muon.engine.peers.Peers`.
        unrecorded: why a step is in no CUDA graph; None where :meth:`facts` and :meth:`after_commit` do nothing but
            launch, on tensors that stay where they are: a graph that is replayed calls no Python.
    """

    engine: Engine
    dynamo_passes: Sequence[GraphPass] = ()
    state_provider: StateProvider | None = None
    peers: Peers | None = None
    unrecorded: str | None = "an extension may ask the host"

    def attach(self, engine: Engine) -> None:
        """Belong to an optimizer, which has all its parts but state; called once."""
        self.engine = engine

    # ------------------------------------------------------------------ frames

    def before_forward(self, groups: frozenset[str], integers: Sequence[Tensor]) -> None:
        """A compiled forward is about to run.

        Args:
            groups: names of the process groups that its collectives meet in.
            integers: those of its inputs that are no floating-point tensors, as ids of tokens.
        """

    def told(self, sharded: ShardedParam, what: str, *facts: Any) -> None:
        """An op that a pass has put into a graph has something to say of a parameter.

        Args:
            what: that the op and its extension agree on, see :meth:`~compile_muon.passes.language.holder.Holder.tell`.
        """

    def dropped(self, sharded: ShardedParam) -> None:
        """A parameter has no gradient (any more), so what was noted of it goes, too: behind a step, and ahead of a
        backward that finds none."""

    # ------------------------------------------------------------------ a step, in this order

    def before_step(self) -> None:
        """A step begins, and has looked at nothing yet."""

    def check(self) -> None:
        """Raise what forbids a step; nothing is sent here.

        Raises:
            UnsupportedModelError: all ranks then raise it, once they have met.
        """

    def facts(self, checks: StepChecks) -> None:
        """Put into the checks what decides over the step, with :meth:`~.StepChecks.add_wrong`: the same names on all
        ranks. They are summed over the ranks with all else."""

    def why_not_finite(self) -> tuple[str, str] | None:
        """Why what a step would write is not finite, and the remedy; None if this feature has no part in it.

        Collective: a step that is refused asks all its ranks."""

    def after_commit(self, found_inf: Tensor | None) -> None:
        """Weights and states are written, and resident weights not gathered yet.

        Args:
            found_inf: 1.0 on the device for a step that has written nothing; None where the host knows that it has.
        """

    # ------------------------------------------------------------------ state

    def kept(self, sharded: ShardedParam, name: str) -> Tensor:
        """This rank's part of what :meth:`state` has begun."""
        return local_tensor({**self.engine.step.optimizer.state[sharded.param]}[name])

    def state(self, sharded: ShardedParam) -> Mapping[str, Tensor]:
        """What is kept of a trained parameter, as it begins, by name in the optimizer's state: saved, loaded and
        resharded with it.

        Returns:
            Tensors of the shape of ``sharded.local``, of any dtype, in memory of their own; or 0-dim, then the same on
            all ranks. In ``optimizer.state`` they are DTensors where the parameter is one. A name has no slash.
        """
        return {}

    def loaded(self) -> None:
        """Weights or states were written from outside."""

    # ------------------------------------------------------------------ what users read

    def metrics(self) -> Mapping[str, float]:
        """Of the latest step, for :meth:`MuonZero.metrics`; NaN for what is not known."""
        return {}

    def totals(self) -> Mapping[str, int]:
        """Since the start, for :meth:`MuonZero.totals`."""
        return {}


def hooks_of(extensions: Sequence[Extension]) -> Hooks:
    """What these extensions do, by occasion."""

    def own(hook: str) -> list[Any]:
        return [getattr(each, hook) for each in extensions if getattr(type(each), hook) is not getattr(Extension, hook)]

    calls: dict[str, Any] = {
        f.name: tuple(own(f.name)) for f in fields(Hooks) if callable(getattr(Extension, f.name, None))
    }
    providers = [each.state_provider for each in extensions]
    asked = [
        each
        for each, kept in zip(extensions, providers, strict=True)
        if kept or each.peers or {*own("facts"), *own("after_commit")}
    ]
    return Hooks(
        dynamo_passes=tuple(each for extension in extensions for each in extension.dynamo_passes),
        state_provider=next((kept for kept in providers if kept is not None), StateProvider()),
        peers=next((each.peers for each in extensions if each.peers is not None), Peers()),
        unrecorded=next((each.unrecorded for each in asked if each.unrecorded is not None), None),
        **calls,
    )


def check_extensions(extensions: Sequence[Extension]) -> None:
    """Raise what a user gave that is no extension, or belongs to another optimizer.

    Raises:
        ConfigError: about the first.
    """
    for each in extensions:
        if not isinstance(each, Extension):
            remedy = "give objects of subclasses of it, extensions=[Average()]"
            raise config_error("extensions", each, "is no compile_muon.Extension", remedy)
        if hasattr(each, "engine"):
            name = type(each).__name__
            raise config_error("extensions", name, "belongs to another optimizer", "make one for each optimizer")
