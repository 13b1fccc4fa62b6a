"""``prepare`` in Accelerate's scripts beyond test_trainers.py: states on disk, several models, and other calls."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import set_seed
from support.harness import RanksOf, on_ranks
from support.launched import accelerated
from support.on_accelerate import prepared
from support.reference import full, refusal, world_and_rank
from support.trainers import LIMIT, MUON, causal_loss, sentences, small, state_of
from torch import nn
from torch.utils.data import DataLoader

import compile_muon
from compile_muon.integrations.accelerate import prepare

CONFIG = {"optimizer": MUON}
FLAGS = [f"ACCELERATE_USE_{name}" for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")]


def one_step(accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any = None) -> float:
    loss = causal_loss(model, sentences(4))
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def equal(model: nn.Module, other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(other[name], value) for name, value in state_of(model).items())


def test_a_state_may_be_saved_over_another(tmp_path: Path) -> None:
    """Also over a later one of another run, which the Checkpointer alone would take."""
    with accelerated():
        accelerator, model, optimizer, *_ = prepared(2, gradient_accumulation_steps=1)
        one_step(accelerator, model, optimizer)
        one_step(accelerator, model, optimizer)
        accelerator.save_state(tmp_path)
    with accelerated():
        accelerator, model, optimizer, *_ = prepared(2, gradient_accumulation_steps=1)
        one_step(accelerator, model, optimizer)
        with pytest.warns(UserWarning, match="step 2 of another run is there"):
            accelerator.save_state(tmp_path)
        first, expected = state_of(model), one_step(accelerator, model, optimizer)
    with accelerated():
        accelerator, model, optimizer, *_ = prepared(2, gradient_accumulation_steps=1)
        accelerator.load_state(tmp_path)
        assert equal(model, first) and one_step(accelerator, model, optimizer) == expected


def test_an_accumulation_begins_anew_after_loading(tmp_path: Path) -> None:
    """With another number of micro-batches, where Accelerate's own count is in the middle of a step. A state in the
    middle of one is refused: its gradients would be lost."""
    for count in (2, 3):
        with accelerated():
            accelerator, model, optimizer, *_ = prepared(2, gradient_accumulation_steps=count)
            if count == 3:
                accelerator.load_state(tmp_path)
            synced = []
            for micro in range(count):
                with accelerator.accumulate(model):
                    synced.append(accelerator.sync_gradients)
                    one_step(accelerator, model, optimizer)
                if micro == 0:
                    with pytest.raises(compile_muon.CheckpointError, match="of the micro-batches .*sync_gradients"):
                        accelerator.save_state(tmp_path / "lost")
            assert synced == [False] * (count - 1) + [True]
            accelerator.save_state(tmp_path)


@on_ranks(2)
def test_several_models_share_an_accelerator(tmp_path: Path) -> None:
    """Two sharded models and a plain one under DDP in one accelerator: losses before saving, and after loading."""
    folder = str(tmp_path)
    losses: list[list[float]] = []
    for resume in (False, True):
        with accelerated():
            accelerator, third = Accelerator(cpu=True), small()
            models = [compile_muon.initialize(small(), {**CONFIG, "zero_optimization": {"stage": s}}) for s in (1, 3)]
            plain_one = torch.optim.AdamW(third.parameters(), lr=0.01)
            (g, g_opt), (d, d_opt) = models
            d_opt, third, d, plain_one = prepare(accelerator, d_opt, third, d, plain_one)
            save_state = accelerator.save_state
            g, g_opt = prepare(accelerator, g, g_opt)
            assert accelerator.save_state == save_state  # not put in its own place
            each = ((g, g_opt), (d, d_opt), (third, plain_one))
            if resume:
                accelerator.load_state(folder)
            else:
                for model, optimizer in (*each, *each[:2], *each[:1]):
                    one_step(accelerator, model, optimizer)
                accelerator.save_state(folder)
            losses.append([one_step(accelerator, *pair) for pair in each])
            whole = accelerator.get_state_dict(third)  # the plain one's own, on every rank
            assert len(whole) == len(third.state_dict()) and g_opt.model is g and d_opt.model is d
    assert losses[0] == losses[1] and len(set(losses[0])) == 3, losses


def rest_of_the_loop(folder: str) -> float:
    """Values clipped, and whole state dicts of torch.compile's wrapper."""
    with accelerated():
        accelerator, model, optimizer, *_ = prepared(1, compiled=True, gradient_accumulation_steps=1)
        accelerator.backward(causal_loss(model, sentences(12)))
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        largest = max(full(param.grad).abs().max().item() for param in model.parameters())
        optimizer.step()
        state = accelerator.get_state_dict(torch.compile(model, backend="muon_zero"))
        assert len(state) == (len(model.state_dict()) if world_and_rank()[1] == 0 else 0)
        accelerator.save_model(model, folder, safe_serialization=False)
        assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
        return largest


