"""Numbers that decide over a step before it writes: norms, finiteness, which speculations hold.

One vector carries all of them, and one all-reduce sums it over the ranks, so all ranks decide alike. Nothing is written
until all of it is checked: by the host, which waits for the vector once, or by the device alone
(:meth:`StepChecks.found_inf`), and then the host reads the vector one step later.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.agreement.compare import gather_objects, ranks_named
from compile_muon.engine.finite import directions_not_finite
from compile_muon.engine.pinned import pinned_numbers
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.speculation import Speculation
from compile_muon.passes.fingerprint import EXAMINE
from compile_muon.passes.methods import state_labels
from compile_muon.passes.norms import squares

__all__ = ["StepChecks"]

# Kinds that stop a step unless they are zero (so do states of methods), and kinds that must be zero or equal on all
# ranks; every other number must be finite.
_WRONG = ("refused", "momentum", "rate", "differs", "direction")
_OF_ALL = ("missing", "ready")

#: ``(kind, names of its numbers)``, in the order of a vector
_Labels = list[tuple[str, Collection[str]]]


@dataclass
class StepChecks:
    """Named numbers of this rank, then of all ranks."""

    group: dist.ProcessGroup | None  # of the all-reduce; None for a single process
    device: torch.device  # of all tensors
    step: int = 1  # number of the step, from 1
    refusal: Exception | None = None  # why this rank, and so every rank, refuses the step
    _labels: _Labels = field(default_factory=list)  # of ``_values``
    _values: list[Tensor] = field(default_factory=list)
    # Numbers of the host, added since the last ``reduce``.
    _facts: list[tuple[str, Mapping[str, float]]] = field(default_factory=list)
    _reduced: list[tuple[_Labels, Tensor]] = field(default_factory=list)  # sums over the ranks
    _own: list[tuple[_Labels, Tensor]] = field(default_factory=list)  # this rank's summands
    _each: set[str] = field(default_factory=set)  # kinds of :meth:`add_each`
    _further: dict[str, None] = field(default_factory=dict)  # kinds of :meth:`add_wrong`
    # The sums on the host, and the event that ends their copy.
    _copy: tuple[Tensor, torch.cuda.Event | None] | None = None
    _read: dict[str, dict[str, float]] = field(default_factory=dict)  # numbers by kind and name
    _masks: list[tuple[Tensor, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._world = 1 if self.group is None else self.group.size()
        self.add_facts("refused", {"step": float(self.refusal is not None)})

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
        """Add this rank's ``numbers`` (fp32, as many on every rank) so that :meth:`each` returns those of all ranks."""
        if self.group is None:
            return
        self._each.add(what)
        # Each rank has a place of its own and zeros elsewhere, so that the sum is exact.
        rank, world, width = self.group.rank(), self.group.size(), len(numbers)
        names = [f"{r}.{i}" for r in range(world) for i in range(width)]
        if isinstance(numbers, Tensor):
            spread = torch.zeros(world, width, device=self.device)
            spread[rank] = numbers.to(self.device, non_blocking=True)
            self.add(what, names, spread.flatten())
            return
        before, after = [0.0] * (rank * width), [0.0] * ((world - rank - 1) * width)
        self.add_facts(what, dict(zip(names, [*before, *numbers, *after], strict=True)))

    def each(self, what: str) -> list[tuple[float, ...]]:
        """Return every rank's numbers of the kind ``what``."""
        numbers = list(self.numbers(what).values())
        width = len(numbers) // self._world
        return [tuple(numbers[rank * width : (rank + 1) * width]) for rank in range(self._world)]

    def add_gradients(self, sharded_params: Sequence[ShardedParam], ready: Mapping[str, Speculation]) -> None:
        """Add squared norms of all gradients (0 without one), and whether each differs from the one its direction was
        made of.

        ``sharded_params`` is the same on every rank; ``ready`` has this rank's directions from backward, by name.
        """
        present = [sharded for sharded in sharded_params if sharded.grad is not None]
        examined = [sharded for sharded in present if sharded.name in ready]
        others = [sharded for sharded in present if sharded.name not in ready]
        found: dict[str, Tensor] = {}
        differs = None
        if examined:
            now, own = EXAMINE([sharded.local_grad for sharded in examined])
            then = torch.stack([ready[sharded.name].fingerprint for sharded in examined])
            differs = (now != then).float()
            found.update(zip((sharded.name for sharded in examined), own.unbind(), strict=True))
        if others:
            own = squares([sharded.local_grad for sharded in others])
            found.update(zip((sharded.name for sharded in others), own.unbind(), strict=True))
        values = None
        if present:
            # The sum over ranks would count a shard once for each rank that holds a copy.
            shares = [1.0 / sharded.spec.layout.copies for sharded in present]
            values = torch.stack([found[sharded.name] for sharded in present])
            if len(set(shares)) == 1:
                values = values * shares[0]
            else:
                values = torch.stack([v * share for v, share in zip(values.unbind(), shares, strict=True)])
        self._spread("gradient", sharded_params, present, values)
        matrices = [sharded for sharded in sharded_params if sharded.spec.muon is not None]
        self._spread("differs", matrices, examined, differs)

    def add_rates(self, rates: Mapping[str, Any]) -> None:
        """Add whether each hyperparameter, a number or a tuple of numbers, is finite."""
        wrong = {
            name: float(not (math.isfinite(rate) if isinstance(rate, (int, float)) else all(map(math.isfinite, rate))))
            for name, rate in rates.items()
        }
        self.add_facts("rate", wrong)

    def add_rate(self, name: str, rate: Tensor) -> None:
        """Add whether a hyperparameter that is a one-element tensor is finite."""
        flag = (~torch.isfinite(rate.reshape(()))).float().to(self.device, non_blocking=True)
        self.add("rate", [name], flag[None])

    def add_speculations(self, sharded_params: Sequence[ShardedParam], ready: Mapping[str, Speculation]) -> None:
        """Add whether this rank's directions from backward, ``ready``, are finite; ``sharded_params`` is the same on
        every rank."""
        present = [sharded for sharded in sharded_params if sharded.name in ready]
        directions = [ready[sharded.name].direction for sharded in present]
        wrong = directions_not_finite([sharded.spec for sharded in present], directions) if present else None
        self._spread("direction", sharded_params, present, wrong)

    def speculated(self) -> frozenset[str]:
        """Return the names whose direction every rank has, made from the gradient that it has."""
        ready = self.numbers("ready").items()
        return frozenset(name for name, count in ready if count == self._world) - self.names("differs")

    def _spread(
        self, what: str, sharded_params: Sequence[ShardedParam], present: Sequence[ShardedParam], values: Tensor | None
    ) -> None:
        """Add ``values`` of the parameters ``present``, and 0 for the others, so that every rank adds as many
        numbers."""
        if not sharded_params:
            return
        if values is not None and len(present) == len(sharded_params):  # ``present`` keeps their order
            self.add(what, [sharded.name for sharded in sharded_params], values)
            return
        zero = torch.zeros((), device=self.device)
        found = () if values is None else values.unbind()
        by_name = dict(zip((sharded.name for sharded in present), found, strict=True))
        self.add(
            what, [a.name for a in sharded_params], torch.stack([by_name.get(a.name, zero) for a in sharded_params])
        )

    @property
    def facts(self) -> list[float]:
        """The numbers of :meth:`add_facts` since the last :meth:`reduce`, in order."""
        return [number for _, facts in self._facts for number in facts.values()]

    def again(self, step: int, refusal: Exception | None) -> StepChecks:
        """Return these checks for a later step, whose numbers a replayed graph has written in place."""
        later = copy.copy(self)
        later.step, later.refusal, later._copy, later._read = step, refusal, None, {}
        return later

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
        # In fp32, squares that are finite each may sum to inf.
        sums = []
        for labels, vector in self._reduced:
            start = 0
            for kind, names in labels:
                if kind == what:
                    sums.append(vector[start : start + len(names)].sum(dtype=torch.float64))
                start += len(names)
        if not sums:
            return torch.zeros((), dtype=torch.float64, device=self.device)
        return functools.reduce(torch.add, sums)

    def found_inf(self) -> Tensor:
        """Return 1.0 if any reduced number stops the step, else 0.0: 0-dim fp32 on the device, equal on all ranks."""
        against = torch.zeros((), device=self.device)
        speaking, each = frozenset((*_WRONG, *state_labels(), *self._further)), frozenset(self._each)
        for labels, vector in self._reduced:
            spans = tuple((what, len(names)) for what, names in labels)
            wrong, of_all, first = masks = _masks(spans, speaking, each, self._world, self.device)
            self._masks.append(masks)  # kept alive: a recorded graph reads them
            # inf and NaN times zero are NaN, so that numbers without a rule still stop the step.
            against = against + vector.sub(self._world).mul_(of_all).add_(wrong).mul_(vector).abs_().sum()
            if self._each:
                against = against + (vector - vector[first]).abs_().sum()
        return (~(against == 0)).float()

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
        if not earlier:
            self.send()
        if self._copy is None:
            return
        vector, copied = self._copy
        if copied is not None and not (earlier and copied.query()):
            copied.synchronize()
        numbers = vector.tolist()
        for what, names in (label for labels, _ in self._reduced for label in labels):
            self._read.setdefault(what, {}).update(zip(names, numbers, strict=False))
            del numbers[: len(names)]
        self._copy, self._reduced = None, []

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
        found = gather_objects(mine, self.group)
        ranks = [rank for rank, holds in enumerate(found) if holds]
        return " on every rank" if len(ranks) in (0, len(found)) else f" on {ranks_named(ranks)}"

    def numbers(self, what: str) -> Mapping[str, float]:
        """Return the numbers of a kind that :meth:`wait` has read, by name."""
        return self._read.get(what, {})

    def spoiled(self) -> dict[str, list[str]]:
        """Return the names of momenta, states, rates and numbers of extensions that are not finite, by kind."""
        kinds = ("momentum", *state_labels(), "rate", *self._further)
        return {what: sorted(self.names(what)) for what in kinds if what in self._read}

    def names(self, what: str) -> set[str]:
        """Return the names of a kind whose number is not zero."""
        numbers = self.numbers(what)
        return {name for name, number in numbers.items() if number != 0} if any(numbers.values()) else set()


@functools.lru_cache(maxsize=16)
def _masks(
    spans: tuple[tuple[str, int], ...], against: Set[str], each: Set[str], world: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return three masks over a vector: 1.0 where a number must be zero; 1.0 where it must be zero or ``world``; and
    the position of rank 0's number where all ranks' must be equal, elsewhere its own position."""
    wrong: list[float] = []
    of_all: list[float] = []
    first: list[int] = []
    for what, count in spans:
        start, width = len(first), count // world
        wrong += [float(what in against)] * count
        of_all += [float(what in _OF_ALL)] * count
        first += [start + (i % width if what in each else i) for i in range(count)]
    return torch.tensor(wrong, device=device), torch.tensor(of_all, device=device), torch.tensor(first, device=device)
