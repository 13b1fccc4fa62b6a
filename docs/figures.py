"""Numbers of the pages, from benchmarks/results/*.json: `python docs/figures.py` renews them after a measurement.

A claim is a piece of a page with {} for each number, and the numbers. A test compares, and looks for numbers of README
that are in no claim.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_NUMBER = r"([-+]?\d[\d,]*(?:\.\d+)?)"
LINKS = ("unlimited", "1600mbit", "800mbit")


@dataclass(frozen=True)
class Claim:
    """A piece of a page.

    Args:
        page: its path.
        text: with {} for numbers.
        numbers: as they are written.
    """

    page: str
    text: str
    numbers: tuple[str, ...]

    def find(self, page: str) -> re.Match[str]:
        """Where it is.

        Raises:
            ValueError: it is not there, or twice.
        """
        pattern = re.sub(r"(?:\\ |\\\n)+", r"\\s+", re.escape(self.text)).replace(r"\{\}", _NUMBER)
        found = list(re.finditer(pattern, page))
        if len(found) != 1:
            raise ValueError(f"{self.page}: {len(found)} places read {self.text!r}")
        return found[0]


@cache
def result(name: str) -> Any:
    """One file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def claims() -> list[Claim]:
    """All of them."""
    return [Claim(page, text, tuple(numbers)) for page, made in PAGES.items() for text, numbers in made()]


Made = Iterator[tuple[str, Sequence[str]]]


# ------------------------------------------------------------------------------------------------- what is written


def steps(name: str) -> dict[tuple[str, int, str], float]:
    """Seconds of a step by contender, stage and link."""
    return {
        (row["contender"], row["stage"], row.get("link", "unlimited")): row["step_s"] for row in result(name)["rows"]
    }


def verdict(name: str, text: str) -> str:
    """The ratio, a median over rounds, of one line of a verdict."""
    (found,) = (v["text"] for v in result(name)["verdicts"] if v["text"].startswith(text + ": "))
    return re.findall(r"\d\.\d+", found.removeprefix(text))[0]


def price(model: str, gpus: int, tokens: int) -> dict[str, float]:
    """A simulated step of Muon's and of AdamW's."""
    (row,) = (r for r in result("price")["simulated"] if (r["model"], r["gpus"]) == (model, gpus))
    (found,) = (each for each in row["prices"] if each["tokens"] == tokens)
    return found


def added(gpus: int, tokens: int, digits: int) -> str:
    return f"{100 * price('1B', gpus, tokens)['share']:+.{digits}f}"


def h100(contender: str) -> dict[str, float]:
    name = "h100_step_1b_adamw" if contender == "ours-adamw" else "h100_step_1b_muon"
    return {row["contender"]: row for row in result(name)["rows"]}[contender]


def h200(contender: str) -> dict[str, float]:
    return {row["contender"]: row for row in result("h200_step_1b")["rows"]}[contender]


def timed(title: str, row: dict[str, float]) -> tuple[str, list[str]]:
    """A line of a table: median and least step, tokens, the first step."""
    steps_s = [f"{row[name]:.3f}" for name in ("step_s", "step_min_s")]
    return f"| {title} | {{}}, {{}} | {{}} | {{}} |", [
        *steps_s, f"{row['tokens_per_s']:,.0f}", f"{row['compile_cold_s']:.0f}"
    ]  # fmt: skip


