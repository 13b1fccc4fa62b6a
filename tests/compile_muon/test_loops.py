"""The loops people write, as written for any PyTorch optimizer: each trains as torch's own optimizers would."""

import warnings

import pytest
import torch
from support.compiled import EAGER, Net, Pair, Plain
from torch import nn

from compile_muon import MuonZero
from compile_muon.config import config_from_kwargs

pytestmark = pytest.mark.usefixtures("fresh_compiler")
LR, ADAMW_LR = 0.02, 1e-3
STEPS = 6


def batch(i):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(i))


def loss_of(run, i):
    return run(batch(i)).square().mean()


def theirs_of(model=None):
    """Unsharded and eager."""
    torch.manual_seed(0)
    return Plain(Net() if model is None else model, config_from_kwargs(lr=LR, adamw_lr=ADAMW_LR))


class Ours:
    """The model and its optimizer."""

    def __init__(self, codegen="eager", compiled=True, **settings):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = MuonZero(
            self.model, lr=LR, adamw_lr=ADAMW_LR, ns_dtype="float32", ns_method="standard", **settings
        )
        options = {"codegen": codegen}
        self.run = torch.compile(self.model, backend="muon_zero", options=options) if compiled else self.model
        self.zero_grad, self.step = self.optimizer.zero_grad, self.optimizer.step

    def set_momentum(self, value):
        self.optimizer.param_groups[0]["momentum"] = value


def grads(side):
    return [p.grad for p in side.model.parameters() if p.grad is not None]


def usual(between=lambda side, i: None, *, loss=lambda side, i: loss_of(side.run, i), zero=None, steps=STEPS):
    """The loop of most programs, with something between backward and step; its results are compared. ``loss`` has what
    stands ahead of backward, and ``zero`` follows a step instead of ``zero_grad()``."""

    def loop(side):
        found = []
        for i in range(steps):
            loss(side, i).backward()
            found.append(between(side, i))
            side.step()
            side.zero_grad() if zero is None else zero(side)
        return [each for each in found if each is not None]

    return loop


def gradient_noise(side, i):
    generator = torch.Generator().manual_seed(i)
    for grad in grads(side):
        grad.add_(torch.randn(grad.shape, generator=generator), alpha=0.01)


def gradients_by_hand(side, i):
    for p in side.model.parameters():
        p.grad = torch.full_like(p, 0.1 * (i + 1)) * torch.arange(p.numel()).view_as(p).cos()


def reversed_through_data(side, i):
    """An even number of signs, through `.data`: PyTorch counts no edit, and norms stay."""
    for grad in grads(side):
        grad.data.neg_()


def penalty(side):
    return 0.1 * sum(p.square().sum() for p in side.model.parameters())


def clip_grad_norm(side, i):
    """Half of these norms are over the limit."""
    return torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.1 if i % 2 else 10.0)


def clip_grad_value(side, i):
    torch.nn.utils.clip_grad_value_(side.model.parameters(), 0.01)


def zero_grad_behind_forward(side, i):
    """Lightning's order."""
    loss = loss_of(side.run, i)
    side.zero_grad()
    return loss


def zero_in_place(side, i):
    side.zero_grad(set_to_none=False)
    return loss_of(side.run, i)


def micro_batches(side, i):
    """Three, which nobody declared: the loss of the last."""
    for k in range(2):
        (loss_of(side.run, 10 * i + k) / 3).backward()
    return loss_of(side.run, 10 * i + 2) / 3


def hook_on_a_matrix(side):
    dict(side.model.named_parameters())["b.weight"].register_hook(lambda grad: grad * torch.linspace(0, 1, 8))
    usual()(side)


def the_same_loss_twice(side, i):
    loss = loss_of(side.run, i)
    loss.backward(retain_graph=True)
    return loss


def validation_with_gradients_on(side, i):
    loss_of(side.run, 50 + i)  # its backward never comes
    return loss_of(side.run, i)


def the_next_forward_before_step(side):
    loss = loss_of(side.run, 0)
    for i in range(STEPS):
        side.zero_grad()
        loss.backward()
        upcoming = batch(i + 1)
        side.step()
        loss = side.run(upcoming).square().mean()


def zero_grad_of_the_model(side):
    side.model.zero_grad()
    assert not grads(side)


def closure(side):
    returned = []
    for i in range(STEPS):

        def closure(i=i):
            side.zero_grad()
            loss = loss_of(side.run, i)
            loss.backward()
            return loss

        returned.append(side.step(closure))
    return returned


