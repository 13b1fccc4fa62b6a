"""A usual Accelerate script, with Muon under ZeRO: the lines that mention Muon are the only ones that differ.

    torchrun --standalone --nproc_per_node=2 examples/train_accelerate.py --epochs 3 --output_dir runs/accelerate

The text is the source code of Python's own standard library, by bytes. Started again, it goes on from its last state.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import compile_muon
from compile_muon.integrations.accelerate import prepare

CONFIG = {
    "compile": True,
    "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003}},
    "zero_optimization": {"stage": 3},
}


class GPT(nn.Module):
    def __init__(self, length: int, width: int = 128) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, 4, nn.LayerNorm(width), enable_nested_tensor=False)
        self.lm_head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        later = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        guess = self.lm_head(self.blocks(x, later, is_causal=True))[:, :-1]
        return F.cross_entropy(guess.flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--windows", type=int, default=4096)
    parser.add_argument("--output_dir", default="runs/accelerate")
    args = parser.parse_args()
    set_seed(0)
    project = ProjectConfiguration(args.output_dir, automatic_checkpoint_naming=True, total_limit=2)
    cpu = not torch.cuda.is_available()  # unless told, Accelerate sees one process there, whatever torchrun started
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=2, log_with="tensorboard", project_config=project)
    accelerator.init_trackers("train_accelerate")
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray(b"".join(file.read_bytes() for file in files)[: args.windows * 128])
    data = TensorDataset(torch.frombuffer(text, dtype=torch.uint8).view(-1, 128).long())
    train, held = torch.utils.data.random_split(data, [0.95, 0.05])
    loader, evaluation = DataLoader(train, batch_size=16, shuffle=True), DataLoader(held, batch_size=16)

    model, optimizer = compile_muon.initialize(GPT(128).to(accelerator.device), CONFIG)  # was: AdamW(...)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader) // 2)
    objects = (model, optimizer, loader, evaluation, scheduler)
    model, optimizer, loader, evaluation, scheduler = prepare(accelerator, *objects)  # was: accelerator.prepare(...)
    done = [int(path.name.split("_")[1]) for path in Path(args.output_dir).glob("checkpoints/*")]
    if done:
        accelerator.load_state()  # the newest
        project.iteration = max(done) + 1
    for epoch in range(project.iteration, args.epochs):
        loader.set_epoch(epoch)
        for (tokens,) in loader:
            with accelerator.accumulate(model):
                loss = model(tokens)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        with torch.no_grad():
            losses = [accelerator.gather_for_metrics(model(tokens).repeat(len(tokens))) for (tokens,) in evaluation]
        figures = {"loss": loss.item(), "eval_loss": torch.cat(losses).mean().item()}
        figures |= {**optimizer.metrics(), **optimizer.totals()}
        accelerator.log(figures, step=epoch)
        accelerator.print(f"epoch {epoch}: loss {figures['loss']:.3f}, evaluation {figures['eval_loss']:.3f}")
        accelerator.save_state()
    accelerator.save_model(model, Path(args.output_dir) / "weights")  # whole: GPT(128).load_state_dict, anywhere
    accelerator.end_training()


if __name__ == "__main__":
    main()
