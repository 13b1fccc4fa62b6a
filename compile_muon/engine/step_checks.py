"""Numbers that decide over a step before it writes: who must agree on what, and which tensors must be finite.

One vector carries all numbers, and one all-reduce sums it over the ranks, so all ranks decide alike. Nothing is written
until all of it is checked: by the host, which waits for the vector once, or by the device alone
(:meth:`StepChecks.found_inf`), and then the host reads the vector one step later. :data:`RULES` lists the kinds that
ranks must agree on, with the error of each; numbers of all other kinds say whether something is finite.

Hyperparameters, visits, and every ``check_replicas`` steps copies of tensors travel as digests, each rank's in a place
of its own, so every rank reads all. Only if digests differ do ranks exchange the facts behind them.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.agreement.compare import compare, differing, gather_objects, ranks_named, worded
from compile_muon.agreement.status import first_difference
from compile_muon.engine.decision import Decision, Facts
from compile_muon.engine.dtensors import edits_of, local_tensor, pinned_numbers
from compile_muon.engine.gradient import Speculation
from compile_muon.engine.ledger import Counters, Ledger
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import method_of_matrix
from compile_muon.engine.trained import OptimizerState
from compile_muon.errors import LedgerError, NonFiniteError, listed
from compile_muon.passes.fingerprint import EXAMINE, fingerprint
from compile_muon.passes.language.spec import ParamSpec
from compile_muon.passes.methods import matrix_method, state_labels
from compile_muon.passes.norms import not_finite, squares
from compile_muon.progress import is_first_rank

#: skipped steps that are logged one by one
SHOWN = 5
_log = logging.getLogger("compile_muon")
#: largest norm of a gradient whose square is finite in fp32
_LARGEST = math.sqrt(torch.finfo(torch.float32).max)
_WORD = 24  # bits of an integer that fp32 holds exactly
#: kinds beside states and those of :data:`RULES` that stop a step unless they are zero
_FINITE = ("momentum", "rate", "direction")

#: ``(kind, names of its numbers)``, in the order of a vector
_Labels = list[tuple[str, Collection[str]]]


class Stops(Enum):
    """The sums over the ranks that stop a step."""

    NONZERO = "not 0"
    SOME = "neither 0 nor the number of ranks"
    UNEQUAL = "ranks have different numbers in :meth:`StepChecks.add_each`"


class Rule(NamedTuple):
    """A row of :data:`RULES`: numbers of one kind, and the LedgerError of every rank if they stop the step."""

    kind: str
    stops: Stops
    finding: str  # with the stopping ``{names}``, the ``{ranks}`` that contributed, and the ``{difference}``
    remedy: str
    difference: Callable[[StepChecks], str] = lambda checks: ""  # of unequal numbers, in words; collective
    applies: Callable[[StepChecks], bool] = lambda checks: True


_RATES = "give every rank the same hyperparameters and let each call its scheduler as often"
#: the first that stops a step is raised
RULES = (
    Rule(
        "refused", Stops.NONZERO, "step() was refused by another rank, whose own error says why",
        "do to the model on every rank what is done to it on one",
    ),
    Rule(
        "missing", Stops.SOME, "gradient of {names} = None{ranks} only",
        "every rank must use the same parameters in a step, e.g. by adding 0 * parameter.sum() to the loss where one "
        "is not used",
    ),
    Rule(
        "rates", Stops.UNEQUAL, "ranks disagree on hyperparameters: {difference}", _RATES,
        lambda checks: worded(differing([dict(zip(checks.scalars, x, strict=True)) for x in checks.each("rates")])),
    ),
    Rule(
        "settings", Stops.UNEQUAL, "ranks disagree on hyperparameters: {difference}", _RATES,
        lambda checks: worded(compare(checks.settings, checks.group)),
    ),
    Rule(
        "visits", Stops.UNEQUAL, "ranks disagree on {difference}",
        "what was exchanged since the last step belongs to other parameters than it was taken for; run the same "
        "modules in the same order on every rank",
        lambda checks: first_difference(gather_objects(checks.trained.ledger.frame_log.visits(), checks.group)),
    ),
    Rule(
        "copies", Stops.UNEQUAL,
        "ranks disagree on what all hold a copy of: {difference} is not what the other ranks have",
        "go back to the last checkpoint, and do on every rank what is done to weights on one",
        lambda checks: checks.differing_copies(),
    ),
    # A rank whose own directions all hold goes on without waiting for the other ranks' numbers.
    Rule(
        "ready", Stops.SOME, "gradient of {names} was edited{ranks} only",
        "edit gradients on every rank, or set checks='in_step'",
        applies=lambda checks: checks.trained.ledger.checks_later,
    ),
    Rule(
        "differs", Stops.NONZERO,
        "gradient of {names} was edited in a way that PyTorch does not count (.data) after the backward that made its "
        "direction",
        "edit .grad itself, or set checks='in_step' or update='step'", applies=lambda checks: checks.later,
    ),
)  # fmt: skip


def _kinds(stops: Stops) -> frozenset[str]:
    return frozenset(rule.kind for rule in RULES if rule.stops is stops)


@dataclass(eq=False)
class StepChecks:
    """Named numbers of this rank, then of all ranks. A new object has the numbers that the host knows."""

    trained: OptimizerState
    # This rank's directions from backward that the step may use, by name of the parameter.
    ready: Mapping[str, Speculation] = field(default_factory=dict)
    refusal: Exception | None = None  # why this rank, and so every rank, refuses the step
    later: bool = False  # the host reads the numbers in the next step
    group: dist.ProcessGroup | None = field(init=False)  # of the all-reduce; None for a single process
    scalars: dict[str, Tensor] = field(init=False)  # hyperparameters that are tensors
    settings: dict[str, str] = field(init=False)  # other hyperparameters, and the number of the step
    # Names and fingerprints of tensors that all ranks hold alike; None in steps that compare none.
    copies: tuple[list[str], Tensor] | None = None
    _labels: _Labels = field(default_factory=list)  # of ``_values``
    _values: list[Tensor] = field(default_factory=list)
    # Numbers of the host, added since the last ``reduce``.
    _facts: list[tuple[str, Mapping[str, float]]] = field(default_factory=list)
    _reduced: list[tuple[_Labels, Tensor]] = field(default_factory=list)  # sums over the ranks
    _own: list[tuple[_Labels, Tensor]] = field(default_factory=list)  # this rank's summands
    _further: dict[str, None] = field(default_factory=dict)  # kinds of :meth:`add_wrong`
    # The sums on the host, and the event that ends their copy.
    _copy: tuple[Tensor, torch.cuda.Event | None] | None = None
    _read: dict[str, dict[str, float]] = field(default_factory=dict)  # numbers by kind and name
    _masks: list[tuple[Tensor, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        trained = self.trained
        self.group, self.device, self.step = trained.group, trained.device, trained.ledger.status.step
        self._world = 1 if self.group is None else self.group.size()
        groups = trained.optimizer.param_groups
        rates = {f"{g['name']} {rate.name}": g[rate.name] for g in groups for rate in trained.method(g).rates}
        self.scalars = {name: rate for name, rate in rates.items() if isinstance(rate, Tensor)}
        numbers = {name: rate for name, rate in rates.items() if name not in self.scalars}
        self.settings = {"steps": str(self.step)} | {name: repr(rate) for name, rate in numbers.items()}
        self.add_facts("refused", {"step": float(self.refusal is not None)})
        self.add_facts("missing", {a.name: float(a.grad is None) for a in (*trained.muon, *trained.rest)})
        self.add_facts("ready", {a.name: float(a.name in self.ready) for a in trained.muon})
        self.add_facts("rate", {name: float(not _all_finite(rate)) for name, rate in numbers.items()})
        if trained.compares:
            self.add_each("settings", _digest(repr(sorted(self.settings.items())).encode()))
            self.add_each("visits", _digest(trained.ledger.frame_log.digest()))
            every = trained.config.zero.check_replicas
            self.copies = self._copies() if every and self.step % every == 0 else None

    def used(self, decision: Decision) -> dict[str, Speculation]:
        """Return the directions of backward that the decision takes, in the order of the model."""
        return {name: speculation for name, speculation in self.ready.items() if name in decision.use}

    # ------------------------------------------------------------------ asking

    def add(self, what: str, names: Sequence[str], values: Tensor) -> None:
        """Add ``values``, one fp32 number per name, as the kind ``what``."""
        self._labels.append((what, names))
        self._values.append(values)

    def add_wrong(self, what: str, names: Sequence[str], flags: Tensor) -> None:
        """Add flags of the kind ``what``, which error messages quote: any number but 0 (finite) stops the step."""
        self._further[what] = None
        self.add(what, names, flags)

    def add_facts(self, what: str, facts: Mapping[str, float]) -> None:
        """Add numbers that the host knows as the kind ``what``."""
        self._facts.append((what, facts))

    def add_each(self, what: str, numbers: Tensor | Sequence[float]) -> None:
        """Add this rank's ``numbers`` (fp32, as many on every rank) so that :meth:`each` returns those of all ranks.
        ``what``: the kind of an ``UNEQUAL`` rule."""
        if self.group is None:
            return
        # Each rank has a place of its own and zeros elsewhere, so that the sum is exact.
        rank, world, width = self.group.rank(), self._world, len(numbers)
        names = [f"{r}.{i}" for r in range(world) for i in range(width)]
        if isinstance(numbers, Tensor):
            spread = torch.zeros(world, width, device=self.device)
            spread[rank] = numbers.to(self.device, non_blocking=True)
            self.add(what, names, spread.flatten())
        else:
            before, after = [0.0] * (rank * width), [0.0] * ((world - rank - 1) * width)
            self.add_facts(what, dict(zip(names, [*before, *numbers, *after], strict=True)))

    def add_device_numbers(self) -> None:
        """Add the numbers that the device computes."""
        trained = self.trained
        self._add_gradients([*trained.muon, *trained.rest])
        states_of_kind: dict[str, dict[ShardedParam, Tensor]] = {}  # by kind, over all groups, for few launches
        for group in trained.optimizer.param_groups:
            for state in trained.method(group).states:
                if state.each != "parameter":
                    sharded_params = [trained.sharded_params[param] for param in group["params"]]
                    # {**state}: indexing an offloaded state itself waits for the GPU that writes it to the host.
                    shards = {a: local_tensor({**trained.optimizer.state[a.param]}[state.name]) for a in sharded_params}
                    states_of_kind.setdefault(state.label, {}).update(shards)
        for label, tensors in states_of_kind.items():
            self.add(label, [a.name for a in tensors], self._states_not_finite(label, tensors))
        for name, rate in self.scalars.items():
            flag = (~torch.isfinite(rate.reshape(()))).float().to(self.device, non_blocking=True)
            self.add("rate", [name], flag[None])
        if trained.compares and self.scalars:
            scalars = [x.detach().float().reshape(1).to(self.device, non_blocking=True) for x in self.scalars.values()]
            self.add_each("rates", torch.cat(scalars))
        if self.copies is not None:
            word = fingerprint([self.copies[1]])
            self.add_each(
                "copies", torch.cat([(word >> shift) & 2**_WORD - 1 for shift in range(0, 64, _WORD)]).float()
            )
        present = [sharded for sharded in trained.muon if sharded.name in self.ready]
        directions = [self.ready[sharded.name].direction for sharded in present]
        wrong = directions_not_finite([sharded.spec for sharded in present], directions) if present else None
        self._spread("direction", trained.muon, present, wrong)
        for add in trained.ledger.hooks.facts:
            add(self)

    def _add_gradients(self, sharded_params: Sequence[ShardedParam]) -> None:
        """Add squared norms of all gradients (0 without one), and whether each differs from the one its direction was
        made of. ``sharded_params`` is the same on every rank."""
        present = [sharded for sharded in sharded_params if sharded.grad is not None]
        examined = [sharded for sharded in present if sharded.name in self.ready]
        others = [sharded for sharded in present if sharded.name not in self.ready]
        square_of: dict[ShardedParam, Tensor] = {}
        differs = values = None
        if examined:
            now, norms = EXAMINE([sharded.local_grad for sharded in examined])
            differs = (now != torch.stack([self.ready[sharded.name].fingerprint for sharded in examined])).float()
            square_of.update(zip(examined, norms.unbind(), strict=True))
        if others:
            square_of.update(zip(others, squares([sharded.local_grad for sharded in others]).unbind(), strict=True))
        if present:
            # The sum over ranks would count a shard once for each rank that holds a copy.
            shares = [1.0 / sharded.spec.layout.copies for sharded in present]
            values = torch.stack([square_of[sharded] for sharded in present])
            if len(set(shares)) == 1:
                values = values * shares[0]
            else:
                values = torch.stack([v * share for v, share in zip(values.unbind(), shares, strict=True)])
        self._spread("gradient", sharded_params, present, values)
        self._spread("differs", [a for a in sharded_params if a.spec.muon is not None], examined, differs)

    def _spread(
        self, what: str, sharded_params: Sequence[ShardedParam], present: Sequence[ShardedParam], values: Tensor | None
    ) -> None:
        """Add ``values`` of the parameters ``present``, and 0 for the others: every rank adds as many numbers."""
        if not sharded_params:
            return
        if values is None or len(present) < len(sharded_params):  # ``present`` keeps their order
            zero = torch.zeros((), device=self.device)
            value_of = dict(zip(present, () if values is None else values.unbind(), strict=True))
            values = torch.stack([value_of.get(sharded, zero) for sharded in sharded_params])
        self.add(what, [sharded.name for sharded in sharded_params], values)

    def _states_not_finite(self, label: str, states: Mapping[ShardedParam, Tensor]) -> Tensor:
        """Return whether each state is not finite; the provider has checked offloaded states when they were written."""
        provider = self.trained.state_provider
        if provider.all_resident:
            return not_finite(list(states.values()))
        flag_of = {sharded: flag for sharded in states if (flag := provider.wrong(sharded, label)) is not None}
        resident = [sharded for sharded in states if sharded not in flag_of]
        if resident:
            flag_of |= zip(resident, not_finite([states[sharded] for sharded in resident]).unbind(), strict=True)
        return torch.stack([flag_of[sharded] for sharded in states])

    @torch.no_grad()
    def _copies(self) -> tuple[list[str], Tensor] | None:
        """Return names and fingerprints, int64 on the device, of weights at stages 0 to 2, and of gradients and states
        of unsharded parameters; None if there are none. Experts and tensor-parallel slices are not among them."""
        tensors: dict[str, Tensor] = {}
        stale = []
        for sharded in self.trained.ledger.sharded_params:
            if sharded.spec.layout.model_parallel:
                continue  # ranks hold different parts
            if sharded.resident is not None:
                sharded.await_refresh()
                # An edit is gathered at the next read, by a collective that ranks without the edit would not join here;
                # a stale copy has the fingerprint 0.
                stale += [len(tensors)] if edits_of(sharded.param) != sharded.refreshed_at else []
                tensors[sharded.name] = sharded.resident
            elif not sharded.spec.layout.sharded:
                tensors[sharded.name] = sharded.local
                if sharded.grad is not None:
                    tensors[f"gradient of {sharded.name}"] = sharded.local_grad
                slots, method = self.trained.optimizer.state.get(sharded.param, {}), method_of_matrix(sharded)
                other = {"step", *(() if method is None else (state.name for state in method.owned))}  # or of one rank
                tensors |= {
                    f"{slot} of {sharded.name}": local_tensor(slots[slot]) for slot in slots if slot not in other
                }
        if not tensors:
            return None
        fingerprints = fingerprint([tensor.detach() for tensor in tensors.values()])
        if stale:
            fingerprints[stale] = 0
        return list(tensors), fingerprints

    # ------------------------------------------------------------------ summing

    @property
    def facts(self) -> list[float]:
        """The numbers of :meth:`add_facts` since the last :meth:`reduce`, in order."""
        return [number for _, facts in self._facts for number in facts.values()]

    def again(self, checks: StepChecks) -> StepChecks:
        """Return these checks for a later step, ``checks``, whose numbers a replayed graph has written in place."""
        later = copy.copy(checks)
        later._reduced, later._own, later._further, later._facts = self._reduced, self._own, self._further, []
        return later

    def measure(self, facts: Tensor | None = None) -> Tensor:
        """Launch the device's checks and sum all over the ranks, without waiting; return the norm of all gradients,
        0-dim fp32 on the device. ``facts``: see :meth:`reduce`."""
        self.add_device_numbers()
        self.reduce(facts)
        return self.total("gradient").sqrt().float()

    def reduce(self, facts: Tensor | None = None) -> None:
        """Sum the numbers added since the last call over the ranks, without waiting. ``facts``: :attr:`facts` in fp32
        on the device; None copies them there."""
        if self._facts:
            self._labels += self._facts
            if facts is None:
                host = pinned_numbers(self.facts, torch.float32, self.device)
                facts = host.to(self.device, non_blocking=True)
            self._values.append(facts)
            self._facts = []
        if not self._values:
            return
        vector = torch.cat(self._values)
        if self.group is not None:
            self._own.append((self._labels, vector.clone()))
            dist.all_reduce(vector, group=self.group)
        self._reduced.append((self._labels, vector))
        self._labels, self._values = [], []

    def total(self, what: str) -> Tensor:
        """Return the sum of the reduced numbers of a kind, 0-dim fp64 on the device."""
        sums = [
            numbers.sum(dtype=torch.float64)  # in fp32, squares that are finite each may sum to inf
            for labels, vector in self._reduced
            for (kind, _), numbers in zip(labels, vector.split([len(names) for _, names in labels]), strict=True)
            if kind == what
        ]
        return functools.reduce(torch.add, sums) if sums else torch.zeros((), dtype=torch.float64, device=self.device)

    def found_inf(self) -> Tensor:
        """Return 1.0 if any reduced number stops the step, else 0.0: 0-dim fp32 on the device, equal on all ranks."""
        against = torch.zeros((), device=self.device)
        nonzero = frozenset((*_kinds(Stops.NONZERO), *_FINITE, *state_labels(), *self._further))
        for labels, vector in self._reduced:
            spans = tuple((what, len(names)) for what, names in labels)
            wrong, some, first = masks = _masks(spans, nonzero, self._world, self.device)
            self._masks.append(masks)  # kept alive: a recorded graph reads them
            # inf and NaN times zero are NaN, so that numbers without a rule still stop the step.
            against = against + vector.sub(self._world).mul_(some).add_(wrong).mul_(vector).abs_().sum()
            if self.group is not None:
                against = against + (vector - vector[first]).abs_().sum()
        return (~(against == 0)).float()

    # ------------------------------------------------------------------ reading

    def send(self) -> None:
        """Reduce the remaining numbers, and start to copy all sums to the host, without waiting."""
        self.reduce()
        if not self._reduced:
            return
        vectors = [vector for _, vector in self._reduced]
        vector = vectors[0] if len(vectors) == 1 else torch.cat(vectors)
        if vector.is_cuda:
            host = torch.empty(vector.shape, dtype=vector.dtype, device="cpu", pin_memory=True)
            host.copy_(vector, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._copy = host, event
        else:
            self._copy = vector, None

    def wait(self) -> None:
        """Read the sums on the host: waits for the device, unless they were sent long ago."""
        earlier = self._copy is not None
        if not (earlier or self._facts or self._values or self._reduced):
            return  # all are read
        with self.trained.ledger.range("step wait"):
            if not earlier:
                self.send()
            assert self._copy is not None
            vector, copied = self._copy
            if copied is not None and not (earlier and copied.query()):
                copied.synchronize()
            numbers = vector.tolist()
        for what, names in (label for labels, _ in self._reduced for label in labels):
            self._read.setdefault(what, {}).update(zip(names, numbers, strict=False))
            del numbers[: len(names)]
        self._copy, self._reduced = None, []

    def read(self, facts: Facts) -> Facts:
        """Wait for the device, once; return ``facts`` with the facts of all ranks. Raises as :meth:`refuse`."""
        self.wait()
        self.refuse()
        # Names of states, rates and numbers of extensions that are not finite, by kind.
        kinds = ("momentum", *state_labels(), "rate", *self._further)
        return replace(
            facts,
            speculated=self.speculated() if self.trained.ledger.speculating else frozenset(),
            gradients=self.numbers("gradient"),
            spoiled={what: sorted(self.names(what)) for what in kinds if what in self._read},
            directions=frozenset(self.names("direction")),
        )

    def numbers(self, what: str) -> Mapping[str, float]:
        """Return the numbers of a kind that :meth:`wait` has read, by name."""
        return self._read.get(what, {})

    def names(self, what: str) -> set[str]:
        """Return the names of a kind whose number is not zero."""
        numbers = self.numbers(what)
        return {name for name, number in numbers.items() if number != 0} if any(numbers.values()) else set()

    def each(self, what: str) -> list[tuple[float, ...]]:
        """Return every rank's numbers of the kind ``what``."""
        numbers = list(self.numbers(what).values())
        width = len(numbers) // self._world
        return [tuple(numbers[rank * width : (rank + 1) * width]) for rank in range(self._world)]

    def speculated(self) -> frozenset[str]:
        """Return the names whose direction every rank has, made from the gradient that it has."""
        ready = self.numbers("ready").items()
        return frozenset(name for name, count in ready if count == self._world) - self.names("differs")

    # ------------------------------------------------------------------ saying

    def refuse(self) -> None:
        """Raise the error of the first rule that stops the step, on every rank; nothing has been written."""
        for rule in RULES:
            if not rule.applies(self) or not (names := self._stopping(rule)):
                continue
            if self.refusal is not None:
                raise self.refusal
            ranks = self.ranks({rule.kind: names}) if rule.stops is Stops.SOME else ""
            finding = rule.finding.format(names=listed(names), ranks=ranks, difference=rule.difference(self))
            raise LedgerError(f"{finding}: nothing was updated in step {self.step}; {rule.remedy}")

    def _stopping(self, rule: Rule) -> list[str]:
        """Return the names of the numbers that stop the step; of unequal ones the kind."""
        if rule.stops is Stops.UNEQUAL:
            return [rule.kind] if len(set(map(repr, self.each(rule.kind)))) > 1 else []  # NaN is equal to NaN
        none_or_all = (0, self._world) if rule.stops is Stops.SOME else (0,)
        return [name for name, number in self.numbers(rule.kind).items() if number not in none_or_all]

    def ranks(self, wrong: Mapping[str, Collection[str]]) -> str:
        """Return `` on rank 1``, the ranks that contributed to ``wrong`` (names by kind), for an error; collective, and
        waits for the device."""
        if self.group is None:
            return ""
        mine = any(
            name in wrong.get(what, ()) and number != 0 and (what != "gradient" or not math.isfinite(number))
            for labels, vector in self._own
            for (what, name), number in zip(
                ((what, name) for what, names in labels for name in names), vector.tolist(), strict=True
            )
        )
        everyone = gather_objects(mine, self.group)
        ranks = [rank for rank, contributes in enumerate(everyone) if contributes]
        return " on every rank" if len(ranks) in (0, len(everyone)) else f" on {ranks_named(ranks)}"

    def differing_copies(self) -> str:
        """Return the copies that differ, each with the ranks that have another one than most; collective."""
        assert self.copies is not None
        names, fingerprints = self.copies
        differences = []
        for name, rows in compare(dict(zip(names, fingerprints.tolist(), strict=True)), self.group).items():
            common = max(rows, key=rows.count)
            differences.append(f"{name} on {ranks_named([rank for rank, row in enumerate(rows) if row != common])}")
        return listed(differences)

    def skips(self, wrong: dict[str, list[str]]) -> bool:
        """Raise for, or skip, a step that would write ``wrong`` numbers (names by kind); nothing has been written."""
        ledger, zero = self.trained.ledger, self.trained.config.zero
        others = "" if ledger.hooks.peers is None else ledger.hooks.peers.elsewhere()
        if not wrong and not others:
            return False
        finding = self._named(wrong) if wrong else f"{others} found inf or nan, and itself says where"
        for why in ledger.hooks.why_not_finite:
            if (explanation := why()) is not None:
                raise NonFiniteError(f"{explanation[0]}: nothing was updated in step {self.step}; {explanation[1]}")
        problem = f"{finding}: nothing was updated in step {self.step}"
        if zero.nonfinite == "error":
            raise NonFiniteError(
                f"{problem}; lower the learning rate, look at the batch, or set nonfinite='skip' to leave such steps "
                "out"
            )
        in_a_row = ledger.skipped()
        if in_a_row >= zero.max_skipped_steps:
            raise NonFiniteError(
                f"{problem}; {in_a_row} steps in a row were skipped (max_skipped_steps): training "
                "does not recover by itself, go back to a checkpoint"
            )
        if is_first_rank():
            _tell(problem, ledger)
        return True

    def _named(self, wrong: dict[str, list[str]]) -> str:
        """Return the non-finite tensors and their ranks in words; collective."""
        trained = self.trained
        value, large = "inf or nan", frozenset[str]()
        says_ranks = trained.compares and trained.config.zero.nonfinite == "error"
        spoiled = self._spoiled_momenta(wrong.get("direction", ()), together=says_ranks or not self.later)
        if any(spoiled):
            momenta = sorted(frozenset().union(*spoiled))
            others = [name for name in wrong["direction"] if name not in momenta]
            wrong = {**wrong, "momentum": momenta, "direction": others}
        if infinite := [name for name in wrong.get("gradient", ()) if self.numbers("gradient")[name] == math.inf]:
            if self.later:  # the gradients may be gone
                value = f"inf, nan or over {_LARGEST:.1e} (whose square is inf in float32)"
            else:
                large = self._finite(infinite)
        kinds = {what: [n for n in names if what != "gradient" or n not in large] for what, names in wrong.items()}
        parts = ["; ".join(f"{what} of {listed(names)}" for what, names in kinds.items() if names)]
        parts[0] += f" = {value}" if parts[0] else ""
        if large:
            named = listed([name for name in infinite if name in large])
            parts.append(f"gradient of {named} = over {_LARGEST:.1e}, finite, but its square is inf in float32")
        where = ""
        if says_ranks:
            holders = [rank for rank, names in enumerate(spoiled) if names]
            where = f" on {ranks_named(holders)}" if 0 < len(holders) < len(spoiled) else self.ranks(wrong)
        stage = "" if trained.ledger.hooks.peers is None else trained.ledger.hooks.peers.here()
        return "; ".join(filter(None, parts)) + where + stage

    def _spoiled_momenta(self, names: Sequence[str], *, together: bool) -> list[set[str]]:
        """Return for each rank the names, of these, whose momentum is not finite, which explains the direction.
        Collective if ``together``; else of this rank alone."""
        resident = [a for a in self.trained.muon if a.name in names and a.momentum.numel()]
        flags = not_finite([sharded.momentum for sharded in resident]).tolist() if resident else []
        mine = {sharded.name for sharded, flag in zip(resident, flags, strict=True) if flag}
        return gather_objects(mine, self.group if together and names and self.trained.compares else None)

    def _finite(self, names: Sequence[str]) -> frozenset[str]:
        """Return the names of these gradients that hold no inf on any rank; collective."""
        graded = [a for a in (*self.trained.muon, *self.trained.rest) if a.name in names and a.grad is not None]
        infinite = {sharded.name for sharded in graded if not_finite([sharded.local_grad]).item()}
        return frozenset(names).difference(*gather_objects(infinite, self.group if self.trained.compares else None))


