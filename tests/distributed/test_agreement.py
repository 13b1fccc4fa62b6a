"""Ranks that differ: found before anything is sharded, or in the step in which they do, and named on every rank."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.harness import RanksOf, on_ranks
from support.reference import DEVICE, placed, state_of, train_step
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR

import compile_muon
from compile_muon.model import setup_agreement

WIDTH = 8
ODD = 1  # the rank that does something else


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 5)
        self.order = [0, 1, 2, 3]

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.blocks[i](x)
        return self.head(x)


def stack() -> Stack:
    torch.manual_seed(0)
    return Stack()


def compile_as(model: Stack, how: str) -> None:
    frames: dict[str, Any] = {"whole": [model], "blocks": model.blocks, "eager": []}
    for module in frames[how]:
        module.compile(backend="muon_zero", options={"codegen": "eager"})


def loss(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    x, y = torch.randn(6, WIDTH, generator=generator), torch.randint(0, 5, (6,), generator=generator)
    return F.cross_entropy(model(placed(x)), placed(y))


def build(difference: dict[str, Any]) -> str:
    model = stack()
    before = copy.deepcopy(model.state_dict())
    settings: dict[str, Any] = {"stage": 2, **(difference if dist.get_rank() == ODD else {})}
    if settings.pop("tied", False):
        model.blocks[3].up.weight = model.blocks[2].up.weight
    if settings.pop("frozen", False):
        model.head.weight.requires_grad_(False)
    if "muon_params" in difference:  # a predicate is compared by what it chooses
        left_out = settings.get("muon_params", "none")
        settings["muon_params"] = lambda name, param: left_out not in name
    theirs, version = settings.pop("version", None), setup_agreement.version
    known = lambda name: theirs if theirs and name == "compile_muon" else version(name)  # noqa: E731
    try:
        with mock.patch.object(setup_agreement, "version", known):
            compile_muon.MuonZero(model, **settings)
    except compile_muon.MuonZeroError as error:
        assert type(model.head) is nn.Linear
        kept = [torch.equal(before[name], value) for name, value in model.state_dict().items()]
        assert all(kept) or "tied" in difference
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("difference", "said"),
    [
        ({"stage": 3}, "settings: zero.stage = 3 on rank 1, 2 on ranks 0, 2; nothing was changed; start every rank"),
        ({"machine": "h200"}, "settings: machine.memory_bandwidth = 4800000000000.0 on rank 1, "),
        (
            {"param_dtype": "bf16", "gradient_clipping": 1.0},
            "settings: zero.gradient_clipping = 1.0 on rank 1, None on ranks 0, 2, zero.param_dtype = torch.bfloat16 "
            "on rank 1, None on ranks 0, 2; ",
        ),
        (
            {"version": "0.0.9"},
            f"library versions: compile_muon = 0.0.9 on rank 1, {compile_muon.__version__} on ranks 0, 2; nothing was",
        ),
        ({"tied": True}, "parameters: blocks.3.up.weight = (absent) on rank 1, (12, 8) float32 on ranks 0, 2; "),
        ({"frozen": True}, "parameters: head.weight = (5, 8) float32 frozen on rank 1, (5, 8) float32 on ranks 0, 2; "),
        (
            {"muon_params": "blocks.2"},
            "layouts: blocks.2.up.weight algorithm = adamw on rank 1, muon on ranks 0, 2, blocks.2.down.weight "
            "algorithm = adamw on rank 1, muon on ranks 0, 2; nothing was changed; build the",
        ),
    ],
)
def test_ranks_compare_versions_settings_and_parameters(ranks: RanksOf, difference: dict[str, Any], said: str) -> None:
    first, *others = ranks(3).run(build, difference=difference)
    kind = "ConfigError" if said.startswith(("settings", "library")) else "UnsupportedModelError"
    assert first.startswith(f"{kind}: ranks disagree on {said}"), first
    assert others == [first, first]


def diverge(stage: int, how: str, fault: str) -> tuple[str, bool]:
    """The error of the fourth step, and whether nothing changed in it."""
    model = stack().to(DEVICE)
    optimizer = compile_muon.MuonZero(model, stage=stage, check_replicas=2 if fault.startswith("edit") else None)
    compile_as(model, how)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    odd = dist.get_rank() == ODD
    for step in range(1, 4):
        train_step(optimizer, loss(model, step))
        scheduler.step()
    muon = optimizer.param_groups[0]
    if odd and fault in muon:
        muon[fault] *= 0.5
    elif odd and fault == "adamw betas":
        optimizer.param_groups[1]["betas"] = (0.9, 0.9)
    elif fault == "tensor lr":
        muon["lr"] = torch.tensor(0.01 if odd else 0.02)
    elif fault == "nan":
        muon["lr"] = torch.tensor(float("nan"))
    elif odd and fault == "swapped":
        model.order = [0, 2, 1, 3]
    elif odd and fault.startswith("edit"):
        param: Any = model.blocks[2].up._parameters["weight"]
        shard = param._local_tensor if isinstance(param, DTensor) else param
        if fault == "edit of a momentum":
            shard = optimizer.state[param]["momentum_buffer"]
        shard.data[0, 0] += 1e-3  # which PyTorch does not count as an edit
    elif odd and fault == "extra forward":
        loss(model, 77)
    loss(model, 4).backward()
    before = state_of(model, optimizer)
    try:
        optimizer.step()
    except (compile_muon.LedgerError, compile_muon.NonFiniteError) as error:
        now = state_of(model, optimizer)
        return str(error), all(torch.equal(value, now[name]) for name, value in before.items())
    return "no error", True


DISAGREE = "ranks disagree on"
COPIES = f"{DISAGREE} what all hold a copy of:"


def check_fault(results: list[tuple[str, bool]], said: str) -> None:
    first = results[0][0]
    assert first.startswith(said), first
    assert "nothing was updated in step 4; " in first
    assert results == [(first, True)] * len(results)


@pytest.mark.parametrize(
    ("stage", "fault", "said"),
    [
        (3, "lr", "muon lr = 0.0025 on rank 1, 0.005 on ranks 0, 2: "),
        (2, "adamw betas", "adamw betas = (0.9, 0.9) on rank 1, (0.9, 0.95) on ranks 0, 2: "),
        (1, "tensor lr", "muon lr = 0.009999999776482582 on rank 1, 0.01999999955296"),
    ],
)
def test_other_hyperparameters_on_one_rank(ranks: RanksOf, stage: int, fault: str, said: str) -> None:
    check_fault(ranks(3).run(diverge, stage=stage, how="eager", fault=fault), f"{DISAGREE} hyperparameters: {said}")


@pytest.mark.parametrize(
    ("stage", "fault", "said"),
    [
        (1, "nan", "rate of muon lr = inf or nan on every rank: "),  # which is no disagreement
        (2, "edit", f"{COPIES} blocks.2.up.weight on rank 1 is not what the other ranks have"),
        (0, "edit of a momentum", f"{COPIES} momentum_buffer of blocks.2.up.weight on rank 1 is not what the other"),
    ],
)
def test_a_rate_that_is_nan_and_replicas_that_drift_apart_are_named(
    ranks: RanksOf, stage: int, fault: str, said: str
) -> None:
    check_fault(ranks(3).run(diverge, stage=stage, how="eager", fault=fault), said)


@pytest.mark.parametrize(
    ("how", "stage"),
    [("eager", 1), ("eager", 3), *(pytest.param(*c, marks=pytest.mark.full) for c in (("whole", 2), ("blocks", 0)))],
)
def test_blocks_in_another_order_on_one_rank(ranks: RanksOf, stage: int, how: str) -> None:
    """Shapes and counts agree, so the exchange goes through: with one block's gradients taken for another's."""
    results = ranks(3).run(diverge, stage=stage, how=how, fault="swapped")
    check_fault(results, f"{DISAGREE} visit ")
    message = results[0][0]  # of all
    half = "forward" if stage == 3 else "backward"
    if how == "eager":
        mine, theirs = ("2.up.weight", "1.up.weight") if stage == 3 else ("1.down.weight", "2.down.weight")
        visit = f"{half} of eager code at blocks"
        assert f"{visit}.{mine} on rank 1, {visit}.{theirs} on ranks 0, 2" in message
        return
    assert f"{half} of frame " in message
    odd, others = message.split(" on rank 1, ")
    assert "at blocks.2." in odd if stage == 3 else "at blocks." in odd
    assert "at blocks.1." in others if stage == 3 else "at blocks." in others


@pytest.mark.parametrize(("how", "stage"), [("eager", 2), pytest.param("whole", 1, marks=pytest.mark.full)])
def test_a_forward_of_one_rank_alone_is_its_own_business(ranks: RanksOf, stage: int, how: str) -> None:
    """To log a sample, or count operations: with resident weights it meets nobody."""
    for message, _ in ranks(2).run(diverge, stage=stage, how=how, fault="extra forward"):
        assert message == "no error"


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_edits_on_every_rank_are_no_drift(stage: int) -> None:
    """What all ranks do alike is no drift, by whichever way; resident weights that nobody has read since are stale."""
    model = stack().to(DEVICE)
    optimizer = compile_muon.MuonZero(model, stage=stage, check_replicas=1)
    for step in range(1, 4):
        loss(model, step).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.99)
        optimizer.step()
        optimizer.zero_grad()


def trained(edits: bool) -> tuple[dict[str, Tensor], int]:
    """What four steps make, two behind an edit of momenta on one rank, which changes nothing; and directions used."""
    model = stack()
    optimizer = compile_muon.MuonZero(model, stage=2, update="backward", ns_dtype="float32")
    compile_as(model, "blocks")
    for step in range(4):
        loss(model, step).backward()
        if edits and step > 1 and dist.get_rank() == ODD:
            for slots in optimizer.state.values():
                if "momentum_buffer" in slots:
                    slots["momentum_buffer"].mul_(1)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model, optimizer), optimizer.totals()["directions_used"]


def test_all_ranks_make_a_direction_anew_that_one_has_lost(ranks: RanksOf) -> None:
    both = (ranks(2).run(trained, edits=edits) for edits in (True, False))
    for (edited, less), (plain, used) in zip(*both, strict=True):
        assert all(torch.equal(value, plain[name]) for name, value in edited.items()) and less == used / 2 > 0
