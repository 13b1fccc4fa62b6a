"""The command: its numbers, what it writes, and what it refuses."""

import contextlib
import html
import io
import json
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from compile_muon import __main__ as cli
from compile_muon.config import MeshConfig, SequenceParallelConfig, config_from_kwargs
from compile_muon.errors import ConfigError
from compile_muon.passes.collectives import Traffic
from compile_muon.planning import plan as plans
from compile_muon.planning.candidates import Candidate, Price, candidates, planned_for, with_adamw
from compile_muon.planning.command import page, price_text, rows
from compile_muon.planning.models import Batch, load_subject, plan_module
from compile_muon.planning.plan import Figures, Plan, Question, World, make_plan
from compile_muon.planning.trace import Target, Trace, trace_step
from compile_muon.simulate import Event, LiveBytes, Timeline
from compile_muon.simulate.machine import load_machine

H100 = load_machine("h100")


def question(world: int = 16, memory: int | None = None, **settings: Any) -> Question:
    machine = H100 if memory is None else replace(H100, memory_bytes=memory)
    config = planned_for(config_from_kwargs(**{"stage": 1, **settings}), machine, "h100")
    batch = Batch(16, 8)
    return Question(load_subject("tiny_gpt:one_layer", batch), batch, config, plans.FrameOptions(), machine, [world])


