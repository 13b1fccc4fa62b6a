"""Trainers of TRL and sentence-transformers beside the same trainers with ``torch.optim.Muon`` and ``AdamW``."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import RanksOf
from support.launched import accelerated
from support.preferences import small_language_model, words
from support.reference import world_and_rank
from torch import nn

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
CONFIG = {
    "optimizer": {"params": {"muon_lr": 0.01, "adam_lr": 0.001, "weight_decay": 0.0}},
    "zero_optimization": {"stage": 3},
}
CONFIG["optimizer"]["params"] |= {"ns_method": "standard", "ns_dtype": "bfloat16", "betas": [0.9, 0.95]}


class MuonBesideAdamW(torch.optim.Optimizer):
    def __init__(self, model: nn.Module) -> None:
        of_muon = {name: param.ndim == 2 and ".h." in name for name, param in model.named_parameters()}
        parts = [[param for name, param in model.named_parameters() if of_muon[name] == kind] for kind in (True, False)]
        super().__init__(parts[0] + parts[1], {})
        adamw = torch.optim.AdamW(parts[1], lr=0.001, betas=(0.9, 0.95), weight_decay=0.0)
        self.both = torch.optim.Muon(parts[0], lr=0.01, weight_decay=0.0), adamw
        self.param_groups = [group for each in self.both for group in each.param_groups]

    def step(self, closure: Any = None) -> None:
        for each in self.both:
            each.step()


def lengths(completions: list[str], **columns: Any) -> list[float]:
    return [float(sum(map(ord, each)) % 17) for each in completions]


def losses(kind: str, ours: bool, folder: str) -> list[float]:
    """The losses of four steps of the same batches."""
    from support.on_transformers import logged

    from compile_muon.integrations.transformers import MuonTrainer

    settings: dict[str, Any] = dict(
        output_dir=f"{folder}/out", max_steps=4, per_device_train_batch_size=8 // world_and_rank()[0], use_cpu=True,
        logging_steps=1, lr_scheduler_type="constant", learning_rate=0.01, save_strategy="no", disable_tqdm=True,
        report_to=[], max_grad_norm=0.0,
    )  # fmt: skip
    with accelerated():
        if kind == "sentences":
            import sentence_transformers as library
            from sentence_transformers.losses import CosineSimilarityLoss

            model = library.SentenceTransformer(folder, device="cpu")
            base: Any = library.SentenceTransformerTrainer
            given = {"model": model, "args": library.SentenceTransformerTrainingArguments(**settings)}
            given |= {"train_dataset": words("anchor", "positive"), "loss": CosineSimilarityLoss(model)}
            given["train_dataset"] = given["train_dataset"].add_column("score", [k % 3 / 2 for k in range(32)])
        else:
            import trl

            base = getattr(trl, f"{kind}Trainer")
            settings |= {"num_generations": 4, "max_completion_length": 6, "beta": 0.1} if kind == "GRPO" else {}
            args = getattr(trl, f"{kind}Config")(**settings, bf16=False, gradient_checkpointing=False)
            columns = ["prompt"] if kind == "GRPO" else ["prompt", "chosen", "rejected"]
            given = {"model": folder, "args": args, "train_dataset": words(*columns)}
            given |= {"reward_funcs": lengths} if kind == "GRPO" else {}

        class Plain(base):
            def create_optimizer(self, model: Any = None) -> Any:
                self.optimizer = MuonBesideAdamW(self.model)
                return self.optimizer

        sharded = type("Sharded", (MuonTrainer, base), {})
        trainer = sharded(**given, muon_config=CONFIG) if ours else Plain(**given)
        trainer.train()
    return logged(trainer, "loss")


@pytest.mark.parametrize(("kind", "library"), [("DPO", "trl"), ("GRPO", "trl"), ("sentences", "sentence_transformers")])
def test_the_losses_of_plain_optimizers(ranks: RanksOf, tmp_path: Path, kind: str, library: str) -> None:
    pytest.importorskip(library)
    small_language_model(tmp_path)
    plain, one = (ranks(1).run(losses, kind=kind, ours=ours, folder=str(tmp_path))[0] for ours in (False, True))
    assert len(one) == 4 and one == pytest.approx(plain, rel=1e-5, abs=1e-7)
    two = ranks(2).run(losses, kind=kind, ours=True, folder=str(tmp_path))[0]
    if kind == "GRPO":  # each rank draws completions of its own
        plain = ranks(2).run(losses, kind=kind, ours=False, folder=str(tmp_path))[0]
    assert two == pytest.approx(plain, rel=1e-3, abs=1e-5)
