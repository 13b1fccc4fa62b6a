"""The layout of offloaded state: which states are kept where, and the slots, chunks and buckets that provide them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from compile_muon.config import Config, OffloadConfig
from compile_muon.engine.hooks import MASTER, StateRequest
from compile_muon.engine.states import row_state_shape
from compile_muon.errors import config_error
from compile_muon.model.assignment import Assignment
from compile_muon.model.groups import Group
from compile_muon.offload.codecs import MOMENTUM, SCALE, Codec
from compile_muon.offload.store import ALIGNED, Bucket, Slot
from compile_muon.passes.exchange.owned import owned, state_shape
from compile_muon.passes.language.spec import ParamSpec, decode_dtype
from compile_muon.passes.methods import ElementMethod, MatrixMethod, Method, matrix_method


def offloaded_names(
    config: Config, groups: Sequence[Group], assignments: Mapping[str, Assignment], model: nn.Module
) -> frozenset[str]:
    """Return the parameters whose states are offloaded, the same on every rank.

    A ``ratio`` below 1 keeps a part resident: a moment is copied in and out once a step, a momentum in once more, so
    moments are offloaded first, which save more bytes for each that is copied; of equals the largest first.
    """
    offload = config.zero.offload
    if offload is None:
        return frozenset()
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    candidates = []
    for group in groups:
        matrices = isinstance(group.method, MatrixMethod)
        momentum = isinstance(group.method, MatrixMethod) and group.method.keeps_momentum and offload.momentum
        slots = sum(state.each == "element" for state in group.method.states) + momentum
        slots += offload.masters
        for name in group.members:
            batch, *shape = assignments[name].matrix or (0, 0, 0)
            at_owners = batch * sum(math.prod(state.shape(*shape)) for state in group.method.states if state.at_owner)
            if size := slots * sizes[name] + at_owners:
                candidates.append((matrices, -size, name))
    remaining_elements = offload.ratio * sum(-size for _, size, _ in candidates)
    chosen = []
    for _, size, name in sorted(candidates):
        if remaining_elements <= 0:
            break
        chosen.append(name)
        remaining_elements += size
    elements = {name: g.method.on_host for g in groups if isinstance(g.method, ElementMethod) for name in g.members}
    if offload.adamw_on == "cpu" and elements and not any(elements.get(name) for name in chosen):
        problem = "finds no moments of AdamW that are offloaded"
        raise config_error("OffloadConfig.adamw_on", "cpu", problem, "raise ratio, or leave adamw_on out")
    return frozenset(chosen)


def with_fetches(
    config: Config, assignments: Mapping[str, Assignment], offloaded: frozenset[str]
) -> dict[str, Assignment]:
    """Return the assignments with ``fetched`` (graphs fetch the momentum) and ``master_offloaded`` set."""
    compressed, offload = config.muon.momentum_dtype is not None, config.zero.offload
    moved, masters = (False, False) if offload is None else (offload.momentum, offload.masters)
    return {
        name: replace(
            row,
            fetched=row.matrix is not None
            and matrix_method(row.algorithm).keeps_momentum
            and (compressed or (moved and name in offloaded)),
            master_offloaded=masters and name in offloaded,
        )
        for name, row in assignments.items()
    }


#: the buckets of a chunk that each request reads; without the momentum's where a fetch has moved it already
_ASKED = {
    StateRequest.STATES: ("momentum", "states"),
    StateRequest.STATES_MASTERS_READ: ("momentum", "states", "masters"),
    StateRequest.MASTERS: ("masters",),
    StateRequest.MASTERS_READ: ("masters",),
    StateRequest.ALL: ("momentum", "states", "masters"),
}


@dataclass(eq=False)
class Chunk:
    """A chunk: parameters, or rows of one, whose states are provided together, in a bucket for each use."""

    on_host: bool = False  # the host computes their step
    rows: range | None = None  # of its only parameter, whose other rows are in other chunks; None for whole parameters
    last: bool = True  # no further rows follow
    names: list[str] = field(default_factory=list)
    # By use: "momentum" is read by graphs, "states" ahead of weights, "masters" with them; unused ones are left out.
    buckets: dict[str, Bucket] = field(default_factory=dict)

    @property
    def first(self) -> bool:
        """Whether the chunk has its parameter's first rows."""
        return not self.rows or self.rows.start == 0

    def part(self, tensor: Tensor) -> Tensor:
        """Return the chunk's rows of a tensor shaped like the parameter."""
        return tensor if self.rows is None else tensor.narrow(0, self.rows.start, len(self.rows))

    def asked_for(self, what: StateRequest, *, moved: bool) -> list[Bucket]:
        """Return the buckets that request ``what`` reads; ``moved``: the momentum was moved when it was fetched."""
        uses = [use for use in _ASKED[what] if use in self.buckets and not (moved and use == "momentum")]
        return [self.buckets[use] for use in uses]

    def fill(self, kept: Mapping[str, Mapping[str, Slot]]) -> None:
        """Make the buckets from the slots of its parameters, by name of parameter and state."""
        slots = [slot for name in self.names for slot in kept[name].values()]
        if self.rows is not None:
            slots = [slot.rows(self.rows.start, len(self.rows)) for slot in slots]
        for use in _ASKED[StateRequest.ALL]:
            if slots_of_use := [slot for slot in slots if slot.use == use]:
                self.buckets[use] = Bucket(slots_of_use)