def write_config(path: Path, **more: Any) -> Path:
    path.write_text(json.dumps({"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 2}, **more}))
    return path


def arguments(file: Path, **changes: str) -> list[str]:
    given = {"config": str(file), "world": "2", "machine": "h100", "tokens": "16", "sequence": "8", **changes}
    model = given.pop("model", "tiny_gpt:one_layer")
    return ["plan", model, *(part for name, value in given.items() for part in (f"--{name}", *value.split()))]


def test_candidates_are_every_stage_on_one_axis_and_with_replicas_in_nodes() -> None:
    found = candidates(config_from_kwargs(stage=2), 16, H100)
    assert [(c.stage, dict(c.axes)) for c in found if c.stage in (0, 3)] == [
        (0, {"shard": 16}),
        (3, {"shard": 16}),
        (3, {"replicate": 2, "shard": 8}),
    ]
    assert [(c.stage, dict(c.axes)) for c in found if c.asked] == [(2, {"shard": 16})]
    assert len(candidates(config_from_kwargs(), 8, H100)) == 4
    config = replace(config_from_kwargs(stage=3), mesh=MeshConfig(replicate=4))
    (asked,) = [c for c in candidates(config, 16, H100) if c.asked]
    assert (asked.stage, dict(asked.axes)) == (3, {"replicate": 4, "shard": 4})
    larger = [dict(c.axes) for c in candidates(config_from_kwargs(stage=2), 512, H100) if c.stage == 3]
    assert larger == [{"shard": 512}, {"replicate": 64, "shard": 8}, {"replicate": 8, "shard": 64}]


def test_a_plan_for_gpus_has_their_dtypes() -> None:
    config = config_from_kwargs(ns_backend="aten")
    assert planned_for(config, H100, "h100").muon.ns.dtype == "float16"
    assert planned_for(config, load_machine("cpu"), "cpu").muon.ns.dtype == "auto"
    assert planned_for(config, H100, "h100").machine == "h100"


@pytest.mark.full
def test_numbers_are_those_of_the_simulated_steps() -> None:
    asked = question(world=16)
    found = make_plan(asked)
    (world,) = found.worlds
    trace = trace_step(asked.subject.build, asked.subject.batch, asked.config, asked.options)
    for figures in (world.candidates[0], world.candidates[2], world.candidates[-1]):
        config = replace(asked.config, zero=replace(asked.config.zero, stage=figures.stage))
        target = Target(16, config, figures.mesh, "nccl")
        step = trace.captured(target, rank=figures.rank).simulated(asked.machine)
        plain = trace.captured(replace(target, config=with_adamw(config)), rank=figures.rank).simulated(asked.machine)
        assert (figures.step_seconds, figures.adamw_seconds) == (step.seconds, plain.seconds)
        assert figures.price_seconds == pytest.approx(step.seconds - plain.seconds)
        assert figures.tokens_per_second == pytest.approx(16 / step.seconds)
        assert figures.sent == dict(step.traffic.by_axis)
        assert sum(figures.memory.values()) == figures.peak_bytes == step.peak.total
        assert 0 < figures.newton_schulz_share < 1
        assert step.traffic.matrices > 0
    assert found.timelines[0].seconds == world.candidates[world.shown].step_seconds
    # 4 matrices on 16 ranks
    assert {figures.owners_idle for figures in world.candidates} == {12}
    assert all("12 ranks own nothing" in figures.warnings for figures in world.candidates)
    assert found.to_json()["simulated"] is True


def test_a_config_of_adamw_is_its_own_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "candidates", lambda *given: candidates(*given)[::3])  # stages 0 and 3
    asked = question(world=1)
    found = make_plan(replace(asked, config=with_adamw(asked.config)))
    assert [figures.stage for figures in found.worlds[0].candidates] == [0, 3]
    for figures in found.worlds[0].candidates:
        assert (figures.price_seconds, figures.newton_schulz_seconds, figures.owners_idle) == (0.0, 0.0, None)
        assert (figures.mesh, figures.sent, set(figures.exposed)) == ({"shard": 1}, {}, {"host"})


@pytest.mark.full
def test_a_price_is_that_of_as_many_micro_batches() -> None:
    """Two of three are a step of two, and five take what a step of five takes."""
    asked = replace(question(world=4), price=(16, 32, 80))
    found = make_plan(asked)
    (world,) = found.worlds
    shown = world.candidates[world.shown]
    assert (world.prices[0].seconds, world.prices[0].adamw_seconds) == (shown.step_seconds, shown.adamw_seconds)
    assert world.prices[0].exposed_share * shown.adamw_seconds == pytest.approx(shown.price_exposed_seconds)
    for price, count in zip(world.prices, (1, 2, 5), strict=True):
        config = config_from_kwargs(stage=shown.stage, gradient_accumulation_steps=count)
        config = planned_for(config, asked.machine, "h100")
        step, plain = (
            trace_step(asked.subject.build, asked.subject.batch, trained, asked.options)
            .captured(Target(4, trained, shown.mesh, "nccl"), rank=shown.rank)
            .simulated(asked.machine)
            for trained in (config, with_adamw(config))
        )
        assert (price.tokens, price.fits) == (16 * count, True)
        exact = count <= 3
        assert price.seconds == pytest.approx(step.seconds, rel=0 if exact else 1e-3)
        assert price.adamw_seconds == pytest.approx(plain.seconds, rel=0 if exact else 1e-3)
    assert found.to_json()["worlds"][0]["prices"][2]["share"] == world.prices[2].share


def figures(stage: int, milliseconds: float, peak: int, limit: int = 100) -> Figures:
    return Figures(
        stage=stage, mesh={"shard": 8}, asked=False, rank=0, fits=peak <= limit, peak_bytes=peak * 2**30,
        limit_bytes=limit * 2**30, memory={}, largest="", sent={}, step_seconds=milliseconds / 1e3,
        exposed_seconds=0.0031, exposed={"exchange": 0.0031}, tokens_per_second=1e6 / milliseconds,
        newton_schulz_seconds=0.0, newton_schulz_share=0.0,
        owners_idle=17, owners_uneven=1.0, adamw_seconds=1.0, adamw_exposed_seconds=0.0, price_seconds=0.0,
        price_exposed_seconds=0.0, price_share=0.0,
    )  # fmt: skip


def test_the_fastest_that_fits_and_of_equals_the_lowest_stage() -> None:
    world = plans._world(8, [figures(0, 300, 120), figures(1, 402, 70), figures(2, 400, 60), figures(3, 500, 20)])
    assert world.choice == 1
    assert "stage 1, shard 8: 402.0 ms, 70.0 GiB of 100.0" in world.why
    assert "3 of 4 fit, 2 of them are as fast" in world.why
    world = plans._world(8, [figures(1, 412, 70), figures(3, 400, 20)])
    assert world.choice == 1
    assert "all fit, and it is the fastest; next is stage 1, shard 8, 3% slower" in world.why


def test_where_nothing_fits_the_least_is_named() -> None:
    world = plans._world(8, [figures(0, 300, 320), figures(3, 500, 120)])
    assert (world.choice, world.shown) == (None, 1)
    assert "nothing fits: stage 3, shard 8 needs least, 120.0 GiB of 100.0" in world.why


def test_warnings_are_sentences() -> None:
    found = plans._warned(replace(figures(3, 412, 120), owners_uneven=1.6)).warnings
    assert list(found) == [
        "does not fit: 120.0 GiB of 100.0 GiB",
        "exchange exposed: 3.1 ms of 412",
        "17 ranks own nothing",
        "owners are uneven: one orthogonalizes 1.6 times the mean",
    ]
    assert "tight: 95.0 GiB of 100.0" in plans._warned(figures(3, 412, 95)).warnings[0]


def cells_of(text: str) -> list[str]:
    """Of all tables of a page."""
    return [html.unescape(re.sub("<.*?>", "", cell)) for cell in re.findall(r"<td[^>]*>(.*?)</td>", text, re.DOTALL)]


def script_of(text: str) -> Any:
    (script,) = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    return json.loads(script)


def worlds_of(written: dict[str, Any]) -> list[World]:
    """What the JSON file says, with prices less the shares that follow from their seconds."""
    return [
        World(
            **{
                **world,
                "candidates": [Figures(**f) for f in world["candidates"]],
                "prices": [Price(**{f.name: p[f.name] for f in fields(Price) if f.init}) for p in world["prices"]],
            }
        )
        for world in written["worlds"]
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What one call of the command leaves."""
    pytest.importorskip("matplotlib")
    folder = tmp_path_factory.mktemp("plan")
    files = {kind: folder / f"plan.{kind}" for kind in ("html", "json", "trace")}
    config = write_config(folder / "config.json")
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(str(Path(__file__).parent))
        given = {kind: str(path) for kind, path in files.items()}
        assert cli.main(arguments(config, **given, price="16")) == 0
    (folder / "printed").write_text(printed.getvalue())
    return files | {"printed": folder / "printed"}


def test_the_command_writes_one_plan_in_four_ways(written: dict[str, Path]) -> None:
    found = json.loads(written["json"].read_text())
    assert set(found) == {
        "simulated", "model", "machine", "parameters", "tokens", "sequence", "micro_batches", "memory_bytes",
        "took_seconds", "worlds",
    }  # fmt: skip
    (world,) = worlds_of(found)
    assert [f.asked for f in world.candidates] == [False, False, True, False]

    text = written["html"].read_text()
    assert not re.search(r"https?:|//[a-z]|@import|\bsrc\b|url\((?!#)", text, re.IGNORECASE)
    assert not re.search(r"<(link|img|iframe|object|base)\b", text)
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', text))
    assert script_of(text) == found
    priced = [str(world.ranks), *map(price_text, world.prices)]
    assert cells_of(text) == [cell for row in rows(world) for cell in row] + priced
    assert text.count("<svg") == 4
    assert "fill: currentColor" in text
    assert "prefers-color-scheme: dark" in text

    printed = written["printed"].read_text()
    assert "simulated" in printed
    assert world.why in " ".join(printed.split())

    events = json.loads(written["trace"].read_text())["traceEvents"]
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last == pytest.approx(world.candidates[world.shown].step_seconds * 1e6)
    assert "2 ranks, stage" in events[0]["args"]["name"]


def test_names_are_escaped_and_prices_stand_in_a_row(written: dict[str, Path]) -> None:
    found = json.loads(written["json"].read_text())
    worlds = worlds_of(found)
    del found["worlds"]
    del found["simulated"]
    (world,) = worlds
    (price,) = world.prices
    world = replace(world, prices=[price, replace(price, tokens=32, seconds=2 * price.seconds)])
    timeline = Timeline(1.0, 1.0, {}, (Event("<i>", "product", "compute", 0.0, 1.0),), Traffic(), LiveBytes(), {})
    plan = Plan(**{**found, "model": "</script><b>&"}, worlds=[world], timelines=[timeline])
    text = page(plan)
    assert cells_of(text)[-3:] == [str(world.ranks), *map(price_text, world.prices)]
    assert not re.search("<[bi]>", text) and script_of(text)["model"] == "</script><b>&"


@pytest.mark.parametrize(
    ("changes", "field", "problem"),
    [
        ({"machine": "h1000"}, "--machine = 'h1000'", "neither a known machine nor a file"),
        ({"model": "no_such_module:GPT"}, "MODEL = 'no_such_module:GPT'", "cannot be imported"),
        ({"model": "tiny_gpt:GPT3"}, "MODEL = 'tiny_gpt:GPT3'", "no function of that name"),
        ({"model": "tiny_gpt:no_module"}, "MODEL", "returns a int"),
        ({"model": "tiny_gpt:reads_values"}, "MODEL", "cannot be built without values"),
        ({"model": "tiny_gpt:Broken"}, "MODEL", "cannot be traced"),
        ({"tokens": "17"}, "--tokens = 17", "no whole number of sequences of 8 tokens; use 16"),
        ({"tokens": "0"}, "--tokens = 0", "is out of range"),
        ({"world": "0"}, "--world = 0", "an integer from 1"),
        ({"price": "24"}, "--price = 24", "no whole number of micro-batches of 16 tokens"),
        ({"json": "/no/such/folder/plan.json"}, "--json", "folder that exists"),
        ({"config": "/no/such.json"}, "config", "/no/such.json"),
        ({"mesh": {"replicate": 3, "shard": 2}}, "mesh", "does not make up 2 ranks"),
        ({"mesh": {"tensor": 2}}, "mesh", "a plan has the whole model on every rank"),
    ],
)
def test_what_is_wrong_is_one_line_with_a_remedy(
    changes: dict[str, Any], field: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {name: value for name, value in changes.items() if name != "mesh"}
    config_file = write_config(tmp_path / "config.json", **{name: changes[name] for name in changes.keys() - given})
    assert cli.main(arguments(config_file, **given)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert field in printed.err
    assert problem in printed.err
    # From 2.15 on PyTorch logs what a fake tensor fails at to the standard error of the moment, which is captured.
    ours = [line for line in printed.err.strip().splitlines() if " torch/_" not in line]
    assert len(ours) == 1 and "Traceback" not in ours[0]


def write_llama(folder: Path, **more: int) -> None:
    pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 8}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads, **more}))


def test_a_folder_of_transformers(tmp_path: Path) -> None:
    write_llama(tmp_path)
    for name in (tmp_path, tmp_path / "config.json"):
        subject = load_subject(str(name), Batch(16, 8))
        assert set(subject.batch) == {"input_ids", "labels", "use_cache"}
        assert sum(param.numel() for param in subject.build().parameters()) == 3632
    with pytest.raises(ConfigError, match="longer than the 8 positions"):
        load_subject(str(tmp_path), Batch(16, 16))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a config of Transformers"):
        load_subject(str(tmp_path), Batch(16, 8))


def test_candidates_with_and_without_shared_sequences() -> None:
    config = replace(config_from_kwargs(stage=3), sequence_parallel=SequenceParallelConfig(4, ("blocks",)))
    found = candidates(config, 16, H100)
    assert [dict(c.axes) for c in found if c.stage == 3] == [
        {"shard": 16}, {"replicate": 2, "shard": 8}, {"shard": 4, "sequence": 4},
        {"replicate": 2, "shard": 2, "sequence": 4},
    ]  # fmt: skip
    assert [(c.stage, dict(c.axes)) for c in found if c.asked] == [(3, {"shard": 4, "sequence": 4})]
    assert {c.config(config).sequence_parallel for c in found} == {
        SequenceParallelConfig(), SequenceParallelConfig(4, ("blocks",), check=False),
    }  # fmt: skip


@pytest.mark.full
def test_where_nothing_fits_sequences_may_be_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By four ranks with a sequence each, of whose memory logits take more than weights."""
    write_llama(tmp_path, max_position_embeddings=256, vocab_size=512)
    batch = Batch(256, 256)
    monkeypatch.setattr(plans, "candidates", lambda *given: [c for c in candidates(*given) if c.asked])
    # At stage 3, which needs least, 1.2 MB are needed, 0.8 where two ranks share a sequence.
    asked = question(world=4, memory=1_000_000, stage=3)
    (world,) = make_plan(replace(asked, subject=load_subject(str(tmp_path), batch), batch=batch)).worlds
    assert world.choice is None and "fit with sequence_parallel.size 2 at stage 3" in world.why


def test_models_that_cannot_share_are_not_told_to() -> None:
    def traced(sharing: int, micro_batches: int) -> Any:
        raise ConfigError(f"sequence_parallel.size = {sharing}: there are no blocks")

    assert plans._shared(traced, question(world=4), 4) == ""
    assert plans._shared(traced, question(world=3), 3) == ""


def test_without_matplotlib_or_transformers_there_is_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, call in (
        ("matplotlib.figure", lambda: plan_module("matplotlib.figure", "--html", "plan.html")),
        ("transformers", lambda: load_subject(str(tmp_path), Batch(16, 8))),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ConfigError, match=r"pip install '.\[plan\]' in compile_muon's checkout"):
            call()


GB = 2**30
STATES = {
    "momenta": 10 * GB, "moments": 20 * GB, "masters": 16 * GB, "rounded": 8 * GB,
    "momentum": 2 * GB, "moment": 0, "master": 3 * GB, "momentum by rows": 5 * GB,
}  # fmt: skip


@pytest.mark.parametrize(("share", "momentum", "moved_out", "left"), [(0.5, True, 15, 4), (1.0, False, 20, 2)])
def test_offload_takes_state_away_but_for_buckets_as_large_as_one_momentum(
    share: float, momentum: bool, moved_out: int, left: int
) -> None:
    offload = plans.OffloadConfig(ratio=share, momentum=momentum, buffer_count=2, buffer_bytes=GB)
    before = replace(figures(2, 4000, 120), memory={"optimizer": 35 * GB})
    found = plans.with_offload(before, offload, STATES, H100)
    assert found.peak_bytes == (120 - moved_out + left) * GB
    assert found.memory == {"optimizer": (35 - moved_out) * GB, "offload buffers": left * GB}
    assert found.fits == (120 - moved_out + left <= 100)
    assert plans.with_offload(before, None, {}, H100) is before


def test_masters_away_leave_what_graphs_read() -> None:
    offload = plans.OffloadConfig(ratio=0.5, masters=True, buffer_count=2, buffer_bytes=GB)
    before = replace(figures(2, 4000, 120), memory={"optimizer": 35 * GB, "parameters": 40 * GB})
    found = plans.with_offload(before, offload, STATES, H100)
    assert found.offloaded_bytes == 23 * GB and found.peak_bytes == (120 - 23 + 4 + 10) * GB
    assert found.memory == {"optimizer": 20 * GB, "parameters": 36 * GB, "offload buffers": 10 * GB}


def test_the_smallest_offload_that_fits_is_named() -> None:
    asked = []

    def offloaded(offload: plans.OffloadConfig) -> Any:
        asked.append((offload.device, offload.ratio))
        return Timeline(5.2, 5.2, {}, (), Traffic(), LiveBytes(), {})

    given = STATES, H100, offloaded
    said = plans._remedy(figures(2, 4000, 105), *given)
    assert said == "fits with offload cpu, ratio 0.5: 98.0 GiB, 30% slower"
    assert asked == [("cpu", 0.5)]
    assert plans._remedy(figures(2, 4000, 200), *given) == ""
    assert plans._remedy(figures(2, 4000, 90), *given) == ""


@pytest.fixture(scope="module")
def one_trace() -> Trace:
    """Of the model of these questions: wherever its state is, the graphs ahead of lowering are the same."""
    asked = question()
    return trace_step(asked.subject.build, asked.subject.batch, asked.config, asked.options)


def played(trace: Trace, machine: dict[str, float], **offload: Any) -> Figures:
    """Stage 1 on two ranks."""
    asked = question(world=2, offload={"buffer_bytes": 2**13, "buffer_count": 2, **offload})
    asked = replace(asked, machine=replace(H100, host_bandwidth=1e8, **machine))
    return plans._simulated(trace, asked, Candidate(1, {"shard": 2}, True), 2)[0]


@pytest.mark.full
def test_gradients_and_weights_travel_to_a_host_that_computes_adamw_in_place_of_moments(one_trace: Trace) -> None:
    there = played(one_trace, {"host_memory_bandwidth": 0.0}, device="cpu", momentum=False)
    timed = played(one_trace, {"host_memory_bandwidth": 1e3}, device="cpu", momentum=False, adamw_on="cpu")
    (came, went), (weights, gradients) = there.offload_moved, timed.offload_moved
    assert gradients == 2 * weights and went == came  # weights have no master there, and come too
    assert 0 < weights < came / 2  # 4 bytes of 8, and these in whole pages
    # The host's memory is what takes time: 28 bytes an element, of which 4 are its weight.
    assert timed.offload_waits["step"] == pytest.approx(7 * weights / 1e3, rel=0.05)


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.full), "nvme"])
def test_a_plan_plays_what_its_config_offloads(device: str, one_trace: Trace) -> None:
    found = played(one_trace, {"disk_bandwidth": 1e8}, device=device, nvme_path="/tmp")
    assert 0 < sum(found.offload_waits.values()) == pytest.approx(found.exposed["offload"])
    assert found.offload_waits["backward"] > 0
    came, went = found.offload_moved
    momenta = 12 * 48**2 * 4 // 2  # 12 matrices of 48 x 48 in the block, in float32 on two ranks
    moments = found.offloaded_bytes - momenta
    # Beside memory a momentum is fetched, and provided to the step; pages are filled up.
    assert came >= went >= momenta + moments
    assert (came - went >= momenta) == (device == "cpu")
    assert any("offload exposed" in warning for warning in found.warnings)
