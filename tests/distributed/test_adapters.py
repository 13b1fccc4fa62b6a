"""LoRA of PEFT over a sharded model, in Accelerate's loop and in the Trainer: beside a plain loop, and as files."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.harness import RanksOf
from support.launched import accelerated
from support.on_transformers import trainer_of
from support.reference import full, train_step
from support.trainers import gpt, sentences
from torch import Tensor

import compile_muon

CONFIG = {
    "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003, "weight_decay": 0.1, "ns_dtype": "fp32"}},
    "zero_optimization": {"stage": 3},
}


def base(**more: Any) -> Any:
    return gpt(n_layer=2, **more)


def lora() -> Any:
    """With a second adapter that is not trained, and a module that is trained whole."""
    from peft import LoraConfig, get_peft_model

    def config(rank: int, **more: Any) -> Any:
        return LoraConfig(r=rank, lora_alpha=8, target_modules=["c_attn"], task_type="CAUSAL_LM", **more)

    model = get_peft_model(base(), config(4, modules_to_save=["ln_f"]))
    model.add_adapter("other", config(2))
    return model


def weights(model: Any) -> dict[str, Tensor]:
    return {name: full(param.detach()).clone() for name, param in model.named_parameters()}


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


def usual_lines(folder: str, adapters: bool) -> dict[str, Tensor]:
    """A Hugging Face model saved as Accelerate's own examples do, by all ranks; adapters as PEFT's do, by the first."""
    from accelerate import Accelerator

    from compile_muon.integrations.accelerate import prepare

    with accelerated():
        accelerator = Accelerator(cpu=True)
        model, _ = prepare(accelerator, *compile_muon.initialize(lora() if adapters else base(), CONFIG))
        accelerator.wait_for_everyone()
        state, first = accelerator.get_state_dict(model), accelerator.is_main_process
        if first or not adapters:
            accelerator.unwrap_model(model).save_pretrained(
                folder, is_main_process=first, save_function=accelerator.save, state_dict=state
            )
        return weights(model)


@pytest.mark.parametrize("adapters", [False, True])
def test_a_model_is_saved_by_the_lines_of_every_example(ranks: RanksOf, tmp_path: Path, adapters: bool) -> None:
    from peft import PeftModel
    from transformers import GPT2LMHeadModel

    found = ranks(2).run(usual_lines, folder=str(tmp_path), adapters=adapters)[0]
    loaded = PeftModel.from_pretrained(base(), tmp_path) if adapters else GPT2LMHeadModel.from_pretrained(tmp_path)
    assert all(torch.equal(value, found[name]) for name, value in loaded.named_parameters())


def trained(folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights of a run; and of one that goes on from its middle."""
    found = []
    for start in (None, f"{folder}/checkpoint-2"):
        with accelerated():
            trainer = trainer_of(folder, 3, net=lora(), max_steps=4, save_steps=2, eval_strategy="no")
            trainer.train(resume_from_checkpoint=start)
            found.append(weights(trainer.model))
    return found[0], found[1]


@pytest.mark.full
def test_the_trainer_trains_adapters_alone_and_goes_on_from_them(ranks: RanksOf, tmp_path: Path) -> None:
    before = weights(lora())
    for found, again in ranks(2).run(trained, folder=str(tmp_path)):
        assert all(torch.equal(value, again[name]) for name, value in found.items())
        moved = {name for name, value in found.items() if not torch.equal(value, before[name])}
        assert moved == {n for n in found if "lora_" in n and ".default." in n or "modules_to_save" in n}
    checkpoint = tmp_path / "checkpoint-4"
    assert not (checkpoint / "model.safetensors").exists() and (checkpoint / "adapter_config.json").exists()
    saved = load_file(checkpoint / "adapter_model.safetensors")
    for name, value in saved.items():
        whole = name.replace("lora_A", "lora_A.default").replace("lora_B", "lora_B.default")
        assert torch.equal(value, found[whole.replace("ln_f.", "ln_f.modules_to_save.default.")])


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
    tokens, found = sentences(4), {}
    for kind in kinds:
        model: Any = adapted(kind)
        config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.05}}, "zero_optimization": {"stage": stage}}
        model, optimizer = compile_muon.initialize(model, config)
        losses = []
        for step in range(4):
            loss = model(input_ids=tokens, labels=tokens).loss
            losses.append(loss.item())
            if step < 3:
                train_step(optimizer, loss)
        if way == "merge_adapters":
            whole = compile_muon.merge_adapters(model)
        elif way == "by hand":  # edits of attributes, which are the parameters
            whole = model.merge_and_unload()
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
        *(pytest.param(2, 3, way, marks=pytest.mark.full) for way in ("by hand", "block", "merge_adapters")),
    ],
)
def test_a_merged_model_is_saved_as_it_was_trained(
    ranks: RanksOf, tmp_path: Path, world: int, stage: int, way: str
) -> None:
    from transformers import GPT2LMHeadModel

    kinds = ["lora", "dora", "tokens", "ia3", "loha", "norms"] if way == "merge_adapters" else ["lora", "dora", "ia3"]
    tokens = sentences(4)
    for found in ranks(world).run(merged, folder=str(tmp_path), kinds=kinds, stage=stage, way=way):
        for kind, (before, trained, now) in found.items():
            saved = GPT2LMHeadModel.from_pretrained(tmp_path / kind)
            assert now == pytest.approx(trained, abs=1e-4) and abs(trained - before) > 1e-3, kind
            assert saved(input_ids=tokens, labels=tokens).loss.item() == pytest.approx(trained, abs=1e-4), kind


def test_a_model_without_adapters_has_none_to_merge() -> None:
    model, _ = compile_muon.initialize(base(), CONFIG)
    with pytest.raises(compile_muon.UnsupportedModelError, match="GPT2LMHeadModel has no adapters to merge"):
        compile_muon.merge_adapters(model)
