"""``MuonTrainer`` beyond test_trainers.py: the best model, texts, schedules, groups, and Transformers' own saving."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file
from support.harness import RanksOf, on_ranks
from support.launched import accelerated
from support.on_transformers import CONFIG, STEPS, Sentences, logged, trainer_of
from support.reference import refusal, world_and_rank
from support.trainers import ACCUMULATED, Counting, gpt, state_of
from torch import Tensor

import compile_muon

UNSAVED: dict[str, Any] = dict(save_strategy="no", eval_strategy="no")


def counted(prediction: Any) -> dict[str, float]:
    """How many rows and positions there are, and how often the likeliest token is the next one."""
    guesses, labels = prediction.predictions.argmax(-1)[:, :-1], prediction.label_ids[:, 1:]
    return {"rows": len(labels), "positions": guesses.shape[1], "hits": int((guesses == labels).sum())}


def train_sharing(folder: str, sequence: int) -> list[Any]:
    """Sequences of 8 tokens on as many ranks; ten rows to evaluate, which do not fill the last batch."""
    config = {**CONFIG, "sequence_parallel": {"size": sequence}}
    with accelerated():
        trainer = trainer_of(
            folder, 3, config=config, include_num_input_tokens_seen="all", save_strategy="no", max_steps=3
        )
        trainer.compute_metrics, trainer.eval_dataset = counted, Sentences(10)
        trainer.train()
        seen = [trainer.state.num_input_tokens_seen, trainer.get_total_train_batch_size(trainer.args)]
        return seen + [logged(trainer, name) for name in ("eval_loss", "eval_rows", "eval_positions", "eval_hits")]


@pytest.mark.full
def test_ranks_that_share_sequences_count_them_once(ranks: RanksOf, tmp_path: Path) -> None:
    expected = train_sharing(str(tmp_path), sequence=1)
    assert expected[:2] == [3 * ACCUMULATED * 8 * 2, 4] and expected[3:5] == [[10], [7]]
    for found in ranks(2).run(train_sharing, folder=str(tmp_path), sequence=2):
        assert [found[0], found[1], *found[3:]] == [expected[0], expected[1], *expected[3:]]
        assert found[2] == pytest.approx(expected[2], rel=2e-5)


def train_to_the_best(folder: str) -> tuple[str, dict[str, Tensor], list[list[int]]]:
    """At a rate that makes it worse: the first checkpoint is the best. Then what the model generates."""
    with accelerated():
        trainer = trainer_of(folder, 3, learning_rate=3.0, load_best_model_at_end=True, metric_for_best_model="loss")
        trainer.train()
        tokens = torch.tensor([[1, 2, 3]])
        trainer.model.eval()
        with torch.no_grad():
            text = trainer.model.generate(tokens, max_new_tokens=4, do_sample=False, attention_mask=tokens.bool())
        return Path(trainer.state.best_model_checkpoint).name, state_of(trainer.model), text.tolist()


@pytest.mark.full
def test_the_best_model_is_loaded_at_the_end_and_generates(ranks: RanksOf, tmp_path: Path) -> None:
    (best, held, text), (_, _, other) = ranks(2).run(train_to_the_best, folder=str(tmp_path))
    saved = load_file(tmp_path / best / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in held.items())
    whole = gpt()
    whole.load_state_dict(saved, strict=False)
    whole.tie_weights()
    tokens = torch.tensor([[1, 2, 3]])
    expected = whole.eval().generate(tokens, max_new_tokens=4, do_sample=False, attention_mask=tokens.bool())
    assert text == other == expected.tolist()


def generate_unevenly(folder: str) -> float:
    """T5 at stage 3, whose ranks generate texts of different lengths; the evaluation's loss."""
    from transformers import Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

    from compile_muon.integrations.transformers import MuonSeq2SeqTrainer

    torch.manual_seed(0)
    shape = dict(vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(T5Config(**shape, dropout_rate=0.0, eos_token_id=1, pad_token_id=0))
    with accelerated():
        arguments = Seq2SeqTrainingArguments(
            output_dir=folder, max_steps=2, per_device_train_batch_size=2, per_device_eval_batch_size=2, use_cpu=True,
            report_to=[], disable_tqdm=True, predict_with_generate=True, save_strategy="no",
        )  # fmt: skip
        config = {**CONFIG, "zero_optimization": {"stage": 3}}
        trainer = MuonSeq2SeqTrainer(
            model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences(8), muon_config=config
        )
        trainer.train()
        return trainer.evaluate(max_new_tokens=3 + 4 * world_and_rank()[1])["eval_loss"]


def test_ranks_generate_together(ranks: RanksOf, tmp_path: Path) -> None:
    one, other = ranks(2).run(generate_unevenly, folder=str(tmp_path))
    assert one == other


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_what_changes_parameters_is_refused_where_it_is_called() -> None:
    """What changes the parameters of a sharded model, tied and not; what is left of it trains."""
    from peft import LoraConfig
    from transformers import GPT2Config, GPT2LMHeadModel

    said = []
    for tied in (False, True):
        shape = GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=tied)
        model = GPT2LMHeadModel(shape)
        optimizer = compile_muon.MuonZero(model, stage=3)
        for kept in ((), (31,), (31, None, False), (30, 31)):  # the last is a multiple to round up to
            assert model.resize_token_embeddings(*kept) is model.get_input_embeddings()
        for change in (
            lambda model: model.resize_token_embeddings(40),
            lambda model: model.resize_token_embeddings(20, mean_resizing=False),
            lambda model: model.resize_token_embeddings(pad_to_multiple_of=8),
            lambda model: model.add_adapter(LoraConfig(target_modules=["c_fc"])),
        ):
            said.append(refusal(change, model))
        tokens = torch.randint(0, 31, (2, 8))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    names = [*["resize_token_embeddings"] * 3, "add_adapter"] * 2
    assert said == [
        f"{name}: gives a sharded model other parameters; call it before MuonZero shards the model" for name in names
    ]


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
    settings = dict(max_steps=4, warmup_steps=0, lr_scheduler_type=kind, lr_scheduler_kwargs=given)
    with accelerated():
        trainer = trainer_of(str(tmp_path), 2, **settings, **UNSAVED)
        trainer.train()
    assert logged(trainer, "learning_rate") == pytest.approx(rates, rel=1e-5)
    assert logged(trainer, "muon_zero/adamw_lr")[0] == pytest.approx(0.003 * rates[1] / 0.02, rel=1e-5)