@pytest.mark.full
def test_values_and_wrappers(ranks: RanksOf, tmp_path: Path) -> None:
    assert ranks(2).run(rest_of_the_loop, folder=str(tmp_path)) == pytest.approx([1e-3] * 2)
    small().load_state_dict(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))


def gathered(shared: int) -> tuple[list[int], list[str]]:
    """Rows of a shuffled epoch as ``gather_for_metrics`` has them, tensors and strings."""
    rows, words = list[int](), list[str]()
    with accelerated():
        accelerator, *_ = prepared(2, shared=shared)
        set_seed(3)
        loader = accelerator.prepare(DataLoader(sentences(5), batch_size=2, shuffle=True))
        for batch in loader:
            rows += accelerator.gather_for_metrics(batch)[:, 0].tolist()
            words += accelerator.gather_for_metrics([str(number.item()) for number in batch[:, 0]])
        if shared > 1:
            accelerator.dataloader_config.dispatch_batches = True
            with pytest.raises(compile_muon.ConfigError, match="dispatch_batches = True: .* ranks share a sequence"):
                accelerator.prepare_data_loader(DataLoader(sentences(5)))
    return rows, words


def test_ranks_that_share_a_sequence_have_one_loader(ranks: RanksOf) -> None:
    rows, words = gathered(1)
    assert sorted(rows) == sorted(sentences(5)[:, 0].tolist()) and words == list(map(str, rows))
    assert ranks(2).run(gathered, shared=2) == [(rows, words)] * 2


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    given = {"optimizer": {**MUON, "params": {**MUON["params"], "nonfinite": "skip"}}}
    with accelerated():
        accelerator, model, optimizer, _, scheduler = prepared(2, given=given, gradient_accumulation_steps=1)
        for weight, skipped in ((float("nan"), True), (1.0, False)):
            before = scheduler.get_last_lr()
            accelerator.backward(causal_loss(model, sentences(12)) * weight)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            assert accelerator.optimizer_step_was_skipped is skipped
            assert (scheduler.get_last_lr() == before) is skipped


@pytest.mark.parametrize("flag", FLAGS)
def test_what_accelerate_launch_sets_is_refused(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    with accelerated():
        accelerator, *_ = prepared(2)
        monkeypatch.setenv(flag, "true")
        with pytest.raises(compile_muon.ConfigError, match=flag.removeprefix("ACCELERATE_USE_").lower()):
            prepare(accelerator, *compile_muon.initialize(small(), CONFIG))


def test_pairs_that_are_not_are_refused() -> None:
    with accelerated():
        accelerator, plain_one = Accelerator(cpu=True), nn.Linear(4, 4)
        model, optimizer = compile_muon.initialize(small(), CONFIG)
        for said, *objects in (
            (
                "objects = 'Linear, SGD': come without a sharded model",
                plain_one,
                torch.optim.SGD(plain_one.parameters()),
            ),
            ("optimizer = 'MuonZero': comes without its other half", plain_one, optimizer),
            ("model = 'Net': comes without its other half", model),
            ("optimizer = 'SGD': trains a sharded model too", model, optimizer, torch.optim.SGD(model.parameters())),
        ):
            assert said in refusal(lambda objects=objects: prepare(accelerator, *objects))
        prepare(accelerator, model, optimizer)
        assert "is prepared already" in refusal(lambda: prepare(accelerator, model, optimizer))


@on_ranks(2)
def test_what_wants_copies_of_the_model_or_another_world_is_refused() -> None:
    """What is said to what wants a copy of the model on every rank, and to ranks that would train alone."""
    alone = [dist.new_group([rank]) for rank in range(2)][world_and_rank()[1]]
    with accelerated():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepare(accelerator, *compile_muon.initialize(small(), CONFIG))
        loader, schedule = prepare(accelerator, [0, 1], torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
        assert loader == [0, 1] and type(schedule).__name__ == "AcceleratedScheduler"  # may come later
        pair = compile_muon.initialize(nn.Linear(8, 8), CONFIG, process_group=alone)
        local = refusal(lambda: LocalSGD(accelerator, model, local_sgd_steps=1).__enter__().step())
        assert "LocalSGD" in local and "enabled=False" in local, local
        uneven = refusal(lambda: accelerator.join_uneven_inputs([model]).__enter__())
        assert "accelerator.join_uneven_inputs = 'a sharded model'" in uneven and "even_batches" in uneven, uneven
        other = refusal(lambda: prepare(Accelerator(cpu=True), *pair))
        assert "is sharded over 1 of the accelerator's 2 processes" in other, other
