"""The ledger: one optimizer's policy for the backward graphs that produce gradients of its parameters.

The life of a gradient, from backward to commit:

1. A *visit* is one run of a graph that has the parameter. A forward visit owes a backward visit (:class:`.Visits`).
2. The backward graph asks the ledger for a :class:`~compile_muon.passes.Purpose`. ACCUMULATE (stage 1 between
   micro-batches) keeps the gradient on the rank, unreduced, and hands zeros to autograd. REDUCE averages it over the
   ranks, with the sum kept so far. SPECULATE also makes the Muon direction of what ``.grad`` will be.
3. Autograd adds the gradient to ``.grad``. Hooks of :meth:`.ShardedParam.watch` then add a kept gradient to the sum
   (:class:`.UnreducedSums`), or drop a sum that was reduced, and discard a direction of another gradient.
4. The loop may clip, edit or drop ``.grad``.
5. ``step()`` reduces a sum that is left over (:mod:`.step`), compares gradients with directions, checks that all is
   finite (:mod:`.step_checks`), decides (:mod:`.decision`), and makes missing directions (:mod:`.directions`).
6. :mod:`.commit` moves the momentum toward ``.grad`` and the weight along the direction; :meth:`Ledger.close` drops
   what is left of the backward, and ``zero_grad()`` the gradient.

A speculation (:mod:`.gradient`) can be wasted, but never changes a number, so the policy only costs time.
docs/why/ledger.md draws the picture.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from compile_muon.agreement.status import EVALUATION, TRAINING, FrameLog, RankStatus
from compile_muon.config import FrameOptions
from compile_muon.engine.forwards import Forwards
from compile_muon.engine.hooks import Hooks
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.errors import warn_user
from compile_muon.passes import Purpose
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.costs import Costs
from compile_muon.passes.ranges import ranged

NOTHING = Traffic()


@dataclass
class Counters:
    """Totals since the optimizer was made."""

    speculated: int = 0  # directions that backward graphs made
    used: int = 0  # of these, directions that a step applied
    in_step: int = 0  # directions that ``step()`` made
    skipped: int = 0  # steps left out because a number was not finite
    skipped_in_a_row: int = 0  # skipped steps since the last written one
    graphs: int = 0  # graphs lowered and compiled
    traffic: Traffic = field(default_factory=Traffic)  # sent by compiled graphs, steps and refreshes of this process

    @property
    def discarded(self) -> int:
        """Directions of backward graphs that no step has applied."""
        return self.speculated - self.used

    def numbers(self, *, by_axis: bool) -> dict[str, int]:
        """Return the entries of :meth:`compile_muon.MuonZero.totals`; ``by_axis`` adds the bytes of each mesh axis."""
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
    """The policy of one optimizer."""

    accumulation_steps: int | None  # micro-batches per step; None if only the loop knows
    # "auto" speculates until directions are thrown away several steps in a row, "backward" always, "step" never.
    update: str
    sharded_params: list[ShardedParam] = field(default_factory=list)  # all of the model, frozen ones included
    accumulating: bool = False  # inside :meth:`accumulate`
    before_backward: Callable[[], None] | None = None  # called ahead of each backward graph
    costs: Costs = Costs()  # of the machine; equal on all ranks
    options: FrameOptions = FrameOptions(codegen="eager")  # of the frame that ran last; used by the step graph, too
    counters: Counters = field(default_factory=Counters)
    status: RankStatus = field(default_factory=RankStatus)  # this rank's place, which other ranks read
    frame_log: FrameLog = field(default_factory=FrameLog)  # visits since the last step that met other ranks
    stepped: bool = True  # False for a copied module, which no optimizer steps
    checks_later: bool = False  # ``checks="next_step"``: the host reads a step's checks in the next step
    hooks: Hooks = field(default_factory=Hooks)
    gathers: tuple[Any, Any] | None = None  # key and gathers of the latest refresh, see :mod:`.resident`
    memory: Any = None  # the optimizer's :class:`~compile_muon.memory.FrameMemory`; None for a copied module
    left: int = 0  # most bytes that a backward graph frees to its end: room for step graphs below the peak
    forwards: Forwards = field(default_factory=Forwards)  # running forwards of the model
    # parameters that are plain and whole at present (``full_parameters``)
    unsharded: set[str] = field(default_factory=set)
    _expected: int | None = None  # backward calls of a step: the declared number or the last step's; None at first
    _warned: set[str] = field(default_factory=set)  # kinds of warnings already given

    def __post_init__(self) -> None:
        self._expected = self.accumulation_steps

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        """Return a ledger without an optimizer, under which gradients are only reduced."""
        fields: dict[str, Any] = {"options": copy.copy(self.options), "forwards": copy.deepcopy(self.forwards, memo)}
        copied = Ledger(accumulation_steps=None, update="step", stepped=False, **fields)
        memo[id(self)] = copied
        return copied

    def phase(self, *, evaluates: bool) -> str:
        """Return the status of a forward that gathers weights. ``evaluates``: it saves nothing for a backward."""
        # Reentrant activation checkpointing runs blocks without gradients first, while their backward is owed.
        return EVALUATION if evaluates and not self.balance() else TRAINING

    # ------------------------------------------------------------------ notes from others

    def compiled(self, left: int = 0) -> None:
        """Count a lowered and compiled graph; ``left`` as the field, of a backward graph."""
        self.counters.graphs += 1
        self.left = max(self.left, left)

    def count(self, traffic: Traffic = NOTHING, *, speculated: int = 0, used: int = 0, in_step: int = 0) -> None:
        """Add what a graph or a refresh has sent and computed, and numbers of directions as in :class:`Counters`."""
        counters = self.counters
        counters.speculated += speculated
        counters.used += used
        counters.in_step += in_step
        if traffic is not NOTHING:
            counters.traffic = counters.traffic + traffic
            self.status.collectives += sum(number for _, number in traffic.collectives)

    def skipped(self) -> int:
        """Count a skipped step; return the number of skipped steps in a row."""
        self.counters.skipped += 1
        self.counters.skipped_in_a_row += 1
        return self.counters.skipped_in_a_row

    def written(self) -> None:
        """Note that a step was written."""
        self.counters.skipped_in_a_row = 0

    # ------------------------------------------------------------------ backward

    def purpose(self, sharded: ShardedParam, call: int, *, receives: bool, speculates: bool) -> Purpose:
        """Note a visit in backward ``call``, and return what the graph is to do with this gradient. ``receives``:
        autograd will add it to ``.grad``. ``speculates``: the graph is able to make a direction of it."""
        only_visit = sharded.visits.backward(call, counts=receives and not self.accumulating)
        if not receives:
            return Purpose.ACCUMULATE if sharded.spec.layout.accumulates else Purpose.REDUCE
        if sharded.spec.layout.accumulates and not self._may_be_last(sharded, self.accumulation_steps or 1):
            return Purpose.ACCUMULATE
        worthwhile = speculates and only_visit and self._may_be_last(sharded, self._expected)
        return Purpose.SPECULATE if worthwhile and self._speculates(sharded) else Purpose.REDUCE

    def keeps(self, sharded: ShardedParam, call: int) -> bool:
        """Return whether a gradient of eager code stays unreduced on the rank; :meth:`purpose` decides for graphs."""
        sharded.visits.backward(call, counts=not self.accumulating, compiled=False)
        return not self._may_be_last(sharded, self.accumulation_steps or 1)

    def _may_be_last(self, sharded: ShardedParam, expected: int | None) -> bool:
        """Return whether this can be the step's last micro-batch; False while the number ``expected`` is unknown."""
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
        """Return whether the current backward can be the step's last for this parameter."""
        return self._may_be_last(sharded, self.accumulation_steps or self._expected)

    @property
    def speculating(self) -> bool:
        """Whether any backward may still make directions; equal on all ranks."""
        return self.update != "step" and any(map(self._speculates, self.sharded_params))

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Only accumulate gradients in the backwards inside: none of them is the step's last."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    # ------------------------------------------------------------------ step

    def note_directions(self, candidates: Collection[ShardedParam], used: frozenset[str], *, clipped: bool) -> None:
        """Record which directions of backward (``candidates``) a step has used, by name, and which it has discarded.
        ``clipped``: the norm is known to be over the limit."""
        self.count(used=len(used))
        reason = "clipped" if clipped else "edited"
        self.discarded([sharded for sharded in candidates if sharded.name not in used], reason)
        for sharded in self.sharded_params:
            if sharded.spec.muon is not None:
                if sharded.name in used:
                    sharded.speculations.used()
                sharded.speculations.note_norm(under_limit=not clipped)

    def discarded(self, sharded_params: Sequence[ShardedParam], reason: str) -> None:
        """Throw away the directions of these parameters: "clipped" by ``gradient_clipping``, or "edited" after
        backward. ``update="auto"`` stops making them after several steps in a row."""
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
        """End a step that updated these parameters, and learn the number of its backwards."""
        # Muon matrices only: a head whose loss is computed in chunks has a backward for each chunk.
        muon = [sharded for sharded in self.sharded_params if sharded.spec.muon is not None]
        most_backwards = max((sharded.visits.backwards for sharded in muon), default=0)
        if most_backwards:
            declared = self.accumulation_steps
            self._expected = most_backwards if declared is None or most_backwards > declared else declared
        muon = [sharded for sharded in updated if sharded.spec.muon is not None]
        eager = next((a.name for a in muon if a.visits.eager), None)  # gradients set by hand have neither flag
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

    def range(self, name: str, category: str = "", payload: int = 0) -> AbstractContextManager[None]:
        """Return a profiler range as :func:`ranged`, or a null context where frames make no ranges."""
        return ranged(name, category, payload) if self.options.nvtx else contextlib.nullcontext()

    def balance(self) -> int:
        """Return the number of backward visits owed, over all parameters."""
        return sum(sharded.visits.owed for sharded in self.sharded_params)