def test_groups_are_those_of_a_loop_and_the_schedule_moves_them_all(tmp_path: Path) -> None:
    """Layer-wise rates of tensors, as people write them in ``create_optimizer``; the rest in a group of its own. An
    extension's metric is logged."""

    def layerwise(model: Any) -> list[dict[str, Any]]:
        layers = [list(layer.parameters()) for layer in model.transformer.h]
        known = {id(param) for params in layers for param in params}
        rest = [param for param in model.parameters() if id(param) not in known]
        rates = [0.01, 0.02]
        return [{"params": p, "lr": rate} for p, rate in zip(layers, rates, strict=True)] + [{"params": rest}]

    with accelerated():
        settings: dict[str, Any] = dict(net=gpt(n_layer=2), groups=layerwise, extensions=[Counting()])
        trainer = trainer_of(str(tmp_path), 2, max_steps=2, warmup_steps=0, **settings, **UNSAVED)
        trainer.train()
    assert logged(trainer, "muon_zero/written") == [1, 2]
    found = {(group["name"], group["algorithm"]): group["initial_lr"] for group in trainer.muon.param_groups}
    assert {rate for (name, _), rate in found.items() if "0" in name} == {0.01}
    assert {rate for (name, _), rate in found.items() if "1" in name} == {0.02}
    assert all(group["lr"] == 0 for group in trainer.muon.param_groups)  # a linear schedule has ended


def test_weights_can_be_saved_before_training(tmp_path: Path) -> None:
    with accelerated():
        trainer_of(str(tmp_path), 2).save_model(str(tmp_path / "first"))
    saved = load_file(tmp_path / "first" / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in state_of(gpt()).items())


@on_ranks(2)
def test_a_checkpoint_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    began: list[int] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            began.append(state.global_step)

    with accelerated():
        trainer = trainer_of(str(tmp_path), 3, max_steps=4, eval_strategy="no", save_steps=2)
        trainer.train()
        if world_and_rank()[1] == 0:  # as after a kill while checkpoint-4 was saved
            (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()
        dist.barrier()
        trainer = trainer_of(str(tmp_path), 3, max_steps=4, eval_strategy="no", save_steps=2)
        trainer.add_callback(Watch())
        trainer.train(resume_from_checkpoint=True)
    assert began == [2]


@on_ranks(2)
def test_transformers_own_saving_and_a_second_trainer(tmp_path: Path) -> None:
    """Of a sharded model: the former writes whole weights on all ranks, the latter says what to do, which works."""
    from compile_muon.errors import ConfigError
    from compile_muon.integrations.transformers import MuonTrainer

    folder = str(tmp_path)
    with accelerated():
        trainer = trainer_of(folder, 2, max_steps=1, gradient_accumulation_steps=1, **UNSAVED)
        trainer.train()
        trainer.model.save_pretrained(f"{folder}/whole", max_shard_size="1GB")  # Transformers' own name, on all ranks
        with pytest.raises(ConfigError, match=r"save_pretrained.variant = 'fp16': is not done with a sharded model"):
            trainer.model.save_pretrained(f"{folder}/other", variant="fp16")
        held = state_of(trainer.model)
        if world_and_rank()[1] == 0:
            saved = load_file(Path(folder) / "whole" / "model.safetensors")
            assert all(torch.equal(held[name], value) for name, value in saved.items() if name in held) and saved
        given: dict[str, Any] = dict(args=trainer.args, train_dataset=trainer.train_dataset, muon_config={})
        again = MuonTrainer(model=trainer.model, **given)
        with pytest.raises(ConfigError, match=r"MuonTrainer.model = .*train\(\) of that trainer.*full_parameters"):
            again.train()
        with compile_muon.full_parameters(trainer.model):
            model = copy.deepcopy(trainer.model)
        again = MuonTrainer(model=model, **given)
        again.train()  # as the remedy says
        model.save_pretrained(f"{folder}/copy")


class Normed(torch.nn.Module, PyTorchModelHubMixin):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.last = torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 4)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = self.last(self.norm(input_ids.float()))
        return {"loss": found.square().mean(), "logits": found}


