"""The states of one optimizer that are not beside their parameters: lent by the bucket, and taken back."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from compile_muon.agreement.compare import ranks_named
from compile_muon.agreement.together import host_mesh
from compile_muon.config import Config, OffloadConfig
from compile_muon.engine import Engine, Extension
from compile_muon.errors import OffloadError, config_error
from compile_muon.model.groups import Group
from compile_muon.offload.arena import Arena
from compile_muon.offload.codecs import CODECS, Codec
from compile_muon.offload.direct import on_disk
from compile_muon.offload.ferry import Ferry
from compile_muon.offload.store import ALIGNED, Bucket, FileStore, MemoryStore, Slot, Store
from compile_muon.passes.costs import Costs
from compile_muon.passes.exchange.owned import owned, state_shape
from compile_muon.passes.methods import ElementMethod, MatrixMethod, Method
from compile_muon.passes.norms import not_finite
from compile_muon.passes.spec import ParamSpec, decode_dtype
from compile_muon.runtime.commit import advance, round_masters
from compile_muon.runtime.lender import GRADIENT, MASTER, ROWS, Lender, Lent
from compile_muon.runtime.owner_states import owners_of, states_kept
from compile_muon.runtime.sharded_param import ShardedParam
from compile_muon.runtime.shards import as_state, edits_of, local_tensor, row_state_shape
from compile_muon.runtime.survey import Survey

__all__ = ["Home", "keeps_momentum_alone"]

MOMENTUM = "momentum_buffer"
#: of a bucket, how often it has been opened in a step; of none, the beginning
_Visit = tuple[Bucket | None, int]
_NOT_KEPT = "could not keep optimizer state: weights and state are as they were"


@dataclass(eq=False)
class _Away:
    """What of one parameter is away.

    Args:
        momentum: what its momentum is kept in, by name in the optimizer's state.
        states: further states, by name.
        masters: its master weight, likewise.
        labels: what errors call them.
    """

    momentum: dict[str, Slot] = field(default_factory=dict)
    states: dict[str, Slot] = field(default_factory=dict)
    masters: dict[str, Slot] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def slots(self) -> dict[str, Slot]:
        return self.momentum | self.states | self.masters


@dataclass(eq=False)
class _Chunk:
    """Parameters whose state is lent together, a bucket for each use of it: by graphs, ahead of weights, with them.

    Args:
        on_host: whether the host computes their step.
        rows: of the one parameter that it has state of, where the others are in other chunks.
        last: whether no further rows follow.
    """

    on_host: bool = False
    rows: range | None = None
    last: bool = True
    names: list[str] = field(default_factory=list)
    momentum: Bucket | None = None
    states: Bucket | None = None
    masters: Bucket | None = None

    @property
    def buckets(self) -> list[Bucket]:
        return [bucket for bucket in (self.momentum, self.states, self.masters) if bucket is not None]

    @property
    def first(self) -> bool:
        """Whether it has the first rows."""
        return not self.rows or self.rows.start == 0

    def part(self, tensor: Tensor) -> Tensor:
        """Its rows of a tensor like the parameter."""
        return tensor if self.rows is None else tensor.narrow(0, self.rows.start, len(self.rows))

    def slots(self, slots: Mapping[str, Slot]) -> list[Slot]:
        """The same of slots."""
        if self.rows is None:
            return [*slots.values()]
        return [slot.rows(self.rows.start, len(self.rows)) for slot in slots.values()]

    def lent(self, what: Lent, *, moved: bool) -> list[Bucket]:
        """Which are asked for."""
        states = [self.states] if moved else [self.momentum, self.states]
        asked = {Lent.STATES: states, Lent.MASTERS: [self.masters]}.get(what, [*states, self.masters])
        return [bucket for bucket in asked if bucket is not None]


class Home(Lender, Extension):
    """State of one rank that is somewhere else, or kept in fewer bits.

    Args:
        groups: those of the optimizer. A bucket is lent once in a step, so it holds state of one group.
        config: says where state is.
        away: names of parameters whose states are offloaded, an attribute.
        group: all ranks of the optimizer.
        device: that computes.
        real: False for plans, which have neither disks nor other ranks.
        fake: mode of the model's tensors, where these are fake.
    """

    beside = False
    unrecorded = "states are not beside their parameters"

    def __init__(
        self,
        groups: Sequence[Group],
        config: Config,
        away: frozenset[str],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        real: bool,
        fake: FakeTensorMode | None = None,
    ) -> None:
        self.lender = self
        self._groups, self._config, self.away = groups, config, away
        self._group, self._device = group if real else None, device
        self._real, self._fake = real, fake
        self._methods = {
            name: each.method for each in groups for name in each.members if isinstance(each.method, MatrixMethod)
        }
        # What was opened behind it, the last time, each by how often it had been in the step; behind None, first.
        self._followed: dict[_Visit, _Visit] = {}
        self._visits: Counter[Bucket | None] = Counter()
        self._last: _Visit = None, 0
        self._moved: dict[str, tuple[int, Tensor]] = {}  # which fetch, and whether it is not finite since
        self._written: list[Bucket] = []  # by the step under way
        self._wrong: dict[tuple[str, str], Tensor] = {}
        self._undone: list[tuple[Tensor, Tensor]] = []
        self._told: OffloadError | None = None  # what all ranks have heard of
        #: of what is not on the device, what the latest of :meth:`lend` is made of, and what of that is only read
        self.lent: tuple[list[Bucket], list[Bucket]] = [], []
        self._shown: dict[str, dict[str, Tensor]] = {}
        self._sharded_params: dict[str, ShardedParam] = {}
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}
        # Sharded parameters with a master weight here, and edits of the parameter when that was last rounded to it.
        self._rounded_at: dict[ShardedParam, int] = {}
        self._optimizer: Optimizer

    def reserve(self, specs: Mapping[str, ParamSpec], costs: Costs) -> None:
        """See :class:`~compile_muon.runtime.lender.Lender`.

        Raises:
            ConfigError: of a parameter no rounded copy can be kept alone.
            OffloadError: the disk of a rank has no room; on every rank.
        """
        config, groups, real = self._config, self._groups, self._real
        for name, spec in specs.items():
            if spec.master:
                _check_master(name, spec, config)
        with self._fake or nullcontext():
            self._codec: Codec = CODECS[config.muon.momentum_dtype](self._device)
        members = {name for each in groups for name in each.members}
        self._owners = owners_of({name: spec for name, spec in specs.items() if name in members}, costs)
        self._kept = {
            name: own
            for each in groups
            for name in each.members
            if (own := self._slots(name, specs[name], each.method, name in self.away)).slots
        }
        offload = config.zero.offload or OffloadConfig()
        self._chunks = [
            chunk
            for each in groups
            for chunk in self._in_chunks([name for name in each.members if name in self._kept], offload, each.method)
        ]
        self._on_host = {bucket for chunk in self._chunks if chunk.on_host for bucket in chunk.buckets}
        self._ferry = Ferry(self._device, real=real and bool(self._on_host))
        self._arrivals: Iterator[dict[ShardedParam, dict[str, Tensor]]]  # of the step under way
        self._chunks_of: dict[str, list[_Chunk]] = {}
        for chunk in self._chunks:
            for name in chunk.names:
                self._chunks_of.setdefault(name, []).append(chunk)
        momenta = [chunk.momentum for chunk in self._chunks if chunk.momentum is not None]
        others = [each for chunk in self._chunks for each in (chunk.states, chunk.masters) if each is not None]
        here = momenta if config.zero.offload is None or not offload.momentum else []
        there = others if here else [*momenta, *others]
        # All of a chunk may be lent at a time.
        self._there, self._buffers = there, max([offload.buffer_count, *(len(c.buckets) for c in self._chunks)])
        self._arenas: dict[Bucket, Arena] = {}
        self._stores: list[Store] = []
        with self._fake or nullcontext():
            if here:
                self._move_in(MemoryStore(here, self._device), here, self._device, real)
            for user, on_host in ((self._device, False), (torch.device("cpu"), True)):
                if used := [bucket for bucket in there if (bucket in self._on_host) == on_host]:
                    self._move_in(self._away(used, user, offload, real), used, user, real)

    def _away(self, buckets: Sequence[Bucket], user: torch.device, offload: OffloadConfig, real: bool) -> Store:
        pin = offload.pin_memory and user.type != "cpu" and real
        if offload.device != "nvme" or not real:
            return MemoryStore(buckets, torch.device("cpu"), pin=pin)
        assert offload.nvme_path is not None
        with self._agreeing("has no place for optimizer state: nothing was sharded"):
            return on_disk(offload.nvme_path, buckets, buffers=self._buffers, pin=pin, device=user)

    def _move_in(self, store: Store, buckets: Sequence[Bucket], user: torch.device, real: bool) -> None:
        arena = Arena(store, buckets, user, buffers=self._buffers, real=real)
        self._stores.append(store)
        self._arenas |= dict.fromkeys(buckets, arena)

    def _slots(self, name: str, spec: ParamSpec, method: Method, away: bool) -> _Away:
        kept, shape, dtype = _Away(), spec.layout.local_shape, decode_dtype(spec.state_dtype)
        if spec.muon is not None and spec.muon.fetched:
            self._codec.check(name, spec)
            columns = math.prod(shape[len(row_state_shape(spec, shape, 1)) - 1 :])
            for part in self._codec.kept(columns):
                own = shape if part.width is None else row_state_shape(spec, shape, part.width)
                kept.momentum[part.name] = Slot(f"{part.name} of {name}", tuple(own), part.dtype or dtype)
            kept.labels[MOMENTUM] = "momentum"
        for state in method.states if away else ():
            if state.each == "element":  # what there is a number a row of is not worth the way
                kept.states[state.name] = Slot(f"{state.name} of {name}", tuple(shape), dtype)
                kept.labels[state.name] = state.label
            elif state.at_owner:
                own = state_shape(spec, state, owned(spec, self._owners[name]))
                wide = torch.promote_types(dtype, torch.float32)
                kept.states[state.name] = Slot(f"{state.name} of {name}", own, wide)
                kept.labels[state.name] = state.label
        if spec.master:
            kept.masters[MASTER] = Slot(f"{MASTER} of {name}", tuple(shape), dtype)
        return kept

    def _in_chunks(self, names: Sequence[str], offload: OffloadConfig, method: Method) -> list[_Chunk]:
        on_host = offload.adamw_on == "cpu" and isinstance(method, ElementMethod) and method.on_host is not None
        chunks: list[_Chunk] = []
        room = 0
        for name in names:
            slots = [*self._kept[name].slots.values()]
            size = sum(slot.nbytes for slot in slots)
            if not on_host and self._by_rows(name, method) and (cut := _cut(slots, offload.buffer_bytes)):
                chunks += [_Chunk(rows=rows, last=rows is cut[-1], names=[name]) for rows in cut]
                room = 0
                continue
            # A momentum is fetched, and to a file written, by itself: two exchanges may have parts of a larger bucket.
            if size > room or not chunks or self._kept[name].momentum:
                chunks.append(_Chunk(on_host))
                room = max(offload.buffer_bytes, size)
            chunks[-1].names.append(name)
            room -= size
        for chunk in chunks:
            kept = [self._kept[name] for name in chunk.names]
            momenta = [slot for one in kept for slot in chunk.slots(one.momentum)]
            states = [slot for one in kept for slot in chunk.slots(one.states)]
            masters = [slot for one in kept for slot in chunk.slots(one.masters)]
            chunk.momentum = Bucket(momenta) if momenta else None
            chunk.states = Bucket(states) if states else None
            chunk.masters = Bucket(masters) if masters else None
        return chunks

    def _by_rows(self, name: str, method: Method) -> bool:
        """Whether all that is kept of a parameter may be lent some rows after the other."""
        kept = self._kept[name]
        if isinstance(method, MatrixMethod):
            return keeps_momentum_alone(method) and self._codec.by_rows and not kept.masters
        states = {state.name for state in method.states if state.each == "element"}
        return states <= kept.states.keys() and all(s.each in ("element", "parameter") for s in method.states)

    def keep_master(self, name: str, master: Tensor) -> None:
        """Begin with this master weight: what this rank's part of the parameter was before it was rounded."""
        slot = self._kept[name].masters[MASTER]
        self._store(name, slot).current(slot).copy_(master)

    def attach(self, engine: Engine) -> None:
        """Belong to these parameters, and show their states in the optimizer's."""
        super().attach(engine)
        self._optimizer = engine.step.optimizer
        self._sharded_params = {
            sharded.name: sharded for sharded in engine.step.sharded_params.values() if sharded.name in self._kept
        }
        for sharded in self._sharded_params.values():
            if sharded.spec.master:
                self._rounded_at[sharded] = -1  # as given, or filled since
        self._follow_parameters()
        self._show()

    def names(self, sharded: ShardedParam) -> frozenset[str]:
        """Of its states that are away, as methods name them."""
        return frozenset(self._kept.get(sharded.name, _Away()).states)

    def _state_of(self, sharded: ShardedParam) -> dict[str, Tensor]:
        """The optimizer's, which loading replaces."""
        return self._optimizer.state[sharded.param]

    # ------------------------------------------------------------------ graphs

    def fetch(self, sharded: ShardedParam, grad: Tensor, out: Tensor) -> Tensor:
        """Write the momentum to ``out``, and begin to read what was fetched behind it the last time.

        In a file it is moved toward the gradient then and there, and written where the next generation is: a step that
        uses the direction keeps that, and need not read it again.
        """
        wrong: list[Tensor] = []
        method = self._methods[sharded.name]
        for chunk in self._chunks_of[sharded.name]:
            if (bucket := chunk.momentum) is None:
                continue
            arena = self._arenas[bucket]
            held = self._opened(bucket)
            parts = {name: held[slot] for name, slot in self._kept[sharded.name].momentum.items()}
            momentum = self._codec.decode(parts, out.dtype)
            chunk.part(out).copy_(momentum)
            # What a method of its own makes of a momentum may depend on the direction.
            if isinstance(arena.store, FileStore) and method.advance is None:
                advance(method, [momentum], [chunk.part(grad)], [], {"momentum": sharded.factor})
                self._codec.encode(momentum, parts, sharded.name, sharded.ledger.status.step)
                wrong.append(not_finite([momentum])[0])
                arena.close(bucket)
            else:
                arena.leave(bucket)
            self._read_ahead()
        if wrong:
            self._moved[sharded.name] = (sharded.fetches, functools.reduce(torch.maximum, wrong))
        return out

    def moved(self, fetches: Mapping[ShardedParam, int]) -> frozenset[ShardedParam]:
        """See :class:`~compile_muon.runtime.lender.Lender`."""
        found = []
        for sharded, number in fetches.items():
            made, wrong = self._moved.get(sharded.name, (-1, None))
            if made == number and wrong is not None:
                found.append(sharded)
                self._wrong[sharded.name, "momentum"] = wrong
        self._written = [bucket for sharded in found for bucket in self._momenta_of(sharded)]
        self._moved.clear()
        return frozenset(found)

    def _momenta_of(self, sharded: ShardedParam) -> list[Bucket]:
        chunks = self._chunks_of.get(sharded.name, [])
        return [chunk.momentum for chunk in chunks if chunk.momentum is not None]

    def _opened(self, bucket: Bucket) -> dict[Slot, Tensor]:
        """Its slots, by those that they are rows of; what is opened behind what is remembered."""
        if bucket is not self._last[0]:
            self._visits[bucket] += 1
            before, self._last = self._last, (bucket, self._visits[bucket])
            self._followed[before] = self._last
        return {slot.whole: tensor for slot, tensor in self._arenas[bucket].open(bucket).items()}

    def _read_ahead(self) -> None:
        """Begin to read what came behind the last in a step before, as far as there is room beside that."""
        visit = self._last
        for _ in range(self._buffers - (visit[0] is not None)):
            if (following := self._followed.get(visit)) is None:
                break
            bucket, _ = visit = following
            if bucket is None or not self._arenas[bucket].start(bucket):
                break

    # ------------------------------------------------------------------ steps

    def lend(
        self, sharded_params: Sequence[ShardedParam], what: Lent, step: int, *, moved: Collection[ShardedParam] = ()
    ) -> Iterator[tuple[list[ShardedParam], Sequence[MutableMapping[str, Tensor]]]]:
        """See :class:`~compile_muon.runtime.lender.Lender`; by the bucket."""
        beside = [sharded for sharded in sharded_params if sharded.name not in self._kept]
        if beside:
            self._note(beside, what)
            yield beside, [self._state_of(sharded) for sharded in beside]
        wanted = {sharded.name: sharded for sharded in sharded_params}
        todo: list[tuple[_Chunk, list[ShardedParam], list[Bucket]]] = []
        for chunk in self._chunks:
            if own := [wanted[name] for name in chunk.names if name in wanted]:
                todo.append((chunk, own, chunk.lent(what, moved=own[0] in moved)))
        for number, (chunk, own, buckets) in enumerate(todo):
            given = next(self._arrivals, None) if chunk.on_host else {}
            if given is None:  # the step is skipped
                return
            read_only = [chunk.masters] if what is Lent.BESIDE_MASTERS and chunk.masters is not None else []
            held: dict[Slot, Tensor] = {}
            for bucket in buckets:
                held |= self._opened(bucket)
            for bucket in todo[number + 1][2] if number + 1 < len(todo) else ():
                self._arenas[bucket].start(bucket)
            self._count_on(torch.device("cpu") if chunk.on_host else self._device, own)
            if chunk.first:
                self._note(own, what)
            lent = [self._views(sharded, held, chunk) | given.get(sharded, {}) for sharded in own]
            if chunk.rows is not None:
                lent[0] |= {GRADIENT: chunk.part(own[0].local_grad)}
            self.lent = ([b for b in buckets if b in self._there], [b for b in read_only if b in self._there])
            yield own, lent
            if chunk.on_host:
                if self._on_disk:  # what was noted is of before
                    self._ferry.follow()
                self._ferry.back(own, lent)
            for sharded, views in zip(own, lent, strict=True):
                slots, kept = self._state_of(sharded), self._kept[sharded.name]
                own_names = slots.keys() - kept.slots.keys() if chunk.last else frozenset()
                slots.update({name: tensor for name, tensor in views.items() if name in own_names})
                if MOMENTUM in views and kept.momentum:
                    parts = {name: held[slot] for name, slot in kept.momentum.items()}
                    self._codec.encode(views[MOMENTUM], parts, sharded.name, step)
            self._look(own, lent, more=not chunk.first)
            for bucket in buckets:
                if bucket in read_only:
                    self._arenas[bucket].leave(bucket)
                else:
                    self._arenas[bucket].close(bucket)
                    self._written.append(bucket)

    def fetched(self, sharded: ShardedParam) -> list[Bucket]:
        """Of what is not on the device, what :meth:`fetch` opens."""
        return [bucket for bucket in self._momenta_of(sharded) if bucket in self._there]

    def computes(self, sharded: ShardedParam) -> bool:
        """Whether the host computes its step."""
        return any(chunk.on_host for chunk in self._chunks_of.get(sharded.name, []))

    def _note(self, sharded_params: Sequence[ShardedParam], what: Lent) -> None:
        """Copy to the host what a step is about to write in place, if a disk can still fail it: who is lent masters
        alone writes no states, and who is lent some to write moves parameters."""
        if not self._on_disk:
            return
        for sharded in sharded_params:
            kept = self._kept[sharded.name].slots if sharded.name in self._kept else {}
            in_file = {name for name, slot in kept.items() if isinstance(self._store(sharded.name, slot), FileStore)}
            states = {} if what is Lent.MASTERS else {**self._state_of(sharded)}
            written = [local_tensor(value) for name, value in states.items() if name not in in_file]
            if what in (Lent.MASTERS, Lent.ALL):
                written.append(sharded.local.detach())
            for tensor in written:
                copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
                self._undone.append((tensor, copy.copy_(tensor, non_blocking=True)))

    def _count_on(self, device: torch.device, sharded_params: Sequence[ShardedParam]) -> None:
        """What is kept of a parameter beside its elements is where its step is computed, wherever a load put it."""
        for sharded in sharded_params:
            slots = self._state_of(sharded)
            for name, tensor in {**slots}.items():
                if name not in self._kept[sharded.name].slots and tensor.device.type != device.type:
                    slots[name] = tensor.to(device)

    def _views(self, sharded: ShardedParam, held: Mapping[Slot, Tensor], chunk: _Chunk) -> dict[str, Tensor]:
        kept = self._kept[sharded.name]
        found = {name: tensor for name, tensor in {**self._state_of(sharded)}.items() if name not in kept.slots}
        if not chunk.last:  # what there is one of moves with the last rows
            found = {name: tensor if tensor.ndim else tensor.clone() for name, tensor in found.items()}
        found |= {name: held[slot] for name, slot in (kept.states | kept.masters).items() if slot in held}
        parts = {name: held[slot] for name, slot in kept.momentum.items() if slot in held}
        if parts:
            found[MOMENTUM] = self._codec.decode(parts, decode_dtype(sharded.spec.state_dtype))
        return found if chunk.rows is None else found | {ROWS: chunk.part(sharded.local.detach())}

    def _look(self, own: Sequence[ShardedParam], lent: Sequence[Mapping[str, Tensor]], *, more: bool) -> None:
        """Note which of these states are not finite.

        Args:
            more: whether these are further rows.
        """
        by_label: dict[str, dict[ShardedParam, Tensor]] = {}
        for sharded, views in zip(own, lent, strict=True):
            for name, label in self._kept[sharded.name].labels.items():
                if name in views:
                    by_label.setdefault(label, {})[sharded] = views[name]
        for label, tensors in by_label.items():
            flags = not_finite(list(tensors.values()))
            if flags.device.type != self._device.type:
                flags = flags.pin_memory().to(self._device, non_blocking=True)
            for sharded, flag in zip(tensors, flags.unbind(), strict=True):
                known = self._wrong.get((sharded.name, label)) if more else None
                self._wrong[sharded.name, label] = flag if known is None else torch.maximum(known, flag)

    def wrong(self, sharded: ShardedParam, label: str) -> Tensor | None:
        """See :class:`~compile_muon.runtime.lender.Lender`."""
        kept = self._kept.get(sharded.name)
        if kept is None or label not in kept.labels.values():
            return None
        found = self._wrong.get((sharded.name, label))
        return torch.zeros((), device=self._device) if found is None else found

    def facts(self, survey: Survey) -> None:
        """Which momenta are not finite. One beside its parameter is seen by its direction, all of which is NaN then."""
        found = {a.name: flag for a in self.engine.step.muon if (flag := self.wrong(a, "momentum")) is not None}
        if found:
            survey.add("momentum", list(found), torch.stack(list(found.values())))

    @contextmanager
    def writing(self, found_inf: Tensor | None) -> Iterator[None]:
        """See :class:`~compile_muon.runtime.lender.Lender`.

        Raises:
            OffloadError: on every rank, if a disk of one failed.
        """
        own = [[self._sharded_params[name] for name in chunk.names] for chunk in self._chunks if chunk.on_host]
        graded = [[sharded for sharded in each if sharded.grad is not None] for each in own]
        self._arrivals = self._ferry.across([each for each in graded if each], found_inf)
        with self._agreeing(_NOT_KEPT, meets=self._on_disk):
            yield
            for store in self._stores:
                store.finish()
        for store in self._stores:
            store.commit(self._written)
        self._note_rounded()
        self._written = []
        self._undone.clear()
        self._new_momenta()
        self._show()
        self._followed.pop(self._last, None)  # what the next step reads is current from now on
        self._visits.clear()
        self._last = None, 0
        self._read_ahead()

    def confirm(self) -> None:
        """See :class:`~compile_muon.runtime.lender.Lender`."""
        with self._agreeing(_NOT_KEPT, meets=self._on_disk):
            for store in self._stores:
                store.finish()

    @contextmanager
    def _agreeing(self, what: str, *, meets: bool = True) -> Iterator[None]:
        """Raise on all ranks what a disk of one failed in the block, once all is as it was.

        Args:
            meets: False where there is no disk, and nothing to hear of.
        """
        failure: OffloadError | None = None
        try:
            yield
        except OffloadError as error:
            if error is self._told:
                raise
            failure = error
        except BaseException:
            self._undo()
            raise
        failed = [failure is not None]
        if self._group is not None and meets:
            flags = torch.zeros(self._group.size(), device=self._device)
            flags[self._group.rank()] = float(failure is not None)
            dist.all_reduce(flags, group=self._group)
            failed = [flag != 0 for flag in flags.tolist()]
        if not any(failed):
            return
        self._undo()
        ranks = ranks_named([rank for rank, flag in enumerate(failed) if flag])
        self._told = failure or OffloadError(f"{ranks} {what}; the error there says why")
        raise self._told

    def _undo(self) -> None:
        """All is as it was ahead of the step."""
        for arena in set(self._arenas.values()):
            arena.discard()
        for tensor, before in reversed(self._undone):
            tensor.copy_(before)
        self._undone.clear()
        self._written = []
        self._moved.clear()
        self._wrong.clear()

    @property
    def _on_disk(self) -> bool:
        return any(isinstance(store, FileStore) for store in self._stores)

    # ------------------------------------------------------------------ what users see

    def settle(self) -> None:
        """Return when host memory has all that was written."""
        for arena in set(self._arenas.values()):
            arena.settle()

    def own(self) -> None:
        """What users put into the optimizer's state, as they may, is kept; what they took out begins anew."""
        self._follow_parameters()
        moved = False
        for owner, shown in self._shown.items():
            sharded = self._sharded_params[owner]
            slots = self._state_of(sharded)
            found = {**slots}
            for name, tensor in shown.items():
                if found.get(name) is tensor:
                    continue
                self.settle()
                # What was taken out begins anew, a master weight as what its parameter is.
                anew = sharded.local.detach() if name == MASTER else torch.zeros_like(local_tensor(tensor))
                local_tensor(tensor).copy_(local_tensor(found.get(name, anew)))
                slots[name] = tensor
                moved = True
        if moved or self._edits() != self._seen:
            self.loaded()
        if moved:
            self._show()

    def loaded(self) -> None:
        """Someone wrote to what is shown."""
        for arena in set(self._arenas.values()):
            arena.discard()
        self._follow_parameters()
        self._wrong.clear()
        self._moved.clear()
        for chunk in self._chunks:
            held: dict[Slot, Tensor] = {}
            for bucket in chunk.buckets:
                held |= {slot.whole: tensor for slot, tensor in self._arenas[bucket].open(bucket).items()}
            own = [self._sharded_params[name] for name in chunk.names]
            lent = [self._views(sharded, held, chunk) for sharded in own]
            self._look(own, lent, more=not chunk.first)
            round_masters(own, lent)
            for bucket in chunk.buckets:
                self._arenas[bucket].leave(bucket)
        self._note_rounded()
        self._new_momenta()
        self._seen = self._edits()

    @torch.no_grad()
    def _follow_parameters(self) -> None:
        """Master weights of parameters that were edited become these, where they are not rounded to them."""
        for sharded, rounded_at in self._rounded_at.items():
            if edits_of(sharded.param) == rounded_at:
                continue
            for chunk in self._chunks_of[sharded.name]:
                assert chunk.masters is not None
                self._arenas[chunk.masters].forget(chunk.masters)
            slot = self._kept[sharded.name].masters[MASTER]
            master = self._store(sharded.name, slot).current(slot)
            param = sharded.local.detach().to(master.device)
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))
        self._note_rounded()

    def _note_rounded(self) -> None:
        """Parameters are rounded to their master weights as these are now."""
        for sharded in self._rounded_at:
            self._rounded_at[sharded] = edits_of(sharded.param)

    def _new_momenta(self) -> None:
        """What was made of the momenta before is of no use any more."""
        for sharded in self._sharded_params.values():
            if sharded.spec.muon is not None:
                torch.autograd.graph.increment_version(sharded.momentum)

    def _edits(self) -> list[int]:
        return [local_tensor(tensor)._version for shown in self._shown.values() for tensor in shown.values()]

    def _show(self) -> None:
        """What is kept stands where users and checkpoints look for it."""
        for sharded in self._sharded_params.values():
            kept, mesh = self._kept[sharded.name], None
            if isinstance(sharded.param, DTensor) and self._device.type != "cpu":
                mesh = host_mesh(sharded.param.device_mesh, self._meshes)
            found = self._shown.setdefault(sharded.name, {})
            for name, slot in kept.slots.items():
                tensor = self._store(sharded.name, slot).current(slot)
                if name not in found or local_tensor(found[name]) is not tensor:
                    each = "element" if tensor.shape == sharded.local.shape else "row"
                    there = mesh if tensor.device != self._device else None
                    at_owner = name in (state.name for state in states_kept(sharded))
                    found[name] = tensor if at_owner else as_state(sharded, tensor, each, there)
            slots = self._state_of(sharded)
            slots.update(found)
            if self._device.type != "cpu" and not isinstance(slots, _Settled):
                self._optimizer.state[sharded.param] = _Settled(self, slots)
        self._seen = self._edits()

    def _store(self, name: str, slot: Slot) -> Store:
        buckets = self._chunks_of[name][0].buckets
        return next(self._arenas[each].store for each in buckets if any(own.whole is slot for own in each.slots))

    def folder_of(self, name: str, state: str) -> Path | None:
        """See :class:`~compile_muon.runtime.lender.Lender`."""
        slot = self._kept[name].slots.get(state) if name in self._kept else None
        store = None if slot is None else self._store(name, slot)
        return store.folder if isinstance(store, FileStore) else None

    @property
    def bytes_away(self) -> int:
        """Of this rank's state that is not on the device."""
        return sum(bucket.nbytes for bucket in self._there)

    @property
    def bytes_in_buffers(self) -> int:
        """Of the device that buckets of it take turns in."""
        sizes = [bucket.nbytes for bucket in self._there if bucket not in self._on_host]
        return min(self._buffers, len(sizes)) * max(sizes, default=0)

    def totals(self) -> Mapping[str, int]:
        """Bytes read from a disk and written to one, where there is one."""
        read, written = (sum(getattr(s, name) for s in self._stores) for name in ("bytes_read", "bytes_written"))
        return {"disk_bytes_read": read, "disk_bytes_written": written} if read or written else {}