def freeze_and_thaw(side):
    matrix = dict(side.model.named_parameters())["a.weight"]
    for i in range(STEPS):
        matrix.requires_grad_(i % 3 != 1)
        side.zero_grad()
        loss_of(side.run, i).backward()
        side.step()


def anomaly_mode(side):
    with torch.autograd.set_detect_anomaly(True):
        usual()(side)


#: loops, and the directions of backward that each must use: all, none, one of the two in each step, or any number
LOOPS = {
    "plain": (usual(), "all"),
    "clip_grad_norm": (usual(clip_grad_norm), "some"),
    "clip_grad_value": (usual(clip_grad_value), "none"),
    "zero_grad_between_forward_and_backward": (usual(loss=zero_grad_behind_forward, zero=lambda side: None), "all"),
    "never_zero_grad": (usual(zero=lambda side: None), "all"),
    "zero_in_place": (usual(loss=zero_in_place, zero=lambda side: None), "all"),
    "micro_batches_nobody_declared": (usual(loss=micro_batches), "all"),
    "penalty_outside_the_model": (usual(loss=lambda side, i: loss_of(side.run, i) + penalty(side)), "none"),
    "penalty_after_backward": (usual(lambda side, i: penalty(side).backward()), "none"),
    "another_momentum_after_backward": (usual(lambda side, i: side.set_momentum(0.95 if i < 2 else 0.8)), "some"),
    "gradient_noise": (usual(gradient_noise), "none"),
    "gradients_by_hand": (usual(gradients_by_hand), "none"),
    "reversed_through_data": (usual(reversed_through_data), "none"),
    "hook_on_a_matrix": (hook_on_a_matrix, "half"),
    "two_forwards": (usual(loss=lambda side, i: loss_of(side.run, i) + loss_of(side.run, 100 + i)), "none"),
    "the_same_loss_twice": (usual(loss=the_same_loss_twice), "all"),
    "two_steps_on_one_gradient": (usual(lambda side, i: side.step()), "some"),
    "validation_with_gradients_on": (usual(loss=validation_with_gradients_on), "all"),
    "the_next_forward_before_step": (the_next_forward_before_step, "all"),
    "zero_grad_of_the_model": (usual(zero=zero_grad_of_the_model), "all"),
    "closure": (closure, "all"),
    "freeze_and_thaw": (freeze_and_thaw, "some"),
    "anomaly_mode": (anomaly_mode, "all"),
}


def same(ours, theirs):
    """Two models."""
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def check(loop, ours):
    theirs = theirs_of()
    with warnings.catch_warnings(), torch._functorch.config.patch(donated_buffer=False):
        warnings.simplefilter("ignore")
        mine, wanted = loop(ours), loop(theirs)
    for x, y in zip(mine or (), wanted or (), strict=True):
        torch.testing.assert_close(x, y, atol=1e-6, rtol=1e-5)
    same(ours.model, theirs.model)
    assert ours.optimizer.engine.ledger.balance() == 0 or loop is the_next_forward_before_step
    metrics = ours.optimizer.totals()
    assert metrics["newton_schulz_matrices"] >= metrics["newton_schulz_calls"] > 0
    return metrics


@pytest.mark.parametrize("name", LOOPS)
def test_every_loop_is_right(name):
    loop, directions = LOOPS[name]
    metrics = check(loop, Ours())
    used, expected = metrics["directions_used"], 2 * STEPS
    if directions == "some":
        assert 0 < used < expected + 1, metrics
    else:
        assert used == {"all": expected, "half": STEPS, "none": 0}[directions], metrics
    assert metrics["directions_in_step"] == 0 or directions != "all"


@pytest.mark.parametrize(
    "settings",
    [
        {"update": "step", "compiled": False},
        pytest.param({"update": "step"}, marks=pytest.mark.full),
        pytest.param({"update": "backward"}, marks=pytest.mark.full),
    ],
)
def test_every_loop_is_right_wherever_directions_are_made(settings):
    for name, (loop, _) in LOOPS.items():
        torch._dynamo.reset()
        metrics = check(loop, Ours(**settings))
        assert settings["update"] != "step" or metrics["directions_speculated"] == metrics["directions_used"] == 0, name


@pytest.mark.parametrize("name", ["clip_grad_norm", pytest.param("two_forwards", marks=pytest.mark.full)])
def test_generated_code(name):
    check(LOOPS[name][0], Ours(codegen="inductor"))


