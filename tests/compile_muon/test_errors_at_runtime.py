"""Bad input while training: one clear error that names the parameter and the remedy, and nothing is changed."""

import copy
import gc
import math
import weakref
from unittest import TestCase, mock

import pytest
import torch
from support.compiled import EAGER, Net, X
from support.reference import train_step
from torch import nn

from compile_muon import ConfigError, MuonZero, MuonZeroError, NonFiniteError, UnsupportedModelError
from compile_muon.engine.step_checks import SHOWN, StepChecks

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def same(a, b):
    """Bit for bit, up to the payload of a NaN."""
    return torch.equal(a.nan_to_num(nan=1e30), b.nan_to_num(nan=1e30))


class Lab:
    """A model after one step, its optimizer, and what must not change; compiled where directions come of backward."""

    def __init__(self, update="step", **settings):
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = MuonZero(
            self.model, **{"update": update, "ns_dtype": "float32", "ns_method": "standard", **settings}
        )
        compiled = update != "step"
        self.run = torch.compile(self.model, backend="muon_zero", options=EAGER) if compiled else self.model
        self.step()
        self.params = dict(self.model.named_parameters())

    def loss(self, x=X):
        return self.run(x).square().mean()

    def step(self):
        train_step(self.optimizer, self.loss())

    def frozen(self):
        """Copies of all parameters, and of momenta and AdamW state."""
        state = {i: copy.deepcopy(s) for i, s in self.optimizer.state_dict()["state"].items()}
        return [p.detach().clone() for p in self.params.values()], state

    def assert_unchanged(self, before):
        params, state = before
        for (name, p), q in zip(self.params.items(), params, strict=True):
            assert torch.equal(p, q), name
        for index, slots in self.optimizer.state_dict()["state"].items():
            for slot, value in slots.items():
                assert same(value, state[index][slot]), (index, slot)

    def refuses(self, said, then=lambda: None):
        """What is not finite, as an error of the step, or of ``then`` behind it; nothing is changed. Its text."""
        before = self.frozen()
        with pytest.raises(NonFiniteError, match=f"^{said}") as caught:
            self.optimizer.step()
            then()
        self.assert_unchanged(before)
        return str(caught.value)

    def poison(self):
        """NaN in the gradient of the head's bias only."""
        self.loss().backward()
        self.params["head.bias"].grad[0] = math.nan

    def recovers(self):
        """After zero_grad() training goes on exactly as if the bad step had never been tried."""
        twin = Lab()
        twin.model.load_state_dict(copy.deepcopy(self.model.state_dict()))
        twin.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        for lab in (self, twin):
            lab.optimizer.zero_grad()
            lab.step()
        for p, q in zip(self.model.parameters(), twin.model.parameters(), strict=True):
            torch.testing.assert_close(p.detach(), q.detach(), atol=1e-6, rtol=1e-5)


def test_compiled_autograd():
    lab = Lab("auto")
    before = lab.frozen()
    with torch._dynamo.config.patch(compiled_autograd=True):
        with pytest.raises(MuonZeroError, match=r"compiled autograd = on.*torch\._dynamo\.config\.compiled_autograd"):
            lab.loss()
    lab.assert_unchanged(before)
    lab.recovers()


@pytest.mark.parametrize("update", ["auto", "step"])
def test_nonfinite_gradients_raise(update):
    """Of one matrix: an input that is infinite times zero; tanh hides it from the layers behind."""
    lab, x = Lab(update), X.clone()
    x[0, 0] = math.inf
    before = lab.frozen()
    lab.loss(x).backward()
    for _ in range(2):  # nothing is consumed: the same step fails the same way
        said = lab.refuses(".*inf or nan: nothing was updated.*nonfinite='skip'")
        assert "a.weight" in said and "b.weight" not in said
        lab.assert_unchanged(before)
    assert lab.optimizer.engine.ledger.balance() == 0
    for param in lab.params.values():  # a repaired gradient can be stepped, whatever was made of it before
        torch.nan_to_num_(param.grad, posinf=0.0, neginf=0.0)
    lab.optimizer.step()
    assert not torch.equal(lab.params["a.weight"], before[0][0])
    assert all(torch.isfinite(param).all() for param in lab.params.values())
    lab.recovers()


def test_nonfinite_gradients_are_skipped():
    lab = Lab(nonfinite="skip")
    before = lab.frozen()
    for _ in range(2):  # as with any optimizer, NaN stays in the gradient until it is dropped
        lab.poison()
        lab.optimizer.step()
        assert not torch.isfinite(lab.optimizer.grad_norm)
        lab.assert_unchanged(before)
    lab.recovers()