def readme() -> Made:
    compiled = {row["stage"]: row for row in result("train_step_full_turns")["rows"] if row["contender"] == "ours-muon"}
    first = [f"{compiled[1][name]:.0f}" for name in ("compile_cold_s", "compile_warm_s")]
    yield "({} s and {} s for a GPT of 12 layers", first
    seen = result("convergence_small")
    yield "A GPT of {} M parameters on a CPU", [f"{seen['parameters'] / 1e6:.1f}"]
    yield "Muon needs {} of AdamW's tokens", [f"{max(row['tokens'] for row in seen['rows']):.2f}"]
    muon, adamw = h200("ours-muon-auto")["step_s"], h200("ours-adamw")["step_s"]
    yield "**{} %** ({} ms)", [f"{100 * (muon / adamw - 1):+.0f}", f"{1000 * (muon - adamw):.0f}"]
    one = price("1B", 1, 8192)
    now = [added(1, 8192, 0), f"{1000 * (one['seconds'] - one['adamw_seconds']):.0f}", added(1, 65536, 0)]
    yield "1 H100, simulated | {} % ({} ms) | {} % |", now
    for gpus in (8, 64):
        yield f"| {gpus} H100s, simulated | {{}} % | {{}} % |", [added(gpus, 8192, 1), added(gpus, 65536, 1)]
    taken = steps("train_step_small_links")
    three = [(f"{system}-{kind}", stage) for stage in (1, 3) for system, kind in
             (("ours", "muon"), ("ours", "adamw"), ("deepspeed", "muon"))]  # fmt: skip
    for title, link in zip(("unlimited", "1600 Mbit/s", "800 Mbit/s"), LINKS, strict=True):
        row = [taken[name, stage, link] for name, stage in (*three, ("fsdp2-adamw", 3))]
        yield f"| {title} |" + " {} |" * len(row), [f"{seconds:.3f}" for seconds in row]
    ours = {stage: taken["ours-muon", stage, "1600mbit"] for stage in (1, 3)}
    of = [ours[stage] / taken["deepspeed-muon", stage, "1600mbit"] for stage in (3, 1)]
    of.append(ours[3] / taken["fsdp2-adamw", 3, "1600mbit"])
    yield "Muon takes {} of DeepSpeed's step at stage 3, {} at stage 1, and {} of FSDP2's", [f"{x:.2f}" for x in of]
    costs = [taken["ours-muon", stage, link] / taken["ours-adamw", stage, link] for stage in (1, 3) for link in LINKS]
    yield "It costs {} to {} of our own AdamW", [f"{min(costs):.2f}", f"{max(costs):.2f}"]
    yield "8,192 tokens takes {} s with Muon and {} s with our AdamW", [f"{muon:.3f}", f"{adamw:.3f}"]


