"""The states of one optimizer that are not resident: provided by the bucket, and taken back."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.optim import Optimizer

from compile_muon.config import Config, OffloadConfig
from compile_muon.engine import Engine, Extension
from compile_muon.engine.commit import advance
from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import GRADIENT, ROWS, StateProvider, StateRequest
from compile_muon.engine.step_checks import StepChecks
from compile_muon.engine.written import round_masters
from compile_muon.model.groups import Group
from compile_muon.offload.codecs import CODECS, MOMENTUM
from compile_muon.offload.device_buffers import DeviceBuffers, ReadAhead
from compile_muon.offload.host_step import HostStep
from compile_muon.offload.layout import Chunk, OffloadedParam, OffloadLayout, check_master
from compile_muon.offload.not_finite import NotFinite
from compile_muon.offload.shown import Shown
from compile_muon.offload.store import Bucket, FileStore, Slot, Store
from compile_muon.offload.transaction import Transaction
from compile_muon.passes.language.spec import ParamSpec, decode_dtype
from compile_muon.passes.methods import MatrixMethod
from compile_muon.passes.norms import not_finite

__all__ = ["OffloadedStates"]

_HOST = torch.device("cpu")
_NOT_KEPT = "could not keep optimizer state: weights and state are as they were"


class OffloadedStates(StateProvider, Extension):
    """State of one rank that is somewhere else, or kept in fewer bits.

    Args:
        groups: those of the optimizer.
        config: says where state is.
        offloaded: names of parameters whose states are offloaded, ``offloaded_names``.
        group: all ranks of the optimizer.
        device: that computes.
        real: False for plans, which have neither disks nor other ranks.
        fake: mode of the model's tensors, where these are fake.
    """

    all_resident = False
    unrecorded = "states are not resident"

    def __init__(
        self,
        groups: Sequence[Group],
        config: Config,
        offloaded: frozenset[str],
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        real: bool,
        fake: FakeTensorMode | None = None,
    ) -> None:
        self.state_provider = self
        self._groups, self._config, self.offloaded_names = groups, config, offloaded
        self._device, self._real, self._fake = device, real, fake
        self._methods = {
            name: each.method for each in groups for name in each.members if isinstance(each.method, MatrixMethod)
        }
        self._buffers = DeviceBuffers((), count=0, real=real)
        self._flags = NotFinite({}, device)
        self._step = Transaction(group if real else None, device, self._forget)
        #: of what is not on the device, what the latest of :meth:`provide` is made of, and what of that is only read
        self.provided: tuple[list[Bucket], list[Bucket]] = [], []
        self._sharded_params: dict[str, ShardedParam] = {}
        self._optimizer: Optimizer

    def reserve(self, specs: Mapping[str, ParamSpec], owners: Mapping[str, tuple[int, ...]]) -> None:
        """See :class:`~compile_muon.engine.state_provider.StateProvider`.

        Raises:
            ConfigError: of a parameter no rounded copy can be kept alone.
            OffloadError: the disk of a rank has no room; on every rank.
        """
        config, device = self._config, self._device
        for name, spec in specs.items():
            if spec.master:
                check_master(name, spec, config)
        with self._fake or nullcontext():
            self._codec = CODECS[config.muon.momentum_dtype](device)
        layout = OffloadLayout(self._groups, specs, self.offloaded_names, owners, config.zero.offload, self._codec)
        self._kept, self._layout = layout.kept, layout
        self._flags = NotFinite({name: kept.labels for name, kept in layout.kept.items()}, device)
        self._host = HostStep(device, real=self._real and bool(layout.on_host))
        placed: list[tuple[Store, Sequence[Bucket], torch.device]] = []
        with self._fake or nullcontext():
            if layout.here:
                placed.append((Store(layout.here, device), layout.here, device))
            for user, on_host in ((device, False), (_HOST, True)):
                if used := [bucket for bucket in layout.there if (bucket in layout.on_host) == on_host]:
                    placed.append((self._store_for(used, user), used, user))
            self._buffers = DeviceBuffers(placed, count=layout.together, real=self._real)
        self._ahead = ReadAhead(self._buffers, layout.together)

    def _store_for(self, buckets: Sequence[Bucket], user: torch.device) -> Store:
        offload = self._config.zero.offload or OffloadConfig()
        pin = offload.pin_memory and user.type != "cpu" and self._real
        if offload.device != "nvme" or not self._real:
            return Store(buckets, _HOST, pin=pin)
        assert offload.nvme_path is not None
        with self._step.agreeing("has no place for optimizer state: nothing was sharded"):
            return FileStore(offload.nvme_path, buckets, buffers=self._layout.together, pin=pin)

    def keep_master(self, name: str, master: Tensor) -> None:
        """Begin with this master weight: what this rank's part of the parameter was before it was rounded."""
        for slot in self._kept[name].masters.values():
            self._buffers.current(slot).copy_(master)

    def attach(self, engine: Engine) -> None:
        """Belong to these parameters, and show their states in the optimizer's."""
        super().attach(engine)
        self._optimizer = engine.step.optimizer
        self._sharded_params = {
            sharded.name: sharded for sharded in engine.step.sharded_params.values() if sharded.name in self._kept
        }
        own = [*self._sharded_params.values()]
        self._shown = Shown(self._optimizer, own, self._layout, self._buffers, self._device)
        self._shown.follow()
        self._shown.show()

    def names(self, sharded: ShardedParam) -> frozenset[str]:
        """Of its states that are offloaded, as methods name them."""
        return frozenset(self._kept.get(sharded.name, OffloadedParam()).states)

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
        for chunk in self._layout.chunks_of[sharded.name]:
            if (bucket := chunk.momentum) is None:
                continue
            held = self._ahead.open(bucket)
            parts = {name: held[slot] for name, slot in self._kept[sharded.name].momentum.items()}
            momentum = self._codec.decode(parts, out.dtype)
            chunk.part(out).copy_(momentum)
            # What a method of its own makes of a momentum may depend on the direction.
            if self._buffers.in_file(bucket) and method.advance is None:
                advance(method, [momentum], [chunk.part(grad)], [], {"momentum": sharded.factor})
                self._codec.encode(momentum, parts, sharded.name, sharded.ledger.status.step)
                wrong.append(not_finite([momentum])[0])
                self._buffers.close(bucket)
            else:
                self._buffers.leave(bucket)
            self._ahead.go()
        if wrong:
            self._flags.moved(sharded, functools.reduce(torch.maximum, wrong))
        return out

    def moved(self, fetches: Mapping[ShardedParam, int]) -> frozenset[ShardedParam]:
        """See :class:`~compile_muon.engine.state_provider.StateProvider`."""
        found = self._flags.kept(fetches)
        self._step.written = [bucket for sharded in found for bucket in self._layout.momenta_of(sharded.name)]
        return frozenset(found)

    def fetched(self, sharded: ShardedParam) -> list[Bucket]:
        """Of what is not on the device, what :meth:`fetch` opens."""
        return self._not_here(self._layout.momenta_of(sharded.name))

    def _not_here(self, buckets: Sequence[Bucket]) -> list[Bucket]:
        return [bucket for bucket in buckets if bucket in self._layout.there]

    # ------------------------------------------------------------------ steps

    def provide(
        self,
        sharded_params: Sequence[ShardedParam],
        what: StateRequest,
        step: int,
        *,
        moved: Collection[ShardedParam] = (),
    ) -> Iterator[tuple[list[ShardedParam], Sequence[MutableMapping[str, Tensor]]]]:
        """See :class:`~compile_muon.engine.state_provider.StateProvider`; by the bucket."""
        resident = [sharded for sharded in sharded_params if sharded.name not in self._kept]
        if resident:
            self._note(resident, what)
            yield resident, [self._state_of(sharded) for sharded in resident]
        wanted = {sharded.name: sharded for sharded in sharded_params}
        todo: list[tuple[Chunk, list[ShardedParam], list[Bucket]]] = []
        for chunk in self._layout.chunks:
            if own := [wanted[name] for name in chunk.names if name in wanted]:
                todo.append((chunk, own, chunk.asked_for(what, moved=own[0] in moved)))
        for number, (chunk, own, buckets) in enumerate(todo):
            given = self._host.next() if chunk.on_host else {}
            if given is None:  # the step is skipped
                return
            reads = what in (StateRequest.STATES_MASTERS_READ, StateRequest.MASTERS_READ)
            read_only = [chunk.masters] if reads and chunk.masters is not None else []
            held: dict[Slot, Tensor] = {}
            for bucket in buckets:
                held |= self._ahead.open(bucket)
            for bucket in todo[number + 1][2] if number + 1 < len(todo) else ():
                self._buffers.start(bucket)
            self._count_on(_HOST if chunk.on_host else self._device, own)
            if chunk.first:
                self._note(own, what)
            provided = [self._views(sharded, held, chunk) | given.get(sharded, {}) for sharded in own]
            if chunk.rows is not None:
                provided[0] |= {GRADIENT: chunk.part(own[0].local_grad)}
            self.provided = self._not_here(buckets), self._not_here(read_only)
            yield own, provided
            if chunk.on_host:
                if self._buffers.on_disk:  # what was noted is of before
                    self._host.follow()
                self._host.back(own, provided)
            self._take_back(chunk, own, provided, held, step)
            for bucket in buckets:
                if bucket in read_only:
                    self._buffers.leave(bucket)
                else:
                    self._buffers.close(bucket)
                    self._step.written.append(bucket)

    def computes(self, sharded: ShardedParam) -> bool:
        """Whether the host computes its step."""
        return any(chunk.on_host for chunk in self._layout.chunks_of.get(sharded.name, []))

    def _take_back(
        self,
        chunk: Chunk,
        own: Sequence[ShardedParam],
        provided: Sequence[Mapping[str, Tensor]],
        held: Mapping[Slot, Tensor],
        step: int,
    ) -> None:
        """What was provided and has no bucket is the optimizer's again, momenta are kept as they are kept."""
        for sharded, views in zip(own, provided, strict=True):
            slots, kept = self._state_of(sharded), self._kept[sharded.name]
            own_names = slots.keys() - kept.slots.keys() if chunk.last else frozenset()
            slots.update({name: tensor for name, tensor in views.items() if name in own_names})
            if MOMENTUM in views and kept.momentum:
                parts = {name: held[slot] for name, slot in kept.momentum.items()}
                self._codec.encode(views[MOMENTUM], parts, sharded.name, step)
        self._flags.look(own, provided, more=not chunk.first)

    def _note(self, sharded_params: Sequence[ShardedParam], what: StateRequest) -> None:
        """Note what a step is about to write in place, if a disk can still fail it: who is given masters alone writes
        no states, and who is given some to write moves parameters."""
        if not self._buffers.on_disk or what is StateRequest.MASTERS_READ:
            return
        for sharded in sharded_params:
            kept = self._kept[sharded.name].slots if sharded.name in self._kept else {}
            in_file = {name for name, slot in kept.items() if isinstance(self._buffers.keeper(slot), FileStore)}
            states = {} if what is StateRequest.MASTERS else {**self._state_of(sharded)}
            written = [local_tensor(value) for name, value in states.items() if name not in in_file]
            if what in (StateRequest.MASTERS, StateRequest.ALL):
                written.append(sharded.local.detach())
            self._step.note(written)

    def _count_on(self, device: torch.device, sharded_params: Sequence[ShardedParam]) -> None:
        """What is kept of a parameter beside its elements is where its step is computed, wherever a load put it."""
        for sharded in sharded_params:
            slots = self._state_of(sharded)
            for name, tensor in {**slots}.items():
                if name not in self._kept[sharded.name].slots and tensor.device.type != device.type:
                    slots[name] = tensor.to(device)

    def _views(self, sharded: ShardedParam, held: Mapping[Slot, Tensor], chunk: Chunk) -> dict[str, Tensor]:
        kept = self._kept[sharded.name]
        found = {name: tensor for name, tensor in {**self._state_of(sharded)}.items() if name not in kept.slots}
        if not chunk.last:  # what there is one of moves with the last rows
            found = {name: tensor if tensor.ndim else tensor.clone() for name, tensor in found.items()}
        found |= {name: held[slot] for name, slot in (kept.states | kept.masters).items() if slot in held}
        parts = {name: held[slot] for name, slot in kept.momentum.items() if slot in held}
        if parts:
            found[MOMENTUM] = self._codec.decode(parts, decode_dtype(sharded.spec.state_dtype))
        return found if chunk.rows is None else found | {ROWS: chunk.part(sharded.local.detach())}

    def wrong(self, sharded: ShardedParam, label: str) -> Tensor | None:
        """See :class:`~compile_muon.engine.state_provider.StateProvider`."""
        return self._flags.of(sharded, label)

    def facts(self, checks: StepChecks) -> None:
        """Which momenta are not finite. One that is resident is seen by its direction, all of which is NaN then."""
        found = {a.name: flag for a in self.engine.step.muon if (flag := self.wrong(a, "momentum")) is not None}
        if found:
            checks.add("momentum", list(found), torch.stack(list(found.values())))

    @contextmanager
    def writing(self, found_inf: Tensor | None) -> Iterator[None]:
        """See :class:`~compile_muon.engine.state_provider.StateProvider`.

        Raises:
            OffloadError: on every rank, if a disk of one failed.
        """
        own = [[self._sharded_params[name] for name in chunk.names] for chunk in self._layout.chunks if chunk.on_host]
        graded = [[sharded for sharded in each if sharded.grad is not None] for each in own]
        self._host.begin([each for each in graded if each], found_inf)
        with self._step.agreeing(_NOT_KEPT, meets=self._buffers.on_disk):
            yield
            self._buffers.finish()
        self._buffers.commit(self._step.written)
        self._step.end()
        self._new_momenta()
        self._shown.show()
        self._ahead.next_step()

    def confirm(self) -> None:
        """See :class:`~compile_muon.engine.state_provider.StateProvider`."""
        with self._step.agreeing(_NOT_KEPT, meets=self._buffers.on_disk):
            self._buffers.finish()

    def _forget(self) -> None:
        """What is known of states is not so any more."""
        self._buffers.discard()
        self._flags.clear()

    # ------------------------------------------------------------------ what users see

    def settle(self) -> None:
        """Return when host memory has all that was written."""
        self._buffers.settle()

    def own(self) -> None:
        """What users put into the optimizer's state, as they may, is kept; what they took out begins anew."""
        self._shown.follow()
        moved = self._shown.take_back()
        if moved or self._shown.edited:
            self.loaded()
        if moved:
            self._shown.show()

    def loaded(self) -> None:
        """Someone wrote to what is shown."""
        self._buffers.discard()
        self._shown.follow()
        self._flags.clear()
        for chunk in self._layout.chunks:
            held: dict[Slot, Tensor] = {}
            for bucket in chunk.buckets:
                held |= {slot.whole: tensor for slot, tensor in self._buffers.open(bucket).items()}
            own = [self._sharded_params[name] for name in chunk.names]
            provided = [self._views(sharded, held, chunk) for sharded in own]
            self._flags.look(own, provided, more=not chunk.first)
            round_masters(own, provided)
            for bucket in chunk.buckets:
                self._buffers.leave(bucket)
        self._new_momenta()
        self._shown.seen()

    def _new_momenta(self) -> None:
        """What was made of the momenta before is of no use any more."""
        for sharded in self._sharded_params.values():
            if sharded.spec.muon is not None:
                torch.autograd.graph.increment_version(sharded.momentum)

    def folder_of(self, name: str, state: str) -> Path | None:
        """See :class:`~compile_muon.engine.state_provider.StateProvider`."""
        slot = self._kept[name].slots.get(state) if name in self._kept else None
        store = None if slot is None else self._buffers.keeper(slot)
        return store.folder if isinstance(store, FileStore) else None

    @property
    def bytes_off_device(self) -> int:
        """Of this rank's state that is not on the device."""
        return sum(bucket.nbytes for bucket in self._layout.there)

    @property
    def bytes_in_buffers(self) -> int:
        """Of the device that buckets of it take turns in."""
        sizes = [bucket.nbytes for bucket in self._layout.there if bucket not in self._layout.on_host]
        return min(self._layout.together, len(sizes)) * max(sizes, default=0)

    def totals(self) -> Mapping[str, int]:
        """Bytes read from a disk and written to one, where there is one."""
        stores = self._buffers.stores
        read, written = (sum(getattr(each, name) for each in stores) for name in ("bytes_read", "bytes_written"))
        return {"disk_bytes_read": read, "disk_bytes_written": written} if read or written else {}
