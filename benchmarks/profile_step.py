"""The ranges of a training step and the kernels it launches, of a small GPT with `"compile": {"nvtx": true}`.

    python benchmarks/profile_step.py --json profile.json --trace trace.json
    nsys profile --trace cuda,nvtx python benchmarks/profile_step.py     # the same ranges in Nsight Systems
    OMP_NUM_THREADS=1 torchrun --nproc_per_node 2 benchmarks/profile_step.py --preset small --stage 3 --bucket-mb 4 \
        --picture docs/profile_cpu.svg                                   # two ranks on CPU, one picture

On a GPU if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt import PRESETS, fresh, read_corpus, sample_batch, shape_of
from pictures import write_svg

import compile_muon
from compile_muon.passes.ranges import COLORS, DOMAIN

Event = dict[str, Any]

#: colours of frames and step(), of the parts of step(), and of events that are no range
_PLAIN, _PART, _OTHER = "#d9d9d9", "#9a9a9a", "#444444"


def is_range(event: Event) -> bool:
    return event.get("cat") == "user_annotation" and event["name"].startswith(f"{DOMAIN} ")


def is_shown(event: Event) -> bool:
    return is_range(event) or event.get("cat") == "kernel" or event["name"].startswith("gloo:")


def category(name: str) -> str:
    """Return the category of a range; "" for frames and for parts of step()."""
    return next((word for word in name.split() if word in COLORS), "")


def exported(profile: torch.profiler.profile, path: Path | None) -> list[Event]:
    """Export a Chrome trace, to `path` if given, and return its events."""
    with tempfile.TemporaryDirectory() as folder:
        path = path or Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


def draw(ranks: list[list[Event]], path: Path, title: str) -> None:
    """Draw a timeline: a row for the ranges of a rank, and one for each of its Gloo threads or CUDA streams."""
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    start = min(event["ts"] for events in ranks for event in events if is_range(event))
    end = max(event["ts"] + event["dur"] for events in ranks for event in events if is_range(event))
    rows: dict[str, list[tuple[Event, int]]] = {}  # events, each with the number of ranges around it
    for rank, events in enumerate(ranks):
        around: list[float] = []  # ends of the open ranges; a step has its ranges on one thread at a time
        threads: list[int] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            if is_range(event):
                around = [other for other in around if other > event["ts"]]
                rows.setdefault(f"rank {rank}", []).append((event, len(around)))
                around.append(event["ts"] + event["dur"])
            elif event["cat"] == "kernel":
                rows.setdefault(f"rank {rank}, stream {event['args']['stream']}", []).append((event, 0))
            else:
                threads += [event["tid"]] * (event["tid"] not in threads)
                rows.setdefault(f"rank {rank}, Gloo {threads.index(event['tid'])}", []).append((event, 0))

    def colour(kind: str, level: int = 1) -> str:
        return f"#{COLORS[kind] & 0xFFFFFF:06x}" if kind else (_PLAIN, _PART)[level > 0]

    figure, axes = pyplot.subplots(figsize=(15, 1.6 + 0.6 * len(rows)))
    drawn_kinds: set[str] = set()
    for number, (row, bars) in enumerate(rows.items()):
        base = len(rows) - 1 - number
        axes.text(-0.006 * (end - start) / 1e3, base + 0.4, row, ha="right", va="center")
        for event, level in bars:
            begin, length = (event["ts"] - start) / 1e3, event["dur"] / 1e3
            if not is_range(event):
                axes.broken_barh([(begin, length)], (base + 0.15, 0.5), facecolors=_OTHER)
                continue
            kind, text = category(event["name"]), event["name"].split()[-1].split(".")[-1]
            drawn_kinds |= {kind} - {""}
            height = (0.9, 0.6, 0.5)[min(level, 2)]
            edge = "white" if level == 0 else "none"
            axes.broken_barh([(begin, length)], (base, height), facecolors=colour(kind, level), edgecolors=edge)
            if level == 0 and length > 0.01 * len(text) * (end - start) / 1e3:
                axes.text(begin + length / 2, base + 0.75, text, ha="center", va="center", fontsize=9)
    axes.set_yticks([])
    axes.set_ylim(-0.1, len(rows))
    axes.set_xlim(0, (end - start) / 1e3)
    axes.set_xlabel("ms")
    axes.set_title(title)
    patches = [Patch(color=_PLAIN, label="frame or step()"), Patch(color=_PART, label="part of step()")]
    patches += [Patch(color=colour(kind), label=kind) for kind in COLORS if kind in drawn_kinds]
    if any(not is_range(event) for events in ranks for event in events):
        patches.append(Patch(color=_OTHER, label="sent by Gloo" if "Gloo" in "".join(rows) else "kernel"))
    figure.legend(handles=patches, ncols=len(patches), loc="lower center", frameon=False)
    figure.subplots_adjust(
        left=0.08, right=0.99, top=1 - 0.4 / figure.get_figheight(), bottom=0.9 / figure.get_figheight()
    )
    write_svg(figure, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="full", choices=list(PRESETS))
    parser.add_argument("--layers", type=int, help="other than the preset's: few, to see that it works")
    parser.add_argument("--stage", type=int, default=0)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--json", type=Path, help="names and kernels of rank 0")
    parser.add_argument("--trace", type=Path, help="a Chrome trace of rank 0")
    parser.add_argument("--picture", type=Path, help="a timeline of all ranks, as SVG")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
    config = {
        "compile": {"nvtx": True, "bucket_mb": options.bucket_mb},
        "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": options.stage},
        "bf16": {"enabled": device == "cuda"},
    }
    torch.manual_seed(0)
    shape = shape_of(options.preset, options.layers)
    model, optimizer = compile_muon.initialize(fresh(shape, torch.device(device)), config)
    corpus, generator = read_corpus(), torch.Generator().manual_seed(rank)

    def step() -> None:
        x, y = sample_batch(corpus, shape, generator)
        model(x.to(device), y.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        step()
    with torch.profiler.profile() as profile:
        step()
    events = exported(profile, options.trace if rank == 0 else None)
    ranges = Counter(event["name"].removeprefix(f"{DOMAIN} ") for event in events if is_range(event))
    kernels: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "kernel":
            kernels[event["name"]] += event["dur"]
    shown = [event for event in events if is_shown(event)]
    events_of_ranks: list[Any] = [shown]
    if world > 1:
        events_of_ranks = [None] * world
        dist.all_gather_object(events_of_ranks, shown)
        dist.destroy_process_group()
    if rank > 0:
        return 0
    print(f"{sum(ranges.values())} ranges of {len(ranges)} names in one step:")
    for name, count in ranges.items():
        print(f"  {count} × {name}")
    print("kernels, µs on the device:")
    for name, microseconds in kernels.most_common(30):
        print(f"  {microseconds:10.0f}  {name[:120]}")
    if options.json:
        report = {"ranges": ranges, "kernels_us": dict(kernels.most_common(30))}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    if options.picture:
        where = f"{world} rank{'s' * (world > 1)} on {'GPU' if device == 'cuda' else 'CPU'}"
        draw(
            events_of_ranks, options.picture, f"One step of the {options.preset} GPT at stage {options.stage}, {where}"
        )
    if not ranges:
        print("no range was made: nvtx has no effect")
    return 0 if ranges else 1


if __name__ == "__main__":
    sys.exit(main())