def evaluate_normed(folder: str) -> tuple[dict[str, Tensor], float]:
    torch.manual_seed(0)
    with accelerated():
        trainer = trainer_of(folder, 2, net=Normed(), max_steps=2, **UNSAVED)
        trainer.eval_dataset = Sentences(16)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model(folder)
        return {name: value.clone() for name, value in trainer.model.named_buffers()}, loss


def test_what_is_evaluated_is_what_is_saved(ranks: RanksOf, tmp_path: Path) -> None:
    """BatchNorm's statistics are of each rank's own batches, and rank 0's are saved."""
    found = ranks(2).run(evaluate_normed, folder=str(tmp_path))
    saved = load_file(tmp_path / "model.safetensors")
    model = Normed.from_pretrained(tmp_path).eval()  # its own class wrote what the constructor is given
    expected = model(Sentences(16).tokens)["loss"].item()
    for buffers, loss in found:
        assert all(torch.equal(saved[name], value) for name, value in buffers.items())
        assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.full
def test_clipping_decay_and_schedules_are_the_trainers(tmp_path: Path) -> None:
    """Without AdamW's decay of norms and biases, and no direction thrown away by a second clipping."""
    keys = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    schedule = {"type": "WarmupDecayLR", "params": {key: "auto" for key in keys} | {"warmup_type": "linear"}}
    config = {**CONFIG, "optimizer": {"type": "Muon"}, "scheduler": schedule, "gradient_clipping": "auto"}
    with accelerated():
        settings: dict[str, Any] = dict(max_grad_norm=1e6, gradient_accumulation_steps=1, save_strategy="no")
        trainer = trainer_of(str(tmp_path), 2, compiled=True, learning_rate=0.01, config=config, **settings)
        decayed = set(trainer.get_decay_parameter_names(trainer.model))
        trainer.train()
        metrics = {**trainer.muon.metrics(), **trainer.muon.totals()}
        assert trainer.muon_config.zero.gradient_clipping == 1e6
        assert metrics["directions_used"] == metrics["directions_speculated"] == STEPS * 4
        assert logged(trainer, "grad_norm")[-1] == pytest.approx(metrics["grad_norm"])
        rates = {name: g["weight_decay"] for g in trainer.muon.param_groups for name in g["param_names"]}
        assert {name for name, decay in rates.items() if decay} == decayed & set(rates) < set(rates)
        assert logged(trainer, "learning_rate") == pytest.approx([0.0, 0.0, 0.005, 0.01, 0.0075, 0.005])


def test_what_the_trainer_fills_in_is_what_a_configuration_says_of_it() -> None:
    from compile_muon.config.accept import FILLED
    from compile_muon.integrations.transformers import _AUTO

    ours = {f"scheduler.params.{name}_num_steps" for name in ("warmup", "total")}
    assert {".".join(path) for path in _AUTO} | ours == set(FILLED)


def test_arguments_without_a_limit_leave_that_of_the_config(tmp_path: Path) -> None:
    with accelerated():
        trainer = trainer_of(str(tmp_path), 2, max_grad_norm=0.0, config={**CONFIG, "gradient_clipping": 0.1})
    assert trainer.muon_config.zero.gradient_clipping == 0.1


def test_searching_hyperparameters_is_refused(tmp_path: Path) -> None:
    with accelerated(), pytest.raises(compile_muon.ConfigError, match="hyperparameter_search.* each trial"):
        trainer_of(str(tmp_path), 2).hyperparameter_search(n_trials=2)


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    with accelerated():
        (tmp_path / "checkpoint-3").mkdir()
        trainer = trainer_of(str(tmp_path), 2)
        with pytest.raises(compile_muon.ConfigError, match="saving checkpoint-3 was cut off, and there is no other"):
            trainer.train(resume_from_checkpoint=True)