def benchmarks() -> Made:
    def of(text: str, *, name: str = "train_step_small_links", links: Sequence[str] = LINKS) -> list[str]:
        return [verdict(name, f"{'' if link == 'unlimited' else f'{link}: '}{text}") for link in links]

    yield (
        "| ours Muon / DeepSpeed Muon, stage 3 | {} | {} | {} |",
        [f"{float(x):.{2 + bool(i)}f}" for i, x in enumerate(of("ours-muon / deepspeed-muon, stage 3"))],
    )
    yield (
        "| the same, stage 1 | {} | {} | {} |",
        [f"{float(x):.{2 + bool(i)}f}" for i, x in enumerate(of("ours-muon / deepspeed-muon, stage 1"))],
    )
    yield "| ours Muon / FSDP2 + AdamW, stage 3 | | {} | {} |", of("ours-muon / fsdp2-adamw, stage 3", links=LINKS[1:])
    four = {"name": "train_step_small_four", "links": LINKS[1:2]}
    against = ["ours-muon / deepspeed-muon, stage 3", "ours-muon / deepspeed-muon, stage 1"]
    yield "{} of DeepSpeed Muon's step at stage 3, {} at stage 1, {} of FSDP2 + AdamW's", [
        *(of(text, **four)[0] for text in against), of("ours-muon / fsdp2-adamw, stage 3", **four)[0],
    ]  # fmt: skip
    wide = {"name": "train_step_small_links_float32", "links": LINKS[1:]}
    yield (
        "the ratios were {} and {} at stage 3, {} and {} at stage 1",
        [x for text in against for x in of(text, **wide)],
    )
    turns = {"name": "train_step_full_turns", "links": LINKS[:1]}
    yield (
        "Ours over DeepSpeed Muon is {} at stage 3 (0.91 to 1.03) and {} at stage 1",
        [of(t, **turns)[0] for t in against],
    )
    for name, title in (("compute-only", "bare forward and backward"), ("ours", "ours Muon"), ("adamw", "ours AdamW"),
                        ("deepspeed", "DeepSpeed Muon")):  # fmt: skip
        yield from _turns(name, title)
    peaks = {row["stage"]: row["peak_bytes"] / 2**20 for row in result("train_step_full_memory")["rows"]}
    yield "Peak memory is {} MiB at stage 3, {} at 1 and {} at 0", [f"{peaks[stage]:,.0f}" for stage in (3, 1, 0)]
    sequences = result("sequence")["contenders"]
    for kind, title in (("ours, heads", "ours, exchanged heads"), ("ours, ring", "ours, ring")):
        yield (
            f"| {title} | {{}} | {{}} | {{}} |",
            [f"{sequences[f'{kind}, stage {n}']['seconds']:.3f}" for n in (1, 2, 3)],
        )
    for device in ("cpu", "nvme"):
        cells = {c["stage"]: c for c in result("offload_deepspeed")["cells"] if c["device"] == device}
        numbers = []
        for cell in (cells[stage] for stage in (1, 2, 3)):
            took = [1000 * cell["seconds"][name] for name in ("ours-muon", cell["faster_deepspeed"])]
            numbers += [*(f"{ms:.0f}" for ms in took), f"{cell['ours_of_deepspeed']:.2f}"]
        yield f'| `"{device}"` |' + " {} / {}: {} |" * 3, numbers
    for contender, title in (
        ("ours-muon-auto", "Muon by defaults (float16, gram form)"),
        ("ours-adamw", "AdamW for all"),
    ):
        yield timed(title, h200(contender))
    muon, adamw = h200("ours-muon-auto")["step_s"], h200("ours-adamw")["step_s"]
    yield "**Muon costs {} ms a step here, {} times", [f"{1000 * (muon - adamw):.0f}", f"{muon / adamw:.2f}"]
    lists = {(row["method"], row["way"]): row for row in result("h200_lists")["rows"]}
    for method, title in (("standard", "standard, bfloat16"), ("auto", '"auto", float16')):
        took = [f"{lists[method, way]['ms']:.1f}" for way in ("list", "replayed", "single")]
        of_sustained = f"{100 * lists[method, 'list']['of_sustained']:.0f}"
        yield f"| {title} | {{}} | {{}} | {{}} | {{}} % |", [*took, of_sustained]
    held = {(row["what"], row["held"]): row["times"] for row in result("h200_contention")["rows"]}
    for what, title in (
        ("in waves", "a list dealt in waves, as ranks have it"),
        ("list of 20", "a list dealt in one wave"),
        ("cuBLAS", "cuBLAS"),
    ):
        yield f"| {title} |" + " {} |" * 3, [f"{held[what, number]:.2f}" for number in (8, 16, 32)]
    for contender, title in (
        ("ours-muon", "ours, Muon"),
        ("plain-muon", "`torch.compile`, autocast, `torch.optim.Muon` and AdamW"),
        ("ours-adamw", "ours, AdamW for all (another run, of the same kind of GPU)"),
    ):
        yield timed(title, h100(contender))
    products = {(row["size"], row["product"]): row for row in result("h100_products")["rows"]}
    for size in (1024, 2048, 4096, 8192):
        took = [products[size, kind][of] for kind in ("X Xᵀ", "bA + cA²", "aX + BX") for of in ("ms", "torch_ms")]
        digits = 4 if size < 4096 else 3
        yield f"| {size} |" + " {} / {} |" * 3, [f"{ms:.{digits}f}" for ms in took]
    muon, adamw = h100("ours-muon")["step_s"], h100("ours-adamw")["step_s"]
    yield "**Muon cost {} ms a step there, {} times", [f"{1000 * (muon - adamw):.0f}", f"{muon / adamw:.1f}"]
    grid = result("example_grid")
    for rate in ("0.01", "0.02", "0.04"):
        row = [grid["config.json"][f"lr {rate}, adam_lr {adam}"] for adam in ("0.0025", "0.005", "0.01")]
        best = min(grid["config.json"].values())
        cells = " | ".join("**{}**" if x == best else "{}" for x in row)
        yield f"| {rate} | {cells} |", [f"{x:.3f}" for x in row]
    rates = list(grid["adamw.json"].values())
    yield "| | " + " | ".join("**{}**" if x == min(rates) else "{}" for x in rates) + " |", [f"{x:.3f}" for x in rates]


def _turns(name: str, title: str) -> Made:
    """Rows of the table of a step where compute dominates."""
    rows = {(r["contender"], r["stage"]): r for r in result("train_step_full_turns")["rows"]}
    keys = {"compute-only": [("compute-only", -1)], "ours": [("ours-muon", 1), ("ours-muon", 3)],
            "adamw": [("ours-adamw", 1), ("ours-adamw", 3)],
            "deepspeed": [("deepspeed-muon", 1), ("deepspeed-muon", 3)]}[name]  # fmt: skip
    columns: list[tuple[str, Callable[[float], str]]] = [
        ("step_s", lambda x: f"{x:.2f}"), ("cpu_s", lambda x: f"{x:.2f}"), ("compile_cold_s", lambda x: f"{x:.0f}"),
        ("bytes_per_step", lambda x: f"{x / 1e6:.0f}"),
    ]  # fmt: skip
    cell = "; ".join(["{}"] * len(keys))
    head = title if len(keys) == 1 else f"{title}, stage 1; stage 3"
    yield f"| {head} |" + f" {cell} |" * 4, [say(rows[key][column]) for column, say in columns for key in keys]


