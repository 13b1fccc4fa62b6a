"""One process: what may not happen to a sharded parameter, by name, and what goes on working."""

import copy
from typing import Any

import pytest
import torch
from support.reference import train_step
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune  # noqa: F401  in statements

from compile_muon import MuonZero, UnsupportedModelError, full_parameters
from compile_muon.model.ownership import Ownership

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 8)
        self.head = nn.Linear(8, 6)
        self.tied = nn.Linear(6, 8, bias=False)
        self.tied.weight = nn.Parameter(self.up.weight.detach().clone())
        self.up.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.head(self.down(self.norm(self.up(x)))))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def optimizer(model: Net) -> MuonZero:
    return MuonZero(model)


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def change(model: Net, statement: str) -> None:
    exec(statement, {**globals(), "model": model, "down": model.down})


DELETED = "cannot be deleted; change the model before MuonZero"
REBUILT = "cannot be replaced; change the model before MuonZero"
REPLACED = r"full_parameters\(module, write=True\).*before MuonZero"
MOVED = [
    ("down.weight = nn.Parameter(torch.zeros(8, 8))", REPLACED),
    ("down.weight = nn.Parameter(torch.zeros(9, 8))", REBUILT),
    ("down.weight = None", REBUILT),
    ("del down.weight", DELETED),
    ("nn.utils.parametrize.register_parametrization(down, 'weight', nn.Identity())", DELETED),
    ("parametrizations.weight_norm(down)", DELETED),
    ("down.register_parameter('weight', nn.Parameter(torch.zeros(8, 8)))", "cannot be replaced"),
    ("prune.random_unstructured(down, 'weight', 0.5)", "weight_orig: is added beside down.weight.*before MuonZero"),
    ("down.adapter = nn.Parameter(torch.zeros(3))", "adapter: is added beside down.weight.*before MuonZero"),
    ("down.half()", "dtype changes from float32 to float16.*param_dtype='float16'"),
    ("down.to('meta')", "device changes from cpu to meta.*move the model before MuonZero"),
]


@pytest.mark.parametrize(("statement", "remedy"), MOVED)
def test_a_sharded_parameter_stays_where_it_is(model: Net, optimizer: MuonZero, statement: str, remedy: str) -> None:
    params, buffers = dict(model.named_parameters()), [id(b) for b in model.buffers()]
    with pytest.raises(UnsupportedModelError, match=rf"(?s)down\.weight.*{remedy}|{remedy}"):
        change(model, statement)
    now = dict(model.named_parameters())
    assert list(now) == list(params) and all(now[name] is params[name] for name in params)
    assert [id(b) for b in model.buffers()] == buffers
    model(X).sum().backward()
    optimizer.step()


def test_what_changes_nothing_is_allowed(model: Net, optimizer: MuonZero) -> None:
    params = [id(p) for p in model.parameters()]
    kept, hooked = whole(model), []
    model.down._parameters["weight"].register_hook(hooked.append)
    model.down.weight = model.down._parameters["weight"]
    frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
    model.down.constant = frozen
    assert model.to("cpu") is model and model.float() is model and model.requires_grad_() is model
    frozen.requires_grad_(False)
    assert [id(p) for p in model.parameters() if p is not frozen] == params
    model(X).sum().backward()
    assert len(hooked) == 1
    assert all(torch.equal(value, whole(model)[name]) for name, value in kept.items() if "norm" not in name)
    optimizer.step()


@pytest.mark.parametrize(
    ("data", "change"),
    [
        (torch.zeros(8, 8, dtype=torch.bfloat16), "dtype changes from float32 to bfloat16"),
        (torch.zeros(9, 8), r"shape changes from \[8, 8\] to \[9, 8\].*; change the model before MuonZero"),
    ],
)
def test_data_of_another_kind_is_refused_when_read_and_by_step(
    model: Net, optimizer: MuonZero, data: torch.Tensor, change: str
) -> None:
    model(X).sum().backward()
    for p in model.parameters():
        p.grad = None
    model.down._parameters["weight"].data = data
    for use in (lambda: model(X), optimizer.step):
        with pytest.raises(UnsupportedModelError, match=rf"down\.weight: {change}"):
            use()