SPOILED = {
    "momentum of b.weight": ("b.weight", "momentum_buffer", math.nan),
    "first moment of head.weight": ("head.weight", "exp_avg", math.inf),
    "second moment of head.bias": ("head.bias", "exp_avg_sq", math.nan),
    "rate of adamw lr": (1, "lr", math.nan),
    "rate of muon lr": (0, "lr", torch.tensor(math.inf)),
    "rate of adamw betas": (1, "betas", (math.nan, 0.9)),
    "rate of muon momentum": (0, "momentum", math.nan),
}


@pytest.mark.parametrize("update", ["auto", "step"])
def test_nothing_that_is_not_finite_is_committed(update):
    """Gradients are fine; something else that the step would write, or write with, is not: before backward or after."""
    lab = Lab(update)
    for (named, (where, slot, bad)), early in zip(2 * list(SPOILED.items()), 7 * [True] + 7 * [False], strict=True):
        if isinstance(where, int):
            holder, key = lab.optimizer.param_groups[where], slot
        else:
            holder, key = lab.optimizer.state[lab.params[where]][slot].view(-1), 0
        kept = copy.deepcopy(holder[key])
        if not early:
            lab.loss().backward()
        holder[key] = bad
        if early:
            lab.loss().backward()
        lab.refuses(f"{named} = inf or nan: nothing was updated")
        lab.optimizer.zero_grad()
        holder[key] = kept
    lab.recovers()


def test_signs_hide_no_momentum_that_is_not_finite():
    lab = Lab(method="adamuon")
    lab.optimizer.state[lab.params["b.weight"]]["momentum_buffer"][0, 0] = math.inf
    lab.loss().backward()
    lab.refuses(r"momentum of b\.weight = inf or nan")


@pytest.mark.parametrize("update", ["auto", "step"])
def test_a_direction_that_is_not_finite_is_not_committed(update, monkeypatch):
    """Newton-Schulz that diverges: finite gradient and momentum, a direction that is not."""
    lab = Lab(update)
    orthogonalize = lab.optimizer.engine.step.step_graphs.orthogonalize

    def diverging(*args):
        directions, *more = orthogonalize(*args)
        return [direction * math.inf for direction in directions], *more

    monkeypatch.setattr(lab.optimizer.engine.step.step_graphs, "orthogonalize", diverging)
    lab.loss().backward()
    for sharded in lab.optimizer.engine.step.muon:
        made = sharded.speculations.current
        assert (made is not None) == (update == "auto")
        if made is not None:
            sharded.speculations.make(made._replace(direction=made.direction * math.inf))
    lab.refuses(r"direction of a\.weight, b\.weight = inf or nan")


def test_skipped_steps_have_a_line_each_at_first_and_a_number_at_the_end():
    lab = Lab(nonfinite="skip", max_skipped_steps=SHOWN + 3, checks="in_step")
    before = lab.frozen()
    with TestCase().assertLogs("compile_muon") as told:
        for _ in range(SHOWN + 2):
            lab.poison()
            lab.optimizer.step()
            lab.optimizer.zero_grad()
    assert lab.optimizer.totals()["skipped_steps"] == SHOWN + 2
    lines = [record.getMessage() for record in told.records]
    assert len(lines) == SHOWN and all("gradient of head.bias" in line and "was skipped" in line for line in lines)
    assert ["only counted" in line for line in lines] == [False] * (SHOWN - 1) + [True]
    lab.poison()
    with pytest.raises(NonFiniteError, match=rf"{SHOWN + 3} steps in a row were skipped \(max_skipped_steps\)"):
        lab.optimizer.step()
    lab.assert_unchanged(before)
    lab.optimizer.zero_grad()
    lab.step()  # one good step and the count starts anew
    lab.poison()
    lab.optimizer.step()
    with TestCase().assertLogs("compile_muon") as told:
        del lab
        gc.collect()
    said = [record.getMessage() for record in told.records]  # optimizers of other tests may go with it
    assert f"steps skipped for inf or nan (nonfinite='skip'): {SHOWN + 4}" in said


