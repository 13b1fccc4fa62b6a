"""Simulate each candidate of a plan, as configured and with AdamW alone, and choose one.

Every number is simulated. docs/how-to/planning.md says what each means, and is the contract of the JSON file.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
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
from compile_muon.planning.models import Batch, Subject, naming_model
from compile_muon.planning.trace import Target, Trace, trace_step
from compile_muon.simulate import Timeline
from compile_muon.simulate.engine import OFFLOAD
from compile_muon.simulate.machine import Machine

#: part of the fastest step: a candidate slower by less counts as equally fast
_AS_FAST = 0.01
#: part of the step: less exposed time than this gives no warning
_EXPOSED = 0.005
#: part of the memory above which a step is tight
_TIGHT = 0.9
#: multiple of the mean above which owners are uneven
_UNEVEN = 1.25


@dataclass(frozen=True)
class Question:
    """A request for a plan."""

    subject: Subject
    batch: Batch  # of a rank at a time
    config: Config  # as :func:`~.candidates.planned_for` resolved it; memory with its offload is computed by formula
    options: FrameOptions  # of torch.compile
    machine: Machine  # of every rank
    worlds: Sequence[int]  # numbers of ranks
    price: Sequence[int] = ()  # tokens of a rank and step to price Muon at: multiples of the batch's
    progress: Callable[[str], None] = lambda text: None  # is told of each part that takes long


@dataclass(frozen=True)
class Figures:
    """The figures of a candidate: seconds and bytes of a step of one rank, the first of those that own most."""

    stage: int  # stage, mesh, asked: those of :class:`~.candidates.Candidate`
    mesh: Mapping[str, int]
    asked: bool
    rank: int  # simulated
    fits: bool  # `peak_bytes` <= `limit_bytes`
    peak_bytes: int
    limit_bytes: int  # of the device
    memory: Mapping[str, int]  # bytes by category at the peak
    largest: str  # the largest of the intermediates at the peak
    sent: Mapping[str, int]  # bytes by mesh dimension
    step_seconds: float  # all micro-batches
    exposed_seconds: float  # part of the step in which compute waits
    exposed: Mapping[str, float]  # by cause
    tokens_per_second: float  # of one rank
    newton_schulz_seconds: float
    newton_schulz_share: float  # of `step_seconds`
    owners_idle: int | None  # ranks without a matrix to orthogonalize; None where no rank has one
    owners_uneven: float  # largest Newton-Schulz time of a rank over the mean
    adamw_seconds: float  # of the step with AdamW for every parameter
    adamw_exposed_seconds: float
    price_seconds: float  # added by Muon
    price_exposed_seconds: float
    price_share: float  # of `adamw_seconds`
    offloaded_bytes: int = 0  # optimizer state that is not on the device
    # seconds that the step waits for offloaded state, by where: "backward", "step"
    offload_waits: Mapping[str, float] = field(default_factory=dict)
    offload_moved: tuple[int, int] = (0, 0)  # bytes of it to the device, and back, in a step
    kept: Sequence[str] = ()  # what each frame keeps within ``compile.memory``, in words
    warnings: Sequence[str] = ()  # in words

    @property
    def name(self) -> str:
        """The candidate in words."""
        return f"stage {self.stage}, {mesh_text(self.mesh)}"


@dataclass(frozen=True)
class World:
    """The candidates for one number of ranks."""

    ranks: int
    candidates: Sequence[Figures]
    choice: int | None  # index of the candidate to take; None if none fits
    why: str  # the choice in a sentence
    prices: Sequence[Price] = ()  # of the candidate shown, by tokens of a step

    @property
    def shown(self) -> int:
        """The candidate whose timeline is shown: the choice, or the one that comes closest to fitting."""
        if self.choice is not None:
            return self.choice
        return min(range(len(self.candidates)), key=lambda i: self.candidates[i].peak_bytes)


@dataclass(frozen=True)
class Plan:
    """A plan, as ``--json`` writes it."""

    model: str
    machine: str
    parameters: int  # elements
    tokens: int  # of a rank and micro-batch
    sequence: int  # tokens of one sequence
    micro_batches: int  # of a step
    memory_bytes: int  # of a device
    took_seconds: float  # to make the plan
    worlds: Sequence[World]
    timelines: Sequence[Timeline] = field(repr=False)  # of the shown candidate of each world

    def to_json(self) -> dict[str, Any]:
        """Return what ``--json`` writes; ``simulated`` is always true."""
        numbers = {"simulated": True, **asdict(replace(self, timelines=()))}
        del numbers["timelines"]
        return numbers


def mesh_text(axes: Mapping[str, int]) -> str:
    """Format ``{"replicate": 8, "shard": 8}`` as "replicate 8 x shard 8"."""
    return " x ".join(f"{name} {size}" for name, size in axes.items())


def make_plan(question: Question) -> Plan:
    """Trace the model, and simulate every candidate of every number of ranks.

    Raises a ConfigError for settings that fit no world, or a model that cannot be traced.
    """
    began = time.perf_counter()
    config, machine = question.config, question.machine
    candidates_of = {world: candidates(config, world, machine) for world in question.worlds}
    trace_of = cache(partial(_traced, question))
    worlds, timelines = [], []
    for world, compared in candidates_of.items():
        results: list[tuple[Figures, Timeline]] = []
        for candidate in compared:
            # With one micro-batch stages 1 and 2 are the same: they differ in gradients kept between micro-batches.
            alike = (1, candidate.axes) if candidate.stage == 2 and config.zero.micro_batches == 1 else None
            simulated = next((both for both in results if alike == (both[0].stage, both[0].mesh)), None)
            trace = trace_of(candidate.sharing, config.zero.micro_batches)
            figures, timeline = simulated or _simulated(trace, question, candidate, world)
            figures = replace(figures, stage=candidate.stage, asked=candidate.asked)
            results.append((figures, timeline))
            question.progress(f"{world} ranks, {figures.name}: {figures.step_seconds * 1e3:,.1f} ms simulated")
        answer = _world(world, [figures for figures, _ in results])
        unshared = config.sequence_parallel.size == 1
        if answer.choice is None and unshared and (shared := _shared(trace_of, question, world)):
            answer = replace(answer, why=f"{answer.why}; {shared}")
        if question.price and config.algorithm == "muon":
            answer = replace(answer, prices=list(_prices(trace_of, question, compared[answer.shown], answer)))
        worlds.append(answer)
        timelines.append(results[answer.shown][1])
    parameters = sum(param.numel() for param in question.subject.build().parameters())
    return Plan(
        question.subject.name, machine.name, parameters, **asdict(question.batch),
        micro_batches=config.zero.micro_batches, memory_bytes=machine.memory_bytes,
        took_seconds=time.perf_counter() - began, worlds=worlds, timelines=timelines,
    )  # fmt: skip


def _prices(
    traced: Callable[[int, int], Trace], question: Question, candidate: Candidate, world: World
) -> Iterator[Price]:
    """Yield the prices of the candidate shown, without offload."""
    target, rank = _resident(question, candidate, world.ranks), world.candidates[world.shown].rank
    tokens = question.batch.tokens
    counts = [price // tokens for price in question.price]
    traces = partial(traced, candidate.sharing)
    for price in prices(traces, target, question.machine, rank=rank, tokens=tokens, counts=counts):
        price_of = f"{world.ranks} ranks, {price.tokens:,} tokens a step"
        question.progress(f"{price_of}: {price.share:+.1%} over AdamW, simulated")
        yield price


def _traced(question: Question, sharing: int, micro_batches: int) -> Trace:
    """Trace a step with `sharing` ranks to a sequence; a ConfigError names a model that cannot be traced."""
    began, subject = time.perf_counter(), question.subject
    config = with_micro_batches(question.config, micro_batches)
    remedy = "torch.compile(model, fullgraph=True) on the same tokens says where; its result has to be a loss"
    with naming_model(subject.name, "traced, forward and backward", remedy):
        trace = trace_step(subject.build, subject.batch, config, question.options, sharing=sharing)
    question.progress(f"traced in {time.perf_counter() - began:.0f} s")
    return trace


def _shared(traced: Callable[[int, int], Trace], question: Question, world: int) -> str:
    """Say how few ranks to a sequence make stage 3 fit; empty if none do, or the model cannot shard sequences."""
    sharing = 2
    while world % sharing == 0:
        axes = meshes(world, sharing, question.machine)[0]
        try:
            trace = traced(sharing, question.config.zero.micro_batches)
            figures, _ = _simulated(trace, question, Candidate(3, axes, False), world)
        except MuonZeroError:
            return ""
        if figures.fits:
            return f"a rank's tokens fit with sequence_parallel.size {sharing} at stage 3: {size(figures.peak_bytes)}"
        sharing *= 2
    return ""


def _resident(question: Question, candidate: Candidate, world: int) -> Target:
    """Return the target of a candidate with all optimizer state on the device."""
    backend = "nccl" if question.machine.device == "cuda" else "gloo"
    return Target(world, candidate.config(question.config), candidate.axes, backend)


def _simulated(trace: Trace, question: Question, candidate: Candidate, world: int) -> tuple[Figures, Timeline]:
    """Simulate a candidate as configured, with all state resident, and with AdamW; return its figures and timeline."""
    machine, device, offload = question.machine, question.machine.shared_by(world), question.config.zero.offload
    target = _resident(question, candidate, world)
    config = target.config

    def elsewhere(offload: OffloadConfig | None) -> Target:
        return replace(target, config=replace(config, zero=replace(config.zero, offload=offload)))

    owner_work = trace.owner_work(elsewhere(offload))
    rank = owner_work.index(max(owner_work))

    def offloaded(offload: OffloadConfig) -> Timeline:
        return trace.captured(elsewhere(offload), rank=rank).simulated(machine)

    captured = trace.captured(target, rank=rank)
    resident = plain = captured.simulated(machine)
    step = resident if offload is None else offloaded(offload)
    if config.algorithm == "muon":
        adamw = replace(target, config=with_adamw(config))
        plain = trace.captured(adamw, rank=rank).simulated(machine)
    # A step moves each weight that lies in host memory.
    weights_seconds = captured.on_host / device.host_bandwidth if captured.on_host and device.host_bandwidth else 0.0
    seconds, exposed = step.seconds + weights_seconds, dict(step.exposed)
    if weights_seconds:
        exposed[OFFLOAD] = exposed.get(OFFLOAD, 0.0) + weights_seconds
    tokens = question.batch.tokens * config.zero.micro_batches / candidate.sharing
    newton_schulz = sum(event.end - event.start for event in step.events if event.category == "newton_schulz")
    plain_exposed = sum(plain.exposed.values())
    mean = sum(owner_work) / world
    figures = Figures(
        stage=candidate.stage, mesh=dict(candidate.axes), asked=candidate.asked, rank=rank,
        fits=resident.peak.total <= device.memory_bytes,
        peak_bytes=resident.peak.total,
        limit_bytes=device.memory_bytes,
        memory={name: nbytes for name, nbytes in resident.peak.by_category.items() if nbytes},
        largest=resident.peak.largest,
        sent=dict(step.traffic.by_axis),
        step_seconds=seconds,
        exposed_seconds=sum(exposed.values()), exposed=exposed,
        tokens_per_second=tokens / seconds,
        newton_schulz_seconds=newton_schulz, newton_schulz_share=newton_schulz / seconds,
        owners_idle=sum(not work for work in owner_work) if mean else None,
        owners_uneven=max(owner_work) / mean if mean else 1.0,
        adamw_seconds=plain.seconds, adamw_exposed_seconds=plain_exposed,
        price_seconds=resident.seconds - plain.seconds,
        price_exposed_seconds=sum(resident.exposed.values()) - plain_exposed,
        price_share=resident.seconds / plain.seconds - 1,
        offload_waits=dict(step.offload_waits), offload_moved=step.moved,
        kept=[f"{frame}: {words}" for frame, words in captured.kept.items()],
    )  # fmt: skip
    figures = with_offload(figures, offload, captured.states, device)
    return _warned(figures, _remedy(figures, captured.states, device, offloaded)), step


def with_offload(
    figures: Figures, offload: OffloadConfig | None, states: Mapping[str, int], machine: Machine
) -> Figures:
    """Return the figures of a resident step with the memory that it holds when optimizer state is offloaded.

    Gradients count as before, though beside offloaded masters they have the dtype of the weights that stay.
    """
    if offload is None:
        return figures
    masters = states["masters"] if offload.masters else 0
    total = states["moments"] + masters + (states["momenta"] if offload.momentum else 0)
    offloaded_bytes = math.ceil(offload.ratio * total)
    rounded_bytes = math.ceil(offload.ratio * states["rounded"]) if masters else 0
    is_offloaded = {"moment": True, "momentum": offload.momentum, "master": offload.masters}
    is_offloaded["momentum by rows"] = offload.momentum and offload.masters
    bucket = max(offload.buffer_bytes, *(states[kind] for kind, goes in is_offloaded.items() if goes))
    buffer_bytes = min(offloaded_bytes, offload.buffer_count * bucket) if machine.device == "cuda" else 0
    if offload.device == "cpu" and machine.device == "cpu":  # host and device share one memory
        buffer_bytes = offloaded_bytes
    peak = figures.peak_bytes - offloaded_bytes + buffer_bytes + rounded_bytes
    weights = math.ceil(offload.ratio * masters)
    memory = {
        **figures.memory,
        "parameters": figures.memory.get("parameters", 0) - weights + rounded_bytes,
        "optimizer": max(figures.memory.get("optimizer", 0) - offloaded_bytes + weights, 0),
        "offload buffers": buffer_bytes,
    }
    return replace(
        figures,
        fits=peak <= figures.limit_bytes,
        peak_bytes=peak,
        memory={name: nbytes for name, nbytes in memory.items() if nbytes},
        offloaded_bytes=offloaded_bytes,
    )


def _remedy(
    figures: Figures, states: Mapping[str, int], machine: Machine, offloaded: Callable[[OffloadConfig], Timeline]
) -> str:
    """Return in words the smallest offload that makes the candidate fit; empty if it fits already, or none helps.

    `offloaded` simulates the step with an offload.
    """
    if figures.fits or figures.offloaded_bytes:
        return ""
    for device, tenths in product(("cpu", "nvme"), range(1, 11)):
        offload = OffloadConfig(device, "/", ratio=tenths / 10)
        with_it = with_offload(figures, offload, states, machine)
        if with_it.fits:
            share = "" if tenths == 10 else f", ratio {tenths / 10}"
            slower = offloaded(offload).seconds / figures.step_seconds - 1
            return f"fits with offload {device}{share}: {size(with_it.peak_bytes)}, {slower:.0%} slower"
    return ""


def _warned(figures: Figures, remedy: str = "") -> Figures:
    warnings, step = [remedy] if remedy else [], figures.step_seconds
    need = f"{size(figures.peak_bytes)} of {size(figures.limit_bytes)}"
    if not figures.fits:
        warnings.append(f"does not fit: {need}")
    elif figures.peak_bytes > _TIGHT * figures.limit_bytes:
        warnings.append(f"tight: {need}, without the allocator's own")
    for cause, seconds in sorted(figures.exposed.items(), key=lambda item: -item[1]):
        if seconds > _EXPOSED * step:
            warnings.append(f"{cause} exposed: {seconds * 1e3:.1f} ms of {step * 1e3:.0f}")
    if idle := figures.owners_idle:
        warnings.append("1 rank owns nothing" if idle == 1 else f"{idle} ranks own nothing")
    if figures.owners_uneven > _UNEVEN:
        warnings.append(f"owners are uneven: one orthogonalizes {figures.owners_uneven:.1f} times the mean")
    return replace(figures, warnings=tuple(warnings))


def size(nbytes: float) -> str:
    """Format bytes with one decimal, in GiB from 1 GiB on, else in MiB."""
    return f"{nbytes / 2**30:,.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _world(ranks: int, all_figures: Sequence[Figures]) -> World:
    """Choose among the fitting candidates within 1 % of the fastest: lowest stage, then fewest mesh dimensions."""
    fitting = [figures for figures in all_figures if figures.fits]
    if not fitting:
        least = min(all_figures, key=lambda figures: figures.peak_bytes)
        why = (
            f"nothing fits: {least.name} needs least, {size(least.peak_bytes)} of {size(least.limit_bytes)}; "
            "use fewer tokens at a time, more ranks, or activation checkpointing"
        )
        return World(ranks, all_figures, None, why)
    fastest = max(figures.tokens_per_second for figures in fitting)
    as_fast = [figures for figures in fitting if figures.tokens_per_second * (1 + _AS_FAST) >= fastest]
    best = min(as_fast, key=lambda figures: (figures.stage, len(figures.mesh), figures.step_seconds))
    why = (
        f"{best.name}: {best.step_seconds * 1e3:,.1f} ms, {size(best.peak_bytes)} of {size(best.limit_bytes)}; "
        f"{_among(best, as_fast, fitting, all_figures)}"
    )
    return World(ranks, all_figures, all_figures.index(best), why)


def _among(best: Figures, close: Sequence[Figures], fitting: Sequence[Figures], all_figures: Sequence[Figures]) -> str:
    if len(all_figures) == 1:
        return "it is the only one"
    fit = "all fit" if len(fitting) == len(all_figures) else f"{len(fitting)} of {len(all_figures)} fit"
    if len(fitting) == 1:
        return f"only it fits of {len(all_figures)}"
    if len(close) > 1:
        return f"{fit}, {len(close)} of them are as fast within {_AS_FAST:.0%}, and it has the lowest stage of these"
    second = max((f for f in fitting if f is not best), key=lambda figures: figures.tokens_per_second)
    slower = best.tokens_per_second / second.tokens_per_second - 1
    return f"{fit}, and it is the fastest; next is {second.name}, {slower:.0%} slower"
