"""`python -m compile_muon plan`."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from compile_muon.config import load_config, read_options
from compile_muon.config.checks import check_integer
from compile_muon.errors import MuonZeroError, config_error
from compile_muon.planning.candidates import planned_for
from compile_muon.planning.machine import load_machine
from compile_muon.planning.models import Batch, load_subject, plan_module
from compile_muon.planning.plan import Plan, Question, make_plan
from compile_muon.planning.report import page, report
from compile_muon.planning.simulate import to_chrome_trace

__all__ = ["run"]


def run(chosen: Namespace) -> int:
    """Make and print the plan that the command line asks for, and write its files; return 2 if an argument is wrong."""
    notes = Console(stderr=True, highlight=False)
    try:
        for option in ("html", "json", "trace"):
            path: Path | None = getattr(chosen, option)
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                problem = "is not a file in a folder that exists"
                raise config_error(f"--{option}", str(path), problem, "make the folder first")
        question = _question(chosen, lambda text: notes.print(text, style="dim"))
        if chosen.html:
            plan_module("matplotlib.figure", "--html", str(chosen.html))
        plan = make_plan(question)
    except MuonZeroError as error:
        notes.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2
    Console(width=None if sys.stdout.isatty() else 200, highlight=False).print(report(plan))
    if chosen.json:
        chosen.json.write_text(json.dumps(plan.to_json(), indent=1))
    if chosen.trace:
        chosen.trace.write_text(json.dumps(traces(plan)))
    if chosen.html:
        chosen.html.write_text(page(plan), encoding="utf-8")
    return 0


def _question(chosen: Namespace, progress: Callable[[str], None]) -> Question:
    """Check the command line and return its question."""
    for world in chosen.world:
        check_integer("--world", world, low=1)
    batch = Batch(chosen.tokens, chosen.tokens if chosen.sequence is None else chosen.sequence)
    machine = load_machine(chosen.machine, "--machine")
    config = planned_for(load_config(chosen.config), machine, chosen.machine)
    options = read_options(config.compile.options())
    subject = load_subject(chosen.model, batch)
    price = sorted(set(chosen.price))
    for tokens in price:
        if tokens < batch.tokens or tokens % batch.tokens:
            problem = f"is no whole number of micro-batches of {batch.tokens} tokens"
            raise config_error("--price", tokens, problem, f"use a multiple of {batch.tokens}, or another --tokens")
    return Question(subject, batch, config, options, machine, list(dict.fromkeys(chosen.world)), price, progress)


def traces(plan: Plan) -> dict[str, Any]:
    """Return what Perfetto reads: one process for each number of ranks."""
    events: list[dict[str, Any]] = []
    for pid, (world, timeline) in enumerate(zip(plan.worlds, plan.timelines, strict=True)):
        name = f"{world.ranks} ranks, {world.candidates[world.shown].name} (simulated)"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}})
        events += [{**event, "pid": pid} for event in to_chrome_trace(timeline)["traceEvents"]]
    return {"traceEvents": events}