def keeps_momentum_alone(method: MatrixMethod) -> bool:
    """Whether it keeps nothing but a momentum, which moves element by element."""
    return not method.states and method.advance is None and method.after is None


def _cut(slots: Sequence[Slot], nbytes: int) -> list[range]:
    """Rows of these tensors of one shape, so that no part of all has more bytes, if it can be; none where one has all.

    Parts begin with a page in each tensor, as requests past a page cache do.
    """
    count, *inner = slots[0].shape or (0,)
    widths = [math.prod(inner) * slot.dtype.itemsize for slot in slots]
    step = math.lcm(*(ALIGNED // math.gcd(width, ALIGNED) for width in widths))
    rows = max(step, nbytes // max(sum(widths), 1) // step * step)
    return [range(first, min(first + rows, count)) for first in range(0, count, rows)] if rows < count else []


def _check_master(name: str, spec: ParamSpec, config: Config) -> None:
    """Raise what forbids to keep only a rounded copy of this parameter, whose gradient then has its dtype."""
    remedy = "leave masters out, so that gradients are float32"
    if spec.reduce_dtype != spec.dtype:
        problem = f"makes the gradient of {name} {spec.dtype}, and reduce_dtype is {spec.reduce_dtype}"
    elif config.zero.micro_batches > 1:
        problem = f"makes the gradient of {name} {spec.dtype}, which micro-batches do not add up in"
    elif config.muon.qk_clip is not None:
        problem, remedy = "keeps weights where qk_clip does not scale them", "leave one of them out"
    else:
        return
    raise config_error("OffloadConfig.masters", True, problem, remedy)


class _Settled(dict[str, Tensor]):
    """The states of one parameter, which a GPU may still be copying to the host: whoever reads one waits for that.

    A copy of it, as in ``{**slots}``, is of the tensors as they are.
    """

    def __init__(self, home: Home, slots: Mapping[str, Tensor]) -> None:
        super().__init__(slots)
        self._home = home

    def __getitem__(self, name: str) -> Tensor:
        self._home.settle()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._home.settle()
        return super().get(name, default)

    def items(self) -> Any:
        self._home.settle()
        return super().items()

    def values(self) -> Any:
        self._home.settle()
        return super().values()

    def __reduce__(self) -> tuple[type[dict[str, Tensor]], tuple[dict[str, Tensor]]]:
        self._home.settle()
        return dict, ({**self},)
