"""``MuonTrainer`` beside a plain loop: clipped, accumulated, evaluated, saved, gone on with, on several ranks."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from support.harness import Ranks
from support.launched import accelerated
from support.reference import full, world_and_rank
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler

import compile_muon

CONFIG = {
    "optimizer": {"type": "Muon", "params": {"lr": "auto", "adam_lr": 0.003, "weight_decay": 0.1, "ns_dtype": "fp32"}},
    "gradient_accumulation_steps": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}
STEPS, ACCUMULATED, BATCH, LIMIT, RATE = 6, 2, 2, 0.5, 0.02


def gpt(**settings: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    shape = dict(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**shape, **dropout, **settings))


class Sentences(Dataset):
    def __init__(self, size: int = 96) -> None:
        dice = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 61, (size, 8), generator=dice)
        # The Trainer divides by the number of labels, of which the first predicts nothing.
        self.labels = torch.cat((torch.full((size, 1), -100), self.tokens[:, 1:]), dim=1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.labels[index]}


def trainer_of(
    folder: str, stage: int, *, compiled: bool = False, config: dict[str, Any] = CONFIG, groups: Any = None,
    extensions: Any = (), **settings: Any,
) -> Any:  # fmt: skip
    from transformers import TrainingArguments

    from compile_muon.integrations.transformers import MuonTrainer

    class InOrder(MuonTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    defaults: dict[str, Any] = dict(
        max_steps=STEPS, per_device_train_batch_size=BATCH, gradient_accumulation_steps=ACCUMULATED, use_cpu=True,
        max_grad_norm=LIMIT, learning_rate=RATE, warmup_steps=2, logging_steps=1, report_to=[], disable_tqdm=True,
        save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4,
    )  # fmt: skip
    config = {**config, "zero_optimization": {"stage": stage}, "compile": {"codegen": "eager"} if compiled else False}
    arguments = TrainingArguments(output_dir=folder, **{**defaults, **settings})
    return InOrder(
        model=gpt(), args=arguments, train_dataset=Sentences(), eval_dataset=Sentences(12), muon_config=config,
        muon_groups=groups, muon_extensions=extensions,
    )  # fmt: skip


def weights(model: Any) -> dict[str, Tensor]:
    return {name: full(param.detach()).clone() for name, param in model.named_parameters()}


def losses(trainer: Any, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def train(folder: str, stage: int, compiled: bool) -> tuple[list[float], list[float], list[float], dict[str, Tensor]]:
    with accelerated():
        trainer = trainer_of(folder, stage, compiled=compiled)
        trainer.train()
        assert trainer.muon.totals()["skipped_steps"] == 0
        assert "muon_zero/bytes_sent" in trainer.state.log_history[0]
        return losses(trainer), losses(trainer, "grad_norm"), losses(trainer, "eval_loss"), weights(trainer.model)


def plain(world: int) -> tuple[list[float], list[float], list[float], dict[str, Tensor]]:
    """The same by hand, in one process on the batches of all ranks."""
    from transformers import get_linear_schedule_with_warmup

    model, data = gpt(), Sentences()
    optimizer = compile_muon.MuonZero(
        model, lr=RATE, adamw_lr=0.003, weight_decay=0.1, adamw_weight_decay=0.1, ns_dtype="fp32",
        gradient_accumulation_steps=None,
    )  # fmt: skip
    schedule = get_linear_schedule_with_warmup(optimizer, 2, STEPS)
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for step in range(STEPS):
        total = 0.0
        for batch in range(world * ACCUMULATED):
            first = (step * world * ACCUMULATED + batch) * BATCH % len(data)
            tokens = data.tokens[first : first + BATCH]
            loss = model(input_ids=tokens, labels=tokens).loss / (world * ACCUMULATED)
            loss.backward()
            total += loss.item()
        found[0].append(total)
        found[1].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if (step + 1) % 3 == 0:
            tokens = Sentences(12).tokens
            with torch.no_grad():
                found[2].append(model(input_ids=tokens, labels=tokens).loss.item())
    return *found, weights(model)


@pytest.mark.parametrize(
    ("world", "stage", "compiled"),
    [
        (2, 2, False),
        *(
            pytest.param(*given, marks=pytest.mark.campaign)
            for given in ((2, 3, True), (2, 0, False), (2, 1, True), (1, 2, True), (3, 3, False))
        ),
    ],
)
def test_the_trainer_trains_as_a_plain_loop(
    ranks: Callable[[int], Ranks], tmp_path: Path, world: int, stage: int, compiled: bool
) -> None:
    expected = plain(world)
    for found in ranks(world).run(train, folder=str(tmp_path), stage=stage, compiled=compiled):
        for mine, theirs in zip(found[:3], expected[:3], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5, abs=2e-5)
        for name, value in expected[3].items():
            torch.testing.assert_close(found[3][name], value, rtol=1e-4, atol=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-3", "checkpoint-6"]
    saved = load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in found[3].items())


def counted(prediction: Any) -> dict[str, float]:
    """How many rows and positions there are, and how often the likeliest token is the next one."""
    guesses, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"rows": len(labels), "positions": guesses.shape[1], "hits": int((guesses == labels).sum())}


def train_sharing(folder: str, sequence: int) -> tuple[list[Any], ...]:
    """Sequences of 8 tokens on as many ranks; ten rows to evaluate, which do not fill the last batch."""
    config = {**CONFIG, "sequence_parallel": {"size": sequence}}
    with accelerated():
        trainer = trainer_of(folder, 3, config=config, include_num_input_tokens_seen="all", save_strategy="no")
        trainer.compute_metrics, trainer.eval_dataset = counted, Sentences(10)
        trainer.train()
        seen = [trainer.state.num_input_tokens_seen, trainer.get_total_train_batch_size(trainer.args)]
        names = ("loss", "grad_norm", "eval_loss", "eval_rows", "eval_positions", "eval_hits")
        return *(losses(trainer, name) for name in names), seen


@pytest.mark.full
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.campaign)])
def test_ranks_that_share_sequences_train_as_half_as_many(
    ranks: Callable[[int], Ranks], tmp_path: Path, world: int
) -> None:
    expected = ranks(world // 2).run(train_sharing, folder=str(tmp_path), sequence=1)[0]
    assert expected[3] == [10, 10] and expected[4] == [7, 7] and expected[6][0] == STEPS * ACCUMULATED * 8 * world
    for found in ranks(world).run(train_sharing, folder=str(tmp_path), sequence=2):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine == pytest.approx(theirs, rel=2e-5)


# ------------------------------------------------------------------------------------------------- going on


def go_on(folder: str, stage: int) -> tuple[dict[str, Tensor], list[float], dict[str, Tensor]]:
    """From checkpoint-3: the weights the next step begins with, its losses, and the last weights."""
    from transformers import TrainerCallback

    began: list[dict[str, Tensor]] = []

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not began:
                began.append(weights(kwargs["model"]))

    with accelerated():
        trainer = trainer_of(folder, stage)
        trainer.add_callback(Watch())
        trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-3"))
        return began[0], losses(trainer)[-3:], weights(trainer.model)


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(((2, 3), (1, 0)), marks=pytest.mark.full),
        pytest.param(((2, 3), (1, 0), (3, 1)), marks=pytest.mark.campaign),
    ],
)
def test_a_run_goes_on_bit_for_bit_and_on_another_world(
    ranks: Callable[[int], Ranks], tmp_path: Path, others: tuple[tuple[int, int], ...]
) -> None:
    whole = ranks(2).run(train, folder=str(tmp_path), stage=3, compiled=False)[0]
    saved = load_file(tmp_path / "checkpoint-3" / "model.safetensors")
    for world, stage in others:
        for began, later, last in ranks(world).run(go_on, folder=str(tmp_path), stage=stage):
            assert all(torch.equal(began[name], saved[name]) for name in began)
            if world == 2:
                assert later == whole[0][3:]
                assert all(torch.equal(last[name], value) for name, value in whole[3].items())


def train_to_the_best(folder: str) -> tuple[str, dict[str, Tensor], list[list[int]]]:
    """At a rate that makes it worse: the first checkpoint is the best. Then what the model generates."""
    with accelerated():
        trainer = trainer_of(folder, 3, learning_rate=3.0, load_best_model_at_end=True, metric_for_best_model="loss")
        trainer.train()
        tokens = torch.tensor([[1, 2, 3]])
        trainer.model.eval()
        with torch.no_grad():
            text = trainer.model.generate(tokens, max_new_tokens=4, do_sample=False, attention_mask=tokens.bool())
        return Path(trainer.state.best_model_checkpoint).name, weights(trainer.model), text.tolist()


def test_the_best_model_is_loaded_at_the_end_and_generates(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    (best, held, text), (_, _, other) = ranks(2).run(train_to_the_best, folder=str(tmp_path))
    saved = load_file(tmp_path / best / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in held.items())
    whole = gpt()
    whole.load_state_dict(saved, strict=False)
    whole.tie_weights()
    tokens = torch.tensor([[1, 2, 3]])
    expected = whole.eval().generate(tokens, max_new_tokens=4, do_sample=False, attention_mask=tokens.bool())
    assert text == other == expected.tolist()


def generate_unevenly(folder: str) -> tuple[list[int], float]:
    """T5 at stage 3, whose ranks generate texts of different lengths; the lengths, and the evaluation's loss."""
    from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from compile_muon.integrations.transformers import MuonSeq2SeqTrainer

    torch.manual_seed(0)
    shape = dict(vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(T5Config(**shape, dropout_rate=0.0, eos_token_id=1, pad_token_id=0))
    with accelerated():
        _, rank = world_and_rank()
        arguments = Seq2SeqTrainingArguments(
            output_dir=folder, max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2, use_cpu=True,
            report_to=[], disable_tqdm=True, predict_with_generate=True, save_strategy="no",
        )  # fmt: skip
        config = {**CONFIG, "zero_optimization": {"stage": 3}}
        trainer = MuonSeq2SeqTrainer(
            model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences(8), muon_config=config
        )
        trainer.train()
        found = trainer.evaluate(max_new_tokens=3 + 4 * rank)
        return [rank], found["eval_loss"]


def test_ranks_generate_together(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    (_, one), (_, other) = ranks(2).run(generate_unevenly, folder=str(tmp_path))
    assert one == other


# ------------------------------------------------------------------------------------------------- other settings


def train_an_epoch(folder: str, stage: int, compiled: bool) -> tuple[list[float], list[float]]:
    """Five micro-batches a rank: the last step of the epoch has one."""
    with accelerated():
        trainer = trainer_of(
            folder, stage, compiled=compiled, max_steps=-1, num_train_epochs=1, eval_strategy="no", save_strategy="no"
        )
        trainer.train_dataset = Sentences(20)
        trainer.train()
        return losses(trainer), losses(trainer, "grad_norm")


@pytest.mark.full
def test_an_epoch_may_end_with_fewer_micro_batches(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    expected = ranks(2).run(train_an_epoch, folder=str(tmp_path), stage=0, compiled=False)[0]
    found = ranks(2).run(train_an_epoch, folder=str(tmp_path), stage=1, compiled=True)[0]
    assert len(expected[1]) == 3
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "given", "rates"),
    [
        ("polynomial", {"lr_end": 0.01}, [0.02, 0.0175, 0.015, 0.0125]),
        ("cosine_with_min_lr", {"min_lr": 0.01}, [0.02, 0.0185355, 0.015, 0.0114645]),
    ],
)
def test_schedules_with_an_end_of_their_own(
    tmp_path: Path, kind: str, given: dict[str, float], rates: list[float]
) -> None:
    settings: dict[str, Any] = dict(max_steps=4, warmup_steps=0, save_strategy="no", eval_strategy="no")
    with accelerated():
        trainer = trainer_of(str(tmp_path), 2, lr_scheduler_type=kind, lr_scheduler_kwargs=given, **settings)
        trainer.train()
    assert losses(trainer, "learning_rate") == pytest.approx(rates, rel=1e-5)
    assert losses(trainer, "muon_zero/adamw_lr")[0] == pytest.approx(0.003 * rates[1] / 0.02, rel=1e-5)


def test_groups_are_those_of_a_loop_and_the_schedule_moves_them_all(tmp_path: Path) -> None:
    """Layer-wise rates of tensors, as people write them in ``create_optimizer``; the rest in a group of its own. An
    extension's metric is logged."""

    class Counting(compile_muon.Extension):
        written = 0

        def after_commit(self, found_inf: Tensor | None) -> None:
            self.written += 1

        def metrics(self) -> dict[str, float]:
            return {"written": self.written}

    def layerwise(model: Any) -> list[dict[str, Any]]:
        layers = [list(layer.parameters()) for layer in model.transformer.h]
        known = {id(param) for params in layers for param in params}
        rest = [param for param in model.parameters() if id(param) not in known]
        rates = [0.01, 0.02]
        return [{"params": p, "lr": rate} for p, rate in zip(layers, rates, strict=True)] + [{"params": rest}]

    with accelerated():
        settings: dict[str, Any] = dict(max_steps=2, warmup_steps=0, save_strategy="no", eval_strategy="no")
        trainer = trainer_of(str(tmp_path), 2, groups=layerwise, extensions=[Counting()], **settings)
        trainer.train()
    assert losses(trainer, "muon_zero/written") == [1, 2]
    found = {(group["name"], group["algorithm"]): group["initial_lr"] for group in trainer.muon.param_groups}
    assert {rate for (name, _), rate in found.items() if "0" in name} == {0.01}
    assert {rate for (name, _), rate in found.items() if "1" in name} == {0.02}
    assert all(group["lr"] == 0 for group in trainer.muon.param_groups)  # a linear schedule has ended


def test_weights_can_be_saved_before_training(tmp_path: Path) -> None:
    with accelerated():
        trainer_of(str(tmp_path), 2).save_model(str(tmp_path / "first"))
    saved = load_file(tmp_path / "first" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in weights(gpt()).items())


def go_on_from_the_newest(folder: str) -> int:
    from transformers import TrainerCallback

    began: list[int] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            began.append(state.global_step)

    with accelerated():
        trainer = trainer_of(folder, 3, max_steps=4, eval_strategy="no", save_steps=2)
        trainer.train()
        if world_and_rank()[1] == 0:  # as after a kill while checkpoint-4 was saved
            (Path(folder) / "checkpoint-4" / "trainer_state.json").unlink()
        dist.barrier()
        trainer = trainer_of(folder, 3, max_steps=4, eval_strategy="no", save_steps=2)
        trainer.add_callback(Watch())
        trainer.train(resume_from_checkpoint=True)
    return began[0]


def test_a_checkpoint_that_was_cut_off_is_passed_over(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    assert ranks(2).run(go_on_from_the_newest, folder=str(tmp_path)) == [2, 2]


def saved_and_trained_again(folder: str) -> None:
    from compile_muon.errors import ConfigError
    from compile_muon.integrations.transformers import MuonTrainer

    few = dict(max_steps=1, eval_strategy="no", save_strategy="no", gradient_accumulation_steps=1)
    with accelerated():
        trainer = trainer_of(folder, 2, **few)
        trainer.train()
        trainer.model.save_pretrained(f"{folder}/whole", max_shard_size="1GB")  # Transformers' own name, on all ranks
        with pytest.raises(ConfigError, match=r"save_pretrained.variant = 'fp16': is not done with a sharded model"):
            trainer.model.save_pretrained(f"{folder}/other", variant="fp16")
        held = {name: full(param) for name, param in trainer.model.named_parameters()}
        if world_and_rank()[1] == 0:
            saved = load_file(Path(folder) / "whole" / "model.safetensors")
            assert all(torch.equal(held[name], value) for name, value in saved.items() if name in held) and saved
        again = MuonTrainer(
            model=trainer.model, args=trainer.args, train_dataset=trainer.train_dataset, muon_config={}
        )  # fmt: skip
        with pytest.raises(ConfigError, match=r"MuonTrainer.model = .*train\(\) of that trainer.*full_parameters"):
            again.train()
        with compile_muon.full_parameters(trainer.model):
            model = copy.deepcopy(trainer.model)
        again = MuonTrainer(model=model, args=trainer.args, train_dataset=trainer.train_dataset, muon_config={})
        again.train()  # as the remedy says
        model.save_pretrained(f"{folder}/copy")


def test_transformers_own_saving_and_a_second_trainer(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Of a sharded model: the former writes whole weights on all ranks, the latter says what to do, which works."""
    ranks(2).run(saved_and_trained_again, folder=str(tmp_path))


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = self.last(self.norm(input_ids.float()))
        return {"loss": found.square().mean(), "logits": found}


def evaluate_normed(folder: str) -> tuple[dict[str, Tensor], float]:
    from transformers import TrainingArguments

    from compile_muon.integrations.transformers import MuonTrainer

    torch.manual_seed(0)
    with accelerated():
        arguments = TrainingArguments(
            output_dir=folder, max_steps=2, per_device_train_batch_size=4, use_cpu=True, report_to=[],
            disable_tqdm=True, save_strategy="no", learning_rate=0.02,
        )  # fmt: skip
        trainer = MuonTrainer(
            model=Normed(), args=arguments, train_dataset=Sentences(), eval_dataset=Sentences(16), muon_config=CONFIG
        )
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model(folder)
        return {name: value.clone() for name, value in trainer.model.named_buffers()}, loss


def test_what_is_evaluated_is_what_is_saved(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """BatchNorm's statistics are of each rank's own batches, and rank 0's are saved."""
    found = ranks(2).run(evaluate_normed, folder=str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    model = Normed().eval()
    model.load_state_dict(saved)
    expected = model(Sentences(16).tokens)["loss"].item()
    for buffers, loss in found:
        assert all(torch.equal(saved[name], value) for name, value in buffers.items())
        assert loss == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"torch_compile": True}, r"TrainingArguments.torch_compile = True: would compile .*\"compile\": true"),
        ({"auto_find_batch_size": True}, "TrainingArguments.auto_find_batch_size = True"),
        ({"optim": "adafactor"}, "TrainingArguments.optim = 'adafactor': is another optimizer; leave it out"),
        ({"save_on_each_node": True}, "TrainingArguments.save_on_each_node = True: .* share output_dir"),
        ({"bf16_full_eval": True}, "TrainingArguments.bf16_full_eval = True: casts the weights that train"),
        ({"weight_decay": 0.01}, r'TrainingArguments.weight_decay = 0.01: is not .*, 0.1, .* "weight_decay": "auto"'),
        ({"adam_beta2": 0.9}, r'TrainingArguments.adam_beta2 = 0.9: is not .*, 0.95, .* "betas": "auto"'),
        ({"gradient_accumulation_steps": 3, "config": {"gradient_accumulation_steps": 2}}, "contradicts"),
        ({"config": {"mesh": {"tensor": 2}}}, "mesh.tensor = 2: needs the same batches on its ranks"),
        ({"config": {"sequence_parallel": {"inputs": "sharded"}}}, "inputs = 'sharded': cannot be: loaders here give"),
        ({"optimizers": (torch.optim.SGD([torch.zeros(1)]), None)}, "optimizers = 'SGD': is another optimizer"),
    ],
)
def test_what_cannot_be_honoured_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    from transformers import TrainingArguments

    from compile_muon.integrations.transformers import MuonTrainer

    given = {name: settings.pop(name) for name in ("optimizers",) if name in settings}
    config = {**CONFIG, **settings.pop("config", {})}
    with accelerated(), pytest.raises(compile_muon.ConfigError, match=said):
        arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **settings)
        MuonTrainer(model=gpt(), args=arguments, train_dataset=Sentences(), muon_config=config, **given)


