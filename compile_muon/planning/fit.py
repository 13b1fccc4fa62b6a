"""`python -m compile_muon plan --fit`: which micro-batch fits, at which stage, and how fast it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from compile_muon.memory import BudgetError, auto_limit
from compile_muon.planning.candidates import Candidate
from compile_muon.planning.capture import capture_step
from compile_muon.planning.models import Batch, Subject
from compile_muon.planning.plan import Question, size

_STAGES = (1, 2, 3)


def fits(question: Question, subject_of: Callable[[Batch], Subject]) -> Iterator[str]:
    """Yield a line for each number of ranks, sequences of a micro-batch (1, 2, 4, ...) and stage, until none fits.

    Frames keep what fits ``compile.memory``, by default what "auto" leaves of the machine. Stage 2 stands in the lines
    of its own only with several micro-batches; else it is stage 1.
    """
    machine, config, sequence = question.machine, question.config, question.batch.sequence
    budget = question.options.memory
    limit = budget * 2**30 if isinstance(budget, (int, float)) else auto_limit(machine.memory_bytes)
    options = replace(question.options, memory=limit / 2**30)
    for world in question.worlds:
        count, fitting = 1, True
        while fitting:
            batch, fitting = Batch(count * sequence, sequence), False
            subject = subject_of(batch)
            for stage in _STAGES:
                if stage == 2 and config.zero.micro_batches == 1:
                    continue
                label = f"{world} ranks, stage {stage}, {count} x {sequence:,} tokens"
                try:
                    captured = capture_step(
                        subject.build, subject.batch, world=world, options=options,
                        config=Candidate(stage, {"shard": world}, False).config(config),
                        axes={"shard": world}, backend="nccl" if machine.device == "cuda" else "gloo",
                    )  # fmt: skip
                except BudgetError as error:
                    yield f"{label}: does not fit, {error.least} of {size(limit)}"
                    continue
                step, fitting = captured.simulated(machine), True
                tokens = count * sequence * config.zero.micro_batches / step.seconds
                choices = "; ".join(captured.kept.values()).partition("; peak")[0]
                yield (
                    f"{label}: {size(step.peak.total)} of {size(limit)}, {step.seconds * 1e3:,.1f} ms, "
                    f"{tokens:,.0f} tokens/s a rank; {choices}"
                )
            count *= 2