class OffloadLayout:
    """The offloaded states of all parameters, in the order in which they are provided.

    ``groups``: of the optimizer; a bucket is provided once in a step, so it holds state of one group. ``owners``: of
    the matrices of parameters with states at owners. ``offload`` is None where momenta are stored in fewer bits and
    nothing is offloaded. ``codec``: of the momenta that graphs fetch.
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
        # Slots by names of parameter and state; parameters that have none are left out.
        self.kept = {
            name: slots
            for group in groups
            for name in group.members
            if (slots := self._slots(name, specs[name], group.method, name in offloaded))
        }
        self.chunks = [
            chunk
            for group in groups
            for chunk in self._in_chunks([name for name in group.members if name in self.kept], group.method)
        ]
        self.chunks_of: dict[str, list[Chunk]] = {}
        for chunk in self.chunks:
            chunk.fill(self.kept)
            for name in chunk.names:
                self.chunks_of.setdefault(name, []).append(chunk)
        self.on_host = {bucket for chunk in self.chunks if chunk.on_host for bucket in chunk.buckets.values()}
        uses = [item for chunk in self.chunks for item in chunk.buckets.items()]
        momenta = [bucket for use, bucket in uses if use == "momentum"]
        others = [bucket for use, bucket in uses if use != "momentum"]
        # Buckets that stay on the device (compressed, not offloaded), and the others.
        self.here = momenta if offload is None or not offload.momentum else []
        self.there = others if self.here else [*momenta, *others]

    @property
    def together(self) -> int:
        """Buckets that may be provided at a time: at least all of one chunk."""
        return max([self._offload.buffer_count, *(len(chunk.buckets) for chunk in self.chunks)])

    def fetched(self, name: str) -> list[Bucket]:
        """Return the buckets with the momentum of a parameter that are not on the device."""
        momentum_buckets = [chunk.buckets.get("momentum") for chunk in self.chunks_of.get(name, [])]
        return [bucket for bucket in momentum_buckets if bucket is not None and bucket not in self.here]

    def _slots(self, name: str, spec: ParamSpec, method: Method, offloaded: bool) -> dict[str, Slot]:
        slots, shape, dtype = dict[str, Slot](), spec.layout.local_shape, decode_dtype(spec.state_dtype)

        def keep(state: str, slot_shape: Sequence[int], kind: torch.dtype, use: str, label: str = "") -> None:
            slots[state] = Slot(f"{state} of {name}", tuple(slot_shape), kind, use, label)

        if spec.muon is not None and spec.muon.fetched:
            self._codec.check(name, spec)
            keep(MOMENTUM, shape, self._codec.dtype or dtype, "momentum", "momentum")
            if self._codec.block:
                columns = math.prod(shape[len(row_state_shape(spec, shape, 1)) - 1 :])
                blocks = -(-columns // self._codec.block)
                keep(SCALE, row_state_shape(spec, shape, blocks), torch.float32, "momentum")
        for state in method.states if offloaded else ():
            if state.each == "element":  # a state of one number a row is too small to offload
                keep(state.name, shape, dtype, "states", state.label)
            elif state.at_owner:
                owner_shape = state_shape(spec, state, owned(spec, self._owners[name]))
                keep(state.name, owner_shape, torch.promote_types(dtype, torch.float32), "states", state.label)
        if spec.master:
            keep(MASTER, shape, dtype, "masters")
        return slots

    def _in_chunks(self, names: Sequence[str], method: Method) -> list[Chunk]:
        largest = self._offload.buffer_bytes
        on_host = self._offload.adamw_on == "cpu" and isinstance(method, ElementMethod) and method.on_host is not None
        chunks: list[Chunk] = []
        room = 0
        for name in names:
            slots = [*self.kept[name].values()]
            size = sum(slot.nbytes for slot in slots)
            if not on_host and self._by_rows(name, method) and (cut := _cut(slots, largest)):
                chunks += [Chunk(rows=rows, last=rows is cut[-1], names=[name]) for rows in cut]
                room = 0
                continue
            # A momentum has a bucket alone: two exchanges may each fetch, and write to a file, a part of a larger one.
            if size > room or not chunks or any(slot.use == "momentum" for slot in slots):
                chunks.append(Chunk(on_host))
                room = max(largest, size)
            chunks[-1].names.append(name)
            room -= size
        return chunks

    def _by_rows(self, name: str, method: Method) -> bool:
        """Return whether all offloaded states of a parameter can be provided some rows at a time."""
        if isinstance(method, MatrixMethod):
            return keeps_momentum_alone(method) and self._codec.by_rows and MASTER not in self.kept[name]
        states = {state.name for state in method.states if state.each == "element"}
        return states <= self.kept[name].keys() and all(s.each in ("element", "parameter") for s in method.states)


def check_master(name: str, spec: ParamSpec, config: Config) -> None:
    """Raise ConfigError if a parameter cannot be a rounded copy alone, with a gradient of that lower dtype."""
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
    """Return whether a method's only state is a momentum, moved element by element."""
    return not method.states and method.advance is None and method.after is None


def _cut(slots: Sequence[Slot], nbytes: int) -> list[range]:
    """Return ranges of rows, of at most ``nbytes`` in all tensors (of one shape) together, or a page; [] if one has
    all. Ranges begin at a page boundary in each tensor, as O_DIRECT requests must."""
    count, *inner = slots[0].shape or (0,)
    widths = [math.prod(inner) * slot.dtype.itemsize for slot in slots]
    step = math.lcm(*(ALIGNED // math.gcd(width, ALIGNED) for width in widths))
    rows = max(step, nbytes // max(sum(widths), 1) // step * step)
    return [range(first, min(first + rows, count)) for first in range(0, count, rows)] if rows < count else []