EDITS = [
    "nn.init.zeros_(down.weight)",
    "model.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)",
    "down.weight.data.zero_()",
    "down.weight.data = torch.zeros(8, 8)",
    "with torch.no_grad(): down.weight.view(-1)[3:5] = 0",
    "down.weight = down.weight; down.weight.data.mul_(2)",
]


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_of_an_attribute_is_an_edit_of_what_is_trained(edit: str) -> None:
    torch.manual_seed(0)
    model = Net()
    plain = copy.deepcopy(model)
    optimizer = MuonZero(model)
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    run(X)
    plain(X)
    assert all(
        param is getattr(model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2])
        for n, param in model.named_parameters()
    )
    for each in (model, plain):
        change(each, edit)
    for forward in (run, model):
        torch.testing.assert_close(forward(X), plain(X))
    assert all(torch.equal(v, plain.state_dict()[n]) for n, v in whole(model).items() if "norm" not in n)
    run(X).sum().backward()
    optimizer.step()


class Writes(nn.Linear):
    """Writes to its weight inside its own forward, in one of the ways there are."""

    how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.how == "without grad":
            with torch.no_grad():
                self.weight.mul_(0.5)
        elif self.how == "copied":
            with torch.no_grad():
                self.weight.copy_(self.weight.clamp(-0.1, 0.1))
        elif self.how == "detached":
            self.weight.detach().clamp_(-0.1, 0.1)
        elif self.how == "renormed":
            functional.embedding(torch.tensor([1, 2]), weight, max_norm=0.1)
        elif self.how == "new":
            weight = torch.renorm(self.weight, 2, 0, 0.1).clamp_(-0.1, 0.1)
        return functional.linear(x, weight, self.bias)


WRITES = ["without grad", "copied", "detached", "renormed"]


@pytest.mark.parametrize(
    ("how", "compiled"), [*((how, False) for how in [*WRITES, "new"]), *((how, True) for how in (*WRITES[:3], "new"))]
)
def test_a_weight_that_its_own_forward_writes_to_is_refused(how: str, compiled: bool) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), Writes(8, 8), nn.Linear(8, 8))
    model[1].how = how
    optimizer = MuonZero(model)
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model

    def train() -> None:
        for _ in range(2):
            train_step(optimizer, run(X).square().mean())

    if how == "new":
        return train()
    with pytest.raises(Exception, match=r"1\.weight: its module writes to the weight inside forward"):
        train()
    torch._dynamo.reset()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_table_with_max_norm_is_refused(kind: type) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^0\.weight: max_norm = 1\.0 rescales rows .*max_norm=None"):
        MuonZero(nn.Sequential(kind(8, 6, max_norm=1.0), nn.Linear(6, 6), nn.Linear(6, 6)))


def test_modules_may_be_taken_out_and_moved_while_they_are_whole(model: Net, optimizer: MuonZero) -> None:
    with full_parameters(model, write=True):
        nn.init.ones_(model.tied.weight)
        model.down, model.norm = nn.Identity(), model.head
    assert isinstance(model.down, nn.Identity) and model.norm is model.head
    assert torch.equal(model.tied.weight, torch.ones(8, 6)) and torch.equal(model.up.weight, torch.ones(8, 6))
    optimizer.step()
    with pytest.raises(RuntimeError, match="on purpose"), full_parameters(model, write=True):
        model.head = nn.Identity()
        raise RuntimeError("on purpose")
    assert model.norm is model.head


def test_whole_parameters_can_be_written(model: Net, optimizer: MuonZero) -> None:
    with full_parameters(model, write=True):
        model.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)
        model.head.bias = nn.Parameter(torch.full((6,), 3.0))
        inside = model(X)
    assert torch.equal(model._modules["up"]._parameters["weight"], torch.ones(8, 6))
    torch.testing.assert_close(model(X), inside)
    assert model.head.bias.eq(3).all()
    model(X).sum().backward()
    optimizer.step()


UNWRITABLE = [
    ("down.weight = nn.Parameter(torch.zeros(3, 3))", r"down\.weight: its shape .* \[3, 3\]; change it before Mu"),
    ("down.bfloat16()", r"down\.weight: its dtype changed from float32 to torch\.bfloat16"),
    ("del down.weight", r"down\.weight: was removed"),
    ("down.extra = nn.Parameter(torch.zeros(3))", r"down\.extra: was added"),
    ("model.up.weight = nn.Parameter(torch.zeros(8, 6))", r"tied to up\.weight, but one of them was replaced alone"),
    ("model.down = nn.Linear(8, 8)", r"down: a module with parameters was added"),
    ("down.weight.requires_grad_(False)", r"down\.weight: requires_grad changed"),
    ("parametrizations.weight_norm(down)", r"down\.parametrizations: a module with parameters was added"),
]


