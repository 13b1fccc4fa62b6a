"""What goes wrong on one rank goes wrong alike on all, or nowhere: errors, dying ranks, checkpoints, odd loops."""

from __future__ import annotations

import copy
import itertools
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.harness import BACKEND, Ranks
from support.reference import ADAMW_LR, DEVICE, Reference, Report, full, placed, relative_error, train
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import compile_muon
from compile_muon.engine.dtensors import local_tensor

WIDTH = 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Tiny(nn.Module):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor, poison: Tensor | None = None) -> Tensor:
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h)
        logits = self.head(h)
        if poison is not None:
            # Forward this is finite; backward the root of 0 has an infinite slope. It reaches the gradient of one row
            # of the first block's `up` and nothing else, so only the rank that holds the row can see it.
            up: Any = self.blocks[0].up
            value = up(torch.ones(WIDTH))[0]
            logits = logits + (value - value.detach() + poison).sqrt() * torch.arange(16.0)
        return logits


def tiny(blocks: int = 2) -> Tiny:
    torch.manual_seed(0)
    return Tiny(blocks)


def matrices(blocks: int = 2) -> dict[str, tuple[int, int, int]]:
    up = {f"blocks.{i}.up.weight": (1, 14, WIDTH) for i in range(blocks)}
    return up | {f"blocks.{i}.down.weight": (1, WIDTH, 14) for i in range(blocks)}


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, 16, (4, 5), generator=generator)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model: nn.Module, **settings: Any) -> compile_muon.MuonZero:
    return compile_muon.MuonZero(model, adamw_eps=1e-4, **settings)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="muon_zero", options={"codegen": "eager"})


def check(reports: list[Report]) -> None:
    for rank, report in enumerate(reports):
        assert not report.problems(), f"rank {rank}: {report.problems()}"


# ----------------------------------------------------------------------------------- before the first step


def test_several_processes_need_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = tiny()
    with pytest.raises(compile_muon.ConfigError, match="WORLD_SIZE.*'2'.*init_process_group"):
        optimizer_of(model)
    assert type(model) is Tiny


def build_differently(difference: str) -> str:
    model = tiny(3 if difference == "shapes" and dist.get_rank() == 1 else 2)
    if difference == "requires_grad" and dist.get_rank() == 1:
        model.head.weight.requires_grad_(False)
    try:
        optimizer_of(model)
    except compile_muon.UnsupportedModelError as error:
        assert type(model.head) is nn.Linear and type(model.head.weight) is nn.Parameter
        return str(error)
    return "no error"


@pytest.mark.parametrize("difference", ["shapes", "requires_grad"])
def test_ranks_with_different_models_all_raise(ranks: Callable[[int], Ranks], difference: str) -> None:
    first, *others = ranks(3).run(build_differently, difference=difference)
    said = {
        "shapes": "blocks.2.norm.weight = (10,) float32 on rank 1, (absent) on ranks 0, 2",
        "requires_grad": "head.weight = (16, 10) float32 frozen on rank 1, (16, 10) float32 on ranks 0, 2;",
    }[difference]
    assert first.startswith(f"ranks disagree on parameters: {said}")
    assert first.endswith("nothing was changed; build the same model on every rank")
    assert others == [first] * 2


# ------------------------------------------------------------------------------------------ a rank that fails


def lose_rank_one(how: str, stage: int) -> tuple[str, float]:
    model = tiny().to(DEVICE)
    optimizer = optimizer_of(model, stage=stage)
    run = compiled(model)
    for step in range(50):
        if step == 2 and dist.get_rank() == 1:
            if how == "dies":
                os._exit(7)
            time.sleep(12)
        started = time.monotonic()
        try:
            loss(run, placed(batch(step, 0, 0))).backward()
            optimizer.step()
            optimizer.zero_grad()
        except RuntimeError as error:
            return str(error), time.monotonic() - started
    return "no error", 0.0


