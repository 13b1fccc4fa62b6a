"""What goes wrong on one rank goes wrong alike on all, or nowhere: errors, dying ranks, checkpoints, odd loops."""

import copy
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.harness import BACKEND, Ranks, RanksOf, on_ranks
from support.odd import data as batch
from support.odd import loss
from support.reference import ADAMW_LR, DEVICE, Reference, full, placed, relative_error, state_of, train, train_step
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
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
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


def tiny(seed: int = 0) -> Tiny:
    torch.manual_seed(seed)
    return Tiny()


MATRICES = {f"blocks.{i}.up.weight": (1, 14, WIDTH) for i in range(2)}
MATRICES |= {f"blocks.{i}.down.weight": (1, WIDTH, 14) for i in range(2)}


def optimizer_of(model: nn.Module, **settings: Any) -> compile_muon.MuonZero:
    return compile_muon.MuonZero(model, adamw_eps=1e-4, **settings)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="muon_zero", options={"codegen": "eager"})


def lose_rank_one(how: str, stage: int) -> tuple[str, float]:
    model = tiny().to(DEVICE)
    optimizer = optimizer_of(model, stage=stage)
    run = compiled(model)
    for step in range(50):
        if step == 2 and dist.get_rank() == 1:
            if how == "dies":
                os._exit(7)
            time.sleep(6)  # twice as long as the other waits
        started = time.monotonic()
        try:
            train_step(optimizer, loss(run, placed(batch(step, 0, 0))))
        except RuntimeError as error:
            return str(error), time.monotonic() - started
    return "no error", 0.0


@pytest.mark.parametrize(("how", "stage"), [pytest.param("dies", 0, marks=pytest.mark.full), ("hangs", 3)])
def test_losing_a_rank_ends_the_others_within_the_timeout(
    how: str, stage: int, capfd: pytest.CaptureFixture[str]
) -> None:
    group = Ranks(2, timeout=15 if how == "dies" else 3)
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


def _same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("stage", "nonfinite", "update", "checks"),
    [
        (2, "skip", "step", None),
        (3, "error", "step", None),
        pytest.param(1, "error", "backward", "next_step", marks=pytest.mark.full),
    ],
)
@on_ranks(2)
def test_nonfinite_gradients_of_one_rank(stage: int, nonfinite: str, update: str, checks: str | None) -> None:
    """Of three steps rank 1 poisons the second, which updates nothing; the third does."""
    model, rank = tiny(), dist.get_rank()
    optimizer = optimizer_of(model, stage=stage, nonfinite=nonfinite, update=update, checks=checks)
    run = compiled(model) if update == "backward" else model
    moved, said = [], []
    for step in range(4 if nonfinite == "error" else 3):
        poison = torch.tensor(0.0 if step == 1 and rank == 1 else 1.0)  # in the loss of every step: its value differs
        if step == 3 and rank == 1:
            momentum = optimizer.state[dict(model.named_parameters())["blocks.0.up.weight"]]["momentum_buffer"]
            local_tensor(momentum).view(-1)[0] = float("inf")  # of one matrix, all of whose direction is NaN
        F.cross_entropy(run(batch(step, 0, rank), poison).flatten(0, 1), batch(step, 0, rank).flatten()).backward()
        before = state_of(model, optimizer)
        try:
            optimizer.step()
            optimizer.metrics()
        except compile_muon.NonFiniteError as error:
            said.append(str(error))
        moved.append(not _same(before, state_of(model, optimizer)))
        optimizer.zero_grad()
    assert moved[1:3] == [False, True]
    # One step later the gradients are gone, and who has read their squares cannot tell what was too large.
    value = "inf, nan or over 1.8e+19 (whose square is inf in float32)" if checks == "next_step" else "inf or nan"
    if nonfinite == "skip":
        assert not said
        return
    of_gradient, of_momentum = said
    # Rank 0 holds the row that is infinite.
    named = f"gradient of blocks.0.up.weight, blocks.0.up.bias = {value} on rank 0: nothing was updated in step 2; "
    assert of_gradient.startswith(named)
    assert of_momentum.startswith("momentum of blocks.0.up.weight = inf or nan on rank 1: nothing was updated in step ")