def methods() -> Made:
    clipped = [f"{run['clipped']:.2f}" for run in result("qk_clip")["runs"]]
    yield "takes {} of one without at a context of 256, {} at 1,024 and {} at 2,048", clipped
    runs = result("methods")["methods"]
    for method, run in runs.items():
        above = [loss - muon for loss, muon in zip(run["seeds"], runs["muon"]["seeds"], strict=True)]
        best = min(run["ends"], key=run["ends"].__getitem__)
        numbers = [best, f"{sum(run['seeds']) / len(run['seeds']):.3f}"]
        if method == "muon":
            yield f'| `"{method}"` | {{}} | {{}} | |', numbers
        else:
            numbers += [f"{gap:+.3f}" for gap in (min(above), max(above))]
            yield f'| `"{method}"` | {{}} | {{}} | {{}} to {{}} |', numbers
    ends = [end for rate, end in runs["muown"]["ends"].items() if float(rate) >= 0.005]
    yield "over a factor of 16 in `lr` its loss differs by {}", [f"{max(ends) - min(ends):.2f}"]


def offload() -> Made:
    found = result("offload")["of_resident"]
    yield "| offloaded | {} (1.09", [f"{found['offloaded']:.2f}"]
    yield "| read everything, step, write everything | {} |", [f"{found['around the step']:.2f}"]
    said = {
        "None": "4 | float32",
        "bfloat16": "2 | rounded up or down by chance, so that the mean is right",
        "8bit": "1.02 | codes of the dynamic map of torchao and bitsandbytes, scaled by 256 elements of a row",
    }
    for dtype, ends in result("momenta")["ends"].items():
        name = dtype if dtype == "None" else f'"{dtype}"'
        yield f"| `{name}` | {said[dtype]} | {{}}, {{}}, {{}} |", [f"{loss:.3f}" for loss in ends]


def counted(name: str, campaign: str) -> dict[str, int]:
    """What happened how often in a campaign of faults."""
    found: dict[str, int] = {}
    for row in result(name)[campaign]["rows"]:
        for outcome, times in row["outcomes"].items():
            found[outcome] = found.get(outcome, 0) + times
    return found


def reliability() -> Made:
    for name, more in (("faults", ""), ("faults_offload", " {} of {} runs ended with the bits of state in memory")):
        kills, longest = counted(name, "kills"), max(row["longest_s"] or 0 for row in result(name)["kills"]["rows"])
        ended, same = kills["the survivor ended by itself"], kills["trainings ended bit for bit as never killed"]
        text = more or " {} of {} runs ended bit for bit as never killed"
        numbers = [ended, ended, math.ceil(longest), same, same]
        yield "{} of {} survivors ended by themselves, within {} s;" + text, [str(number) for number in numbers]
    ranks = counted("faults", "ranks")
    numbers = [result("faults")["ranks"]["tried"], ranks["named"] + ranks["named, late"], ranks["right"]]
    text = "{} runs: {} named, {} right, {} aborted, named, {} WRONG"
    yield text, [str(number) for number in (*numbers, ranks["aborted, named"], ranks["WRONG"])]
    pairs = counted("faults", "resharding")["bit for bit"]
    yield "| {} of {} pairs bit for bit |", [str(pairs)] * 2


def host_time() -> Made:
    for name, plain, title in (
        ("first_step_cpu", "torch.compile, AdamW", "CPU, one layer: `torch.compile`, AdamW"),
        ("first_step_rehearsed_small", "torch.compile, torch.optim.Muon and AdamW",
         "sm_90 rehearsed, two layers: `torch.compile`, `torch.optim.Muon` and AdamW"),
        ("first_step_rehearsed", "torch.compile, torch.optim.Muon and AdamW", "the same, eight layers"),
    ):  # fmt: skip
        row, mine = (result(name)["contenders"][key] for key in (plain, "compile_muon, Muon"))
        took = [[f"{row[key]:.1f}" for key in ("cpu", "seconds")] for row in (row, mine)]
        text = f"| {title} | {{}} | | {{}} | | |\n| the same, compile_muon with Muon | {{}} | {{}} | {{}} | {{}} |"
        yield text, [*took[0], took[1][0], f"{mine['cpu_ratio']:.2f}", took[1][1], f"{mine['ratio']:.2f}"]


