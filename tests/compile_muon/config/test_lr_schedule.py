"""DeepSpeed's schedules: the same rate in every step, resumed exactly, and read from its section of a config."""

import dataclasses
import json
import math
import pickle

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.drawn import adamw, params, range_of

from compile_muon.checkpoint.values import Values
from compile_muon.config import (
    AdamWConfig,
    Config,
    LRRangeTest,
    MuonConfig,
    OneCycle,
    ScheduleConfig,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
    convert,
    load_config,
)
from compile_muon.config.lr_schedule import SCHEDULES
from compile_muon.config.vocabulary import parameters
from compile_muon.errors import ConfigError

# What `deepspeed/runtime/lr_schedules.py` of DeepSpeed 0.19.8 defines, for iterations from -1: the constructor sets the
# rates of iteration -1, and the engine steps the schedule after each step of the optimizer.


def climbed(i, steps, kind):
    return math.log(i + 1) / math.log(steps) if kind == "log" else i / steps


def warmup(own, i, top, low):
    steps = max(own.warmup_num_steps, 2)
    if i == -1:
        return low
    return low + (top - low) * (climbed(i, steps, own.warmup_type) if i < steps else 1.0)


def warmup_decay(own, i, top, low):
    steps = max(own.warmup_num_steps, 2)
    if i < steps:
        return warmup(own, i, top, low)
    return low + (top - low) * max(0.0, (own.total_num_steps - i) / max(1.0, own.total_num_steps - steps))


def warmup_cosine(own, i, top, low):
    steps, start, end = max(own.warmup_num_steps, 2), own.warmup_min_ratio, own.cos_min_ratio
    if i == -1:
        return 0.0
    if i < steps:
        return top * (start + (1 - start) * climbed(i, steps, own.warmup_type))
    progress = (i - steps + 1) / max(1, own.total_num_steps - steps)
    return top * (end + (1 - end) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def one_cycle(own, i, top, low):
    up, stairs_up = own.cycle_first_step_size, own.cycle_first_stair_count
    down = up if own.cycle_second_step_size is None else own.cycle_second_step_size
    stairs_down = stairs_up if own.cycle_second_stair_count is None else own.cycle_second_stair_count
    n = i + 1
    if n > up + down:
        return low / (1 + own.decay_lr_rate * (n - up - down) / own.decay_step_size) if own.decay_step_size else low
    n %= up + down
    part, stairs = (n / up, stairs_up) if n <= up else ((up + down - n) / down, stairs_down)
    if stairs:
        part = math.floor(part * stairs + 1e-9) / stairs
    return low + (top - low) * part


def range_test(own, i, top, low):
    n = (i + 1) / own.lr_range_test_step_size
    return top * (1 + own.lr_range_test_step_rate * (math.floor(n) if own.lr_range_test_staircase else n))


ORACLES = {
    WarmupLR: warmup, WarmupDecayLR: warmup_decay, WarmupCosineLR: warmup_cosine, OneCycle: one_cycle,
    LRRangeTest: range_test,
}  # fmt: skip


def bounded(kind, field):
    """Counts that 120 steps see the end of, shares and rates; defaults are among them."""
    words, default = field.metadata["values"](), field.default
    if words.startswith("an integer from"):
        some = st.integers(int(words.split()[-1]), 60)
    elif words.startswith("a number"):
        some = st.floats(0, 1).filter(lambda x: x == 0 or x > 1e-6)
        some = st.tuples(some, some) | some if "list" in words else some
    else:
        some = range_of(kind, field.name).good
    return some if field.metadata["needed"] or default is True else some | st.just(default)


def schedules(kinds=tuple(ORACLES)):
    return st.one_of(
        [st.builds(kind, **{f.name: bounded(kind, f) for f in dataclasses.fields(kind)}) for kind in kinds]
    )


def optimizer_of(**rates) -> torch.optim.Optimizer:
    """One group for each algorithm, in this order."""
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate, "algorithm": name.rstrip("_")}
        for name, rate in rates.items()
    ]
    return torch.optim.SGD(groups)