@pytest.mark.parametrize(("stage", "where", "checks"), [(1, "blocks.0.up.weight", "next_step"), (3, "head.bias", None)])
@on_ranks(2)
def test_a_gradient_that_one_rank_lacks_is_an_error_on_all(stage: int, where: str, checks: str | None) -> None:
    model = tiny()
    optimizer = optimizer_of(model, stage=stage, checks=checks)
    loss(compiled(model), batch(0, 0, 0)).backward()
    if dist.get_rank() == 1:
        dict(model.named_parameters())[where].grad = None
    before = state_of(model, optimizer)
    said = f"gradient of {where} = None on rank 1 only: nothing was updated in step 1; "
    with pytest.raises(compile_muon.LedgerError, match=f"^{said}"):
        optimizer.step()
        optimizer.metrics()
    assert _same(before, state_of(model, optimizer))


@on_ranks(2)
def test_edits_of_gradients_count() -> None:
    """Operations on lists of DTensors, with which PyTorch clips, count as an edit neither of them nor of shards."""
    model = tiny()
    reference = Reference(copy.deepcopy(model), MATRICES)
    optimizer = optimizer_of(model, stage=1, adamw_lr=ADAMW_LR, ns_dtype="float32")
    run = compiled(model)
    for step in range(3):
        loss(run, batch(step, 0, dist.get_rank())).backward()
        for rank in range(dist.get_world_size()):
            (loss(reference.model, batch(step, 0, rank)) / dist.get_world_size()).backward()
        for named in (dict(model.named_parameters()), dict(reference.model.named_parameters())):
            if step == 0:
                torch.nn.utils.clip_grad_norm_(named.values(), 0.05)
            elif step == 1:
                torch._foreach_neg_([p.grad for p in named.values()])
            else:  # an entry of rank 1's shard, through its memory
                held: Any = named["blocks.0.up.weight"].grad
                if not isinstance(held, DTensor) or dist.get_rank() == 1:
                    getattr(held, "_local_tensor", held).data[-1, 0] = 1.0
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    errors = [relative_error(full(p.detach()), reference.named[name].detach()) for name, p in model.named_parameters()]
    totals = optimizer.totals()
    assert max(errors) < 1e-5
    assert (totals["directions_used"], totals["directions_in_step"]) == (3, 9)


def _trained(stage: int, seed: int) -> tuple[nn.Module, compile_muon.MuonZero]:
    """On the same batch on every rank: worlds of all sizes see one gradient."""
    model = tiny(seed)
    optimizer = optimizer_of(model, stage=stage)
    for step in range(2):
        train_step(optimizer, loss(model, batch(step, 0, 0)))
    return model, optimizer


def saved_by_torch(folder: str) -> dict[str, Tensor]:
    model, optimizer = _trained(3, seed=0)
    optimizer.param_groups[0]["lr"] = 0.013
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return state_of(model, optimizer)


def loaded_by_torch(folder: str, stage: int, saved: dict[str, Tensor]) -> tuple[bool, float]:
    model, optimizer = _trained(stage, seed=1)  # nothing of these weights may survive
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder, no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    return _same(saved, state_of(model, optimizer)), optimizer.param_groups[0]["lr"]


@pytest.mark.full
def test_torchs_own_checkpoints_load_on_other_worlds_and_stages(ranks: RanksOf, tmp_path: Path) -> None:
    saved = ranks(2).run(saved_by_torch, folder=str(tmp_path))[0]
    for world, stage in ((1, 0), (3, 1), (2, 2)):
        for found in ranks(world).run(loaded_by_torch, folder=str(tmp_path), stage=stage, saved=saved):
            assert found == (True, 0.013), world


@pytest.mark.parametrize(("stage", "update"), [(1, "backward"), (2, "step")])
@on_ranks(2)
def test_accumulate_says_where_a_step_ends(stage: int, update: str) -> None:
    settings = {"stage": stage, "update": update, "gradient_accumulation_steps": 3, "by_context": True}
    train(tiny(), MATRICES, loss, batch, steps=3, **settings).check()


#: Tokens per sequence by rank and step: each rank meets a new length, and compiles for it, at steps of its own.
LENGTHS = ((5, 5, 5, 8, 3, 8), (4, 7, 1, 6, 9, 3), (6, 6, 3, 3, 7, 1))


def lengths(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + rank)
    return torch.randint(0, 16, (2, LENGTHS[rank][step]), generator=generator)


def reconstruction_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


@pytest.mark.full
@on_ranks(2)
def test_ranks_with_different_lengths_agree_on_collectives() -> None:
    train(tiny(), MATRICES, reconstruction_loss, lengths, steps=6, stage=3).check()