@pytest.mark.parametrize(
    ("how", "stage"),
    [
        pytest.param("dies", 3, marks=pytest.mark.campaign),
        pytest.param("dies", 0, marks=pytest.mark.full),
        ("hangs", 3),
    ],
)
def test_losing_a_rank_ends_the_others_within_the_timeout(
    how: str, stage: int, capfd: pytest.CaptureFixture[str]
) -> None:
    group = Ranks(2, timeout=15 if how == "dies" else 6)
    try:
        alive, lost = group.outcomes(lose_rank_one, how=how, stage=stage, patience=60, grace=30)
    finally:
        group.close()
    if BACKEND == "nccl":  # no call returns: who is missing is written ahead of the end of the process
        said = capfd.readouterr().err
        assert alive.failure is not None and "process ended" in alive.failure, alive
        assert re.search(r"rank 1 (was last seen in|runs the loop's own code after) step [123]", said), said[-4000:]
        return
    assert alive.failure is None, alive.failure
    message, seconds = alive.value
    assert re.search(r"; rank 0 waits in step 3, (forward|backward) of frame \d+ \(", message), message
    if how == "dies":  # its place may be a beat old
        assert re.search(r"\nrank 1 was last seen (in|after) step [123], ", message), message
    else:
        assert "\nrank 1 runs the loop's own code after step 2, the optimizer's step; " in message
    assert seconds < group.timeout + 5
    if how == "dies":
        assert lost.failure is not None and "code 7" in lost.failure


# -------------------------------------------------------------------------------------- non-finite gradients


def _snapshot(model: nn.Module, optimizer: compile_muon.MuonZero) -> dict[str, Tensor]:
    held = {name: full(param).detach().clone() for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            held |= {f"{name}.{key}": full(v).detach().clone() for key, v in optimizer.state[param].items()}
    return held


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def poison_one_rank(stage: int, nonfinite: str, update: str, checks: str | None) -> tuple[bool, str, bool]:
    """Three steps with a poisoned one in the middle, beside a twin that never sees the poison."""
    model = tiny()
    twin = copy.deepcopy(model)
    settings = {"stage": stage, "nonfinite": nonfinite, "update": update, "checks": checks}
    optimizers = [optimizer_of(m, **settings) for m in (model, twin)]
    runs = [compiled(model), compiled(twin)]
    rank = dist.get_rank()
    kept, message = True, ""
    for step in range(3):
        bad = torch.tensor(0.0 if step == 1 and rank == 1 else 1.0)
        for optimizer, run, poison in zip(optimizers, runs, (bad, torch.tensor(1.0)), strict=True):
            if step == 1 and run is runs[1]:
                continue
            logits = run(batch(step, 0, rank), poison)
            F.cross_entropy(logits.flatten(0, 1), batch(step, 0, rank).flatten()).backward()
            if step != 1:
                # the poisoned term is in the loss of every step, so that only its value differs
                optimizer.step()
            else:
                before = _snapshot(model, optimizer)
                try:
                    optimizer.step()
                    optimizer.metrics()
                except compile_muon.NonFiniteError as error:
                    message = str(error)
                kept = _same(before, _snapshot(model, optimizer))
            optimizer.zero_grad()
    as_if_never = _same(_snapshot(model, optimizers[0]), _snapshot(twin, optimizers[1]))
    if nonfinite == "error":
        message += "\n" + spoiled_momentum(optimizers[0], lambda: runs[0](batch(3, 0, rank), torch.tensor(1.0)))
    return kept, message, as_if_never


def spoiled_momentum(optimizer: compile_muon.MuonZero, logits: Callable[[], Tensor]) -> str:
    """What is said of an entry that one rank has made infinite: of one matrix, all of whose direction is NaN."""
    if dist.get_rank() == 1:
        group = next(group for group in optimizer.param_groups if "momentum" in group)
        param = group["params"][group["param_names"].index("blocks.0.up.weight")]
        local_tensor(optimizer.state[param]["momentum_buffer"]).view(-1)[0] = float("inf")
    F.cross_entropy(logits().flatten(0, 1), batch(3, 0, dist.get_rank()).flatten()).backward()
    try:
        optimizer.step()
        optimizer.metrics()
    except compile_muon.NonFiniteError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("stage", "nonfinite", "update", "checks"),
    [
        pytest.param(0, "skip", "step", None, marks=pytest.mark.campaign),
        pytest.param(1, "error", "step", None, marks=pytest.mark.campaign),
        (2, "skip", "step", None),
        (3, "error", "backward", None),
        pytest.param(1, "error", "backward", "next_step", marks=pytest.mark.full),
        pytest.param(0, "error", "backward", None, marks=pytest.mark.campaign),
        pytest.param(1, "skip", "step", None, marks=pytest.mark.campaign),
        pytest.param(2, "error", "backward", None, marks=pytest.mark.campaign),
        pytest.param(3, "skip", "step", None, marks=pytest.mark.campaign),
    ],
)
def test_nonfinite_gradients_of_one_rank(
    ranks: Callable[[int], Ranks], stage: int, nonfinite: str, update: str, checks: str | None
) -> None:
    results = ranks(2).run(poison_one_rank, stage=stage, nonfinite=nonfinite, update=update, checks=checks)
    assert [kept for kept, _, _ in results] == [True, True]
    assert [as_if_never for _, _, as_if_never in results] == [True, True]
    (message,) = {message for _, message, _ in results}
    who = "every rank" if stage == 0 else "rank 0"  # who holds the row that is infinite
    # One step later the gradients are gone, and who has read their squares cannot tell what was too large.
    value = "inf, nan or over 1.8e+19 (whose square is inf in float32)" if checks == "next_step" else "inf or nan"
    named = f"gradient of blocks.0.up.weight, blocks.0.up.bias = {value} on {who}: nothing was updated in step 2; "
    if nonfinite == "skip":
        assert message == ""
        return
    of_gradient, of_momentum = message.split("\n")
    assert of_gradient.startswith(named)
    assert of_momentum.startswith("momentum of blocks.0.up.weight = inf or nan on rank 1: nothing was updated in step ")


