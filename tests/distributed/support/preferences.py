"""A small language model with a tokenizer, in a folder, and texts of its words."""

from pathlib import Path
from typing import Any

import torch


def small_language_model(folder: Path | str) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1} | {f"t{i}": i for i in range(2, 40)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    dropout = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    special = dict(bos_token_id=1, eos_token_id=1, pad_token_id=0)
    torch.manual_seed(3)
    shape = dict(vocab_size=40, n_positions=64, n_embd=24, n_layer=2, n_head=2)
    GPT2LMHeadModel(GPT2Config(**shape, **dropout, **special)).save_pretrained(folder)


def words(*columns: str, rows: int = 32) -> Any:
    from datasets import Dataset

    dice = torch.Generator().manual_seed(1)
    drawn = torch.randint(2, 40, (len(columns), rows, 5), generator=dice).tolist()
    texts = [[" " + " ".join(f"t{i}" for i in row) for row in column] for column in drawn]
    return Dataset.from_dict(dict(zip(columns, texts, strict=True)))