def test_what_the_launcher_says_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with accelerated(), pytest.raises(compile_muon.ConfigError, match="fsdp_plugin.* shards the model too"):
        trainer_of(str(tmp_path), 2)


@pytest.mark.full
def test_clipping_decay_and_schedules_are_the_trainers(tmp_path: Path) -> None:
    """Without AdamW's decay of norms and biases, and no direction thrown away by a second clipping."""
    from compile_muon.config.checks import FILLED
    from compile_muon.integrations.transformers import _AUTO

    with accelerated():
        trainer = trainer_of(str(tmp_path), 2, compiled=True, max_grad_norm=1e6, gradient_accumulation_steps=1)
        decayed = set(trainer.get_decay_parameter_names(trainer.model))
        trainer.train()
        metrics = {**trainer.muon.metrics(), **trainer.muon.totals()}
        assert trainer.muon_config.zero.gradient_clipping == 1e6
        assert metrics["directions_used"] == metrics["directions_speculated"] == STEPS * 8
        assert losses(trainer, "grad_norm")[-1] == pytest.approx(metrics["grad_norm"])
        rates = {name: g["weight_decay"] for g in trainer.muon.param_groups for name in g["param_names"]}
        assert {name for name, decay in rates.items() if decay} == decayed & set(rates) < set(rates)
    schedule = {"type": "WarmupDecayLR", "params": {key: "auto" for key in (
        "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"
    )} | {"warmup_type": "linear"}}  # fmt: skip
    config = {**CONFIG, "optimizer": {"type": "Muon"}, "scheduler": schedule, "gradient_clipping": "auto"}
    with accelerated():
        trainer = trainer_of(str(tmp_path), 2, learning_rate=0.01, save_strategy="no", config=config)
        trainer.train()
        assert losses(trainer, "learning_rate") == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.0075, 0.005])
    known = {".".join(path) for path in _AUTO} | {
        "scheduler.params.warmup_num_steps",
        "scheduler.params.total_num_steps",
    }
    assert known == set(FILLED)