@pytest.mark.parametrize(("statement", "message"), UNWRITABLE)
def test_what_cannot_be_written_back_is_refused(model: Net, optimizer: MuonZero, statement: str, message: str) -> None:
    before, modules, classes = whole(model), list(model.modules()), [type(m) for m in model.modules()]
    with pytest.raises(UnsupportedModelError, match=message + ".*nothing was written"):
        with full_parameters(model, write=True):
            nn.init.zeros_(model.head.weight)
            change(model, statement)
    assert list(model.modules()) == modules and [type(m) for m in modules] == classes
    now = whole(model)
    assert list(now) == list(before) and all(torch.equal(now[n], before[n]) for n in before if "norm" not in n)
    model(X).sum().backward()
    optimizer.step()


def test_nested_blocks(model: Net, optimizer: MuonZero) -> None:
    with full_parameters(model, write=True):
        with full_parameters(model.down):
            nn.init.ones_(model.down.weight)
    assert model.down.weight.eq(1).all()
    with full_parameters(model.up):
        with pytest.raises(UnsupportedModelError, match=r"up\.weight: is whole already in an outer"):
            with full_parameters(model.tied):
                pass
        with full_parameters(model.head, write=True):
            nn.init.zeros_(model.head.weight)
    assert not model.head.weight.any()
    with full_parameters(nn.Linear(2, 2), write=True):
        pass


def test_step_inside_a_block(model: Net, optimizer: MuonZero) -> None:
    with full_parameters(model.down):
        with pytest.raises(UnsupportedModelError, match=r"down\.weight: is whole inside.*leave the block before"):
            optimizer.step()
    optimizer.step()


ANOTHER = [
    ("model.head = nn.Linear(8, 6)", r"head\.weight, head\.bias: came into the model after MuonZero"),
    ("model.adapter = nn.Linear(8, 2)", r"adapter\.weight, adapter\.bias: came into the model"),
    ("model.prompt = nn.Parameter(torch.zeros(3))", "prompt: came into the model"),
    ("down._parameters['weight'] = nn.Parameter(torch.zeros(8, 8))", r"down\.weight: is sharded, and .* holds another"),
    ("model.up.__class__ = nn.Linear", r"up\.weight: another optimizer or library has taken over"),
    ("model.down = nn.DataParallel(down)", r"down: was made data-parallel \(DataParallel\)"),
]


@pytest.mark.parametrize(("statement", "message"), ANOTHER)
def test_step_refuses_a_model_that_is_no_longer_ours(
    model: Net, optimizer: MuonZero, statement: str, message: str
) -> None:
    model(X).sum().backward()
    before = whole(model)
    change(model, statement)
    for _ in range(2):  # and again, as long as it is so
        with pytest.raises(UnsupportedModelError, match=message):
            optimizer.step()
    now = whole(model)
    assert all(torch.equal(now[n], before[n]) for n in before if n.startswith(("up", "tied")))


def test_an_attribute_is_unfrozen_as_the_parameter() -> None:
    model = Net()
    model.down.requires_grad_(False)
    optimizer = MuonZero(model)
    model.down.weight.requires_grad = True
    model.down.bias.requires_grad_(True)
    optimizer.step()
    assert {sharded.name for sharded in optimizer.engine.step.sharded_params.values()} >= {"down.weight", "down.bias"}


def test_changes_that_train_nothing_are_accepted(model: Net, optimizer: MuonZero) -> None:
    ownership = optimizer.engine.ownership
    assert isinstance(ownership, Ownership)
    model.probe = nn.Identity()
    model.teacher = nn.Linear(3, 3).requires_grad_(False)
    assert not ownership._unchanged()
    optimizer.step()
    assert ownership._unchanged()  # looked at once
    model.teacher.requires_grad_(True)  # trains now, though its identity has not changed


class Tagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.up.weight.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.up.weight
        return self.down(x @ weight.t() * getattr(weight, "scale", 100.0)) * getattr(self.down.weight, "late", 1.0)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_copy_has_the_attributes_of_its_parameter(compiled: bool) -> None:
    model, plain = Tagged(), Tagged()
    MuonZero(model)
    run = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    params = dict(model.named_parameters())
    torch.testing.assert_close(run(X), plain(X))
    params["up.weight"].scale = plain.up.weight.scale = 3.0
    torch.testing.assert_close(run(X), plain(X))
    model.down.weight.late = plain.down.weight.late = 5.0
    assert params["down.weight"].late == model.down.weight.late == 5.0
    torch.testing.assert_close(run(X), plain(X))
