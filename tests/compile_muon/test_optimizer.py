"""MuonZero as an optimizer: bit for bit torch's own at world 1, and at home with torch's schedulers and tools."""

import contextlib
import dataclasses
from itertools import product

import pytest
import torch
from support.compiled import EAGER, Words
from support.reference import decayed_apart, train_step
from torch import nn
from torch.optim import lr_scheduler

from compile_muon import Checkpointer, ConfigError, MuonZero, full_state_dict, initialize
from compile_muon.config import config_from_kwargs

pytestmark = pytest.mark.usefixtures("fresh_compiler")


MUON = ("q.weight", "up.weight", "down.weight")


def tokens(seed):
    return torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(seed))


def built(compiled=True, **settings):
    torch.manual_seed(0)
    model = Words()
    optimizer = MuonZero(model, **{"ns_dtype": "bfloat16", "ns_method": "standard", **settings})
    run = torch.compile(model, backend="muon_zero", options=EAGER) if compiled else model
    return model, optimizer, run


def torch_optimizers(model, *, lr=0.02, weight_decay=0.1, adamw_lr=3e-4, **muon):
    named = dict(model.named_parameters())
    yield torch.optim.Muon([named[name] for name in MUON], lr=lr, weight_decay=weight_decay, **muon)
    rest = [p for name, p in named.items() if name not in MUON]
    yield torch.optim.AdamW(decayed_apart(rest), lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.1)


def loss_of(run, seed):
    return run(tokens(seed)).square().mean()


def assert_equal(model, reference):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), f"{name} differs by {(p - q).abs().max():.1e}"


def advance(optimizer, run, seeds):
    for seed in seeds:
        train_step(optimizer, loss_of(run, seed))


class Both:
    """Ours by ``settings``, and torch's own optimizers by ``theirs``, over a model of the same weights."""

    def __init__(self, compiled=True, *, theirs=None, **settings):
        self.model, self.optimizer, self.run = built(compiled, **settings)
        torch.manual_seed(0)
        self.reference = Words()
        self.others = list(torch_optimizers(self.reference, **(theirs or {})))

    def train(self, steps=5, *, micro=1, then=lambda: None):
        """And compare behind each step, of so many micro-batches."""
        for i in range(steps):
            for run in (self.run, self.reference):
                for k in range(micro):
                    (loss_of(run, 10 * i + k) / micro).backward()
            for each in (self.optimizer, *self.others):
                each.step()
                each.zero_grad()
            then()
            assert_equal(self.model, self.reference)


SETTINGS = list(product(["backward", "step"], ["original", "match_rms_adamw"], [True, False], [0.0, 0.1]))
# Every third has each pair of values.
THIRD = [
    case if number % 3 == 0 else pytest.param(*case, marks=pytest.mark.full) for number, case in enumerate(SETTINGS)
]


@pytest.mark.parametrize(("update", "adjust", "nesterov", "decay"), THIRD)
def test_bitwise_torch(update, adjust, nesterov, decay):
    common = {"nesterov": nesterov, "weight_decay": decay}
    both = Both(update=update, adjust_lr=adjust, **common, theirs={"adjust_lr_fn": adjust, **common})
    both.train()
    # torch 2.11 decomposes lerp with a tensor weight into other roundings, which bfloat16 Newton-Schulz hides here.
    last_bit = 2**-22 if torch.__version__.startswith("2.11") else 0
    for name in MUON:
        buffer = both.optimizer.state[dict(both.model.named_parameters())[name]]["momentum_buffer"]
        theirs = both.others[0].state[both.reference.get_parameter(name)]["momentum_buffer"]
        torch.testing.assert_close(buffer, theirs, rtol=last_bit, atol=last_bit * 1e-3)
    made = both.optimizer.totals()
    assert (made["directions_used"], made["directions_in_step"]) == ((15, 0) if update == "backward" else (0, 15))


@pytest.mark.parametrize(("stage", "compiled"), [(0, True), (3, False)])
def test_bitwise_torch_at_every_stage(stage, compiled):
    """At world 1 a stage changes nothing, and neither does leaving the model eager."""
    Both(compiled, stage=stage).train(steps=3)


