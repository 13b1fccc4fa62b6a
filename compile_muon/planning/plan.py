"""The numbers of a plan: each candidate simulated, once as configured and once with AdamW alone, and the one to take.

Every number is simulated; docs/how-to/planning.md says what each means, and is the contract of the JSON file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from typing import Any

from compile_muon.config import Config, FrameOptions, OffloadConfig
from compile_muon.errors import MuonZeroError
from compile_muon.planning.candidates import (
    Candidate,
    Price,
    candidates,
    meshes,
    prices,
    with_adamw,
    with_micro_batches,
)  # fmt: skip
from compile_muon.planning.machine import Machine
from compile_muon.planning.models import Batch, Subject, naming_model
from compile_muon.planning.simulate import Timeline
from compile_muon.planning.simulate.engine import OFFLOAD
from compile_muon.planning.trace import Target, Trace, trace_step

__all__ = ["Figures", "Plan", "Question", "World", "make_plan"]

#: of the fastest step: a candidate that is slower by less is as fast
_AS_FAST = 0.01
#: of the step: less than this exposed is not worth a word
_EXPOSED = 0.005
#: of the memory: more than this is tight
_TIGHT = 0.9
#: of the mean: owners with more are uneven
_UNEVEN = 1.25


@dataclass(frozen=True)
class Question:
    """What is asked.

    Args:
        subject: the model.
        batch: of a rank at a time.
        config: as the plan is to follow it, see :func:`~.candidates.planned_for`; what its offload leaves on the device
            is by formula.
        options: of torch.compile.
        machine: that every rank has.
        worlds: numbers of ranks.
        price: tokens of a rank and step that Muon's price is asked for, multiples of the batch's.
        progress: told about every part that takes long.
    """

    subject: Subject
    batch: Batch
    config: Config
    options: FrameOptions
    machine: Machine
    worlds: Sequence[int]
    price: Sequence[int] = ()
    progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Figures:
    """One candidate. Seconds and bytes of a step of one rank: of those that own most, the first.

    Args:
        stage, mesh, asked: see :class:`~.candidates.Candidate`.
        rank: that was simulated.
        fits: whether ``peak_bytes`` are no more than ``limit_bytes``, what the device has.
        memory: bytes by category, where most are live; ``largest`` of them what is the largest of the intermediates.
        sent: bytes by axis.
        step_seconds: of the step, all micro-batches.
        exposed_seconds: of it, waited for collectives; ``exposed`` by cause.
        tokens_per_second: of one rank.
        newton_schulz_seconds: of the step; ``newton_schulz_share`` as a fraction of it.
        owners_idle: ranks without a matrix to orthogonalize; None where every rank does all.
        owners_uneven: the most that a rank has to orthogonalize, over the mean.
        adamw_seconds, adamw_exposed_seconds: of the step with AdamW for every parameter.
        price_seconds, price_exposed_seconds: what Muon adds to those; ``price_share`` as a fraction of AdamW's step.
        offloaded_bytes: of optimizer state that are not on the device.
        offload_waits: seconds of the step that wait for this state, by where: "backward", "step".
        offload_moved: bytes of it that come to the device, and go back, in a step.
        warnings: in words.
    """

    stage: int
    mesh: Mapping[str, int]
    asked: bool
    rank: int
    fits: bool
    peak_bytes: int
    limit_bytes: int
    memory: Mapping[str, int]
    largest: str
    sent: Mapping[str, int]
    step_seconds: float
    exposed_seconds: float
    exposed: Mapping[str, float]
    tokens_per_second: float
    newton_schulz_seconds: float
    newton_schulz_share: float
    owners_idle: int | None
    owners_uneven: float
    adamw_seconds: float
    adamw_exposed_seconds: float
    price_seconds: float
    price_exposed_seconds: float
    price_share: float
    offloaded_bytes: int = 0
    offload_waits: Mapping[str, float] = field(default_factory=dict)
    offload_moved: tuple[int, int] = (0, 0)
    warnings: Sequence[str] = ()

    @property
    def name(self) -> str:
        """In words."""
        return f"stage {self.stage}, {mesh_text(self.mesh)}"


@dataclass(frozen=True)
class World:
    """All candidates of a number of ranks.

    Args:
        choice: which of them to take; None if none fits.
        why: that one, in a sentence.
        prices: of the candidate shown, by tokens of a step.
    """

    ranks: int
    candidates: Sequence[Figures]
    choice: int | None
    why: str
    prices: Sequence[Price] = ()

    @property
    def shown(self) -> int:
        """The candidate whose timeline is shown: the choice, or what comes closest to fitting."""
        if self.choice is not None:
            return self.choice
        return min(range(len(self.candidates)), key=lambda i: self.candidates[i].peak_bytes)


@dataclass(frozen=True)
class Plan:
    """The answer.

    Args:
        parameters: elements.
        tokens, sequence: of a rank and micro-batch, and of them in one sequence.
        micro_batches: of a step.
        memory_bytes: of a device.
        took_seconds: to make it.
        timelines: of the candidate shown of each world.
    """

    model: str
    machine: str
    parameters: int
    tokens: int
    sequence: int
    micro_batches: int
    memory_bytes: int
    took_seconds: float
    worlds: Sequence[World]
    timelines: Sequence[Timeline] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """What ``--json`` writes; ``simulated`` is always true."""
        found = {"simulated": True, **asdict(self)}
        del found["timelines"]
        for written, world in zip(found["worlds"], self.worlds, strict=True):
            written["prices"] = [price.to_json() for price in world.prices]
        return found


def mesh_text(axes: Mapping[str, int]) -> str:
    """``{"replicate": 8, "shard": 8}`` as "replicate 8 x shard 8"."""
    return " x ".join(f"{name} {size}" for name, size in axes.items())


def make_plan(question: Question) -> Plan:
    """Trace the model, and simulate every candidate of every world.

    Raises:
        ConfigError: settings that fit no world, or a model that cannot be traced.
    """
    began = time.perf_counter()
    config, machine = question.config, question.machine
    chosen = {world: candidates(config, world, machine) for world in question.worlds}
    several = cache(partial(_traced, question))
    traced = partial(several, config.zero.micro_batches)
    worlds, timelines = [], []
    for world, compared in chosen.items():
        played: list[tuple[Figures, Timeline]] = []
        for candidate in compared:
            # Stages 1 and 2 only differ in what they keep of a gradient between micro-batches.
            alike = (1, candidate.axes) if candidate.stage == 2 and config.zero.micro_batches == 1 else None
            known = next((both for both in played if alike == (both[0].stage, both[0].mesh)), None)
            figures, timeline = known or _simulated(traced(candidate.sharing), question, candidate, world)
            figures = replace(figures, stage=candidate.stage, asked=candidate.asked)
            played.append((figures, timeline))
            question.progress(f"{world} ranks, {figures.name}: {figures.step_seconds * 1e3:,.1f} ms simulated")
        answer = _world(world, [figures for figures, _ in played])
        unshared = config.sequence_parallel.size == 1
        if answer.choice is None and unshared and (shared := _shared(traced, question, world)):
            answer = replace(answer, why=f"{answer.why}; {shared}")
        if question.price and config.algorithm == "muon":
            answer = replace(answer, prices=list(_prices(several, question, compared[answer.shown], answer)))
        worlds.append(answer)
        timelines.append(played[answer.shown][1])
    return Plan(
        model=question.subject.name,
        machine=machine.name,
        parameters=sum(param.numel() for param in question.subject.build().parameters()),
        tokens=question.batch.tokens,
        sequence=question.batch.sequence,
        micro_batches=config.zero.micro_batches,
        memory_bytes=machine.memory_bytes,
        took_seconds=time.perf_counter() - began,
        worlds=worlds,
        timelines=timelines,
    )


def _prices(
    traced: Callable[[int, int], Trace], question: Question, candidate: Candidate, world: World
) -> Iterator[Price]:
    """Of the candidate shown, resident."""
    for price in prices(
        lambda count: traced(count, candidate.sharing),
        _resident(question, candidate, world.ranks),
        question.machine,
        rank=world.candidates[world.shown].rank,
        tokens=question.batch.tokens,
        counts=[tokens // question.batch.tokens for tokens in question.price],
    ):
        price_of = f"{world.ranks} ranks, {price.tokens:,} tokens a step"
        question.progress(f"{price_of}: {price.share:+.1%} over AdamW, simulated")
        yield price


def _traced(question: Question, micro_batches: int, sharing: int) -> Trace:
    """The model's trace, of a step of so many micro-batches, with so many ranks that share a sequence.

    Raises:
        ConfigError: it cannot be traced.
    """
    began, subject = time.perf_counter(), question.subject
    config = with_micro_batches(question.config, micro_batches)
    remedy = "torch.compile(model, fullgraph=True) on the same tokens says where; its result has to be a loss"
    with naming_model(subject.name, "traced, forward and backward", remedy):
        trace = trace_step(subject.build, subject.batch, config, question.options, sharing=sharing)
    question.progress(f"traced in {time.perf_counter() - began:.0f} s")
    return trace


def _shared(traced: Callable[[int], Trace], question: Question, world: int) -> str:
    """With how few ranks to a sequence stage 3 fits, in words; empty where it does not, or the model cannot be cut."""
    sharing = 2
    while world % sharing == 0:
        axes = meshes(world, sharing, question.machine)[0]
        try:
            figures, _ = _simulated(traced(sharing), question, Candidate(3, axes, False), world)
        except MuonZeroError:
            return ""
        if figures.fits:
            return f"a rank's tokens fit with sequence_parallel.size {sharing} at stage 3: {size(figures.peak_bytes)}"
        sharing *= 2
    return ""


def _resident(question: Question, candidate: Candidate, world: int) -> Target:
    """With all state on the device."""
    backend = "nccl" if question.machine.device == "cuda" else "gloo"
    return Target(world, candidate.config(question.config), candidate.axes, backend)


def _simulated(trace: Trace, question: Question, candidate: Candidate, world: int) -> tuple[Figures, Timeline]:
    machine, own, offload = question.machine, question.machine.shared_by(world), question.config.zero.offload
    target = _resident(question, candidate, world)
    config = target.config

    def elsewhere(offload: OffloadConfig | None) -> Target:
        return replace(target, config=replace(config, zero=replace(config.zero, offload=offload)))

    owned = trace.owner_work(elsewhere(offload))
    rank = owned.index(max(owned))

    def offloaded(offload: OffloadConfig) -> Timeline:
        return trace.captured(elsewhere(offload), rank=rank).simulated(machine)

    captured = trace.captured(target, rank=rank)
    resident = plain = captured.simulated(machine)
    step = resident if offload is None else offloaded(offload)
    if config.algorithm == "muon":
        adamw = replace(target, config=with_adamw(config))
        plain = trace.captured(adamw, rank=rank).simulated(machine)
    tokens = question.batch.tokens * config.zero.micro_batches / candidate.sharing
    newton_schulz = sum(event.end - event.start for event in step.events if event.category == "newton_schulz")
    plain_exposed = sum(plain.exposed.values())
    mean = sum(owned) / world
    figures = Figures(
        stage=candidate.stage, mesh=dict(candidate.axes), asked=candidate.asked, rank=rank,
        fits=resident.peak.total <= own.memory_bytes,
        peak_bytes=resident.peak.total,
        limit_bytes=own.memory_bytes,
        memory={name: nbytes for name, nbytes in resident.peak.by_category.items() if nbytes},
        largest=resident.peak.largest,
        sent=dict(step.traffic.by_axis),
        step_seconds=step.seconds,
        exposed_seconds=sum(step.exposed.values()), exposed=dict(step.exposed),
        tokens_per_second=tokens / step.seconds,
        newton_schulz_seconds=newton_schulz, newton_schulz_share=newton_schulz / step.seconds,
        owners_idle=sum(not work for work in owned) if mean else None,
        owners_uneven=max(owned) / mean if mean else 1.0,
        adamw_seconds=plain.seconds, adamw_exposed_seconds=plain_exposed,
        price_seconds=resident.seconds - plain.seconds,
        price_exposed_seconds=sum(resident.exposed.values()) - plain_exposed,
        price_share=resident.seconds / plain.seconds - 1,
        offload_waits=dict(step.offload_waits), offload_moved=step.moved,
    )  # fmt: skip
    if captured.on_host and own.host_bandwidth:  # a step reads and writes each of these weights
        figures = _later(figures, captured.on_host / own.host_bandwidth)
    figures = with_offload(figures, offload, captured.states, own)
    return _warned(figures, _remedy(figures, captured.states, own, offloaded)), step


def with_offload(
    figures: Figures, offload: OffloadConfig | None, states: Mapping[str, int], machine: Machine
) -> Figures:
    """The figures of a resident step with what it holds where optimizer state is elsewhere.

    Gradients count as they were, though beside offloaded masters they have the dtype of the weights that stay.
    """
    if offload is None:
        return figures
    masters = states["masters"] if offload.masters else 0
    total = states["moments"] + masters + (states["momenta"] if offload.momentum else 0)
    offloaded_bytes = math.ceil(offload.ratio * total)
    kept = math.ceil(offload.ratio * states["rounded"]) if masters else 0
    moves = {"moment": True, "momentum": offload.momentum, "master": offload.masters}
    moves["momentum by rows"] = offload.momentum and offload.masters
    bucket = max(offload.buffer_bytes, *(states[each] for each, goes in moves.items() if goes))
    left = min(offloaded_bytes, offload.buffer_count * bucket) if machine.device == "cuda" else 0
    if offload.device == "cpu" and machine.device == "cpu":  # the same memory
        left = offloaded_bytes
    peak = figures.peak_bytes - offloaded_bytes + left + kept
    weights = math.ceil(offload.ratio * masters)
    memory = {
        **figures.memory,
        "parameters": figures.memory.get("parameters", 0) - weights + kept,
        "optimizer": max(figures.memory.get("optimizer", 0) - offloaded_bytes + weights, 0),
        "offload buffers": left,
    }
    return replace(
        figures,
        fits=peak <= figures.limit_bytes,
        peak_bytes=peak,
        memory={name: nbytes for name, nbytes in memory.items() if nbytes},
        offloaded_bytes=offloaded_bytes,
    )


def _later(figures: Figures, seconds: float) -> Figures:
    """The figures with so much more waiting for what is offloaded."""
    step = figures.step_seconds + seconds
    return replace(
        figures,
        step_seconds=step,
        exposed_seconds=figures.exposed_seconds + seconds,
        exposed={**figures.exposed, OFFLOAD: figures.exposed.get(OFFLOAD, 0.0) + seconds},
        tokens_per_second=figures.tokens_per_second * figures.step_seconds / step,
        newton_schulz_share=figures.newton_schulz_seconds / step,
    )


def _remedy(
    figures: Figures, states: Mapping[str, int], machine: Machine, offloaded: Callable[[OffloadConfig], Timeline]
) -> str:
    """The smallest offload that makes it fit, in words; empty where it fits, or none does.

    Args:
        offloaded: the step with one.
    """
    if figures.fits or figures.offloaded_bytes:
        return ""
    for device in ("cpu", "nvme"):
        for tenths in range(1, 11):
            offload = OffloadConfig(device, "/", ratio=tenths / 10)
            found = with_offload(figures, offload, states, machine)
            if found.fits:
                share = "" if tenths == 10 else f", ratio {tenths / 10}"
                slower = offloaded(offload).seconds / figures.step_seconds - 1
                return f"fits with offload {device}{share}: {size(found.peak_bytes)}, {slower:.0%} slower"
    return ""


def _warned(figures: Figures, remedy: str = "") -> Figures:
    found = [remedy] if remedy else []
    step = figures.step_seconds
    if not figures.fits:
        found.append(f"does not fit: {size(figures.peak_bytes)} of {size(figures.limit_bytes)}")
    elif figures.peak_bytes > _TIGHT * figures.limit_bytes:
        found.append(f"tight: {size(figures.peak_bytes)} of {size(figures.limit_bytes)}, without the allocator's own")
    for cause, seconds in sorted(figures.exposed.items(), key=lambda item: -item[1]):
        if seconds > _EXPOSED * step:
            found.append(f"{cause} exposed: {seconds * 1e3:.1f} ms of {step * 1e3:.0f}")
    if figures.owners_idle:
        found.append("1 rank owns nothing" if figures.owners_idle == 1 else f"{figures.owners_idle} ranks own nothing")
    if figures.owners_uneven > _UNEVEN:
        found.append(f"owners are uneven: one orthogonalizes {figures.owners_uneven:.1f} times the mean")
    return replace(figures, warnings=tuple(found))


def size(nbytes: float) -> str:
    """Bytes with one digit behind the point, in a unit that leaves some ahead of it."""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _world(ranks: int, found: Sequence[Figures]) -> World:
    fitting = [figures for figures in found if figures.fits]
    if not fitting:
        least = min(found, key=lambda figures: figures.peak_bytes)
        why = (
            f"nothing fits: {least.name} needs least, {size(least.peak_bytes)} of {size(least.limit_bytes)}; "
            "use fewer tokens at a time, more ranks, or activation checkpointing"
        )
        return World(ranks, found, None, why)
    fastest = max(figures.tokens_per_second for figures in fitting)
    close = [figures for figures in fitting if figures.tokens_per_second * (1 + _AS_FAST) >= fastest]
    best = min(close, key=lambda figures: (figures.stage, len(figures.mesh), figures.step_seconds))
    why = (
        f"{best.name}: {best.step_seconds * 1e3:,.1f} ms, {size(best.peak_bytes)} of {size(best.limit_bytes)}; "
        f"{_among(best, close, fitting, found)}"
    )
    return World(ranks, found, found.index(best), why)


def _among(best: Figures, close: Sequence[Figures], fitting: Sequence[Figures], found: Sequence[Figures]) -> str:
    """Why it was chosen."""
    if len(found) == 1:
        return "it is the only one"
    fit = "all fit" if len(fitting) == len(found) else f"{len(fitting)} of {len(found)} fit"
    if len(fitting) == 1:
        return f"only it fits of {len(found)}"
    if len(close) > 1:
        return f"{fit}, {len(close)} of them are as fast within {_AS_FAST:.0%}, and it has the lowest stage of these"
    second = max((f for f in fitting if f is not best), key=lambda figures: figures.tokens_per_second)
    slower = best.tokens_per_second / second.tokens_per_second - 1
    return f"{fit}, and it is the fastest; next is {second.name}, {slower:.0%} slower"