def test_checks_read_in_the_next_step():
    """The step itself writes nothing that is not finite, and raises nothing; the next step, or metrics(), does."""
    lab = Lab("backward", checks="next_step")
    before = lab.frozen()
    lab.poison()
    lab.optimizer.step()
    lab.assert_unchanged(before)
    lab.optimizer.zero_grad()
    lab.loss().backward()
    with mock.patch.object(StepChecks, "wait", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        lab.optimizer.check()
    lab.refuses("gradient of head.bias = inf or nan: nothing was updated in step 2")
    lab.optimizer.step()  # said once: this is the step whose gradients are fine
    assert lab.optimizer.metrics()["grad_norm"] > 0
    assert not torch.equal(lab.params["a.weight"], before[0][0])
    lab.recovers()


@pytest.mark.parametrize("checks", ["in_step", "next_step"])
def test_a_finite_gradient_whose_square_overflows_is_not_called_infinite(checks):
    lab = Lab(checks=checks)
    lab.loss().backward()
    lab.params["head.bias"].grad.fill_(1e20)
    named = "inf, nan or over 1.8e.19" if checks == "next_step" else "over 1.8e.19, finite, but its square is inf"
    lab.refuses(f"gradient of head.bias = {named}", then=lab.optimizer.check)


def test_squares_that_overflow_together_or_in_a_state_are_clipped():
    """Of each gradient the square is finite in float32, of all together it is not; a second moment may be large."""
    lab = Lab(gradient_clipping=1.0)
    lab.optimizer.state[lab.params["head.bias"]]["exp_avg_sq"].fill_(1e30)
    lab.loss().backward()
    for param in lab.params.values():
        param.grad.fill_(1.7e19 / param.numel() ** 0.5)
    lab.optimizer.step()
    assert lab.optimizer.grad_norm == pytest.approx(1.7e19 * len(lab.params) ** 0.5, rel=1e-5)
    for param in lab.params.values():
        assert param.grad.norm() == pytest.approx(len(lab.params) ** -0.5, rel=1e-4)


def test_a_matrix_without_gradient_is_skipped():
    """Like torch: neither momentum, decay nor direction, though it had gradients before."""
    lab = Lab("auto")
    lab.loss().backward()
    lab.params["a.weight"].grad = None
    params, state = lab.frozen()
    lab.optimizer.step()
    for number, (name, param) in enumerate(lab.params.items()):
        assert torch.equal(param, params[number]) == (name == "a.weight")
    momenta = {s.name: s.momentum for s in lab.optimizer.engine.step.muon}
    before = {tuple(s["momentum_buffer"].shape): s["momentum_buffer"] for s in state.values() if len(s) == 1}
    assert torch.equal(momenta["a.weight"], before[8, 6]) and not torch.equal(momenta["b.weight"], before[6, 8])


@pytest.mark.parametrize("cleared", ["all", "momentum_buffer", "exp_avg", "step", "parameter"])
def test_state_that_was_taken_out_begins_anew(cleared):
    """As in torch.optim: the next step is that of an optimizer without this state."""
    lab, fresh = Lab("backward" if cleared == "all" else "step"), Lab()
    for each in (lab, fresh):
        each.step()
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
        torch.testing.assert_close(param, fresh.params[name], rtol=1e-6, atol=1e-6)
    lab.recovers()


def test_a_deleted_model_and_optimizer_are_freed():
    for stage in (0, 1, 3):
        lab = Lab("auto", stage=stage)
        gone = [weakref.ref(lab.model), weakref.ref(lab.optimizer), *map(weakref.ref, lab.params.values())]
        del lab
        gc.collect()
        assert not [reference for reference in gone if reference() is not None]


def test_a_model_needs_its_optimizer_but_no_variable_for_it():
    """What a graph gets when a module was taken apart: no sharded parameter, no silent training."""
    lab = Lab("auto")
    want = lab.run(X).detach()
    sharded = lab.optimizer.engine.step.muon[0]
    del lab.optimizer
    gc.collect()
    assert torch.equal(lab.run(X), want)
    delattr(sharded.momentum, "_muon_zero_holder")
    with pytest.raises(MuonZeroError, match=r"belongs to no MuonZero optimizer.*call compile_muon\.MuonZero"):
        lab.loss()


def test_a_deep_copy_can_be_trained_by_a_new_optimizer():
    """And touches nothing of the first."""
    lab = Lab("auto")
    before = lab.frozen()
    twin = copy.deepcopy(lab.model)
    optimizer = MuonZero(twin, ns_dtype="float32", ns_method="standard")
    torch.compile(twin, backend="muon_zero", options=EAGER)(X).square().mean().backward()
    assert all(sharded.speculations.current is not None for sharded in optimizer.engine.step.muon)
    assert all(sharded.speculations.current is None for sharded in lab.optimizer.engine.params)
    optimizer.step()
    lab.assert_unchanged(before)
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
        *(
            (lambda model: None, ConfigError, rf"{name} = '2': .*init_process_group", {})
            for name in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
        ),
    ],
)
def test_what_cannot_be_trained_is_left_as_it_was(monkeypatch, make, kind, match, settings):
    if kind is ConfigError and match[0].isupper():  # several processes without a group
        monkeypatch.setenv(match.split()[0], "2")
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
