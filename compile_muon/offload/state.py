"""Offloaded and compressed states of one optimizer: provided by the bucket, and taken back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.optim import Optimizer

from compile_muon.config import Config, OffloadConfig
from compile_muon.engine import Engine, Extension
from compile_muon.engine.commit import advance, round_masters
from compile_muon.engine.dtensors import local_tensor
from compile_muon.engine.hooks import GRADIENT, MASTER, ROWS, Provided, StateProvider, StateRequest
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import method_of_matrix
from compile_muon.engine.step_checks import StepChecks
from compile_muon.model.assignment import Assignment
from compile_muon.model.groups import Group
from compile_muon.offload.codecs import CODECS, MOMENTUM
from compile_muon.offload.device_buffers import DeviceBuffers, Placed, ReadAhead
from compile_muon.offload.host_step import HostStep
from compile_muon.offload.layout import Chunk, OffloadLayout, check_master, offloaded_names
from compile_muon.offload.not_finite import NotFinite
from compile_muon.offload.shown import OffloadedStateView
from compile_muon.offload.store import Bucket, FileStore, Slot, Store
from compile_muon.offload.transaction import Transaction
from compile_muon.passes.language.spec import ParamSpec, decode_dtype
from compile_muon.passes.norms import not_finite

_HOST = torch.device("cpu")


class OffloadedStates(StateProvider, Extension):
    """The states of one rank that are offloaded, or stored in fewer bits. ``group``: all ranks of the optimizer;
    ``compares``: whether they exist (False in a plan); ``device`` computes."""

    all_resident = False
    unrecorded = "states are not resident"
    layout: OffloadLayout  # set by `reserve`

    def __init__(
        self,
        groups: Sequence[Group],
        config: Config,
        assignments: Mapping[str, Assignment],
        model: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        *,
        compares: bool,
    ) -> None:
        self.state_provider = self
        self._groups, self._config, self._device = groups, config, device
        self.offloaded_names = offloaded_names(config, groups, assignments, model)
        fakes = [each for each in map(local_tensor, model.parameters()) if isinstance(each, FakeTensor)]
        self._fake = fakes[0].fake_mode if fakes else nullcontext()
        self._real = compares if group is not None else not fakes  # a plan has neither disks nor other ranks
        self._buffers = DeviceBuffers((), count=0, real=self._real)
        self._flags = NotFinite({}, device)
        self._step = Transaction(group if self._real else None, device, self._forget)
        self.moved = frozenset[ShardedParam]()  # the step need not move their momenta: a fetch has
        # Buckets off the device of the latest item of `provide`, and those of them that are only read.
        self.provided: tuple[list[Bucket], list[Bucket]] = [], []
        self._sharded_params: dict[str, ShardedParam] = {}
        self._optimizer: Optimizer

    def reserve(self, specs: Mapping[str, ParamSpec], owners: Mapping[str, tuple[int, ...]]) -> None:
        """Make room for the states; an OffloadError of one rank's disk is raised on every rank."""
        config, device = self._config, self._device
        offload = config.zero.offload or OffloadConfig()
        for name, spec in specs.items():
            if spec.master:
                check_master(name, spec, config)
        with self._fake:
            self._codec = CODECS[config.muon.momentum_dtype](device)
            layout = OffloadLayout(self._groups, specs, self.offloaded_names, owners, config.zero.offload, self._codec)
            placed: list[Placed] = []
            if layout.here:
                placed.append((Store(layout.here, device), layout.here, device))
            for user, on_host in ((device, False), (_HOST, True)):
                used = [bucket for bucket in layout.there if (bucket in layout.on_host) == on_host]
                pin = offload.pin_memory and user.type != "cpu" and self._real
                if used and self._real and offload.nvme_path is not None and offload.device == "nvme":
                    with self._step.agreeing("has no place for optimizer state: nothing was sharded"):
                        file_store = FileStore(offload.nvme_path, used, buffers=layout.together, pin=pin)
                    placed.append((file_store, used, user))
                elif used:
                    placed.append((Store(used, _HOST, pin=pin), used, user))
            self._buffers = DeviceBuffers(placed, count=layout.together, real=self._real)
        self.layout, self._ahead = layout, ReadAhead(self._buffers, layout.together)
        labels = {n: {state: s.label for state, s in slots.items() if s.label} for n, slots in layout.kept.items()}
        self._flags = NotFinite(labels, device)
        self._host = HostStep(device, real=self._real and bool(layout.on_host))
        folders = {slot.whole: store.folder for store, used, _ in placed for bucket in used for slot in bucket.slots}
        self.places = {n: {state: folders[slot] for state, slot in slots.items()} for n, slots in layout.kept.items()}
        sizes = [bucket.nbytes for bucket in layout.there if bucket not in layout.on_host]
        self.bytes_off_device = sum(bucket.nbytes for bucket in layout.there)
        self.bytes_in_buffers = min(layout.together, len(sizes)) * max(sizes, default=0)

    def keep_master(self, name: str, master: Tensor) -> None:
        self._buffers.current(self.layout.kept[name][MASTER]).copy_(master)

    def attach(self, engine: Engine) -> None:
        """Take the engine's parameters, and show their states in the optimizer's."""
        super().attach(engine)
        self._optimizer = engine.step.optimizer
        offloaded_params = [a for a in engine.step.sharded_params.values() if a.name in self.layout.kept]
        self._sharded_params = {sharded.name: sharded for sharded in offloaded_params}
        self._shown = OffloadedStateView(self._optimizer, offloaded_params, self.layout, self._buffers, self._device)
        self._shown.follow()
        self._shown.show()

    # ------------------------------------------------------------------ graphs

    def fetch(self, sharded: ShardedParam, grad: Tensor, out: Tensor) -> Tensor:
        """Write the momentum to ``out``, and read ahead what was fetched next the last time. One in a file is moved
        toward the gradient into the file's next generation, which a step that uses the direction commits."""
        self._drop_broken_off()
        wrong: list[Tensor] = []
        method = method_of_matrix(sharded)
        assert method is not None
        for chunk in self.layout.chunks_of[sharded.name]:
            if (bucket := chunk.buckets.get("momentum")) is None:
                continue
            parts = self._parts(sharded, self._ahead.open(bucket))
            momentum = self._codec.decode(parts, out.dtype)
            chunk.part(out).copy_(momentum)
            # A method's own `advance` may need the direction, which is not made yet.
            if self._buffers.in_file(bucket) and method.advance is None:
                rates = {"momentum": sharded.rates[0] if sharded.rates else 0.0}
                advance(method, [momentum], [chunk.part(grad)], [], rates)
                self._codec.encode(momentum, parts, sharded.name, sharded.ledger.status.step)
                wrong.append(not_finite([momentum])[0])
                self._buffers.close(bucket)
            else:
                self._buffers.leave(bucket)
            self._ahead.go()
        if wrong:
            self._flags.moved(sharded, functools.reduce(torch.maximum, wrong))
        return out

    def _parts(self, sharded: ShardedParam, slot_tensors: Mapping[Slot, Tensor]) -> dict[str, Tensor]:
        """Return the tensors that store a parameter's momentum, as far as they are in ``slot_tensors``."""
        slots = self.layout.kept[sharded.name]
        return {
            name: slot_tensors[slot] for name, slot in slots.items() if slot.use == "momentum" and slot in slot_tensors
        }

    # ------------------------------------------------------------------ steps

    def provide(self, sharded_params: Sequence[ShardedParam], what: StateRequest, step: int) -> Provided:
        self._drop_broken_off()
        self.provided = [], []
        if resident := [sharded for sharded in sharded_params if sharded.name not in self.layout.kept]:
            self._note(resident, what)
            yield resident, [self._optimizer.state[sharded.param] for sharded in resident]
        wanted = {sharded.name: sharded for sharded in sharded_params}
        todo: list[tuple[Chunk, list[ShardedParam], list[Bucket]]] = []
        for chunk in self.layout.chunks:
            if chunk_params := [wanted[name] for name in chunk.names if name in wanted]:
                todo.append((chunk, chunk_params, chunk.asked_for(what, moved=chunk_params[0] in self.moved)))
        reads = what in (StateRequest.STATES_MASTERS_READ, StateRequest.MASTERS_READ)
        for number, (chunk, chunk_params, buckets) in enumerate(todo):
            host_rows = next(self._host.arrivals, None) if chunk.on_host else {}
            if host_rows is None:  # the step is skipped
                return
            slot_tensors: dict[Slot, Tensor] = {}
            for bucket in buckets:
                slot_tensors |= self._ahead.open(bucket)
            for bucket in todo[number + 1][2] if number + 1 < len(todo) else ():
                self._buffers.start(bucket)
            provided = [
                self._views(sharded, slot_tensors, chunk) | host_rows.get(sharded, {}) for sharded in chunk_params
            ]
            if chunk.first:
                self._note(chunk_params, what)
            if chunk.rows is not None:
                provided[0] |= {GRADIENT: chunk.part(chunk_params[0].local_grad)}
            read_only = [bucket for bucket in buckets if reads and bucket is chunk.buckets.get("masters")]
            there = [bucket for bucket in buckets if bucket in self.layout.there]
            self.provided = there, [bucket for bucket in there if bucket in read_only]
            yield chunk_params, provided
            if chunk.on_host:
                if self._buffers.on_disk:  # back() overwrites weights whose copies `_note` has only begun
                    self._host.follow()
                self._host.back(chunk_params, provided)
            for sharded, views in zip(chunk_params, provided, strict=True):
                slots = self._optimizer.state[sharded.param]
                if chunk.last:  # resident states go back to the optimizer, as new tensors perhaps
                    resident_names = slots.keys() - self.layout.kept[sharded.name].keys()
                    slots.update({name: tensor for name, tensor in views.items() if name in resident_names})
                if parts := self._parts(sharded, slot_tensors):
                    self._codec.encode(views[MOMENTUM], parts, sharded.name, step)
            self._flags.look(chunk_params, provided, more=not chunk.first)
            for bucket in buckets:
                if bucket in read_only:
                    self._buffers.leave(bucket)
                else:
                    self._buffers.close(bucket)
                    self._step.written.append(bucket)

    def _note(self, sharded_params: Sequence[ShardedParam], what: StateRequest) -> None:
        """Copy what a step is about to write in place, if a disk can still fail the step. A request for masters alone
        writes no states; a request for states that are written moves parameters too."""
        if not self._buffers.on_disk or what is StateRequest.MASTERS_READ:
            return
        for sharded in sharded_params:
            folders = self.places.get(sharded.name, {})
            states = {} if what is StateRequest.MASTERS else {**self._optimizer.state[sharded.param]}
            written = [local_tensor(value) for name, value in states.items() if folders.get(name) is None]
            if what in (StateRequest.MASTERS, StateRequest.ALL):
                written.append(sharded.local.detach())
            self._step.note(written)

    def _views(self, sharded: ShardedParam, slot_tensors: Mapping[Slot, Tensor], chunk: Chunk) -> dict[str, Tensor]:
        """Return the states of a parameter by name; resident ones move to the device that computes the step."""
        offloaded_slots, slots = self.layout.kept[sharded.name], self._optimizer.state[sharded.param]
        device = _HOST if chunk.on_host else self._device
        states = {name: tensor for name, tensor in {**slots}.items() if name not in offloaded_slots}
        for name, tensor in states.items():
            if tensor.device.type != device.type:
                slots[name] = states[name] = tensor.to(device)
        if not chunk.last:  # a scalar, such as `step`, advances once, with the last rows
            states = {name: tensor if tensor.ndim else tensor.clone() for name, tensor in states.items()}
        states |= {
            name: slot_tensors[slot]
            for name, slot in offloaded_slots.items()
            if slot.use != "momentum" and slot in slot_tensors
        }
        if parts := self._parts(sharded, slot_tensors):
            states[MOMENTUM] = self._codec.decode(parts, decode_dtype(sharded.spec.state_dtype))
        return states if chunk.rows is None else states | {ROWS: chunk.part(sharded.local.detach())}

    def wrong(self, sharded: ShardedParam, label: str) -> Tensor | None:
        return self._flags.of(sharded, label)

    def facts(self, checks: StepChecks) -> None:
        """Add which momenta are not finite. Resident ones need no flag: their direction is all NaN then."""
        flags = {a.name: flag for a in self.engine.step.muon if (flag := self.wrong(a, "momentum")) is not None}
        if flags:
            checks.add("momentum", list(flags), torch.stack(list(flags.values())))

    @contextmanager
    def writing(self, fetches: Mapping[ShardedParam, int], found_inf: Tensor | None) -> Iterator[Callable[[], None]]:
        """Enclose a step's writes in a transaction: an OffloadError of one rank's disk is raised on every rank."""
        host_chunks = [
            [self._sharded_params[name] for name in chunk.names] for chunk in self.layout.chunks if chunk.on_host
        ]
        graded = [[sharded for sharded in params if sharded.grad is not None] for params in host_chunks]
        what = "could not keep optimizer state: weights and state are as they were"
        agreeing = functools.partial(self._step.agreeing, what, meets=self._buffers.on_disk)

        def confirm() -> None:
            with agreeing():
                self._buffers.finish()

        try:
            with agreeing():
                # With `found_inf` only the device knows whether the step writes: momenta moved at a fetch are not kept.
                self.moved = frozenset(self._flags.kept(fetches if found_inf is None else {}))
                self._step.written = [bucket for sharded in self.moved for bucket in self.layout.fetched(sharded.name)]
                self._host.begin([params for params in graded if params], found_inf)
                yield confirm
                self._buffers.finish()
        except BaseException:
            self.engine.step.torn &= not self._buffers.on_disk  # whose steps are put back
            raise
        self._shown.behind = True
        self._buffers.commit(self._step.written)
        self._step.end()
        self._new_momenta()
        self._shown.show()
        self._ahead.next_step()

    def _drop_broken_off(self) -> None:
        """Nobody works on a bucket now: what is open is of a fetch or step that raised, and may be half-written."""
        if self._buffers.in_use:
            self._forget()

    def _forget(self) -> None:
        """Drop buffers and flags: the stored states were replaced, or a step is given up."""
        self._buffers.forget()
        self._flags.clear()

    # ------------------------------------------------------------------ states that users see

    def own(self) -> None:
        """Store what users put into the optimizer's state; states that they deleted begin anew."""
        self._shown.follow()
        if self._shown.take_back() or self._shown.edited:
            self.loaded()
            self._shown.show()

    def loaded(self) -> None:
        """Take up values that were written to the shown tensors: masters, flags, and parameters rounded to masters."""
        self._forget()
        self._shown.follow()
        for chunk in self.layout.chunks:
            slot_tensors: dict[Slot, Tensor] = {}
            for bucket in chunk.buckets.values():
                slot_tensors |= self._buffers.open(bucket)
            chunk_params = [self._sharded_params[name] for name in chunk.names]
            provided = [self._views(sharded, slot_tensors, chunk) for sharded in chunk_params]
            self._flags.look(chunk_params, provided, more=not chunk.first)
            round_masters(chunk_params, provided)
            for bucket in chunk.buckets.values():
                self._buffers.leave(bucket)
        self._new_momenta()
        self._shown.seen()

    def _new_momenta(self) -> None:
        """Invalidate the directions that were made from the earlier momenta."""
        for sharded in self._sharded_params.values():
            if sharded.spec.muon is not None:
                torch.autograd.graph.increment_version(sharded.momentum)

    def totals(self) -> Mapping[str, int]:
        """Return the bytes read from a disk and written to one; empty without a disk."""
        stores = self._buffers.stores
        read, written = (sum(getattr(each, name) for each in stores) for name in ("bytes_read", "bytes_written"))
        return {"disk_bytes_read": read, "disk_bytes_written": written} if read or written else {}
