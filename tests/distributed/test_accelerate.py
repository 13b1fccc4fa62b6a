"""``prepare`` in a usual Accelerate script, beside a plain loop: clipped, accumulated, saved, gone on with."""

from __future__ import annotations

import copy
import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.harness import Ranks
from support.launched import accelerated
from support.reference import full, world_and_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

import compile_muon

CONFIG = {"optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003, "ns_dtype": "fp32"}}}
EPOCHS, BATCHES, ACCUMULATED, BATCH, LIMIT = 2, 5, 2, 2, 0.5  # micro-batches of a rank and epoch: the last is alone
SAVED = 4  # steps, of 3 an epoch
FLAGS = [f"ACCELERATE_USE_{name}" for name in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    """Guesses each token from the one before; its head is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(31, 16)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.lm_head = nn.Linear(16, 31, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        guess = self.lm_head(self.blocks(self.embedding(tokens[:, :-1])))
        return nn.functional.cross_entropy(guess.flatten(0, 1), tokens[:, 1:].flatten())


def tokens(world: int) -> Tensor:
    """Of an epoch: ``BATCHES`` batches for each rank."""
    return torch.randint(0, 31, (64, 6), generator=torch.Generator().manual_seed(1))[: world * BATCHES * BATCH]


def rate(done: int) -> float:
    return 1 / (1 + 0.3 * done)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(param.detach()).clone() for name, param in model.named_parameters()}


def prepared(stage: int, *, compiled: bool = False, given: Any = None, size: int | None = None, **settings: Any) -> Any:
    """(accelerator, model, optimizer, loader, scheduler), as a script has them."""
    from accelerate import Accelerator

    from compile_muon.integrations.accelerate import prepare

    accelerator = Accelerator(cpu=True, **{"gradient_accumulation_steps": ACCUMULATED, **settings})
    config = {**CONFIG, "zero_optimization": {"stage": stage}, "compile": {"codegen": "eager"} if compiled else False}
    model, optimizer = compile_muon.initialize(Words().to(accelerator.device), {**config, **(given or {})})
    loader = DataLoader(TensorDataset(tokens(size or accelerator.num_processes)), batch_size=BATCH)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    return accelerator, *prepare(accelerator, model, optimizer, loader, scheduler)


Found = tuple[list[float], list[float], list[float], dict[str, Tensor], list[float]]


def script(folder: str, stage: int, compiled: bool = False, resume: str = "") -> Found:
    """Losses and norms of each step, evaluations of each epoch, the last weights, bytes sent in each step."""
    from accelerate.utils import ProjectConfiguration

    project = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=1)
    found: Found = ([], [], [], {}, [])
    with accelerated():
        accelerator, model, optimizer, loader, scheduler = prepared(stage, compiled=compiled, project_config=project)
        done, sent, total = 0, 0.0, 0.0
        if resume:
            accelerator.load_state(resume)
            done = SAVED
        for epoch in range(done // 3, EPOCHS):
            skipped = ACCUMULATED if resume and epoch == done // 3 else 0
            for (batch,) in accelerator.skip_first_batches(loader, skipped) if skipped else loader:
                with accelerator.accumulate(model):
                    loss = model(batch)
                    accelerator.backward(loss)
                    total += accelerator.gather(loss.detach()).mean().item() / ACCUMULATED
                    if accelerator.sync_gradients:
                        norm = accelerator.clip_grad_norm_(model.parameters(), LIMIT)
                        assert type(norm) is Tensor
                        found[1].append(norm.item())
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    found[0].append(total)
                    found[4].append(optimizer.totals()["bytes_sent"] - sent)
                    sent, total, done = optimizer.totals()["bytes_sent"], 0.0, done + 1
                    if done in (2, SAVED) and not resume:
                        accelerator.save_state()
            model.eval()
            with torch.no_grad():
                found[2].append(accelerator.gather_for_metrics(model(tokens(1))).mean().item())
            model.train()
        accelerator.save_model(model, Path(folder) / "weights")
        assert accelerator.unwrap_model(model) is model
        found[3].update(weights(model))
    return found


@functools.cache
def plain(world: int, then: int = 0) -> Found:
    """The same by hand, in one process on the batches of all ranks; after ``SAVED`` steps those of ``then`` ranks."""
    model = Words()
    optimizer = compile_muon.MuonZero(
        model, lr=0.02, adamw_lr=0.003, weight_decay=0.1, ns_dtype="fp32", gradient_accumulation_steps=None
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    found: Found = ([], [], [], {}, [])
    step = 0
    for _ in range(EPOCHS):
        for first in range(0, BATCHES, ACCUMULATED):
            total = 0.0
            for batch in range(first * world, min(first + ACCUMULATED, BATCHES) * world):
                loss = model(tokens(world)[batch * BATCH : (batch + 1) * BATCH]) / ACCUMULATED
                (loss / world).backward()
                total += loss.item() / world
            found[0].append(total)
            found[1].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(world):  # Accelerate counts what one process would have needed
                schedule.step()
            step += 1
            world = then if then and step == SAVED else world
        with torch.no_grad():
            found[2].append(model(tokens(1)).item())
    found[3].update(weights(model))
    return found


def check(found: Found, expected: Found, start: int = 0) -> None:
    for mine, theirs, skipped in zip(found[:3], expected[:3], (start, start, start // 3), strict=False):
        assert mine == pytest.approx(theirs[skipped:], rel=1e-5, abs=2e-5)
    for name, value in expected[3].items():
        torch.testing.assert_close(found[3][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("world", "stage", "compiled"),
    [
        (2, 2, False),
        pytest.param(2, 3, True, marks=pytest.mark.campaign),
        pytest.param(1, 2, True, marks=pytest.mark.full),
        *(
            pytest.param(*given, marks=pytest.mark.campaign)
            for given in ((2, 0, False), (3, 1, False), (2, 1, True), (3, 3, False))
        ),
    ],
)
def test_a_script_trains_as_a_plain_loop(
    ranks: Callable[[int], Ranks], tmp_path: Path, world: int, stage: int, compiled: bool
) -> None:
    for found in ranks(world).run(script, folder=str(tmp_path), stage=stage, compiled=compiled):
        check(found, plain(world))
        # Steps of an epoch end two, two and one micro-batch; at stage 1 that is one reduction each.
        assert world == 1 or not compiled or (found[4][4] == found[4][5]) is (stage == 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint_1"]
    model = Words()
    missing = model.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"), strict=False)
    assert missing.missing_keys == ["lm_head.weight"] and not missing.unexpected_keys  # tied, as in Accelerate
    assert all(torch.equal(value, found[3][name]) for name, value in model.named_parameters())


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(((2, 3), (1, 0)), marks=pytest.mark.full),
        pytest.param(((2, 3), (1, 0), (3, 1), (2, 1)), marks=pytest.mark.campaign),
    ],
)
def test_a_run_goes_on_bit_for_bit_and_on_another_world(
    ranks: Callable[[int], Ranks], tmp_path: Path, others: tuple[tuple[int, int], ...]
) -> None:
    whole = ranks(2).run(script, folder=str(tmp_path), stage=3)[0]
    state = str(tmp_path / "checkpoints" / "checkpoint_1")
    for world, stage in others:
        later = ranks(world).run(script, folder=str(tmp_path / "later"), stage=stage, resume=state)
        for found in later:
            check(found, plain(2, world), SAVED)
            if (world, stage) == (2, 3):
                assert found[:3] == (whole[0][SAVED:], whole[1][SAVED:], whole[2][1:])
                assert all(torch.equal(found[3][name], value) for name, value in whole[3].items())


# ------------------------------------------------------------------------------------------------- states


def one_step(accelerator: Any, model: nn.Module, optimizer: Any, scheduler: Any = None) -> float:
    loss = model(tokens(1)[:4])
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()
    if scheduler is not None:
        scheduler.step()
    optimizer.zero_grad()
    return loss.item()


def saved(folder: str) -> None:
    """A state after one step, and one after the next in ``later``."""
    with accelerated():
        accelerator, model, optimizer, _, scheduler = prepared(3, gradient_accumulation_steps=1)
        accelerator.register_for_checkpointing(scheduler)
        for name in ("state", "later"):
            one_step(accelerator, model, optimizer, scheduler)
            accelerator.save_state(Path(folder) / name)


def load_damaged(folder: str) -> tuple[str, bool]:
    """What load_state raises, and whether the model is as it was."""
    with accelerated():
        accelerator, model, _, _, scheduler = prepared(3, gradient_accumulation_steps=1)
        accelerator.register_for_checkpointing(scheduler)
        before = weights(model)
        try:
            accelerator.load_state(folder)
        except compile_muon.CheckpointError as error:
            return str(error), all(torch.equal(before[name], value) for name, value in weights(model).items())
        return "", False


def damage(state: Path, how: str) -> None:
    if how == "foreign":
        shutil.rmtree(state / "muon_zero")
    elif how == "mixed":  # a save over this one was killed before its commit
        for path in (state.parent / "later").iterdir():
            if path.is_file():
                shutil.copy(path, state)
    elif how == "missing":
        (state / "random_states_0.pkl").unlink()
    elif how == "shard":
        path = next((state / "muon_zero" / "step-1" / "tensors").iterdir())
        path.write_bytes(path.read_bytes()[:-1] + b"\x99")
    elif how == "two models":
        shutil.copytree(state / "muon_zero", state / "muon_zero_1")
    else:
        path = state / how
        path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("foreign", r"muon_zero: has no checkpoint of MuonZero; load a state that was saved after prepare\(\)"),
        pytest.param(
            "mixed",
            r"step 1: custom_checkpoint_0.pkl, scheduler.bin: is damaged, missing, or of another",
            marks=pytest.mark.full,
        ),
        pytest.param("missing", "random_states_0.pkl: is damaged, missing", marks=pytest.mark.full),
        ("scheduler.bin", "scheduler.bin: is damaged"),
        pytest.param("muon_zero/accelerate-1.json", "accelerate-1.json: ", marks=pytest.mark.full),
        ("shard", "tensors/shard-.*"),
        ("two models", "muon_zero_1: is of a model that is not prepared"),
    ],
)
def test_a_state_that_is_not_whole_is_refused(
    ranks: Callable[[int], Ranks], tmp_path: Path, how: str, said: str
) -> None:
    world = 2 if how in ("mixed", "foreign") else 1
    ranks(world).run(saved, folder=str(tmp_path))
    damage(tmp_path / "state", how)
    for error, untouched in ranks(world).run(load_damaged, folder=str(tmp_path / "state")):
        assert re.search(said, error) and untouched, error


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
        first, expected = weights(model), one_step(accelerator, model, optimizer)
    with accelerated():
        accelerator, model, optimizer, *_ = prepared(2, gradient_accumulation_steps=1)
        accelerator.load_state(tmp_path)
        assert all(torch.equal(first[name], value) for name, value in weights(model).items())
        assert one_step(accelerator, model, optimizer) == expected


def test_gradients_that_would_be_lost_are_refused(tmp_path: Path) -> None:
    with accelerated():
        accelerator, model, optimizer, *_ = prepared(2)
        with accelerator.accumulate(model):
            accelerator.backward(model(tokens(1)))
            optimizer.step()
            optimizer.zero_grad()
        with pytest.raises(compile_muon.CheckpointError, match="gradients of the micro-batches .*sync_gradients"):
            accelerator.save_state(tmp_path)


def test_an_accumulation_begins_anew_after_loading(tmp_path: Path) -> None:
    """With another number of micro-batches, where Accelerate's own count is in the middle of a step."""
    for count in (2, 3):
        with accelerated():
            accelerator, model, optimizer, *_ = prepared(2, gradient_accumulation_steps=count)
            if count == 3:
                accelerator.load_state(tmp_path)
            synced = []
            for _ in range(count):
                with accelerator.accumulate(model):
                    synced.append(accelerator.sync_gradients)
                    one_step(accelerator, model, optimizer)
            assert synced == [False] * (count - 1) + [True]
            accelerator.save_state(tmp_path)


def adversaries(folder: str) -> tuple[list[float], list[float]]:
    """Two sharded models and a plain one under DDP in one accelerator: losses before saving, and after loading."""
    from accelerate import Accelerator

    from compile_muon.integrations.accelerate import prepare

    found: list[list[float]] = []
    for resume in (False, True):
        with accelerated():
            accelerator, third = Accelerator(cpu=True), Words()
            models = [compile_muon.initialize(Words(), {**CONFIG, "zero_optimization": {"stage": s}}) for s in (1, 3)]
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
            found.append([one_step(accelerator, *pair) for pair in each])
            whole = accelerator.get_state_dict(third)  # the plain one's own, on every rank
            assert len(whole) == len(third.state_dict()) and g_opt.model is g and d_opt.model is d
    return found[0], found[1]


def test_several_models_share_an_accelerator(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    for before, after in ranks(2).run(adversaries, folder=str(tmp_path)):
        assert before == after
        assert len(set(before)) == 3


# ------------------------------------------------------------------------------------------------- the rest of the loop


def others(folder: str) -> tuple[float, float, bool]:
    """bfloat16 by autocast; values clipped; a copy; whole state dicts of torch.compile's wrapper; memory freed."""
    with accelerated():
        accelerator, model, optimizer, *_ = prepared(
            1, compiled=True, mixed_precision="bf16", gradient_accumulation_steps=1
        )
        accelerator.backward(model(tokens(1)))
        accelerator.clip_grad_value_(model.parameters(), 1e-3)
        largest = max(full(param.grad).abs().max().item() for param in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        average = copy.deepcopy(model)
        assert all(torch.equal(value, weights(average)[name]) for name, value in weights(model).items())
        state = accelerator.get_state_dict(torch.compile(model, backend="muon_zero"))
        assert len(state) == (len(model.state_dict()) if world_and_rank()[1] == 0 else 0)
        accelerator.save_model(model, folder, safe_serialization=False)
        assert accelerator.unwrap_model(model, keep_fp32_wrapper=False) is model
        optimizer = accelerator.free_memory(optimizer)[0]
        return largest, one_step_in_bf16(), optimizer is None


def one_step_in_bf16() -> float:
    with accelerated():
        accelerator, model, optimizer, *_ = prepared(3, mixed_precision="bf16", gradient_accumulation_steps=1)
        one_step(accelerator, model, optimizer)
        return one_step(accelerator, model, optimizer)


def share_sequences(sequence: int) -> tuple[list[float], list[int], list[str]]:
    """Losses of an epoch; then its rows as ``gather_for_metrics`` has them, tensors and strings."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from transformers import LlamaConfig, LlamaForCausalLM

    from compile_muon.integrations.accelerate import prepare

    shape = dict(vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    losses, rows, words = list[float](), list[int](), list[str]()
    with accelerated():
        accelerator = Accelerator(cpu=True)
        set_seed(3)
        model = LlamaForCausalLM(LlamaConfig(**shape, use_cache=False))
        config = {**CONFIG, "zero_optimization": {"stage": 2}, "sequence_parallel": {"size": sequence}}
        model, optimizer = compile_muon.initialize(model, config)
        texts = tokens(2)[:5]
        model, optimizer, loader = prepare(accelerator, model, optimizer, DataLoader(texts, batch_size=2, shuffle=True))
        if sequence > 1:
            accelerator.dataloader_config.dispatch_batches = True
            with pytest.raises(compile_muon.ConfigError, match="dispatch_batches = True: .* ranks share a sequence"):
                accelerator.prepare_data_loader(DataLoader(texts))
        for batch in loader:
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            rows += accelerator.gather_for_metrics(batch)[:, 0].tolist()
            words += accelerator.gather_for_metrics([str(number.item()) for number in batch[:, 0]])
    return losses, rows, words


def test_ranks_that_share_a_sequence_have_one_loader(ranks: Callable[[int], Ranks]) -> None:
    expected = share_sequences(1)
    assert sorted(expected[1]) == sorted(tokens(2)[:5, 0].tolist()) and expected[2] == list(map(str, expected[1]))
    for losses, *others in ranks(2).run(share_sequences, sequence=2):
        assert losses == pytest.approx(expected[0], rel=1e-5) and tuple(others) == expected[1:]


@pytest.mark.full
def test_bf16_values_copies_and_wrappers(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    with accelerated():
        accelerator, model, optimizer, *_ = prepared(3, gradient_accumulation_steps=1)
        one_step(accelerator, model, optimizer)
        expected = one_step(accelerator, model, optimizer)
    for largest, loss, freed in ranks(2).run(others, folder=str(tmp_path)):
        assert largest == pytest.approx(1e-3) and freed
        assert loss == pytest.approx(expected, abs=0.02) and loss != expected
    Words().load_state_dict(torch.load(tmp_path / "pytorch_model.bin", weights_only=True))


def test_a_skipped_step_does_not_move_the_schedule() -> None:
    given = {"nonfinite": "skip"}
    optimizer_keys = {"optimizer": {"type": "Muon", "params": {**CONFIG["optimizer"]["params"], **given}}}
    with accelerated():
        accelerator, model, optimizer, _, scheduler = prepared(2, given=optimizer_keys, gradient_accumulation_steps=1)
        for weight, skipped in ((float("nan"), True), (1.0, False)):
            before = scheduler.get_last_lr()
            accelerator.backward(model(tokens(1)) * weight)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            assert accelerator.optimizer_step_was_skipped is skipped
            assert (scheduler.get_last_lr() == before) is skipped


def refused(settings: dict[str, Any], given: dict[str, Any]) -> str:
    with accelerated():
        try:
            prepared(2, given=given, **settings)
        except compile_muon.ConfigError as error:
            return str(error)
    return ""


def plugin(name: str) -> Any:
    from accelerate import DistributedDataParallelKwargs, FullyShardedDataParallelPlugin
    from accelerate.utils import DDPCommunicationHookType, ParallelismConfig

    if name == "fsdp_plugin":
        return FullyShardedDataParallelPlugin(fsdp_version=2)
    if name == "parallelism_config":
        return ParallelismConfig(dp_replicate_size=1)
    return [DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)]


@pytest.mark.parametrize(
    ("settings", "given", "said"),
    [
        ({"mixed_precision": "fp16"}, {}, "mixed_precision = 'fp16': scales the loss .*use \"bf16\""),
        ({"dynamo_backend": "eager"}, {}, "dynamo_backend = 'EAGER': would compile the model a second time"),
        ({"fsdp_plugin": None}, {}, r"Accelerator\(fsdp_plugin=...\).* shards the model too; leave it out"),
        ({"parallelism_config": None}, {}, r"Accelerator\(parallelism_config=...\).* shards the model too"),
        ({"kwargs_handlers": None}, {}, "comm_hook = 'bf16': there is no DDP to hook"),
        ({}, {"gradient_accumulation_steps": 2}, "gradient_accumulation_steps = 2: is the accelerator's to say"),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings: dict[str, Any], given: dict[str, Any], said: str) -> None:
    settings = {name: plugin(name) if value is None else value for name, value in settings.items()}
    assert re.search(said, refused(settings, given))


@pytest.mark.parametrize("flag", FLAGS)
def test_what_accelerate_launch_sets_is_refused(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    with accelerated():
        accelerator, *_ = prepared(2)
        from compile_muon.integrations.accelerate import prepare

        monkeypatch.setenv(flag, "true")
        with pytest.raises(compile_muon.ConfigError, match=flag.removeprefix("ACCELERATE_USE_").lower()):
            prepare(accelerator, *compile_muon.initialize(Words(), CONFIG))


def test_pairs_that_are_not_are_refused() -> None:
    from accelerate import Accelerator

    from compile_muon.integrations.accelerate import prepare

    with accelerated():
        accelerator, words = Accelerator(cpu=True), Words()
        adamw = torch.optim.AdamW(words.parameters())
        with pytest.raises(compile_muon.ConfigError, match=r"objects = 'Words, AdamW': hold no sharded model"):
            prepare(accelerator, words, adamw)
        model, optimizer = compile_muon.initialize(Words(), CONFIG)
        with pytest.raises(compile_muon.ConfigError, match="optimizer = 'MuonZero': comes without the model it trains"):
            prepare(accelerator, words, optimizer)
        with pytest.raises(compile_muon.ConfigError, match="model = 'Words': is sharded, and its MuonZero is not"):
            prepare(accelerator, model)
        late = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(compile_muon.ConfigError, match="optimizer = 'SGD': trains a sharded model too"):
            prepare(accelerator, model, optimizer, late)
        prepare(accelerator, model, optimizer)
        with pytest.raises(compile_muon.ConfigError, match="is prepared already"):
            prepare(accelerator, model, optimizer)


def elsewhere(kind: str) -> str:
    """An optimizer over a group of its own: each rank would train alone; one whose ranks need the same batches."""
    from accelerate import Accelerator

    from compile_muon.integrations.accelerate import prepare

    with accelerated():
        accelerator, words = Accelerator(cpu=True), Words()
        if kind == "tensor":
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
            name = next(name for name, child in words.named_modules() if isinstance(child, nn.Linear))
            parallelize_module(words, mesh, {name: ColwiseParallel()})
            pair = compile_muon.initialize(words, CONFIG, mesh=mesh)
        else:
            group = [dist.new_group([rank]) for rank in range(2)][world_and_rank()[1]]
            pair = compile_muon.initialize(words, CONFIG, process_group=group)
        try:
            prepare(accelerator, *pair)
        except compile_muon.ConfigError as error:
            return str(error)
    return ""


def together() -> list[str]:
    """What wants a copy of the model on every rank; loaders may be prepared later."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    from compile_muon.integrations.accelerate import prepare

    said = []
    with accelerated():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepare(accelerator, *compile_muon.initialize(Words(), CONFIG))
        loader, schedule = prepare(accelerator, [0, 1], torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
        assert loader == [0, 1] and type(schedule).__name__ == "AcceleratedScheduler"
        assert accelerator.reduce(torch.ones(1)).item() == dist.get_world_size()
        for context in (
            lambda: LocalSGD(accelerator, model, local_sgd_steps=1),
            lambda: accelerator.join_uneven_inputs([model]),
        ):
            try:
                with context() as local:
                    local.step()
            except compile_muon.ConfigError as error:
                said.append(str(error))
    return said


def test_what_wants_copies_of_the_model_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for local, uneven in ranks(2).run(together):
        assert "LocalSGD" in local and "enabled=False" in local
        assert "accelerator.join_uneven_inputs = 'a sharded model'" in uneven and "even_batches" in uneven


def test_another_world_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for error in ranks(2).run(elsewhere, kind="alone"):
        assert "is sharded over 1 of the accelerator's 2 processes" in error
    for error in ranks(2).run(elsewhere, kind="tensor"):
        assert "mesh.tensor = 2: needs the same batches on its ranks" in error