def rates_of(optimizer) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def walk(optimizer, scheduler, steps: int) -> list[list[float]]:
    """The rates that each step is made with."""
    used = []
    for _ in range(steps):
        used.append(rates_of(optimizer))
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("kind", ORACLES)
def test_every_step_has_the_rate_of_deepspeed_and_a_run_goes_on_with_it(kind):
    @settings(max_examples=20, derandomize=True)
    @given(schedules([kind]), st.integers(0, 60))
    @example(OneCycle(cycle_min_lr=0.0, cycle_first_step_size=49, cycle_first_stair_count=49, cycle_momentum=False), 30)
    @example(WarmupDecayLR(warmup_num_steps=9, total_num_steps=4, warmup_type="linear"), 1)
    @example(WarmupLR(warmup_num_steps=1), 0)
    def has(schedule, at):
        same = pickle.loads(pickle.dumps(schedule))
        assert same == schedule and hash(same) == hash(schedule)
        optimizer = optimizer_of(muon=0.4, adamw=0.003)
        scheduler = schedule.build(optimizer)
        used = walk(optimizer, scheduler, at)
        again, its_scheduler = resumed(schedule, as_saved(scheduler.state_dict()), optimizer.state_dict())
        assert rates_of(again) == rates_of(optimizer)
        used += walk(optimizer, scheduler, 120 - at)
        assert walk(again, its_scheduler, 120 - at) == used[at:]
        assert its_scheduler.get_last_lr() == scheduler.get_last_lr()
        low = getattr(schedule, "warmup_min_lr", getattr(schedule, "cycle_min_lr", 0.0))
        for half, own in enumerate((0.4, 0.003)):
            least = low[half] if isinstance(low, tuple) else low
            expected = [ORACLES[type(schedule)](schedule, i, own, least) for i in range(-1, 119)]
            assert [rates[half] for rates in used] == pytest.approx(expected, rel=1e-9, abs=1e-13)
        for share in scheduler.lr_lambdas:
            copied = pickle.loads(pickle.dumps(share))
            assert [copied(step) for step in range(40)] == [share(step) for step in range(40)]
        state = scheduler.state_dict()
        assert pickle.loads(pickle.dumps(state)) == state and state["lr_lambdas"] == [{}, {}]

    has()


@pytest.mark.parametrize(
    "schedule", [WarmupLR(warmup_min_lr=(0.1, 0.001)), OneCycle(cycle_min_lr=(0.1, 0.001), cycle_momentum=False)]
)
def test_a_pair_goes_by_algorithm(schedule):
    for rates in ({"muon": 1.0, "adamw": 0.5}, {"adamw": 0.5, "muon": 1.0}, {"adamw": 0.5, "muon": 1.0, "adamw_": 0.5}):
        optimizer = optimizer_of(**rates)
        schedule.build(optimizer)
        assert rates_of(optimizer) == pytest.approx([0.1 if name == "muon" else 0.001 for name in rates])


def resumed(schedule: ScheduleConfig, state: dict, of_optimizer: dict):
    """Another process: the optimizer as the config makes it, its schedule, and then what was saved of both."""
    optimizer = optimizer_of(muon=0.4, adamw=0.003)
    scheduler = schedule.build(optimizer)
    optimizer.load_state_dict(of_optimizer)
    scheduler.load_state_dict(state)
    return optimizer, scheduler


def as_saved(state: dict) -> dict:
    """Through what a checkpoint consists of, where nothing is pickled."""
    values = Values()
    values.put("scheduler", state)
    return Values(json.loads(json.dumps(values.named))).get("scheduler")


def test_a_run_goes_on_with_more_steps_than_were_planned():
    optimizer = optimizer_of(muon=0.4, adamw=0.003)
    short = WarmupDecayLR(warmup_num_steps=2, total_num_steps=10)
    scheduler = short.build(optimizer)
    walk(optimizer, scheduler, 8)
    longer = WarmupDecayLR(warmup_num_steps=2, total_num_steps=20)
    again, its_scheduler = resumed(longer, scheduler.state_dict(), optimizer.state_dict())
    used = walk(again, its_scheduler, 14)[1:]
    expected = [warmup_decay(longer, i, 0.4, 0.0) for i in range(8, 21)]
    assert [muon for muon, _ in used] == pytest.approx(expected)


def section(kind, given=None, optimizer=None):
    return {"scheduler": {"type": kind, "params": given or {}}} | (optimizer or {})