def test_a_head_that_runs_in_chunks_does_not_hide_the_last_backward():
    """It has two backwards where the matrices have one; directions are made in theirs."""
    torch.manual_seed(0)
    model = Net()
    optimizer = MuonZero(model, muon_params=["a.weight", "b.weight"])
    options = {"codegen": "eager"}
    blocks = torch.compile(nn.Sequential(model.a, nn.Tanh(), model.b), backend="muon_zero", options=options)
    head = torch.compile(model.head, backend="muon_zero", options=options)
    for i in range(STEPS):
        hidden = blocks(batch(i))
        leaf = hidden.detach().requires_grad_()
        for chunk in leaf.chunk(2):
            head(chunk).square().sum().backward()
        hidden.backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad()
    metrics = optimizer.totals()
    assert metrics["directions_used"] == metrics["directions_speculated"] == 2 * STEPS, metrics


def test_directions_resume_once_the_norm_stays_under_the_limit():
    def loss(side, i):
        return loss_of(side.run, i) * (100.0 if i < 4 else 1e-3)

    def clip(side, i):  # by the optimizer on our side
        if isinstance(side, Plain):
            torch.nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)

    metrics = check(usual(clip, loss=loss, steps=12), Ours(gradient_clipping=1.0))
    # 3 discarded, 1 + 3 made in step() until it resumes
    assert metrics["directions_discarded"] == 2 * 3, metrics
    assert metrics["directions_used"] == 2 * 5, metrics


@pytest.mark.parametrize(
    "other", [{"gradient_clipping": 0.05}, {"gradient_accumulation_steps": None}, {"update": "step"}]
)
def test_each_optimizer_of_a_frame_decides_for_its_own_parameters(other):
    """The left one steps after every micro-batch, the right one after two: whatever its settings say."""
    torch.manual_seed(0)
    model, plain = Pair(), Pair()
    plain.load_state_dict(model.state_dict())
    theirs = [theirs_of(plain.left), theirs_of(plain.right)]
    common = {"lr": LR, "adamw_lr": ADAMW_LR, "ns_dtype": "float32", "ns_method": "standard"}
    ours = [MuonZero(model.left, **common), MuonZero(model.right, **{**common, **other})]
    run = torch.compile(model, backend="muon_zero", options=EAGER)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(8):
            for forward, (left, right) in ((run, ours), (plain, theirs)):
                loss_of(forward, i).backward()
                left.step()
                left.zero_grad()
                if i % 2:
                    if forward is plain and "gradient_clipping" in other:
                        torch.nn.utils.clip_grad_norm_(plain.right.parameters(), other["gradient_clipping"])
                    right.step()
                    right.zero_grad()
    same(model, plain)
    left = ours[0].totals()
    assert left["directions_used"] == left["directions_speculated"] == 2 * 8, left


def test_auto_stops_and_says_once_why():
    ours = Ours()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usual(clip_grad_value)(ours)
    warned = [w for w in caught if "thrown away" in str(w.message)]
    assert [w.filename for w in warned] == [__file__]  # the line that called step(), not one of ours or of torch's
    told = [str(w.message) for w in warned]
    assert "a.weight" in told[0] and "gradient_clipping=" in told[0] and "update='step'" in told[0]
    metrics = ours.optimizer.totals()
    assert metrics["directions_discarded"] == metrics["directions_speculated"] == 2 * 3
    assert metrics["directions_in_step"] == 2 * STEPS


def test_backward_never_stops():
    ours = Ours(update="backward")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usual(clip_grad_value)(ours)
    assert ours.optimizer.totals()["directions_speculated"] == 2 * STEPS


def test_another_backend_is_right_and_told_once_in_its_first_step():
    ours, theirs = Ours(), theirs_of()
    ours.run = torch.compile(ours.model, backend="aot_eager")

    def zeros(side):  # as torch.distributed.checkpoint does to have state
        for param in side.model.parameters():
            param.grad = torch.zeros_like(param)
        side.step()
        side.zero_grad()

    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loop in (zeros, usual(steps=1), usual()):
            loop(ours)
            loop(theirs)
            told.append(sum("no graph of backend='muon_zero'" in str(w.message) for w in caught))
    assert told == [0, 1, 1]
    same(ours.model, theirs.model)


def test_metrics_are_plain_numbers():
    ours = Ours()
    usual()(ours)
    metrics = {**ours.optimizer.metrics(), **ours.optimizer.totals()}
    assert all(type(value) in (int, float) for value in metrics.values()), metrics
    assert metrics["grad_norm"] == pytest.approx(float(ours.optimizer.grad_norm))
    assert metrics["muon_lr"] == LR and metrics["adamw_lr"] == ADAMW_LR
    assert metrics["compiled_graphs"] == 2
    assert metrics["skipped_steps"] == 0 and metrics["bytes_sent"] == 0
