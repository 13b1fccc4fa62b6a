"""Train a LightningModule with Lightning's Trainer, with Muon under ZeRO.

    torchrun --standalone --nproc_per_node=2 examples/train_lightning.py --max_steps 200 --out runs/lightning

Without torchrun Lightning starts the processes itself (--devices 2). The text is the source code of Python's own
standard library, by bytes. Started again with more steps it goes on from its last checkpoint, on as many ranks as there
are then. The model is a small GPT-2 of Hugging Face's: any nn.Module will do.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from compile_muon.integrations.lightning import MuonZeroStrategy

# "compile" compiles what training_step calls: self.model.
CONFIG = {
    "compile": True,
    "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003}},
    "zero_optimization": {"stage": 3},
}


class Language(L.LightningModule):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=length, n_embd=128, n_layer=4, n_head=4))

    def loss(self, batch: list[Tensor]) -> Tensor:
        tokens = batch[0].long()
        return self.model(input_ids=tokens, labels=tokens).loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True)
        muon = self.trainer.strategy.muon
        self.log_dict({f"muon_zero/{k}": v for k, v in (muon.metrics() | muon.totals()).items()})
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> dict:
        optimizer = self.trainer.strategy.muon  # made from the config; both of its rates are scheduled
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_steps", type=int, default=200)
    parser.add_argument("--out", default="runs/lightning")
    parser.add_argument("--devices", type=int, default=int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--save_every", type=int, default=100)
    args = parser.parse_args()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    windows = text[: len(text) // 128 * 128].view(-1, 128)
    split = len(windows) * 9 // 10
    train = DataLoader(TensorDataset(windows[:split]), batch_size=args.batch, shuffle=True)
    evaluate = DataLoader(TensorDataset(windows[split : split + 128]), batch_size=args.batch)
    saves = ModelCheckpoint(dirpath=args.out, every_n_train_steps=args.save_every, save_last=True)
    trainer = L.Trainer(
        strategy=MuonZeroStrategy(CONFIG),
        devices=args.devices,
        max_steps=args.max_steps,
        gradient_clip_val=1.0,
        val_check_interval=args.save_every,
        check_val_every_n_epoch=None,
        log_every_n_steps=10,
        logger=TensorBoardLogger(args.out),
        callbacks=[saves, LearningRateMonitor("step")],
    )
    trainer.fit(Language(128), train, evaluate, ckpt_path="last")
    # Whole weights: Language.load_from_checkpoint(f"{args.out}/last.ckpt"), anywhere.


if __name__ == "__main__":
    main()