def lose_a_gradient(stage: int, where: str, checks: str | None, update: str = "auto") -> tuple[str, bool]:
    """One rank has no gradient of a parameter that the others have."""
    model = tiny()
    optimizer = optimizer_of(model, stage=stage, checks=checks, update=update)
    loss(compiled(model), batch(0, 0, 0)).backward()
    if dist.get_rank() == 1:
        dict(model.named_parameters())[where].grad = None
    before = _snapshot(model, optimizer)
    try:
        optimizer.step()
        optimizer.metrics()
    except compile_muon.LedgerError as error:
        return str(error), _same(before, _snapshot(model, optimizer))
    return "", False


@pytest.mark.parametrize(
    ("stage", "where", "checks", "update"),
    [
        (1, "head.bias", None, "auto"),
        (1, "blocks.0.up.weight", "next_step", "auto"),
        pytest.param(2, "blocks.0.up.weight", None, "step", marks=pytest.mark.full),
        *(
            pytest.param(*given, None, "auto", marks=pytest.mark.campaign)
            for given in ((0, "blocks.0.up.weight"), (3, "blocks.1.down.weight"))
        ),
    ],
)
def test_a_gradient_that_one_rank_lacks_is_an_error_on_all(
    ranks: Callable[[int], Ranks], stage: int, where: str, checks: str | None, update: str
) -> None:
    given = {"stage": stage, "where": where, "checks": checks, "update": update}
    for message, kept in ranks(2).run(lose_a_gradient, **given):
        assert message.startswith(f"gradient of {where} = None on rank 1 only: nothing was updated in step 1; ")
        assert kept


# ------------------------------------------------------------------------------------------------- clipping


def train_tiny(blocks: int = 2, steps: int = 3, **settings: Any) -> Report:
    return train(tiny(blocks), matrices(blocks), loss, batch, steps=steps, **settings)


@pytest.mark.parametrize(
    ("stage", "limit"),
    [
        (2, 1e6),
        (3, 0.05),
        *(pytest.param(stage, 0.05, marks=pytest.mark.campaign) for stage in (0, 1, 2)),
    ],
)
def test_clipping_by_the_global_norm(ranks: Callable[[int], Ranks], stage: int, limit: float) -> None:
    check(ranks(3).run(train_tiny, stage=stage, gradient_clipping=limit))


# ------------------------------------------------------------------------------------------- edits in place


def edit_in_place(stage: int) -> float:
    """Largest error of the logits after every parameter was scaled, an unsharded copy's beside the model's."""
    model = tiny()
    copied = copy.deepcopy(model)
    optimizer = optimizer_of(model, stage=stage)
    run = compiled(model)
    run(batch(0, 0, 0))
    with torch.no_grad():
        for mine, theirs in zip(model.parameters(), copied.parameters(), strict=True):
            mine.mul_(0.5)
            theirs.mul_(0.5)
        error = (run(batch(0, 0, 0)) - copied(batch(0, 0, 0))).abs().max()
    assert optimizer.summary()
    return float(error)


