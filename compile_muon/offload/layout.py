"""Which states of a parameter are kept where, and which are provided together: slots, chunks and their buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compile_muon.config import Config, OffloadConfig
from compile_muon.engine.state_provider import MASTER, StateRequest
from compile_muon.engine.states import row_state_shape
from compile_muon.errors import config_error
from compile_muon.model.groups import Group
from compile_muon.offload.codecs import MOMENTUM, Codec
from compile_muon.offload.store import ALIGNED, Bucket, Slot
from compile_muon.passes.exchange.owned import owned, state_shape
from compile_muon.passes.language.spec import ParamSpec, decode_dtype
from compile_muon.passes.methods import ElementMethod, MatrixMethod, Method

__all__ = ["Chunk", "OffloadLayout", "OffloadedParam", "check_master", "keeps_momentum_alone"]


@dataclass(eq=False)
class OffloadedParam:
    """What of one parameter is offloaded.

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
        """All of it, by name."""
        return self.momentum | self.states | self.masters


@dataclass(eq=False)
class Chunk:
    """Parameters whose state is provided together, a bucket for each use of it: by graphs, ahead of weights, with them.

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
        """All of them."""
        return [bucket for bucket in (self.momentum, self.states, self.masters) if bucket is not None]

    @property
    def first(self) -> bool:
        """Whether it has the first rows."""
        return not self.rows or self.rows.start == 0

    def part(self, tensor: Tensor) -> Tensor:
        """Its rows of a tensor like the parameter."""
        return tensor if self.rows is None else tensor.narrow(0, self.rows.start, len(self.rows))

    def asked_for(self, what: StateRequest, *, moved: bool) -> list[Bucket]:
        """Which are asked for."""
        states = [self.states] if moved else [self.momentum, self.states]
        alone = {
            StateRequest.STATES: states,
            StateRequest.MASTERS: [self.masters],
            StateRequest.MASTERS_READ: [self.masters],
        }
        asked = alone.get(what, [*states, self.masters])
        return [bucket for bucket in asked if bucket is not None]

    def fill(self, kept: Mapping[str, OffloadedParam]) -> None:
        """Make the buckets of its parameters."""

        def bucket(use: str) -> Bucket | None:
            slots = [slot for name in self.names for slot in getattr(kept[name], use).values()]
            if self.rows is not None:
                slots = [slot.rows(self.rows.start, len(self.rows)) for slot in slots]
            return Bucket(slots) if slots else None

        self.momentum, self.states, self.masters = bucket("momentum"), bucket("states"), bucket("masters")


class OffloadLayout:
    """The states of all parameters, in the order in which they are provided.

    Args:
        groups: those of the optimizer. A bucket is provided once in a step, so it holds state of one group.
        specs: of all parameters, by name.
        offloaded: names of those whose states are offloaded.
        owners: of the matrices of those that keep states at owners, by name.
        offload: None where momenta are kept in fewer bits and nothing is offloaded.
        codec: of the momenta that graphs fetch.

    Attributes:
        kept: what of each parameter is offloaded, by name; of none, nothing.
        chunks: all of them; ``chunks_of`` each parameter, by name.
        on_host: the buckets that the host computes with.
        here, there: those that stay on the device, and the others.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        specs: Mapping[str, ParamSpec],
        offloaded: frozenset[str],
        owners: Mapping[str, tuple[int, ...]],
        offload: OffloadConfig | None,
        codec: Codec,
    ) -> None:
        self._owners, self._codec, self._offload = owners, codec, offload or OffloadConfig()
        self.kept = {
            name: own
            for each in groups
            for name in each.members
            if (own := self._slots(name, specs[name], each.method, name in offloaded)).slots
        }
        self.chunks = [
            chunk
            for each in groups
            for chunk in self._in_chunks([name for name in each.members if name in self.kept], each.method)
        ]
        self.chunks_of: dict[str, list[Chunk]] = {}
        for chunk in self.chunks:
            chunk.fill(self.kept)
            for name in chunk.names:
                self.chunks_of.setdefault(name, []).append(chunk)
        self.on_host = {bucket for chunk in self.chunks if chunk.on_host for bucket in chunk.buckets}
        momenta = [chunk.momentum for chunk in self.chunks if chunk.momentum is not None]
        others = [each for chunk in self.chunks for each in (chunk.states, chunk.masters) if each is not None]
        self.here = momenta if offload is None or not offload.momentum else []
        self.there = others if self.here else [*momenta, *others]

    @property
    def together(self) -> int:
        """How many buckets may be provided at a time: all of a chunk."""
        return max([self._offload.buffer_count, *(len(chunk.buckets) for chunk in self.chunks)])

    def momenta_of(self, name: str) -> list[Bucket]:
        """What has the momentum of a parameter."""
        return [chunk.momentum for chunk in self.chunks_of.get(name, []) if chunk.momentum is not None]

    def _slots(self, name: str, spec: ParamSpec, method: Method, offloaded: bool) -> OffloadedParam:
        kept, shape, dtype = OffloadedParam(), spec.layout.local_shape, decode_dtype(spec.state_dtype)
        if spec.muon is not None and spec.muon.fetched:
            self._codec.check(name, spec)
            columns = math.prod(shape[len(row_state_shape(spec, shape, 1)) - 1 :])
            for part in self._codec.kept(columns):
                own = shape if part.width is None else row_state_shape(spec, shape, part.width)
                kept.momentum[part.name] = Slot(f"{part.name} of {name}", tuple(own), part.dtype or dtype)
            kept.labels[MOMENTUM] = "momentum"
        for state in method.states if offloaded else ():
            if state.each == "element":  # what there is a number a row of is not worth the way
                slot = Slot(f"{state.name} of {name}", tuple(shape), dtype)
            elif state.at_owner:
                own = state_shape(spec, state, owned(spec, self._owners[name]))
                slot = Slot(f"{state.name} of {name}", own, torch.promote_types(dtype, torch.float32))
            else:
                continue
            kept.states[state.name], kept.labels[state.name] = slot, state.label
        if spec.master:
            kept.masters[MASTER] = Slot(f"{MASTER} of {name}", tuple(shape), dtype)
        return kept

    def _in_chunks(self, names: Sequence[str], method: Method) -> list[Chunk]:
        largest = self._offload.buffer_bytes
        on_host = self._offload.adamw_on == "cpu" and isinstance(method, ElementMethod) and method.on_host is not None
        chunks: list[Chunk] = []
        room = 0
        for name in names:
            slots = [*self.kept[name].slots.values()]
            size = sum(slot.nbytes for slot in slots)
            if not on_host and self._by_rows(name, method) and (cut := _cut(slots, largest)):
                chunks += [Chunk(rows=rows, last=rows is cut[-1], names=[name]) for rows in cut]
                room = 0
                continue
            # A momentum is fetched, and to a file written, by itself: two exchanges may have parts of a larger bucket.
            if size > room or not chunks or self.kept[name].momentum:
                chunks.append(Chunk(on_host))
                room = max(largest, size)
            chunks[-1].names.append(name)
            room -= size
        return chunks

    def _by_rows(self, name: str, method: Method) -> bool:
        """Whether all that is kept of a parameter may be provided some rows after the other."""
        kept = self.kept[name]
        if isinstance(method, MatrixMethod):
            return keeps_momentum_alone(method) and self._codec.by_rows and not kept.masters
        states = {state.name for state in method.states if state.each == "element"}
        return states <= kept.states.keys() and all(s.each in ("element", "parameter") for s in method.states)


def check_master(name: str, spec: ParamSpec, config: Config) -> None:
    """Raise what forbids to keep only a rounded copy of this parameter, whose gradient then has its dtype.

    Raises:
        ConfigError: naming it.
    """
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
