"""Bad input while training: one clear error that names the parameter and the remedy, and nothing is changed."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

from compile_muon import ConfigError, LedgerError, MuonZero, MuonZeroError, NonFiniteError, UnsupportedModelError
from compile_muon.runtime.ledger import state_of

EAGER = {"codegen": "eager"}
X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


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
        momenta = [s.momentum.clone() for s in self.optimizer._muon]
        return [p.detach().clone() for p in self.params.values()], state, momenta

    def assert_unchanged(self, before):
        params, state, momenta = before
        for (name, p), q in zip(self.params.items(), params, strict=True):
            assert torch.equal(p, q), name
        for index, slots in self.optimizer.state_dict()["state"].items():
            for slot, value in slots.items():
                assert torch.equal(value, state[index][slot]), (index, slot)
        assert all(torch.equal(s.momentum, m) for s, m in zip(self.optimizer._muon, momenta, strict=True))

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


# --- gradients edited between the update in backward and step() -------------------------------------------------------


def scale(lab):
    lab.params["b.weight"].grad.mul_(0.5)


def replace(lab):
    lab.params["b.weight"].grad = lab.params["b.weight"].grad.clone()


def clip(lab):
    torch.nn.utils.clip_grad_norm_(lab.model.parameters(), 1e-3)


def zero(lab):
    lab.params["b.weight"].grad.zero_()


def through_data(lab):
    lab.params["b.weight"].grad[0, 0] = 1.0


@pytest.mark.parametrize("edit", [scale, replace, clip, zero, through_data])
def test_edited_directions(edit):
    lab = Lab()
    lab.loss().backward()
    before = lab.frozen()
    edit(lab)
    with pytest.raises(LedgerError, match=r"gradient of '(a|b)\.weight' was edited.*gradient_clipping.*update='step'"):
        lab.optimizer.step()
    lab.assert_unchanged(before)
    lab.recovers()


@pytest.mark.parametrize("edit", [scale, replace, clip, zero, through_data])
def test_editing_raw_gradients_is_fine(edit):
    lab = Lab(update="step")
    lab.loss().backward()
    edit(lab)
    lab.optimizer.step()


def test_editing_an_adamw_gradient_is_fine():
    lab = Lab()
    lab.loss().backward()
    lab.params["head.weight"].grad.mul_(0.5)
    lab.optimizer.step()


# --- late gradients ---------------------------------------------------------------------------------------------------


def test_second_backward_after_the_update():
    with torch._functorch.config.patch(donated_buffer=False):  # else torch itself refuses retain_graph after step one
        lab = Lab()
        loss = lab.loss()
        loss.backward(retain_graph=True)
    before = lab.frozen()
    with pytest.raises(LedgerError, match=r"'(a|b)\.weight' arrived after .*gradient_accumulation_steps=N.*accumulate"):
        loss.backward()
    lab.assert_unchanged(before)
    lab.recovers()


def test_second_micro_batch_without_telling():
    lab = Lab()
    lab.loss().backward()
    before = lab.frozen()
    with pytest.raises(LedgerError, match="arrived after its Muon update"):
        lab.loss(2 * X).backward()
    lab.assert_unchanged(before)
    lab.recovers()


def test_backward_on_top_of_an_old_direction():
    lab = Lab()
    lab.loss().backward()
    lab.optimizer.step()
    before = lab.frozen()
    with pytest.raises(LedgerError, match=r"still holds the Muon direction of the previous step; call .*zero_grad\(\)"):
        lab.loss().backward()
    lab.assert_unchanged(before)
    lab.recovers()


def test_eager_backward_on_top_of_an_old_direction():
    lab = Lab()
    lab.loss().backward()
    lab.optimizer.step()
    before = lab.frozen()
    with pytest.raises(LedgerError, match=r"added to the Muon direction of the previous step; call .*zero_grad\(\)"):
        lab.model(X).square().mean().backward()
    lab.assert_unchanged(before)
    lab.recovers()


def test_step_twice_on_one_backward():
    lab = Lab()
    lab.loss().backward()
    lab.optimizer.step()
    before = lab.frozen()
    with pytest.raises(LedgerError, match="still holds the Muon direction"):
        lab.optimizer.step()
    lab.assert_unchanged(before)
    lab.recovers()


def test_step_twice_with_raw_gradients_is_as_in_torch():
    lab = Lab(update="step")
    lab.loss().backward()
    lab.optimizer.step()
    before = lab.frozen()
    lab.optimizer.step()
    assert not torch.equal(before[0][0], lab.params["a.weight"])


# --- gradients from elsewhere -----------------------------------------------------------------------------------------


def test_a_penalty_on_parameters_beside_the_model():
    """Its gradient would be added to a direction before anyone could tell them apart."""
    lab = Lab()
    before = lab.frozen()
    penalty = sum(p.square().sum() for p in lab.model.parameters())
    with pytest.raises(LedgerError, match=r"'(a|b)\.weight' got a gradient beside its Muon update.*update='step'"):
        (lab.loss() + 0.1 * penalty).backward()
    lab.assert_unchanged(before)
    lab.recovers()


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
    """A hook that edits gradients must not scale a direction: with one, the update waits for step()."""
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
    assert lab.optimizer._ledger.balance() == 0
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


def test_nonfinite_then_backward_without_zero_grad():
    """What is left in `.grad` is a direction: another backward must not be added to it."""
    lab = Lab()
    lab.loss().backward()
    lab.params["head.bias"].grad[0] = float("nan")
    before = lab.frozen()
    with pytest.raises(NonFiniteError):
        lab.optimizer.step()
    with pytest.raises(LedgerError):
        lab.loss().backward()
    lab.assert_unchanged(before)
    lab.recovers()


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


def test_skipped_then_backward_without_zero_grad():
    lab = Lab(nonfinite="skip")
    poison(lab, "head.bias")
    lab.optimizer.step()
    before = lab.frozen()
    with pytest.raises(LedgerError, match="still holds the Muon direction"):
        lab.loss().backward()
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
    names = [s.name for s in lab.optimizer._muon]
    assert torch.equal(lab.params["a.weight"], params[0])
    assert torch.equal(lab.optimizer._muon[names.index("a.weight")].momentum, momenta[names.index("a.weight")])
    assert not torch.equal(lab.optimizer._muon[names.index("b.weight")].momentum, momenta[names.index("b.weight")])
    assert not torch.equal(lab.params["b.weight"], params[list(lab.params).index("b.weight")])


# --- models and optimizers that were copied, deleted, or cannot be trained --------------------------------------------


def test_the_model_outlives_the_variable_that_held_its_optimizer():
    lab = Lab()
    want = lab.run(X).detach()
    del lab.optimizer
    gc.collect()
    assert torch.equal(lab.run(X), want)
    lab.loss().backward()


def test_a_weight_without_an_optimizer_is_refused():
    """What a graph gets when a module was taken apart: no account, no silent training."""
    lab = Lab()
    state = lab.optimizer._muon[0]
    delattr(state.state, "_muon_zero_state")
    with pytest.raises(MuonZeroError, match=r"belongs to no MuonZero optimizer.*call compile_muon\.MuonZero"):
        lab.loss()


def test_a_deep_copy_is_a_model_of_its_own():
    """An average of weights: it follows its own parameters, and touches neither account nor gradients of the first."""
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
    assert all(s.pending is None and s.owed == 0 for s in lab.optimizer._ledger.states)
    plain = Net()
    plain.load_state_dict(twin.state_dict())
    plain(X).square().mean().backward()
    for p, q in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-5)
    mine = {id(s) for s in lab.optimizer._ledger.states}
    for module in (twin.a, twin.b, twin.head):
        state = module.__dict__["_muon_zero_weight"]
        assert id(state) not in mine
        assert state_of(state.state) is state
    lab.recovers()


def test_a_deep_copy_can_be_trained_by_a_new_optimizer():
    lab = Lab()
    twin = copy.deepcopy(lab.model)
    optimizer = MuonZero(twin, ns_dtype="float32", ns_method="standard")
    torch.compile(twin, backend="muon_zero", options=EAGER)(X).square().mean().backward()
    assert all(state.pending is not None for state in optimizer._muon)
    optimizer.step()
    plain = Net()
    plain.load_state_dict(lab.model.state_dict())
    alone = MuonZero(plain, ns_dtype="float32", ns_method="standard")
    plain(X).square().mean().backward()
    alone.step()
    for p, q in zip(twin.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), atol=1e-6, rtol=1e-5)


def refused(make, kind, match):
    torch.manual_seed(0)
    model = Net()
    make(model)
    kept = {name: (p, type(p)) for name, p in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    with pytest.raises(kind, match=match):
        MuonZero(model)
    assert {name: (p, type(p)) for name, p in model.named_parameters()} == kept
    assert [type(module) for module in model.modules()] == classes
    assert not any(key.startswith("_muon_zero") for m in model.modules() for key in vars(m))


def meta(model):
    model.b.to("meta")


def sparse(model):
    model.b.weight = nn.Parameter(torch.eye(6, 8).to_sparse())


def complex_weights(model):
    model.b.weight = nn.Parameter(torch.zeros(6, 8, dtype=torch.complex64))


def overlapping(model):
    model.b.weight = nn.Parameter(model.a.weight.detach().view(6, 8))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (meta, r"b\.weight.*meta.*to_empty"),
        (sparse, r"b\.weight.*sparse.*to_dense"),
        (complex_weights, r"b\.weight.*complex.*view_as_real"),
        (overlapping, r"(a|b)\.weight"),
    ],
)
def test_models_that_cannot_be_trained(make, match):
    refused(make, UnsupportedModelError, match)


def test_several_processes_without_a_group(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused(lambda model: None, ConfigError, r"WORLD_SIZE = '2'.*init_process_group")


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"stage": 4}, r"stage = 4.*0 to 3"),
        ({"update": "backward", "gradient_clipping": 1.0}, r"update = 'backward': contradicts gradient_clipping=1\.0"),
        ({"update": "backward", "gradient_accumulation_steps": None}, "contradicts gradient_accumulation_steps"),
        ({"lr": float("nan")}, "lr = nan"),
    ],
)
def test_settings_are_checked_before_the_model_is_touched(settings, match):
    model = Net()
    classes = [type(module) for module in model.modules()]
    with pytest.raises(ConfigError, match=match):
        MuonZero(model, **settings)
    assert [type(module) for module in model.modules()] == classes