@pytest.mark.parametrize(
    "stage",
    [
        1,
        pytest.param(3, marks=pytest.mark.full),
        pytest.param(2, marks=pytest.mark.campaign),
        pytest.param(0, marks=pytest.mark.campaign),
    ],
)
def test_edits_in_place_reach_every_rank(ranks: Callable[[int], Ranks], stage: int) -> None:
    """Operations of a DTensor do not count as edits of its shard, by which resident weights once went."""
    assert max(ranks(2).run(edit_in_place, stage=stage)) < 1e-6


def edit_gradients(stage: int, how: str) -> tuple[float, dict[str, float]]:
    """Three steps that edit gradients between backward and step; the largest error of a parameter, and the metrics."""
    model = tiny()
    reference = Reference(copy.deepcopy(model), matrices())
    optimizer = optimizer_of(model, stage=stage, adamw_lr=ADAMW_LR, ns_dtype="float32")
    run = compiled(model)
    for step in range(3):
        loss(run, batch(step, 0, dist.get_rank())).backward()
        for rank in range(dist.get_world_size()):
            (loss(reference.model, batch(step, 0, rank)) / dist.get_world_size()).backward()
        for params in (list(model.parameters()), list(reference.model.parameters())):
            if how == "clip":
                torch.nn.utils.clip_grad_norm_(params, 0.05)
            elif how == "foreach":
                torch._foreach_neg_([p.grad for p in params])
            elif how == "one rank" and step == 1:  # an entry of rank 1's shard, through its memory
                held: Any = dict(zip(names(), params, strict=True))["blocks.0.up.weight"].grad
                shard = held._local_tensor if isinstance(held, DTensor) else held
                if shard is held or dist.get_rank() == 1:
                    shard.data[-1, 0] = 1.0
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    found = dict(model.named_parameters())
    errors = [relative_error(full(p.detach()), found_in) for p, found_in in pairs(found, reference)]
    return max(errors), {**optimizer.metrics(), **optimizer.totals()}


def names() -> list[str]:
    return [name for name, _ in tiny().named_parameters()]


def pairs(found: dict[str, Any], reference: Reference) -> list[tuple[Any, Tensor]]:
    return [(p, reference.named[name].detach()) for name, p in found.items()]


#: Every way and every stage is here; the other pairs run in campaigns alone.
EDITS = (("nothing", 0), ("clip", 1), ("clip", 3), ("foreach", 2), ("one rank", 1), ("one rank", 3))


@pytest.mark.parametrize(
    ("how", "stage"),
    [
        pytest.param(
            *given,
            marks=() if given in EDITS[1:2] else pytest.mark.full if given in EDITS[::4] else pytest.mark.campaign,
        )
        for given in itertools.product(("nothing", "clip", "foreach", "one rank"), range(4))
    ],
)
def test_edits_of_gradients_count(ranks: Callable[[int], Ranks], stage: int, how: str) -> None:
    """Operations on lists of DTensors, with which PyTorch clips, count as an edit neither of them nor of shards."""
    for error, metrics in ranks(2).run(edit_gradients, stage=stage, how=how):
        assert error < 1e-5
        used = {"nothing": 12, "clip": 0, "foreach": 0, "one rank": 11}[how]
        assert metrics["directions_used"] == used
        assert metrics["directions_in_step"] == 12 - used


# ---------------------------------------------------------------------------------------------- checkpoints


