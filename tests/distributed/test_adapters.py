"""LoRA of PEFT over a sharded model, in Accelerate's loop and in the Trainer: beside a plain loop, and as files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.harness import Ranks
from support.launched import accelerated
from support.reference import full, world_and_rank
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler

import compile_muon

STEPS, BATCH, LIMIT = 4, 2, 0.5
CONFIG = {
    "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003, "weight_decay": 0.1, "ns_dtype": "fp32"}},
    "zero_optimization": {"stage": 3},
}

#: a process without compile_muon: adapters onto the base model
APART = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapters, out = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapters)
torch.save({name: param.detach() for name, param in model.named_parameters()}, out)
assert not any(name.startswith("compile_muon") for name in sys.modules)
"""


def base(**more: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    shape = dict(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **more))


def lora() -> Any:
    """With a second adapter that is not trained, and a module that is trained whole."""
    from peft import LoraConfig, get_peft_model

    def config(rank: int, **more: Any) -> Any:
        return LoraConfig(r=rank, lora_alpha=8, target_modules=["c_attn"], task_type="CAUSAL_LM", **more)

    model = get_peft_model(base(), config(4, modules_to_save=["ln_f"]))
    model.add_adapter("other", config(2))
    return model


class Sentences(Dataset):
    def __init__(self) -> None:
        self.tokens = torch.randint(0, 61, (48, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].clone()
        labels[0] = -100  # the Trainer divides by the number of labels, of which the first predicts nothing
        return {"input_ids": self.tokens[index], "labels": labels}


def weights(model: Any) -> dict[str, Tensor]:
    return {name: full(param.detach()).clone() for name, param in model.named_parameters()}


def plain(world: int) -> tuple[list[float], dict[str, Tensor]]:
    """By hand, in one process on the batches of all ranks."""
    model, data, losses = lora(), Sentences(), []
    optimizer = compile_muon.MuonZero(
        model, lr=0.02, adamw_lr=0.003, weight_decay=0.1, ns_dtype="fp32", gradient_accumulation_steps=None
    )
    for step in range(STEPS):
        total = 0.0
        for rank in range(world):
            tokens = data.tokens[(step * world + rank) * BATCH :][:BATCH]
            loss = model(input_ids=tokens, labels=tokens).loss / world
            loss.backward()
            total += loss.item()
        losses.append(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(model)


def by_accelerate(folder: str) -> tuple[list[float], dict[str, Tensor]]:
    """Accelerate's loop. Saved in each way there is, loaded into another one; a state too."""
    from accelerate import Accelerator

    from compile_muon.integrations.accelerate import prepare

    place, losses = Path(folder), []
    world, rank = world_and_rank()
    with accelerated():
        accelerator = Accelerator(cpu=True)
        model, optimizer = prepare(accelerator, *compile_muon.initialize(lora(), CONFIG))
        for step in range(STEPS):
            tokens = Sentences().tokens[(step * world + rank) * BATCH :][:BATCH]
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            losses.append(accelerator.gather(loss.detach()).mean().item())
            accelerator.clip_grad_norm_(model.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()
        compile_muon.save_pretrained(model, place / "ours")
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(place / "theirs", state_dict=state)
        accelerator.save_model(model, place / "whole")
        accelerator.save_state(place / "state")
        found = weights(model)
        for load in ("ours", "theirs", "state"):
            with torch.no_grad():
                for param in model.parameters():
                    if param.requires_grad:
                        param.zero_()
            load_state = accelerator.load_state if load == "state" else None
            load_state(place / load) if load_state else compile_muon.load_pretrained(model, place / load)
            assert all(torch.equal(value, found[name]) for name, value in weights(model).items())
        return losses, found


@pytest.mark.campaign
def test_accelerate_trains_adapters_as_a_plain_loop(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    losses, expected = plain(2)
    before = weights(lora())
    for mine, found in ranks(2).run(by_accelerate, folder=str(tmp_path)):
        assert mine == pytest.approx(losses, rel=1e-5, abs=2e-5)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
        trained = {name for name, value in found.items() if not torch.equal(value, before[name])}
        assert trained == {n for n in found if "lora_" in n and ".default." in n or "modules_to_save" in n}
    for ours in ("ours", "state/muon_zero"):
        for name in ("", "other/"):
            one = load_file(tmp_path / ours / f"{name}adapter_model.safetensors")
            other = load_file(tmp_path / "theirs" / f"{name}adapter_model.safetensors")
            assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
            assert (tmp_path / ours / f"{name}adapter_config.json").exists()
    assert not (tmp_path / "ours" / "model.safetensors").exists()
    assert len(load_file(tmp_path / "whole" / "model.safetensors")) > len(one) * 5
    base().save_pretrained(tmp_path / "base")
    command = [sys.executable, "-c", APART, *(str(tmp_path / name) for name in ("base", "ours", "out"))]
    subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True)
    apart = torch.load(tmp_path / "out", weights_only=True)
    assert all(torch.equal(value, found[name]) for name, value in apart.items())


def test_adapters_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    model, _ = compile_muon.initialize(lora(), CONFIG)
    compile_muon.save_pretrained(model, tmp_path)
    other = get_peft_model(base(), LoraConfig(r=4, target_modules=["c_attn", "c_proj"]))
    other, _ = compile_muon.initialize(other, CONFIG)
    before = weights(other)
    with pytest.raises(compile_muon.CheckpointError, match=r"c_proj.lora_A.weight: is missing.*, .*and . more"):
        compile_muon.load_pretrained(other, tmp_path)
    assert all(torch.equal(value, before[name]) for name, value in weights(other).items())
    compile_muon.load_pretrained(other, tmp_path, strict=False)
    assert not all(torch.equal(value, before[name]) for name, value in weights(other).items())


def test_adapters_are_no_values_of_a_model_on_the_meta_device(tmp_path: Path) -> None:
    model, _ = compile_muon.initialize(lora(), CONFIG)
    compile_muon.save_pretrained(model, tmp_path)
    for settled in (False, True):
        if settled:  # whole weights beside them are
            whole = {name: value.clone() for name, value in compile_muon.full_state_dict(model).items()}
            save_file(whole, tmp_path / "model.safetensors")
        with torch.device("meta"):
            hollow = lora()
        refused = pytest.raises(compile_muon.CheckpointError, match="holds neither model.safetensors nor")
        with contextlib.nullcontext() if settled else refused:
            compile_muon.initialize(hollow, CONFIG, weights=tmp_path)
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(hollow).items())


def usual_lines(folder: str) -> dict[str, Tensor]:
    """A Hugging Face model saved as Accelerate's own examples do, by all ranks."""
    from accelerate import Accelerator

    from compile_muon.integrations.accelerate import prepare

    with accelerated():
        accelerator = Accelerator(cpu=True)
        model, _ = prepare(accelerator, *compile_muon.initialize(base(), CONFIG))
        accelerator.wait_for_everyone()
        accelerator.unwrap_model(model).save_pretrained(
            folder,
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=accelerator.get_state_dict(model),
        )
        return weights(model)


def test_a_model_is_saved_by_the_lines_of_every_example(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    found = ranks(2).run(usual_lines, folder=str(tmp_path))[0]
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, found[name]) for name, value in loaded.named_parameters())


def trainer_of(folder: str, **settings: Any) -> Any:
    from transformers import TrainingArguments

    from compile_muon.integrations.transformers import MuonTrainer

    class InOrder(MuonTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    defaults: dict[str, Any] = dict(
        max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, max_grad_norm=LIMIT, learning_rate=0.02,
        lr_scheduler_type="constant", logging_steps=1, report_to=[], disable_tqdm=True, save_steps=2,
        eval_strategy="steps", eval_steps=2,
    )  # fmt: skip
    arguments = TrainingArguments(output_dir=folder, **{**defaults, **settings})
    return InOrder(
        model=lora(), args=arguments, train_dataset=Sentences(), eval_dataset=Sentences(), muon_config=CONFIG
    )


Trained = tuple[list[float], dict[str, Tensor], dict[str, Tensor]]


def trained(folder: str) -> Trained:
    """Losses and weights of a run; and of one that goes on from its middle."""
    with accelerated():
        trainer = trainer_of(folder)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = weights(trainer.model)
    with accelerated():
        trainer = trainer_of(folder)
        trainer.train(resume_from_checkpoint=str(Path(folder) / "checkpoint-2"))
        return losses, found, weights(trainer.model)


@pytest.mark.full
def test_the_trainer_trains_adapters_as_a_plain_loop(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    losses, expected = plain(2)
    for mine, found, again in ranks(2).run(trained, folder=str(tmp_path)):
        assert mine == pytest.approx(losses, rel=1e-5, abs=2e-5)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)
            assert torch.equal(found[name], again[name]), name
    checkpoint = tmp_path / f"checkpoint-{STEPS}"
    assert not (checkpoint / "model.safetensors").exists() and (checkpoint / "adapter_config.json").exists()
    saved = load_file(checkpoint / "adapter_model.safetensors")
    for name, value in saved.items():
        whole = name.replace("lora_A", "lora_A.default").replace("lora_B", "lora_B.default")
        assert torch.equal(value, found[whole.replace("ln_f.", "ln_f.modules_to_save.default.")])


def best(folder: str) -> tuple[str, dict[str, Tensor]]:
    """With the rates turned up, and the worst for the best: which is not the last."""
    with accelerated():
        settings = dict(load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=True)
        trainer = trainer_of(folder, **settings)
        for group in trainer.create_optimizer().param_groups:
            group["lr"] = 1.0
        trainer.train()
        assert any(param.requires_grad for param in trainer.model.parameters())
        return Path(trainer.state.best_model_checkpoint).name, weights(trainer.model)


@pytest.mark.full
def test_the_best_adapters_are_loaded_at_the_end(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    for name, found in ranks(2).run(best, folder=str(tmp_path)):
        saved = load_file(tmp_path / name / "adapter_model.safetensors")
        key = "base_model.model.transformer.h.1.attn.c_attn.lora_{}.weight"
        for letter in "AB":
            assert torch.equal(saved[key.format(letter)], found[key.format(f"{letter}.default")])
        last = load_file(tmp_path / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
        assert name != f"checkpoint-{STEPS}" and not torch.equal(last[key.format("A")], saved[key.format("A")])


# ------------------------------------------------------------------------------------------------------------ merging


def adapted(kind: str) -> Any:
    import peft

    names = {"target_modules": ["c_attn", "c_proj"]}
    configs: dict[str, Any] = {
        "lora": lambda: peft.LoraConfig(r=4, lora_alpha=32, modules_to_save=["ln_f"], **names),
        "dora": lambda: peft.LoraConfig(r=4, lora_alpha=32, use_dora=True, **names),
        "tokens": lambda: peft.LoraConfig(r=4, lora_alpha=32, trainable_token_indices=[1, 2, 3], **names),
        "ia3": lambda: peft.IA3Config(feedforward_modules=["c_proj"], **names),
        "loha": lambda: peft.LoHaConfig(r=4, alpha=32, target_modules=["lm_head"]),
        "norms": lambda: peft.LNTuningConfig(target_modules=["ln_f"]),
    }
    # PEFT merges what it learns of a tied head into the embedding, too.
    return peft.get_peft_model(base(tie_word_embeddings=kind != "loha"), configs[kind]())


def merged(folder: str, kinds: list[str], stage: int, way: str) -> dict[str, tuple[float, float, float]]:
    """Loss of the base, of the adapters, and of the merged model that stays."""
    tokens, found = Sentences().tokens[:4], {}
    for kind in kinds:
        model: Any = adapted(kind)
        config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.05}}, "zero_optimization": {"stage": stage}}
        model, optimizer = compile_muon.initialize(model, config)
        losses = []
        for step in range(4):
            loss = model(input_ids=tokens, labels=tokens).loss
            losses.append(loss.item())
            if step < 3:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        if way == "merge_adapters":
            whole = compile_muon.merge_adapters(model)
        else:
            with compile_muon.full_parameters(model, write=True):
                whole = model.merge_and_unload()
        assert not any("lora" in name for name, _ in whole.named_parameters())
        with torch.no_grad():
            now = whole(input_ids=tokens, labels=tokens).loss.item()
        compile_muon.save_pretrained(whole, Path(folder) / kind)
        found[kind] = (losses[0], losses[-1], now)
    return found


@pytest.mark.parametrize(
    ("world", "stage", "way"),
    [
        (1, 2, "merge_adapters"),
        (2, 3, "block"),
        pytest.param(2, 3, "merge_adapters", marks=pytest.mark.full),
        pytest.param(2, 1, "block", marks=pytest.mark.campaign),
    ],
)
def test_a_merged_model_is_saved_as_it_was_trained(
    ranks: Callable[[int], Ranks], tmp_path: Path, world: int, stage: int, way: str
) -> None:
    from transformers import GPT2LMHeadModel

    kinds = ["lora", "dora", "tokens", "ia3", "loha", "norms"] if way == "merge_adapters" else ["lora", "ia3"]
    tokens = Sentences().tokens[:4]
    for found in ranks(world).run(merged, folder=str(tmp_path), kinds=kinds, stage=stage, way=way):
        for kind, (before, trained, now) in found.items():
            saved = GPT2LMHeadModel.from_pretrained(tmp_path / kind)
            assert now == pytest.approx(trained, abs=1e-4) and abs(trained - before) > 1e-3, kind
            assert saved(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(trained, abs=1e-4), kind


def merged_by_hand(folder: str) -> list[str]:
    """As one does with a model that is not sharded: the edits of copies are lost, so nothing may save the base."""
    model, _ = compile_muon.initialize(adapted("dora"), CONFIG)
    whole = model.merge_and_unload()
    said = []
    for act in (lambda: compile_muon.save_pretrained(whole, folder), lambda: compile_muon.full_state_dict(whole)):
        try:
            with torch.no_grad():
                whole.transformer.h[0].attn.c_attn.weight.mul_(2)
            act()
        except compile_muon.CheckpointError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("world", [1, 2])
def test_a_merge_of_copies_is_never_saved(ranks: Callable[[int], Ranks], tmp_path: Path, world: int) -> None:
    for said in ranks(world).run(merged_by_hand, folder=str(tmp_path / "saved")):
        assert len(said) == 2 and all("c_attn.base_layer.weight" in text for text in said)
        assert all("to merge adapters use compile_muon.merge_adapters(model)" in text for text in said)
    assert not (tmp_path / "saved").exists()


def test_a_model_without_adapters_has_none_to_merge() -> None:
    model, _ = compile_muon.initialize(base(), CONFIG)
    with pytest.raises(compile_muon.UnsupportedModelError, match="GPT2LMHeadModel has no adapters to merge"):
        compile_muon.merge_adapters(model)