def test_bitwise_torch_with_accumulation():
    both = Both(gradient_accumulation_steps=3)
    both.train(steps=3, micro=3)
    assert both.optimizer.traffic.matrices == 3 * len(MUON)  # once per matrix and step


SCHEDULES = [
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
]


@pytest.mark.parametrize("make", SCHEDULES)
def test_schedulers_of_torch_keep_both_rates(make):
    both = Both(False, lr=0.02, adamw_lr=1e-3, theirs={"adamw_lr": 1e-3})
    schedulers = [make(each) for each in (both.optimizer, *both.others)]
    both.train(then=lambda: [scheduler.step() for scheduler in schedulers])
    theirs = [group["lr"] for other in both.others for group in other.param_groups]
    assert [group["lr"] for group in both.optimizer.param_groups] == theirs != [0.02, 1e-3, 1e-3]


def test_one_cycle_cycles_the_momentum_without_recompiling():
    both, seen = Both(), set()
    cycle = {"total_steps": 12, "cycle_momentum": True, "base_momentum": 0.7, "max_momentum": 0.9}
    schedulers = [
        lr_scheduler.OneCycleLR(both.optimizer, max_lr=[0.05, 1e-2, 1e-2], **cycle),
        lr_scheduler.OneCycleLR(both.others[0], max_lr=0.05, **cycle),
        lr_scheduler.OneCycleLR(both.others[1], max_lr=1e-2, **{**cycle, "cycle_momentum": False}),
    ]

    def then():
        seen.add(both.optimizer.param_groups[0]["momentum"])
        for scheduler in schedulers:
            scheduler.step()

    both.train(steps=2, then=then)
    with torch._dynamo.config.patch(error_on_recompile=True):
        both.train(steps=4, then=then)
    assert len(seen) > 4, "the schedule must move the momentum"


def test_step_hooks_of_torch_run():
    _, optimizer, run = built(compiled=False)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    loss_of(run, 0).backward()
    optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("stage", [0, 3])
def test_state_dicts_are_saved_without_us_and_go_on_bit_for_bit(stage, tmp_path):
    """What is saved loads as plain tensors, without unpickling anything of ours."""
    model, optimizer, run = built(stage=stage)
    advance(optimizer, run, range(3))
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    advance(optimizer, run, range(3, 6))
    again, loaded, rerun = built(stage=stage)
    loss_of(rerun, 99).backward()  # a step under way is forgotten
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    again.load_state_dict(weights)
    loaded.load_state_dict(state)
    loaded.zero_grad()
    advance(loaded, rerun, range(3, 6))
    assert_equal(again, model)
    # The momentum that graphs read is the one that state_dict saves.
    for sharded in loaded.engine.step.muon:
        assert loaded.state[sharded.param]["momentum_buffer"].data_ptr() == sharded.momentum.data_ptr()


@pytest.mark.parametrize("when", ["put", "before", "after"])
def test_a_momentum_that_users_edit_counts(when):
    """Around backward, or in place of the one that is there: directions that were made of another are made anew."""
    pairs = [built(), built(compiled=False, update="step")]
    for ours, (model, optimizer, run) in zip((True, False), pairs, strict=True):
        state = optimizer.state[dict(model.named_parameters())["up.weight"]]
        advance(optimizer, run, [0])
        if when == "put" and ours:
            state["momentum_buffer"] = state["momentum_buffer"] * -0.5
        elif when != "after":
            state["momentum_buffer"].mul_(-0.5)
        loss_of(run, 1).backward()
        if when == "after":
            state["momentum_buffer"].mul_(-0.5)
        optimizer.step()
    assert_equal(pairs[0][0], pairs[1][0])
    assert pairs[0][1].totals()["directions_used"] == (6 if when == "before" else 5)