FULL = {
    "WarmupLR": {"warmup_min_lr": 1e-4, "warmup_num_steps": 9, "warmup_type": "linear"},
    "WarmupDecayLR": {"warmup_min_lr": 1e-4, "warmup_num_steps": 9, "warmup_type": "linear", "total_num_steps": 99},
    "WarmupCosineLR": {
        "warmup_min_ratio": 0.1, "warmup_num_steps": 9, "warmup_type": "linear", "cos_min_ratio": 0.2,
        "total_num_steps": 99,
    },
    "OneCycle": {
        "cycle_min_lr": 1e-4, "cycle_first_step_size": 5, "cycle_second_step_size": 6, "cycle_first_stair_count": 2,
        "cycle_second_stair_count": 3, "decay_lr_rate": 0.5, "decay_step_size": 7, "cycle_momentum": False,
    },
    "LRRangeTest": {
        "lr_range_test_step_size": 5, "lr_range_test_step_rate": 2.0, "lr_range_test_staircase": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SCHEDULES)
def test_each_parameter_is_read(kind):
    schedule = load_config(section(kind, FULL[kind])).scheduler
    assert schedule == SCHEDULES[kind](**FULL[kind])
    assert set(FULL[kind]) == set(parameters(type(schedule))) - {type(schedule).rate_key}


@pytest.mark.parametrize("value", [None, {}, {"type": None}, {"params": {"warmup_num_steps": 4}}])
def test_a_section_without_a_type_is_none(value):
    with pytest.warns(UserWarning, match="^no effect here: scheduler$"):
        assert load_config({"scheduler": value}) == Config()


#: kind, its rate, optimizer, and the rates of Muon and AdamW that come of it; without a rate DeepSpeed's default counts
RATES = [
    ("WarmupLR", None, None, 0.02, 3e-4), ("WarmupLR", None, params(lr=0.1), 0.1, 0.1),
    ("WarmupLR", None, params(muon_lr=0.1, adam_lr=0.2), 0.1, 0.2),
    ("WarmupLR", 0.5, params(muon_lr=0.1, adam_lr=0.1), 0.5, 0.5), ("WarmupLR", [0.5, 0.25], params(lr=0.1), 0.5, 0.25),
    ("WarmupLR", [0.5, 0.25], params(muon_lr=0.1, adam_lr=0.2), 0.5, 0.25),
    ("WarmupLR", None, adamw(lr=0.1), 0.02, 0.1), ("WarmupLR", 0.5, adamw(lr=0.1), 0.02, 0.5),
    ("WarmupLR", [0.5], adamw(lr=0.1), 0.02, 0.5), ("WarmupDecayLR", None, None, 0.001, 0.001),
    ("WarmupDecayLR", None, adamw(lr=0.1), 0.02, 0.001),
    ("WarmupCosineLR", None, params(muon_lr=0.1, adam_lr=0.2), 0.1, 0.2),
    ("OneCycle", None, params(muon_lr=0.1, adam_lr=0.2), 0.1, 0.2), ("OneCycle", 0.5, params(lr=0.1), 0.5, 0.5),
    ("LRRangeTest", 0.5, params(lr=0.1), 0.5, 0.5),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "rate", "optimizer", "of_muon", "of_adamw"), RATES)
def test_the_rates_of_a_schedule_are_those_of_the_halves(kind, rate, optimizer, of_muon, of_adamw):
    given = {} if rate is None else {SCHEDULES[kind].rate_key: rate}
    source = section(kind, FULL[kind] | given, optimizer)
    config, converted = load_config(source), convert(source)
    assert (config.muon.lr, config.adamw.lr) == (of_muon, of_adamw)
    assert config.scheduler == SCHEDULES[kind](**FULL[kind])
    assert load_config(json.loads(json.dumps(converted))) == config
    assert convert(converted) == converted


@pytest.mark.parametrize(
    ("kind", "rate", "optimizer", "own"),
    [
        ("WarmupLR", 0.5, params(muon_lr=0.1, adam_lr=0.2), [0.1, 0.2]),
        ("WarmupLR", 0.02, params(muon_lr=0.02), [0.02, 3e-4]),
        ("WarmupDecayLR", 0.001, params(adam_lr=0.2), [0.02, 0.2]),
        ("LRRangeTest", 0.5, params(muon_lr=0.1, adam_lr=0.2), [0.1, 0.2]),
    ],
)
def test_one_rate_for_halves_that_have_two_is_an_error(kind, rate, optimizer, own):
    key = SCHEDULES[kind].rate_key
    with pytest.raises(ConfigError) as caught:
        load_config(section(kind, FULL[kind] | {key: rate}, optimizer))
    assert (caught.value.field, caught.value.shown) == (f"scheduler.params.{key}", str(rate))
    assert f"{own[0]} for Muon and {own[1]} for AdamW" in caught.value.problem
    assert caught.value.remedy == f"write {own}, or remove the scheduler"
    config = load_config(section(kind, FULL[kind] | {key: own}, optimizer))
    assert [config.muon.lr, config.adamw.lr] == own