def nanogpt() -> Made:
    compiled = {row["stage"]: row for row in result("train_step_full_turns")["rows"] if row["contender"] == "ours-muon"}
    seconds = [h200("ours-muon-auto")["compile_cold_s"], compiled[1]["compile_cold_s"]]
    yield "{} s for 1 G parameters on one H200; {} s", [f"{x:.0f}" for x in seconds]
    yield "takes {} s of those {}:", [f"{compiled[1]['compile_warm_s']:.0f}", f"{seconds[1]:.0f}"]


def which() -> Made:
    share = h200("ours-muon-auto")["step_s"] / h200("ours-adamw")["step_s"] - 1
    yield "{} % of AdamW's, as measured on one H200", [f"{100 * share:.0f}"]
    yield "needed {} of AdamW's tokens", [f"{max(row['tokens'] for row in result('convergence_small')['rows']):.2f}"]


def comparison() -> Made:
    share = 100 * (h200("ours-muon-auto")["step_s"] / h200("ours-adamw")["step_s"] - 1)
    yield "8,192 tokens, one H200 | {} % |", [f"{share:+.0f}"]
    of_torch = h100("ours-muon")["step_s"] / h100("plain-muon")["step_s"]
    yield "the same on one H100, earlier code | {} |", [f"{of_torch:.2f}"]
    against = [f"ours-muon / deepspeed-muon, stage {stage}" for stage in (3, 1)]
    linked = [verdict("train_step_small_links", f"1600mbit: {text}") for text in against]
    yield "1600 Mbit/s, stages 3 and 1 | {}, {} |", linked
    yield "no limit, stages 3 and 1 | {}, {} |", [verdict("train_step_full_turns", text) for text in against]
    first = {(row["contender"], row["stage"]): row["compile_cold_s"] for row in result("train_step_full_turns")["rows"]}
    yield "took {} s where ours took {}", [f"{first[name, 1]:.0f}" for name in ("deepspeed-muon", "ours-muon")]


PAGES: dict[str, Callable[[], Made]] = {
    "README.md": readme,
    "docs/reference/benchmarks.md": benchmarks,
    "docs/reference/host-time.md": host_time,
    "docs/how-to/methods.md": methods,
    "docs/how-to/offload.md": offload,
    "docs/reference/reliability.md": reliability,
    "docs/start/from-nanogpt.md": nanogpt,
    "docs/start/which.md": which,
    "docs/why/comparison.md": comparison,
}


_PLANNED = "| GPU | step | measured | planned | off |"


def planned_beside_measured() -> str:
    """The table of what the planner says of each step that a GPU has run."""
    lines = [_PLANNED, "|---|---|---|---|---|"]
    for file in sorted(RESULTS.glob("*_planned.json")):
        card = file.name.partition("_")[0].upper()
        for row in result(file.stem)["rows"]:
            took, said, unit = row["measured"], row["planned"], row["unit"]
            step = row["what"].replace("ours-", "")
            lines.append(f"| {card} | {step} | {took:.4g} {unit} | {said:.4g} | {100 * (said / took - 1):+.1f} % |")
    return "\n".join(lines)


#: tables that are written as a whole, by page and first row
TABLES: dict[tuple[str, str], Callable[[], str]] = {
    ("docs/reference/benchmarks.md", _PLANNED): planned_beside_measured,
}


def table_of(page: str, header: str) -> re.Match[str]:
    """The place of a table that is written as a whole: its text is the group."""
    found = re.search(rf"^({re.escape(header)}(?:\n\|.*)*)$", page, re.MULTILINE)
    if found is None:
        raise ValueError(f"no table begins with {header!r}")
    return found


def renewed(page: str, made: Sequence[Claim]) -> str:
    """The page with the numbers as the results have them."""
    for claim in made:
        found = claim.find(page)
        for number, value in reversed(list(enumerate(claim.numbers, 1))):
            page = page[: found.start(number)] + value + page[found.end(number) :]
    return page


def main() -> int:
    """Renew the pages."""
    for path in PAGES:
        page = renewed((ROOT / path).read_text(encoding="utf-8"), [c for c in claims() if c.page == path])
        for name in (name for of, name in TABLES if of == path):
            place = table_of(page, name)
            page = page[: place.start(1)] + TABLES[path, name]() + page[place.end(1) :]
        (ROOT / path).write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
