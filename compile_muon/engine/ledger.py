"""The ledger: one optimizer's policy for the backward graphs that produce gradients of its parameters.

It decides, per gradient and backward visit, what the compiled backward does beside computing it: keep it on the rank
(stage 1 between a step's micro-batches), reduce it, or also make the Muon direction of it. The last is a speculation,
which ``step()`` uses or throws away (``engine/speculation.py``): the ledger decides when it pays, and no number hangs
on it. docs/why/ledger.md draws the picture.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from compile_muon.agreement.frame_log import FrameLog
from compile_muon.agreement.status import EVALUATION, TRAINING, RankStatus
from compile_muon.config import FrameOptions
from compile_muon.engine.forwards import Forwards
from compile_muon.engine.hooks import Hooks
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import warn_user
from compile_muon.passes import Purpose
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.costs import Costs
from compile_muon.passes.ranges import ranged

__all__ = ["Counters", "Ledger"]

NOTHING = Traffic()


@dataclass
class Counters:
    """What has happened since the optimizer was made.

    Args:
        speculated: directions that backward graphs made.
        used: of them, those a step applied.
        in_step: directions that ``step()`` made.
        skipped: steps left out for something that was not finite.
        skipped_in_a_row: of them, those since the last step that was not.
        graphs: graphs that were lowered and compiled.
        traffic: what compiled graphs, steps and refreshes of this process sent.
    """

    speculated: int = 0
    used: int = 0
    in_step: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    graphs: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def discarded(self) -> int:
        """Directions of backward graphs that no step applied, or not yet."""
        return self.speculated - self.used

    def numbers(self, *, by_axis: bool) -> dict[str, int]:
        """What :meth:`compile_muon.MuonZero.totals` tells of them.

        Args:
            by_axis: whether bytes are told by axis of the mesh as well.
        """
        traffic = self.traffic
        return {
            "bytes_sent": traffic.bytes_sent,
            **{f"bytes_sent_{axis}": sent for axis, sent in traffic.by_axis if by_axis},
            "directions_speculated": self.speculated,
            "directions_used": self.used,
            "directions_discarded": self.discarded,
            "directions_in_step": self.in_step,
            "newton_schulz_matrices": traffic.matrices,
            "newton_schulz_calls": traffic.calls,
            "skipped_steps": self.skipped,
        }


@dataclass(eq=False)
class Ledger:
    """Policy of one optimizer.

    Args:
        accumulation_steps: micro-batches per step, or None when only the loop knows.
        update: "auto" speculates until directions are thrown away several steps in a row, "backward" always, "step"
            never.
        sharded_params: the optimizer's parameters.
        accumulating: inside :meth:`accumulate`.
        before_backward: called before a backward graph runs.
        costs: what the machine costs, as each of its ranks sees it; the same on every rank.
        options: of the frame compiled last, eager code before one is; the step graph uses them too.
        status: where this rank is, for the others to read.
        frame_log: visits since the last step that met other ranks.
        stepped: whether there is an optimizer, which a copied module does not have.
        checks_later: whether a step's checks are read in the next; Muon matrices then note how autograd
            left ``.grad`` (``UnreducedSums.untouched``).
        hooks: of the optimizer's extensions.
        gathers: of the latest refresh of resident weights, and which they were of, see :mod:`.resident`.
        left: bytes that a backward graph has held, and holds no more in ``step()``.
        forwards: of the model that are under way.
        whole: names of parameters that are whole and plain for the moment (``full_parameters``).
    """

    accumulation_steps: int | None
    update: str
    sharded_params: list[ShardedParam] = field(default_factory=list)
    accumulating: bool = False
    before_backward: Callable[[], None] | None = None
    costs: Costs = Costs()
    options: FrameOptions = FrameOptions(codegen="eager")
    counters: Counters = field(default_factory=Counters)
    status: RankStatus = field(default_factory=RankStatus)
    frame_log: FrameLog = field(default_factory=FrameLog)
    stepped: bool = True
    checks_later: bool = False
    hooks: Hooks = field(default_factory=Hooks)
    gathers: tuple[Any, Any] | None = None
    left: int = 0
    forwards: Forwards = field(default_factory=Forwards)
    whole: set[str] = field(default_factory=set)
    _expected: int | None = None
    _warned: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._expected = self.accumulation_steps

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        """No optimizer steps a copied module: its gradients stay gradients."""
        own: dict[str, Any] = {"options": copy.copy(self.options), "forwards": copy.deepcopy(self.forwards, memo)}
        copied = Ledger(accumulation_steps=None, update="step", stepped=False, **own)
        memo[id(self)] = copied
        return copied

    def phase(self, *, evaluates: bool) -> str:
        """What a forward gathers weights for.

        Args:
            evaluates: whether it keeps nothing for a backward. While one is owed it is training all the same:
                activation checkpointing of old runs blocks without gradients first.
        """
        return EVALUATION if evaluates and not self.balance() else TRAINING

    # ------------------------------------------------------------------ what it is told

    def begin(self, sharded_params: Sequence[ShardedParam], hooks: Hooks, *, checks_later: bool) -> None:
        """The optimizer has its parameters and extensions now."""
        self.sharded_params, self.hooks, self.checks_later = list(sharded_params), hooks, checks_later

    def join(self, sharded: ShardedParam) -> None:
        """One parameter more, of a copied module."""
        self.sharded_params.append(sharded)

    def call_before_backward(self, call: Callable[[], None]) -> None:
        """Have a call made ahead of each backward graph."""
        self.before_backward = call

    def runs(self, options: FrameOptions) -> None:
        """A frame with these options runs forward."""
        self.options = options

    def compiled(self, left: int = 0) -> None:
        """A graph was lowered and compiled.

        Args:
            left: bytes that a backward graph has held, and holds no more in ``step()``.
        """
        self.counters.graphs += 1
        self.left = max(self.left, left)

    def count(self, traffic: Traffic = NOTHING, *, speculated: int = 0, used: int = 0, in_step: int = 0) -> None:
        """Add what a graph sent and computed, and directions that backward made, steps applied, and steps made."""
        counters = self.counters
        counters.speculated += speculated
        counters.used += used
        counters.in_step += in_step
        if traffic is not NOTHING:
            counters.traffic = counters.traffic + traffic
            self.status.collectives += sum(number for _, number in traffic.collectives)

    def skipped(self) -> int:
        """A step was left out; returns how many in a row were."""
        self.counters.skipped += 1
        self.counters.skipped_in_a_row += 1
        return self.counters.skipped_in_a_row

    def written(self) -> None:
        """A step was not."""
        self.counters.skipped_in_a_row = 0

    def latest_gathers(self, of: Any, make: Callable[[], Any]) -> Any:
        """What :attr:`gathers` has, made anew where it is of others."""
        if self.gathers is None or self.gathers[0] != of:
            self.gathers = of, make()
        return self.gathers[1]

    # ------------------------------------------------------------------ backward

    def purpose(self, sharded: ShardedParam, call: int, *, receives: bool, speculates: bool) -> Purpose:
        """A backward visit: note it, and say what the graph is to do with this parameter's gradient.

        Args:
            sharded: the parameter.
            call: number of the backward call under way.
            receives: whether autograd will add the gradient to ``.grad``.
            speculates: whether the graph could make a direction of it.
        """
        alone = sharded.visits.backward(call, counts=receives and not self.accumulating)
        if not receives:
            return Purpose.ACCUMULATE if sharded.spec.layout.accumulates else Purpose.REDUCE
        if sharded.spec.layout.accumulates and not self._may_be_last(sharded, self.accumulation_steps or 1):
            return Purpose.ACCUMULATE
        worthwhile = speculates and alone and self._may_be_last(sharded, self._expected)
        return Purpose.SPECULATE if worthwhile and self._speculates(sharded) else Purpose.REDUCE

    def keeps(self, sharded: ShardedParam, call: int) -> bool:
        """Whether a gradient that eager code made stays on the rank, as :meth:`purpose` says of graphs."""
        sharded.visits.backward(call, counts=not self.accumulating, compiled=False)
        return not self._may_be_last(sharded, self.accumulation_steps or 1)

    def _may_be_last(self, sharded: ShardedParam, expected: int | None) -> bool:
        """Whether this can be the step's last micro-batch; with an unknown number the first step cannot tell."""
        return not self.accumulating and expected is not None and sharded.visits.backwards >= expected

    def _speculates(self, sharded: ShardedParam) -> bool:
        muon = sharded.spec.muon
        if muon is None or not muon.speculates:
            return False
        if self.update == "auto":
            return sharded.speculations.stopped is None
        return self.update == "backward"

    @property
    def replays_between(self) -> bool:
        """Whether CUDA graphs are replayed between the micro-batches of a step."""
        return self.options.cuda_graphs and (self.accumulation_steps != 1 or self.accumulating)

    def is_last(self, sharded: ShardedParam) -> bool:
        """Whether the backward under way can be the step's last of this parameter."""
        return self._may_be_last(sharded, self.accumulation_steps or self._expected)

    @property
    def speculating(self) -> bool:
        """Whether any backward may still make directions: the same on every rank."""
        return self.update != "step" and any(map(self._speculates, self.sharded_params))

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside are not the step's last: gradients only accumulate."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    # ------------------------------------------------------------------ step

    def discarded(self, sharded_params: Sequence[ShardedParam], reason: str) -> None:
        """A step throws these directions away; several times in a row, and "auto" stops making them.

        Args:
            reason: "clipped" by ``gradient_clipping``, or "edited" by whatever came after backward.
        """
        stopped = [sharded.name for sharded in sharded_params if sharded.speculations.discarded(reason)]
        if not stopped or self.update != "auto" or reason in self._warned:
            return
        self._warned.add(reason)
        cause = {
            "clipped": "the gradient norm was over gradient_clipping (a trainer's max_grad_norm); once it stays under "
            "it, they are made again",
            "edited": "their gradients were changed after the backward that made them (clip_grad_norm_, a hook, "
            "another backward, a penalty). Clip with gradient_clipping=..., which keeps directions whose norm is under "
            "the limit; declare gradient_accumulation_steps; or set update='step' to say that this is meant",
        }[reason]
        more = f" and {len(stopped) - 3} more" if len(stopped) > 3 else ""
        warn_user(
            f"Muon directions made in backward were thrown away several steps in a row for {', '.join(stopped[:3])}"
            f"{more}, so they are made in step() from now on: {cause}. Training is right either way, only slower"
        )

    def close(self, updated: Sequence[ShardedParam]) -> None:
        """End of a step that updated these parameters: visits left over are closed."""
        # Of Muon matrices alone: a head whose loss is made in chunks has a backward for each.
        muon = [sharded for sharded in self.sharded_params if sharded.spec.muon is not None]
        came = max((sharded.visits.backwards for sharded in muon), default=0)
        if came:
            declared = self.accumulation_steps
            self._expected = came if declared is None or came > declared else declared
        muon = [sharded for sharded in updated if sharded.spec.muon is not None]
        eager = next((a.name for a in muon if a.visits.eager), None)  # gradients set by hand come of no backward
        if eager and self.update != "step" and "eager" not in self._warned and not any(a.visits.compiled for a in muon):
            self._warned.add("eager")
            warn_user(
                f"no graph of backend='muon_zero' has produced a gradient of {eager!r} or any other Muon matrix "
                "in this step: the model runs eagerly, or is compiled by another backend. Training is right, but "
                'weights are gathered one by one and directions made in step(); write "compile": true in '
                "the config, or model.compile(backend='muon_zero') (of a ModuleList, which nobody calls, each module's "
                "own); or set update='step', if this is meant"
            )
        for sharded in self.sharded_params:
            sharded.close()
        self.frame_log.close()
        self.status.step += 1

    def drop_gradients(self) -> None:
        """``zero_grad()``: nothing that belongs to the old gradients may reach the next step."""
        for sharded in self.sharded_params:
            sharded.drop_gradient()

    def range(self, name: str, category: str = "", payload: int = 0) -> AbstractContextManager[None]:
        """``with ledger.range(...):`` as :func:`ranged`, where frames make ranges."""
        return ranged(name, category, payload) if self.options.nvtx else contextlib.nullcontext()

    def balance(self) -> int:
        """Backward visits still owed, over all parameters."""
        return sum(sharded.visits.owed for sharded in self.sharded_params)
