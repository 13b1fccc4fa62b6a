"""Train a Hugging Face model with their Trainer, with Muon under ZeRO.

    torchrun --standalone --nproc_per_node=2 examples/train_transformers.py --max_steps 200 --output_dir runs/hf

Arguments are those of transformers.TrainingArguments. The text is the source code of Python's own standard library, by
bytes; the model a small GPT-2 made from its configuration: put AutoModelForCausalLM.from_pretrained(...) in its place.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, TrainingArguments, set_seed

from compile_muon.integrations.transformers import MuonTrainer

# As DeepSpeed's: "auto" is what the TrainingArguments say.
CONFIG = {
    "compile": True,
    "optimizer": {"type": "Muon", "params": {"lr": "auto", "adam_lr": 0.003, "weight_decay": "auto"}},
    "zero_optimization": {"stage": 3},
    "gradient_accumulation_steps": "auto",
}


class Windows(Dataset):
    """Bytes of text, ``length`` at a time; the model shifts the labels itself."""

    def __init__(self, text: bytes, length: int) -> None:
        whole = text[: len(text) // length * length]
        self.bytes = torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(-1, length)

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.bytes[index].long()
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    defaults = ["--learning_rate=0.02", "--lr_scheduler_type=cosine", "--warmup_steps=10", "--logging_steps=10"]
    defaults += ["--save_steps=100", "--save_total_limit=2", "--eval_strategy=steps", "--eval_steps=100"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*defaults, *sys.argv[1:]])
    set_seed(args.seed)  # every rank starts from the same weights
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)
    split = len(text) * 9 // 10
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=128, n_embd=128, n_layer=4, n_head=4))
    trainer = MuonTrainer(
        model=model,
        args=args,
        train_dataset=Windows(text[:split], 128),
        eval_dataset=Windows(text[split : split + 16384], 128),
        muon_config=CONFIG,
    )
    # Started again, it goes on from its last checkpoint, on as many ranks as there are now.
    trainer.train(resume_from_checkpoint=any(Path(args.output_dir).glob("checkpoint-*")))
    trainer.save_model()  # for from_pretrained, anywhere


if __name__ == "__main__":
    main()