def _steps(model: nn.Module, optimizer: compile_muon.MuonZero, first: int, count: int) -> None:
    run = model
    for step in range(first, first + count):  # the same batch on every rank: worlds of all sizes see one gradient
        loss(run, batch(step, 0, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


RATES = [0.013, 1e-4, 2e-4]


def save_and_go_on(folder: str, stage: int) -> None:
    model = tiny()
    optimizer = optimizer_of(model, stage=stage)
    for group, rate in zip(optimizer.param_groups, RATES, strict=True):
        group["lr"] = rate
    _steps(model, optimizer, 0, 2)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    saved = _snapshot(model, optimizer)
    _steps(model, optimizer, 2, 2)
    later = _snapshot(model, optimizer)
    if dist.get_rank() == 0:
        torch.save((saved, later), f"{folder}.pt")


def load_and_go_on(folder: str, stage: int) -> tuple[bool, list[float], float]:
    torch.manual_seed(1)  # nothing of the initial weights may survive
    model = Tiny()
    optimizer = optimizer_of(model, stage=stage)
    _steps(model, optimizer, 50, 1)
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    saved, later = torch.load(f"{folder}.pt")
    loaded = _same(saved, _snapshot(model, optimizer))
    _steps(model, optimizer, 2, 2)
    now = _snapshot(model, optimizer)
    distance = max(relative_error(now[name], later[name]) for name in later)
    return loaded, [group["lr"] for group in optimizer.param_groups], distance


@pytest.mark.full
def test_torchs_own_checkpoints_load_on_other_worlds_and_stages(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks(2).run(save_and_go_on, folder=folder, stage=3)
    for world, stage in ((1, 0), (3, 1), (2, 2)):
        for loaded, rates, distance in ranks(world).run(load_and_go_on, folder=folder, stage=stage):
            assert loaded, f"world {world}: weights, momentum or moments differ from what was saved"
            assert rates == RATES
            assert distance <= 1e-6


# -------------------------------------------------------------------------------------- loops of many kinds


@pytest.mark.parametrize(
    ("stage", "update"),
    [
        (1, "backward"),
        (2, "step"),
        *(pytest.param(stage, "backward", marks=pytest.mark.campaign) for stage in (0, 3)),
    ],
)
def test_accumulate_says_where_a_step_ends(ranks: Callable[[int], Ranks], stage: int, update: str) -> None:
    check(ranks(2).run(train_tiny, stage=stage, update=update, gradient_accumulation_steps=3, by_context=True))


def train_regionally(folder: str, **settings: Any) -> tuple[Report, int, list[str]]:
    options = {"codegen": "eager", "dump": f"{folder}/{dist.get_rank()}"}

    def compile_blocks(model: nn.Module) -> nn.Module:
        blocks: Any = model.blocks
        for block in blocks:
            block.compile(backend="muon_zero", options=options)
        return model

    torch._dynamo.utils.counters.clear()
    report = train_tiny(blocks=4, compiled=compile_blocks, **settings)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return report, graphs, sorted(path.name for path in Path(options["dump"]).iterdir())


@pytest.mark.parametrize(
    ("stage", "update"),
    [
        (1, "backward"),
        *(
            pytest.param(*given, marks=pytest.mark.campaign)
            for given in ((0, "backward"), (2, "backward"), (3, "step"))
        ),
    ],
)
def test_identical_blocks_compile_once(ranks: Callable[[int], Ranks], tmp_path: Path, stage: int, update: str) -> None:
    results = ranks(2).run(
        train_regionally, folder=str(tmp_path), stage=stage, update=update, gradient_accumulation_steps=2
    )
    check([report for report, _, _ in results])
    for _, graphs, files in results:
        assert graphs == 1
        assert sum(".forward.00_" in file for file in files) == 1
        # one per lowering that two micro-batches and one step need, whatever the number of blocks
        lowered = [file for file in files if ".backward." in file and ".00_" in file]
        assert len(lowered) == (2 if stage == 1 or update == "backward" else 1), lowered


#: Tokens per sequence by rank and step: each rank meets a new length, and compiles for it, at steps of its own.
LENGTHS = ((5, 5, 5, 8, 3, 8), (4, 7, 1, 6, 9, 3), (6, 6, 3, 3, 7, 1))


def lengths(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + rank)
    return torch.randint(0, 16, (2, LENGTHS[rank][step]), generator=generator)


def reconstruction_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def train_lengths(**settings: Any) -> Report:
    return train(tiny(), matrices(), reconstruction_loss, lengths, steps=6, **settings)


@pytest.mark.parametrize(
    ("world", "stage", "codegen"),
    [
        *(
            pytest.param(*given, marks=pytest.mark.campaign)
            for given in ((3, 1, "eager"), (3, 3, "eager"), (2, 2, "inductor"))
        ),
        pytest.param(2, 3, "eager", marks=pytest.mark.full),
    ],
)
def test_ranks_with_different_lengths_agree_on_collectives(
    ranks: Callable[[int], Ranks], world: int, stage: int, codegen: str
) -> None:
    check(ranks(world).run(train_lengths, stage=stage, codegen=codegen))