class Marked(nn.Module):
    """What decays and what does not, whatever it is called."""

    def __init__(self):
        super().__init__()
        self.emb, self.hidden, self.norm = nn.Embedding(8, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.A_log, self.D = nn.Parameter(torch.ones(6, 6)), nn.Parameter(torch.ones(6, 2))
        self.A_log._no_weight_decay = True
        self.kept = nn.Parameter(torch.ones(6, 6))
        self.kept._no_weight_decay = True
        self.cls_token = nn.Parameter(torch.ones(1, 1, 6))
        self.head = nn.Linear(6, 8)


def test_a_summary_says_what_decays_as_groups_do():
    groups = [{"params": "hidden.*", "weight_decay": 0.5}, {"params": "head.*", "weight_decay": 0.0}]
    optimizer = MuonZero(Marked(), groups=groups, weight_decay=0.1, adamw_weight_decay=0.1)
    decays = {row.name: row.decays for row in optimizer.summary().rows}
    assert decays == {name: g["weight_decay"] > 0 for g in optimizer.param_groups for name in g["param_names"]}
    assert decays["hidden.bias"] and not decays["head.weight"]
    optimizer.param_groups[0]["weight_decay"] = 0.0  # as loops set it
    assert not any(r.decays for r in optimizer.summary().rows if r.name in optimizer.param_groups[0]["param_names"])


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("algorithm", ["muon", "adamw"])
def test_vectors_do_not_decay_unless_they_are_told_to(vectors, algorithm):
    config = config_from_kwargs(adamw_decay_vectors=vectors, adamw_weight_decay=0.5)
    model = Marked()
    for param in model.parameters():
        nn.init.ones_(param)
    optimizer = MuonZero.from_config(model, dataclasses.replace(config, algorithm=algorithm))
    still = {name for g in optimizer.param_groups if g["weight_decay"] == 0 for name in g["param_names"]}
    marked = {"A_log", "kept"}
    vector = {"hidden.bias", "norm.weight", "norm.bias", "cls_token", "head.bias"}
    expected = marked if vectors else marked | vector
    assert still == expected
    assert {row.name for row in optimizer.summary().rows if not row.decays} == expected
    assert "no decay" in str(optimizer.summary())
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert {name for name, param in model.named_parameters() if torch.equal(param, before[name])} == expected


def test_muons_groups_have_one_momentum():
    optimizer = MuonZero(Marked())
    names = [group["name"] for group in optimizer.param_groups]
    assert names == ["muon", "muon_no_decay", "adamw", "adamw_no_decay"]
    optimizer.param_groups[1]["momentum"] = 0.5
    with pytest.raises(ConfigError, match="momentum = .*differs between muon, muon_no_decay"):
        optimizer.step()


def scheduled():
    torch.manual_seed(0)
    params = {"warmup_max_lr": 0.02, "warmup_num_steps": 4, "warmup_type": "linear", "total_num_steps": 8}
    return initialize(Words(), {"scheduler": {"type": "WarmupDecayLR", "params": params}})


def test_a_schedule_of_the_configuration_moves_all_rates():
    model, optimizer = scheduled()
    seen = []
    for i in range(9):
        loss_of(model, i).backward()
        seen.append({group["lr"] for group in optimizer.param_groups})
        optimizer.step()
        optimizer.scheduler.step()
        optimizer.zero_grad()
    assert all(len(rates) == 1 for rates in seen)
    assert [rates.pop() / 0.02 for rates in seen[1:]] == pytest.approx([0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25])


def test_a_schedule_that_nobody_steps_is_an_error_in_the_second_step():
    model, optimizer = scheduled()
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(ConfigError, match=r"[0-9]+: was not stepped since .*optimizer.scheduler.step\(\)"):
        optimizer.step()
    optimizer.scheduler.step()
    optimizer.step()
    optimizer.scheduler = None
    optimizer.step()
    optimizer.step()
    assert MuonZero(Words()).scheduler is None


def test_the_default_device_has_no_say(tmp_path):
    def run(checks):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        x, found = torch.randn(5, 4), []
        with torch.device("meta") if checks else contextlib.nullcontext():
            optimizer = MuonZero(model, offload={"device": "cpu"}, gradient_clipping=0.1)
            model.compile(backend="muon_zero", options={"codegen": "eager"})
            for _ in range(3):
                train_step(optimizer, model(x).square().mean())
                found.append(optimizer.metrics()["grad_norm"])
            Checkpointer(tmp_path).save(1, model, optimizer)
            Checkpointer(tmp_path).load(model, optimizer)
            full_state_dict(model)
        return found, [p.detach().clone() for p in model.parameters()]

    (norms, weights), (expected, plain) = run(True), run(False)
    assert norms == expected and all(map(torch.equal, weights, plain))