def test_a_limit_that_contradicts_the_arguments_is_refused(tmp_path: Path) -> None:
    said = "gradient_clipping = 0.1: contradicts TrainingArguments.max_grad_norm = 0.5"
    with accelerated(), pytest.raises(compile_muon.ConfigError, match=said):
        trainer_of(str(tmp_path), 2, config={**CONFIG, "gradient_clipping": 0.1})
    with accelerated():
        trainer = trainer_of(str(tmp_path), 2, max_grad_norm=0.0, config={**CONFIG, "gradient_clipping": 0.1})
    assert trainer.muon_config.zero.gradient_clipping == 0.1


def test_searching_hyperparameters_is_refused(tmp_path: Path) -> None:
    with accelerated(), pytest.raises(compile_muon.ConfigError, match="hyperparameter_search: .* each trial"):
        trainer_of(str(tmp_path), 2).hyperparameter_search(n_trials=2)


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    with accelerated():
        (tmp_path / "checkpoint-3").mkdir()
        trainer = trainer_of(str(tmp_path), 2)
        with pytest.raises(compile_muon.ConfigError, match="saving checkpoint-3 was cut off, and there is no other"):
            trainer.train(resume_from_checkpoint=True)
        trainer.create_optimizer()
        with pytest.raises(compile_muon.ConfigError, match="has no optimizer state of MuonZero"):
            trainer._load_optimizer_and_scheduler(str(tmp_path / "checkpoint-3"))


def test_every_rank_saves_whichever_the_trainer_would_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Transformers 5.20 it asks the first one alone, which would wait for the others."""
    from transformers import Trainer

    from compile_muon.integrations.transformers import MuonTrainer

    saved: list[str | None] = []
    monkeypatch.setattr(Trainer, "save_model", lambda *_: pytest.fail("was asked"))
    monkeypatch.setattr(MuonTrainer, "_save", lambda self, folder=None, state_dict=None: saved.append(folder))
    trainer = object.__new__(MuonTrainer)
    trainer.optimizer, trainer.args = object(), SimpleNamespace(push_to_hub=False, should_save=False)
    trainer.save_model("weights")
    assert saved == ["weights"]


def test_the_package_does_not_import_transformers() -> None:
    code = "import compile_muon.integrations, sys; assert not {'transformers', 'accelerate'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
