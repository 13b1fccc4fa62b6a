"""One contract of trainers: each library's own loop does what a plain loop does on the batches of all ranks.

A trainer is a module beside this one, ``on_<library>``, with

- ``STEPS``, and ``SAVED``: the step whose checkpoint a run goes on from;
- ``batches(step, worlds)``: all micro-batches of a step, where earlier ones ran on ``worlds[:step]`` ranks;
- ``rate(step, worlds)``, ``evaluated(step, world)``: the schedule's factor, and what is evaluated behind a step;
- ``model(shared)``, ``loss(model, batch)``; ``LIMITS``: of the norm of gradients, by number of ranks; ``BY_ITEMS``:
  whether a step's loss is a mean over what it has, and not over what it may have;
- ``fit(folder, stage, compiled, resume, shared)``, which runs on each rank: ``shared`` ranks have the same sequences;
- ``build(change)``: makes a trainer of settings that cannot be honoured;
- ``saved(folder)``: names of checkpoints, and whole weights as a file has them.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import compile_muon
from support.reference import state_of

ACCUMULATED, BATCH, LIMIT = 2, 2, 0.5
STEPS_OF_EPOCH, BATCHES_OF_EPOCH = 3, 5  # of a rank, where epochs end with a micro-batch that is alone
MUON = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003, "weight_decay": 0.1, "ns_dtype": "fp32"}}


@dataclass
class Run:
    """Losses and norms of each step, evaluations, whole weights at the end, all state where a checkpoint is; where a
    library's steps differ in their micro-batches, the bytes sent until the end of each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Tensor] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)


def trainer(library: str) -> Any:
    """The module of a library, or a skipped test."""
    pytest.importorskip("transformers")
    pytest.importorskip(library, reason=f"{library} is not installed: pip install compile_muon[{library}]")
    return importlib.import_module(f"support.on_{library}")


class Counting(compile_muon.Extension):
    """How many steps were written."""

    written = 0

    def after_commit(self, found_inf: Tensor | None) -> None:
        self.written += 1

    def metrics(self) -> dict[str, float]:
        return {"written": self.written}


class Net(nn.Module):
    """A small one with a tied head, which may begin on the meta device; with dropout and BatchNorm if asked for."""

    def __init__(self, dropout: float = 0.0, normalized: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(61, 24)
        self.up, self.down = nn.Linear(24, 36), nn.Linear(36, 24)
        self.drop = nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(24) if normalized else nn.Identity()
        self.lm_head = nn.Linear(24, 61, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        x = x + self.down(torch.relu(self.up(self.drop(x))))
        logits = self.lm_head(self.norm(x.flatten(0, 1))).unflatten(0, labels.shape)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def gpt(**settings: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    shape = dict(vocab_size=61, n_positions=16, n_embd=24, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**{**shape, **dropout, **settings}))


def causal_loss(model: Any, tokens: Tensor) -> Tensor:
    return model(input_ids=tokens, labels=tokens)["loss"]


def small(shared: int = 1) -> nn.Module:
    """A model for ranks that share sequences, or a smaller one."""
    torch.manual_seed(3)
    return gpt() if shared > 1 else Net()


def sentences(size: int = 96) -> Tensor:
    return torch.randint(0, 61, (size, 8), generator=torch.Generator().manual_seed(1))


def of_epochs(step: int, worlds: Sequence[int]) -> Sequence[Tensor]:
    first, world = step % STEPS_OF_EPOCH * ACCUMULATED, worlds[step]
    return sentences().split(BATCH)[first * world : min(first + ACCUMULATED, BATCHES_OF_EPOCH) * world]


def plain(
    job: Any, worlds: Sequence[int], *, shared: int = 1, dtype: torch.dtype | None = None, groups: Any = None,
    optimizer: Any = MUON, thaw: tuple[str, int] = ("", 0), clip: Callable[..., Any] = nn.utils.clip_grad_norm_,
) -> Run:  # fmt: skip
    """By hand, in one process on the batches of all ranks: ``worlds`` of them by step, of which ``shared`` would share
    a sequence. ``dtype``: of autocast. ``thaw``: a module, and the step until which it is frozen."""
    run, model = Run(), job.model(shared)
    config = {"optimizer": optimizer, "gradient_accumulation_steps": None}
    model, muon = compile_muon.initialize(model, config, groups=groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(muon, lambda step: job.rate(step, worlds))

    def loss_of(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            return job.loss(model, tokens)

    for step, world in enumerate(worlds):
        if thaw[0]:
            model.get_submodule(thaw[0]).requires_grad_(step >= thaw[1])
        total, batches = 0.0, job.batches(step, worlds)
        for tokens in batches:
            loss = loss_of(tokens) / (len(batches) if job.BY_ITEMS else world * ACCUMULATED)
            loss.backward()
            total += loss.item()
        run.losses.append(total)
        gradients = [param.grad for param in model.parameters() if param.grad is not None]
        run.norms.append(float(nn.utils.get_total_norm(gradients)))
        clip(model.parameters(), job.LIMITS[world])
        muon.step()
        muon.zero_grad()
        schedule.step()
        if batches := job.evaluated(step, world):
            with torch.no_grad():
                run.evaluations.append(sum(loss_of(tokens).item() for tokens in batches) / len(batches))
    run.weights = state_of(model)
    return run


def check(run: Run, expected: Run, start: int = 0, near: float = 1e-5) -> None:
    """A run, from step ``start`` on, equals the expected one."""
    for mine, theirs in ((run.losses, expected.losses[start:]), (run.norms, expected.norms[start:])):
        assert mine == pytest.approx(theirs, rel=near, abs=2 * near)
    assert run.evaluations and run.evaluations == pytest.approx(
        expected.evaluations[-len(run.evaluations) :], rel=near, abs=2 * near
    )
    assert run.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        torch.testing.assert_close(run.weights[name], value, rtol=10 * near, atol=near)
