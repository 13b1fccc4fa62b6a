"""Bad input while training: one clear error that names the parameter and the remedy, and nothing is changed."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from unittest import TestCase

import pytest
import torch
from support.compiled import EAGER, Net, X
from torch import nn

from compile_muon import ConfigError, MuonZero, MuonZeroError, NonFiniteError, UnsupportedModelError
from compile_muon.engine.refusal import SHOWN
from compile_muon.engine.sharded_param import sharded_param_of

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def same(a, b):
    """Bit for bit, up to the payload of a NaN."""
    return torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))


class Lab:
    """A compiled model after one step, its optimizer, and what must not change."""

    def __init__(self, **settings):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = MuonZero(self.model, **{"ns_dtype": "float32", "ns_method": "standard", **settings})
        self.run = torch.compile(self.model, backend="muon_zero", options=EAGER)
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.params = dict(self.model.named_parameters())

    def loss(self, x=X):
        return self.run(x).square().mean()

    def frozen(self):
        """Copies of all parameters, momenta and AdamW state."""
        state = {i: copy.deepcopy(s) for i, s in self.optimizer.state_dict()["state"].items()}
        momenta = [s.momentum.clone() for s in self.optimizer.engine.step.muon]
        return [p.detach().clone() for p in self.params.values()], state, momenta

    def assert_unchanged(self, before):
        params, state, momenta = before
        for (name, p), q in zip(self.params.items(), params, strict=True):
            assert torch.equal(p, q), name
        for index, slots in self.optimizer.state_dict()["state"].items():
            for slot, value in slots.items():
                assert same(value, state[index][slot]), (index, slot)
        assert all(same(s.momentum, m) for s, m in zip(self.optimizer.engine.step.muon, momenta, strict=True))

    def recovers(self):
        """After zero_grad() training goes on exactly as if the bad step had never been tried."""
        twin = Lab.__new__(Lab)
        torch.manual_seed(0)
        twin.model = Net()
        settings = {"ns_dtype": "float32", "ns_method": "standard"}
        twin.optimizer = MuonZero(twin.model, **settings)
        twin.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        twin.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        twin.run = twin.model
        for lab in (self, twin):
            lab.optimizer.zero_grad()
            lab.loss().backward()
            lab.optimizer.step()
            lab.optimizer.zero_grad()
        for p, q in zip(self.model.parameters(), twin.model.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), atol=1e-6, rtol=1e-5)


# --- gradients from elsewhere -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["auto", "step"])
def test_a_penalty_that_reads_weights_through_the_model_is_right(update):
    lab = Lab(update=update)
    (lab.loss() + 0.1 * (lab.model.a.weight.square().sum() + lab.model.b.weight.square().sum())).backward()
    plain = Net()
    plain.load_state_dict(lab.model.state_dict())
    loss = plain(X).square().mean() + 0.1 * (plain.a.weight.square().sum() + plain.b.weight.square().sum())
    loss.backward()
    for (name, p), q in zip(lab.params.items(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-5, msg=name)
    lab.optimizer.step()


def test_hooks_on_a_parameter_see_gradients():
    lab = Lab()
    seen = []

    def hook(grad):
        seen.append(grad.clone())
        return grad * torch.linspace(0, 1, 8)

    lab.params["b.weight"].register_hook(hook)
    lab.loss().backward()
    plain = Net()
    plain.load_state_dict(lab.model.state_dict())
    plain(X).square().mean().backward()
    torch.testing.assert_close(seen[0], plain.b.weight.grad, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lab.params["b.weight"].grad, seen[0] * torch.linspace(0, 1, 8))
    lab.optimizer.step()
    assert lab.optimizer.totals()["directions_discarded"] == 1


def test_compiled_autograd():
    lab = Lab()
    before = lab.frozen()
    with torch._dynamo.config.patch(compiled_autograd=True):
        with pytest.raises(MuonZeroError, match=r"compiled autograd = on.*torch\._dynamo\.config\.compiled_autograd"):
            lab.loss()
    lab.assert_unchanged(before)
    lab.recovers()


# --- non-finite gradients ---------------------------------------------------------------------------------------------


def poison(lab, name):
    """NaN in the gradient of one parameter only."""
    if name == "head.bias":
        lab.loss().backward()
        lab.params[name].grad[0] = float("nan")
        return
    # a huge input makes the gradient of the first matrix overflow; tanh hides it from the others
    lab.run(torch.full_like(X, 1e38)).mul(1e38).sum().backward()


@pytest.mark.parametrize("update", ["auto", "step"])
@pytest.mark.parametrize("name", ["head.bias", "a.weight"])
def test_nonfinite_gradients_raise(update, name):
    lab = Lab(update=update)
    before = lab.frozen()
    if name == "a.weight":
        x = X.clone()
        x[0, 0] = float("inf")  # d loss / d a.weight has inf * 0; b and head see tanh's finite output
        lab.loss(x).backward()
    else:
        poison(lab, name)
    with pytest.raises(NonFiniteError, match="inf or nan: nothing was updated.*nonfinite='skip'") as caught:
        lab.optimizer.step()
    assert name in str(caught.value)
    assert ("b.weight" in str(caught.value)) is False
    lab.assert_unchanged(before)
    assert lab.optimizer.engine.ledger.balance() == 0
    with pytest.raises(NonFiniteError):
        lab.optimizer.step()  # nothing was consumed: the same step fails the same way
    lab.assert_unchanged(before)
    lab.recovers()


def test_a_repaired_gradient_can_be_stepped():
    lab, good = Lab(), Lab()
    for each in (lab, good):
        each.loss().backward()
    kept = lab.params["head.bias"].grad[0].clone()
    lab.params["head.bias"].grad[0] = float("inf")
    with pytest.raises(NonFiniteError):
        lab.optimizer.step()
    lab.params["head.bias"].grad[0] = kept
    for each in (lab, good):
        each.optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(lab.model.parameters(), good.model.parameters(), strict=True))


@pytest.mark.parametrize("nonfinite", ["error", "skip"])
def test_a_direction_of_a_gradient_that_was_repaired_does_not_matter(nonfinite):
    lab = Lab(nonfinite=nonfinite)
    x = X.clone()
    x[0, 0] = float("inf")
    lab.loss(x).backward()
    for p in lab.params.values():
        torch.nan_to_num_(p.grad, posinf=0.0, neginf=0.0)
    before = lab.frozen()
    lab.optimizer.step()
    assert lab.optimizer.totals()["skipped_steps"] == 0
    assert not torch.equal(before[0][0], lab.params["a.weight"])
    assert all(torch.isfinite(p).all() for p in lab.params.values())


def test_nonfinite_gradients_are_skipped():
    lab = Lab(nonfinite="skip")
    before = lab.frozen()
    for name in ("head.bias", "a.weight"):
        poison(lab, name)
        lab.optimizer.step()
        assert not torch.isfinite(lab.optimizer.grad_norm)
        lab.assert_unchanged(before)
        lab.optimizer.zero_grad()
    lab.recovers()


SPOILED = {
    "momentum of b.weight": "state[params['b.weight']]['momentum_buffer'][0, 0] = math.nan",
    "first moment of head.weight": "state[params['head.weight']]['exp_avg'][0, 0] = math.inf",
    "second moment of head.bias": "state[params['head.bias']]['exp_avg_sq'][0] = math.nan",
    "rate of adamw lr": "adamw['lr'] = math.nan",
    "rate of muon lr": "muon['lr'] = torch.tensor(math.inf)",
    "rate of adamw betas": "adamw['betas'] = (math.nan, 0.9)",
    "rate of muon momentum": "muon['momentum'] = math.nan",
}


@pytest.mark.parametrize("named", SPOILED)
@pytest.mark.parametrize(("update", "early"), [("auto", True), ("auto", False), ("step", False)])
def test_nothing_that_is_not_finite_is_committed(update, early, named):
    """Gradients are fine; something else that the step would write, or write with, is not: before backward or after."""
    lab = Lab(update=update)
    muon, adamw = lab.optimizer.param_groups[:2]
    names = {**globals(), "state": lab.optimizer.state, "params": lab.params, "muon": muon, "adamw": adamw}
    if early:
        exec(SPOILED[named], names)
    lab.loss().backward()
    if not early:
        exec(SPOILED[named], names)
    before = lab.frozen()
    with pytest.raises(NonFiniteError, match=f"^{named} = inf or nan: nothing was updated"):
        lab.optimizer.step()
    lab.assert_unchanged(before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_signs_hide_no_momentum_that_is_not_finite(bad):
    lab = Lab(method="adamuon")
    lab.optimizer.state[lab.params["b.weight"]]["momentum_buffer"][0, 0] = bad
    lab.loss().backward()
    before = lab.frozen()
    with pytest.raises(NonFiniteError, match=r"^momentum of b\.weight = inf or nan"):
        lab.optimizer.step()
    lab.assert_unchanged(before)


def diverge(lab, monkeypatch):
    """Newton-Schulz of the step graph does not end near one."""
    made = lab.optimizer.engine.step.step_graphs.orthogonalize

    def diverging(*args):
        directions, *more = made(*args)
        return [direction * float("inf") for direction in directions], *more

    monkeypatch.setattr(lab.optimizer.engine.step.step_graphs, "orthogonalize", diverging)


@pytest.mark.parametrize("update", ["auto", "step"])
def test_a_direction_that_is_not_finite_is_not_committed(update, monkeypatch):
    """Newton-Schulz that diverges: finite gradient and momentum, a direction that is not."""
    lab = Lab(update=update)
    diverge(lab, monkeypatch)
    lab.loss().backward()
    for sharded in lab.optimizer.engine.step.muon:
        made = sharded.speculations.current
        assert (made is not None) == (update == "auto")
        if made is not None:
            sharded.speculations.make(made._replace(direction=made.direction * float("inf")))
    before = lab.frozen()
    with pytest.raises(NonFiniteError, match=r"^direction of a\.weight, b\.weight = inf or nan"):
        lab.optimizer.step()
    lab.assert_unchanged(before)


def test_a_discarded_direction_made_anew_is_checked_too(monkeypatch):
    lab = Lab()
    lab.loss().backward()
    lab.params["b.weight"].grad.mul_(2)
    diverge(lab, monkeypatch)
    before = lab.frozen()
    with pytest.raises(NonFiniteError, match=r"^direction of b\.weight = inf or nan"):
        lab.optimizer.step()
    lab.assert_unchanged(before)


def test_skipped_steps_have_a_line_each_at_first_and_a_number_at_the_end():
    lab = Lab(nonfinite="skip", max_skipped_steps=SHOWN + 3, checks="in_step")
    before = lab.frozen()
    with TestCase().assertLogs("compile_muon") as told:
        for _ in range(SHOWN + 2):
            poison(lab, "head.bias")
            lab.optimizer.step()
            lab.optimizer.zero_grad()
    assert lab.optimizer.totals()["skipped_steps"] == SHOWN + 2
    lines = [record.getMessage() for record in told.records]
    assert len(lines) == SHOWN and all("gradient of head.bias" in line and "was skipped" in line for line in lines)
    assert ["only counted" in line for line in lines] == [False] * (SHOWN - 1) + [True]
    poison(lab, "head.bias")
    with pytest.raises(NonFiniteError, match=rf"{SHOWN + 3} steps in a row were skipped \(max_skipped_steps\)"):
        lab.optimizer.step()
    lab.assert_unchanged(before)
    lab.optimizer.zero_grad()
    lab.loss().backward()
    lab.optimizer.step()  # one good step and the count starts anew
    poison(lab, "head.bias")
    lab.optimizer.step()
    with TestCase().assertLogs("compile_muon") as told:
        del lab
        gc.collect()
    assert told.records[0].getMessage() == f"steps skipped for inf or nan (nonfinite='skip'): {SHOWN + 4}"


@pytest.mark.parametrize("update", ["backward", "step"])
def test_checks_read_in_the_next_step(update):
    """The step itself writes nothing that is not finite, and raises nothing; the next step, or metrics(), does."""
    lab = Lab(update=update, checks="next_step")
    before = lab.frozen()
    poison(lab, "head.bias")
    lab.optimizer.step()
    lab.assert_unchanged(before)
    lab.optimizer.zero_grad()
    lab.loss().backward()
    with pytest.raises(NonFiniteError, match=r"gradient of head.bias = inf or nan: nothing was updated in step 2"):
        lab.optimizer.step()
    lab.assert_unchanged(before)
    lab.optimizer.step()  # said once: this is the step whose gradients are fine
    assert lab.optimizer.metrics()["grad_norm"] > 0
    assert not torch.equal(lab.params["a.weight"], before[0][0])
    lab.recovers()


def test_checks_read_in_the_next_step_write_the_same_bits():
    labs = [Lab(checks=checks) for checks in ("in_step", "next_step")]
    for lab in labs:
        for _ in range(3):
            lab.optimizer.zero_grad()
            lab.loss().backward()
            lab.optimizer.step()
        assert lab.optimizer.totals()["directions_used"] == 8
    labs[1].assert_unchanged(labs[0].frozen())


def test_an_edit_that_nothing_counts_is_an_error_of_the_step_before():
    lab = Lab(update="backward", checks="next_step")
    before = lab.frozen()
    lab.loss().backward()
    lab.params["a.weight"].grad.data.mul_(2)
    lab.optimizer.step()
    lab.assert_unchanged(before)
    with pytest.raises(MuonZeroError, match=r"gradient of a\.weight was edited .* nothing was updated in step 2"):
        lab.optimizer.check()
    lab.loss().backward()
    lab.params["a.weight"].grad.mul_(2)  # counted: made anew in this step, which waits
    lab.optimizer.step()
    lab.optimizer.check()
    assert not torch.equal(lab.params["a.weight"], before[0][0])


def test_skipped_then_backward_without_zero_grad():
    """As with any optimizer: what is not finite stays in the gradient until it is dropped."""
    lab = Lab(nonfinite="skip")
    poison(lab, "head.bias")
    lab.optimizer.step()
    before = lab.frozen()
    lab.loss().backward()
    lab.optimizer.step()
    lab.assert_unchanged(before)
    lab.recovers()


# --- missing gradients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["auto", "step"])
def test_a_matrix_without_gradient_is_skipped(update):
    """Like torch: neither momentum, decay nor direction, though it had gradients before."""
    lab = Lab(update=update)
    lab.loss().backward()
    lab.params["a.weight"].grad = None
    params, _, momenta = lab.frozen()
    lab.optimizer.step()
    kept = {s.name: torch.equal(s.momentum, m) for s, m in zip(lab.optimizer.engine.step.muon, momenta, strict=True)}
    assert kept == {"a.weight": True, "b.weight": False}
    assert torch.equal(lab.params["a.weight"], params[0])
    assert not torch.equal(lab.params["b.weight"], params[list(lab.params).index("b.weight")])


# --- models and optimizers that were copied, deleted, or cannot be trained --------------------------------------------


def test_a_deleted_model_and_optimizer_are_freed():
    for stage in (0, 1, 3):
        lab = Lab(stage=stage)
        lab.loss().backward()
        lab.optimizer.step()
        gone = [weakref.ref(lab.model), weakref.ref(lab.optimizer), *map(weakref.ref, lab.params.values())]
        del lab
        gc.collect()
        assert not [reference for reference in gone if reference() is not None]


def test_the_model_outlives_the_variable_that_held_its_optimizer():
    lab = Lab()
    want = lab.run(X).detach()
    del lab.optimizer
    gc.collect()
    assert torch.equal(lab.run(X), want)
    lab.loss().backward()


def test_a_weight_without_an_optimizer_is_refused():
    """What a graph gets when a module was taken apart: no sharded parameter, no silent training."""
    lab = Lab()
    sharded = lab.optimizer.engine.step.muon[0]
    delattr(sharded.momentum, "_muon_zero_holder")
    with pytest.raises(MuonZeroError, match=r"belongs to no MuonZero optimizer.*call compile_muon\.MuonZero"):
        lab.loss()


def test_a_deep_copy_is_a_model_of_its_own():
    """An average of weights: it follows its own parameters, and touches nothing of the first."""
    lab = Lab()
    twin = copy.deepcopy(lab.model)
    run = torch.compile(twin, backend="muon_zero", options=EAGER)
    assert torch.equal(run(X), lab.run(X))
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(0.5)
    assert not torch.equal(run(X), lab.run(X))
    lab.optimizer.zero_grad()
    before = lab.frozen()
    run(X).square().mean().backward()
    lab.assert_unchanged(before)
    assert all(p.grad is None for p in lab.model.parameters())
    assert all(sharded.speculations.current is None for sharded in lab.optimizer.engine.params)
    plain = Net()
    plain.load_state_dict(twin.state_dict())
    plain(X).square().mean().backward()
    for p, q in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-5)
    mine = {id(a) for a in lab.optimizer.engine.params}
    for module in (twin.a, twin.b, twin.head):
        sharded = module.__dict__["_muon_zero_weight"]
        assert id(sharded) not in mine
        assert sharded_param_of(sharded.momentum) is sharded
    lab.recovers()


def test_a_deep_copy_can_be_trained_by_a_new_optimizer():
    lab = Lab()
    twin = copy.deepcopy(lab.model)
    optimizer = MuonZero(twin, ns_dtype="float32", ns_method="standard")
    torch.compile(twin, backend="muon_zero", options=EAGER)(X).square().mean().backward()
    assert all(sharded.speculations.current is not None for sharded in optimizer.engine.step.muon)
    optimizer.step()
    plain = Net()
    plain.load_state_dict(lab.model.state_dict())
    alone = MuonZero(plain, ns_dtype="float32", ns_method="standard")
    plain(X).square().mean().backward()
    alone.step()
    for p, q in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), atol=1e-6, rtol=1e-5)


def overlapping(model):
    model.b.weight = nn.Parameter(model.a.weight.detach().view(6, 8))


@pytest.mark.parametrize(
    ("make", "kind", "match", "settings"),
    [
        (lambda model: model.b.to("meta"), UnsupportedModelError, r"b\.weight.*meta.*weights=folder", {}),
        (overlapping, UnsupportedModelError, r"(a|b)\.weight", {}),
        (lambda model: None, ConfigError, "lr = nan", {"lr": math.nan}),
        (lambda model: None, ConfigError, r"WORLD_SIZE = '2'.*init_process_group", {}),
    ],
)
def test_what_cannot_be_trained_is_left_as_it_was(monkeypatch, make, kind, match, settings):
    if "WORLD_SIZE" in match:  # several processes without a group
        monkeypatch.setenv("WORLD_SIZE", "2")
    torch.manual_seed(0)
    model = Net()
    make(model)
    kept = {name: (p, type(p)) for name, p in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    with pytest.raises(kind, match=match):
        MuonZero(model, **settings)
    assert {name: (p, type(p)) for name, p in model.named_parameters()} == kept
    assert [type(module) for module in model.modules()] == classes
    assert not any(key.startswith("_muon_zero") for m in model.modules() for key in vars(m))


@pytest.mark.parametrize("update", ["backward", "step"])
@pytest.mark.parametrize("checks", ["in_step", "next_step"])
def test_a_finite_gradient_whose_square_overflows_is_not_called_infinite(update, checks):
    lab = Lab(update=update, checks=checks)
    before = lab.frozen()
    lab.loss().backward()
    lab.params["head.bias"].grad.fill_(1e20)
    named = "inf, nan or over 1.8e.19" if checks == "next_step" else "over 1.8e.19, finite, but its square is inf"
    with pytest.raises(NonFiniteError, match=f"^gradient of head.bias = {named}"):
        lab.optimizer.step()
        lab.optimizer.check()
    lab.assert_unchanged(before)


def test_gradients_whose_squares_overflow_together_are_clipped():
    """Of each the square is finite in float32, of all together it is not."""
    lab = Lab(update="step", gradient_clipping=1.0)
    lab.loss().backward()
    for param in lab.params.values():
        param.grad.fill_(1.7e19 / param.numel() ** 0.5)
    lab.optimizer.step()
    assert lab.optimizer.grad_norm == pytest.approx(1.7e19 * len(lab.params) ** 0.5, rel=1e-5)
    for param in lab.params.values():
        assert param.grad.norm() == pytest.approx(len(lab.params) ** -0.5, rel=1e-4)


def test_a_state_whose_square_overflows_is_finite():
    lab = Lab(update="step")
    lab.loss().backward()
    lab.optimizer.step()
    lab.optimizer.state[lab.params["head.bias"]]["exp_avg_sq"].fill_(1e30)
    lab.loss().backward()
    lab.optimizer.step()


@pytest.mark.parametrize("update", ["backward", pytest.param("step", marks=pytest.mark.full)])
@pytest.mark.parametrize("cleared", ["all", "momentum_buffer", "exp_avg", "step", "parameter"])
def test_state_that_was_taken_out_begins_anew(update, cleared):
    """As in torch.optim: the next step is that of an optimizer without this state."""
    lab, fresh = Lab(update=update), Lab(update=update)
    for each in (lab, fresh):
        each.loss().backward()
        each.optimizer.step()
        each.optimizer.zero_grad()
        each.loss().backward()
    for name, param in lab.params.items():
        held, new = lab.optimizer.state[param], fresh.optimizer.state[fresh.params[name]]
        if cleared in ("all", "parameter"):
            for slot in new.values():
                slot.zero_()
        elif cleared in held:
            del held[cleared]
            new[cleared].zero_()
        if cleared == "parameter":
            del lab.optimizer.state[param]
    if cleared == "all":
        lab.optimizer.state.clear()
    for each in (lab, fresh):
        each.optimizer.step()
    for name, param in lab.params.items():
        torch.testing.assert_close(param, fresh.params[name], rtol=0, atol=0)
    lab.recovers()