def _all_finite(rate: Any) -> bool:
    """Return whether a rate, a number or a tuple of numbers, is finite."""
    return all(map(math.isfinite, rate if isinstance(rate, Iterable) else [rate]))


def _digest(text: bytes) -> list[float]:
    """Return a digest as integers that fp32 holds."""
    digest = hashlib.blake2b(text, digest_size=6).digest()
    return [float(int.from_bytes(half, "big")) for half in (digest[:3], digest[3:])]


def _tell(problem: str, ledger: Ledger) -> None:
    """Log the first skipped steps, and the number of all at the end of the optimizer or the interpreter."""
    skipped = ledger.counters.skipped
    if skipped == 1:
        weakref.finalize(ledger, _tell_number, ledger.counters)
    if skipped <= SHOWN:
        quiet = "; later ones are only counted (optimizer.totals()['skipped_steps'])" if skipped == SHOWN else ""
        _log.warning(f"{problem}; the step was skipped{quiet}")


def _tell_number(counters: Counters) -> None:
    _log.warning(f"steps skipped for inf or nan (nonfinite='skip'): {counters.skipped}")


@functools.lru_cache(maxsize=16)
def _masks(
    spans: tuple[tuple[str, int], ...], nonzero: Set[str], world: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three masks over a vector: 1.0 where a number must be zero; 1.0 where it must be zero or ``world``; and
    the position of rank 0's number where all ranks' must be equal, elsewhere its own position."""
    wrong: list[float] = []
    some: list[float] = []
    first: list[int] = []
    for what, count in spans:
        start, width = len(first), count // world
        wrong += [float(what in nonzero)] * count
        some += [float(what in _kinds(Stops.SOME))] * count
        first += [start + (i % width if what in _kinds(Stops.UNEQUAL) else i) for i in range(count)]
    return torch.tensor(wrong, device=device), torch.tensor(some, device=device), torch.tensor(first, device=device)


def directions_not_finite(specs: Sequence[ParamSpec], directions: Sequence[Tensor]) -> Tensor:
    """Return 1.0 for each direction with an inf or NaN, else 0.0, ``[len(directions)]`` fp32, without waiting.

    Newton-Schulz makes all entries of a matrix finite or none, so each rank reads one of those that it holds. It reads
    all where a method computes more, or coefficients may diverge. ``directions``: at least one, each of its spec's
    ``layout.local_shape``.
    """
    corners = [_corners(spec, direction) for spec, direction in zip(specs, directions, strict=True)]
    sizes = [0 if parts is None else sum(part.numel() for part in parts) for parts in corners]
    entries = [part for parts in corners if parts is not None for part in parts]
    flat = torch.cat(entries) if entries else directions[0].new_empty(0)
    if set(sizes) == {1}:
        return (~torch.isfinite(flat)).float()
    pairs = zip(corners, directions, flat.split(sizes), strict=True)
    return not_finite([direction if parts is None else corner for parts, direction, corner in pairs])


def _corners(spec: ParamSpec, direction: Tensor) -> list[Tensor] | None:
    """Return one entry of each matrix, or None if one entry does not suffice."""
    muon = spec.muon_settings
    if matrix_method(muon.method).whole is not None or not muon.all_or_nothing:
        return None
    return [part.corners(direction) for part in spec.parts]