@pytest.mark.parametrize(
    ("kind", "given", "field", "words"),
    [
        ("WarmupDecayLR", {}, "params.total_num_steps", ["is missing", "write it"]),
        ("OneCycle", {"cycle_momentum": False}, "params.cycle_min_lr", ["is missing"]),
        ("OneCycle", {"cycle_min_lr": 0.1}, "params.cycle_momentum", ["= True", '"cycle_momentum": false']),
        ("WarmupLR", {"warmup_min_lr": [0.1]}, "params.warmup_min_lr", ["is not a pair", "the two of Muon and AdamW"]),
        ("WarmupLR", {"warmup_max_lr": "auto"}, "params.warmup_max_lr", ["MuonTrainer"]),
        ("WarmupLR", {"total_num_steps": 9}, "params.total_num_steps", ["WarmupLR", "warmup_max_lr"]),
        ("WarmupCosineLR", {"total_num_steps": 9, "warmup_max_lr": 1}, "params.warmup_max_lr", ["not a parameter"]),
        ("WarmupLR", {"warmup_steps": 9}, "params.warmup_steps", ["did you mean scheduler.params.warmup_num_steps?"]),
        ("WarmupLR", {"last_batch_iteration": 7}, "params.last_batch_iteration", ["remove it", "checkpoint"]),
        ("WarmupDecayLR", {"total_num_steps": 9, "warmup_max_lr": None}, "params.warmup_max_lr", ["number"]),
        ("CosineAnnealingLR", {"T_max": 9}, "type", ["WarmupCosineLR", "torch.optim.lr_scheduler"]),
        (7, {}, "type", ["use one of"]),
    ],
)  # fmt: skip
def test_bad_sections(kind, given, field, words):
    with pytest.raises(ConfigError) as caught:
        load_config(section(kind, given))
    assert caught.value.errors == (caught.value,)
    assert caught.value.field == f"scheduler.{field}"
    for word in words:
        assert word in str(caught.value)


def test_adamw_has_one_rate_in_a_schedule():
    for key in ("warmup_min_lr", "warmup_max_lr"):
        with pytest.raises(ConfigError) as caught:
            load_config(section("WarmupLR", {key: [0.1, 0.2]}, adamw()))
        assert (caught.value.field, caught.value.remedy) == (f"scheduler.params.{key}", "write one number")
    assert load_config(section("WarmupLR", {"warmup_min_lr": [0.1]}, adamw())).scheduler.warmup_min_lr == 0.1


def test_momenta_of_a_cycle_without_momentum_have_no_effect():
    given = FULL["OneCycle"] | {"cycle_min_mom": 0.8, "cycle_max_mom": 0.9, "decay_mom_rate": 0.1}
    with pytest.warns(UserWarning, match="no effect here") as caught:
        config = load_config(section("OneCycle", given | {"last_batch_iteration": -1}))
    assert config.scheduler == OneCycle(**FULL["OneCycle"])
    noted = str(caught[0].message).removeprefix("no effect here: ").split(", ")
    names = ("cycle_min_mom", "cycle_max_mom", "decay_mom_rate", "last_batch_iteration")
    assert noted == [f"scheduler.params.{name}" for name in names]


@settings(max_examples=30, derandomize=True)
@given(schedules())
def test_a_config_of_python_is_written(schedule):
    config = Config(MuonConfig(0.1), AdamWConfig(0.2), scheduler=schedule)
    assert load_config(json.loads(json.dumps(convert(config)))) == config


def test_a_rate_is_written_once():
    given = {"warmup_max_lr": [0.5, 0.25], "total_num_steps": 9}
    assert convert(section("WarmupDecayLR", given, params(lr=0.1))) == section("WarmupDecayLR", given)
    assert convert(section("WarmupLR", {"warmup_max_lr": 0.5}, adamw(lr=0.1))) == section("WarmupLR", {}, adamw(lr=0.5))
