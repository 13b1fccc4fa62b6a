"""MuonZero as an optimizer: bit for bit torch's own at world 1, and at home with torch's schedulers and tools."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from compile_muon import MuonZero

EAGER = {"codegen": "eager"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.l1 = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.l2 = nn.Linear(12, 8, bias=False)
        self.head = nn.Linear(8, 16)

    def forward(self, x):
        return self.head(self.l2(torch.relu(self.norm(self.l1(self.emb(x))))))


MUON = ("l1.weight", "l2.weight")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def tokens(seed):
    return torch.randint(0, 16, (4, 5), generator=torch.Generator().manual_seed(seed))


def built(compiled=True, **settings):
    torch.manual_seed(0)
    model = Net()
    optimizer = MuonZero(model, **{"ns_dtype": "bfloat16", "ns_method": "standard", **settings})
    run = torch.compile(model, backend="muon_zero", options=EAGER) if compiled else model
    return model, optimizer, run


def torch_optimizers(model, *, lr=0.02, weight_decay=0.1, adamw_lr=3e-4, **muon):
    named = dict(model.named_parameters())
    yield torch.optim.Muon([named[name] for name in MUON], lr=lr, weight_decay=weight_decay, **muon)
    rest = [p for name, p in named.items() if name not in MUON]
    yield torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.1)


def loss_of(run, seed):
    return run(tokens(seed)).square().mean()


def assert_equal(model, reference):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(p, q), f"{name} differs by {(p - q).abs().max():.1e}"


def train_both(model, optimizer, run, others, reference, steps=5, before=None):
    for i in range(steps):
        loss_of(run, i).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(reference, i).backward()
        for other in others:
            other.step()
            other.zero_grad()
        if before:
            before()
        assert_equal(model, reference)


# --- bitwise ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_bitwise_torch(update, adjust, nesterov, decay):
    model, optimizer, run = built(update=update, adjust_lr=adjust, nesterov=nesterov, weight_decay=decay)
    torch.manual_seed(0)
    reference = Net()
    others = list(torch_optimizers(reference, adjust_lr_fn=adjust, nesterov=nesterov, weight_decay=decay))
    train_both(model, optimizer, run, others, reference)
    # torch 2.11 decomposes lerp with a tensor weight into other roundings, which bfloat16 Newton-Schulz hides here.
    last_bit = 2**-22 if torch.__version__.startswith("2.11") else 0
    for name in MUON:
        buffer = optimizer.state[dict(model.named_parameters())[name]]["momentum_buffer"]
        theirs = others[0].state[dict(reference.named_parameters())[name]]["momentum_buffer"]
        torch.testing.assert_close(buffer, theirs, rtol=last_bit, atol=last_bit * 1e-3)
    made = optimizer.metrics()
    assert (made["directions_used"], made["directions_in_step"]) == ((10, 0) if update == "backward" else (0, 10))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("compiled", [True, False])
def test_bitwise_torch_at_every_stage(stage, compiled):
    """At world 1 a stage changes nothing, and neither does leaving the model eager."""
    model, optimizer, run = built(compiled, stage=stage)
    torch.manual_seed(0)
    reference = Net()
    train_both(model, optimizer, run, list(torch_optimizers(reference)), reference, steps=3)


def test_bitwise_torch_with_accumulation():
    model, optimizer, run = built(gradient_accumulation_steps=3)
    torch.manual_seed(0)
    reference = Net()
    others = list(torch_optimizers(reference))
    for i in range(3):
        for k in range(3):
            (loss_of(run, 10 * i + k) / 3).backward()
            (loss_of(reference, 10 * i + k) / 3).backward()
        for each in (optimizer, *others):
            each.step()
            each.zero_grad()
        assert_equal(model, reference)


def test_bitwise_would_notice_one_bit():
    """The comparison itself: a different Newton-Schulz must fail it."""
    model, optimizer, run = built(ns_method="gram")
    torch.manual_seed(0)
    reference = Net()
    with pytest.raises(AssertionError, match="differs by"):
        train_both(model, optimizer, run, list(torch_optimizers(reference)), reference)


# --- schedulers -------------------------------------------------------------------------------------------------------


def test_lambda_lr_keeps_both_rates():
    model, optimizer, run = built(lr=0.02, adamw_lr=1e-3)
    torch.manual_seed(0)
    reference = Net()
    others = list(torch_optimizers(reference, adamw_lr=1e-3))
    decay = [lr_scheduler.LambdaLR(each, lambda step: 1 / (1 + step)) for each in (optimizer, *others)]
    ours = dict(zip(("muon", "adamw"), (0.02, 1e-3), strict=True))

    def advance():
        for scheduler in decay:
            scheduler.step()

    train_both(model, optimizer, run, others, reference, before=advance)
    for group in optimizer.param_groups:
        assert group["lr"] == pytest.approx(ours[group["algorithm"]] / 6)


def test_one_cycle_cycles_the_momentum_without_recompiling():
    model, optimizer, run = built()
    torch.manual_seed(0)
    reference = Net()
    others = list(torch_optimizers(reference))
    cycle = {"total_steps": 12, "cycle_momentum": True, "base_momentum": 0.7, "max_momentum": 0.9}
    mine = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.05, 1e-2], **cycle)
    theirs = [
        lr_scheduler.OneCycleLR(others[0], max_lr=0.05, **cycle),
        lr_scheduler.OneCycleLR(others[1], max_lr=1e-2, **{**cycle, "cycle_momentum": False}),
    ]
    seen = set()

    def advance():
        seen.add(optimizer.param_groups[0]["momentum"])
        for scheduler in (mine, *theirs):
            scheduler.step()

    train_both(model, optimizer, run, others, reference, steps=2, before=advance)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train_both(model, optimizer, run, others, reference, steps=6, before=advance)
    assert len(seen) > 4, "the schedule must move the momentum"


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: lr_scheduler.StepLR(o, 2),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
)
def test_schedulers_of_torch(make):
    model, optimizer, run = built()
    torch.manual_seed(0)
    reference = Net()
    others = list(torch_optimizers(reference))
    schedulers = [make(each) for each in (optimizer, *others)]
    train_both(model, optimizer, run, others, reference, before=lambda: [s.step() for s in schedulers])


# --- an optimizer like others -----------------------------------------------------------------------------------------


def test_groups_say_who_is_who():
    model, optimizer, _ = built()
    groups = {group["algorithm"]: group for group in optimizer.param_groups}
    assert set(groups) == {"muon", "adamw"}
    assert tuple(groups["muon"]["param_names"]) == MUON
    named = dict(model.named_parameters())
    assert [id(p) for p in groups["muon"]["params"]] == [id(named[name]) for name in MUON]
    assert set(groups["adamw"]["param_names"]) == set(named) - set(MUON)
    assert groups["muon"]["lr"] == 0.02 and groups["adamw"]["lr"] == 3e-4


def test_groups_are_not_added_from_outside():
    _, optimizer, _ = built()
    with pytest.raises(NotImplementedError, match="build a new MuonZero"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(optimizer.param_groups) == 2


def test_step_runs_a_closure():
    model, optimizer, run = built()
    torch.manual_seed(0)
    reference = Net()
    others = list(torch_optimizers(reference))

    def closure():
        optimizer.zero_grad()
        loss = loss_of(run, 0)
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first.item() == pytest.approx(loss_of(reference, 0).item())
    loss_of(reference, 0).backward()
    for other in others:
        other.step()
    assert_equal(model, reference)


def test_step_hooks_of_torch_run():
    _, optimizer, run = built()
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    loss_of(run, 0).backward()
    optimizer.step()
    assert calls == ["before", "after"]


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(update, set_to_none):
    model, optimizer, run = built(update=update)
    torch.manual_seed(0)
    reference = Net()
    others = list(torch_optimizers(reference))
    for i in range(4):
        loss_of(run, i).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        assert all((p.grad is None) if set_to_none else not p.grad.any() for p in model.parameters())
        loss_of(reference, i).backward()
        for other in others:
            other.step()
            other.zero_grad(set_to_none=set_to_none)
        assert_equal(model, reference)


def test_zero_grad_of_the_model_is_as_good():
    model, optimizer, run = built()
    torch.manual_seed(0)
    reference = Net()
    others = list(torch_optimizers(reference))
    for i in range(3):
        loss_of(run, i).backward()
        optimizer.step()
        model.zero_grad()
        loss_of(reference, i).backward()
        for other in others:
            other.step()
            other.zero_grad()
        assert_equal(model, reference)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_grad_norm_is_that_of_the_raw_gradients(update):
    _, optimizer, run = built(update=update)
    torch.manual_seed(0)
    reference = Net()
    loss_of(run, 0).backward()
    optimizer.step()
    loss_of(reference, 0).backward()
    want = torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()])
    torch.testing.assert_close(optimizer.grad_norm, want)


def test_gradient_clipping_is_that_of_torch():
    model, optimizer, run = built(gradient_clipping=0.01, ns_dtype="float32")
    torch.manual_seed(0)
    unclipped = copy.deepcopy(Net())
    torch.manual_seed(0)
    reference, clipped, ref_run = built(update="step", ns_dtype="float32")
    for i in range(3):
        loss_of(run, i).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(ref_run, i).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        clipped.step()
        clipped.zero_grad()
        torch.testing.assert_close(optimizer.grad_norm, norm)
        assert norm > 0.01
    for p, q, start in zip(model.parameters(), reference.parameters(), unclipped.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), atol=1e-6, rtol=1e-5)
        assert not torch.equal(p, start)


@pytest.mark.parametrize("update", ["backward", "step"])
def test_state_dict_round_trip_continues_bit_for_bit(update):
    settings = {"update": update}
    model, optimizer, run = built(**settings)
    for i in range(3):
        loss_of(run, i).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))
    for i in range(3, 6):
        loss_of(run, i).backward()
        optimizer.step()
        optimizer.zero_grad()
    again, loaded, rerun = built(**settings)
    loss_of(rerun, 99).backward()  # a step under way is forgotten
    again.load_state_dict(saved[0])
    loaded.load_state_dict(saved[1])
    loaded.zero_grad()
    for i in range(3, 6):
        loss_of(rerun, i).backward()
        loaded.step()
        loaded.zero_grad()
    assert_equal(again, model)
    # The momentum that graphs read is the one that state_dict saves.
    for state in loaded._muon:
        assert loaded.state[state.param]["momentum_buffer"].data_ptr() == state.momentum.data_ptr()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_state_dicts_are_saved_without_us(stage, tmp_path):
    """What is saved loads as plain tensors, without unpickling anything of ours."""
    model, optimizer, run = built(stage=stage)
    loss_of(run, 0).backward()
    optimizer.step()
    torch.save((model.state_dict(), optimizer.state_dict()), tmp_path / "state.pt")
    weights, state = torch.load(tmp_path / "state.pt", weights_only=True)
    again, loaded, _ = built(stage=stage)
    again.load_state_dict(weights)
    loaded.load_state_dict(state)
    assert_equal(again, model)
    for mine, theirs in zip(loaded._muon, optimizer._muon, strict=True):
        assert torch.equal(mine.momentum, theirs.momentum)


def test_a_momentum_that_users_put_into_the_state_is_used():
    model, optimizer, run = built()
    twin, other, rerun = built()
    for each, go in ((optimizer, run), (other, rerun)):
        loss_of(go, 0).backward()
        each.step()
        each.zero_grad()
    for name in MUON:
        old = optimizer.state[dict(model.named_parameters())[name]]
        old["momentum_buffer"] = old["momentum_buffer"] * 0.5
        other.state[dict(twin.named_parameters())[name]]["momentum_buffer"].mul_(0.5)
    for each, go in ((optimizer, run), (other, rerun)):
        loss_of(go, 1).backward()
        each.step()
    assert_equal(model, twin)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_momentum_edited_around_backward_counts(when):
    model, optimizer, run = built()
    twin, other, rerun = built(update="step")
    for each, net, go in ((optimizer, model, run), (other, twin, rerun)):
        loss_of(go, 0).backward()
        each.step()
        each.zero_grad()
        if when == "before":
            each.state[net.l1._parameters["weight"]]["momentum_buffer"].mul_(-0.5)
        loss_of(go, 1).backward()
        if when == "after":
            each.state[net.l1._parameters["weight"]]["momentum_buffer"].mul_(-0.5)
        each.step()
    assert_equal(model, twin)
    assert optimizer.metrics()["directions_used"] == (4 if when == "before" else 3)


def test_parameters_without_gradient_are_left_alone():
    """Like torch: no gradient, no decay, no momentum."""
    model, optimizer, run = built()
    loss_of(run, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    momenta = [state.momentum.clone() for state in optimizer._muon]
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(torch.equal(s.momentum, m) for s, m in zip(optimizer._muon, momenta, strict=True))


def test_newton_schulz_runs_once_per_matrix_and_step():
    _, optimizer, run = built(gradient_accumulation_steps=4)
    for i in range(3):
        for k in range(4):
            (loss_of(run, 10 * i + k) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.traffic.matrices == 3 * len(MUON)
