"""Train a small mixture of experts in DeepSeek-V3's style, its experts spread over ranks, with Muon under ZeRO-3.

    torchrun --standalone --nproc_per_node=4 examples/train_moe.py    # shard 2 x expert 2; on 2 ranks expert 2
    python examples/train_moe.py --steps 50                           # one process: the same model, whole

The text is the source code of Python's own standard library, by bytes. Of 16 experts each rank of a pair has 8, and
each rank tokens of its own, which travel to their experts and back; docs/how-to/meshes.md says which axis to use when.
"""

import argparse
import math
import os
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import compile_muon

MODEL = DeepseekV3Config(
    vocab_size=256, hidden_size=128, num_hidden_layers=3, max_position_embeddings=256, use_cache=False,
    first_k_dense_replace=1, intermediate_size=352, moe_intermediate_size=64,  # the first layer has no experts
    n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, n_shared_experts=1, routed_scaling_factor=2.5,
    num_attention_heads=4, num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=32,
    qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=32, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip


def config_for(world: int) -> dict:
    return {
        # One graph: "fullgraph" lets torch trace sizes that only the router's choices decide. "compile": true works
        # too, with a graph break around each layer's experts, and slower.
        "compile": {"fullgraph": True},
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.003}},
        "zero_optimization": {"stage": 3},
        "expert_parallel": {"size": math.gcd(world, 2)},
    }


def windows(text: Tensor, batch: int, length: int, seed: int, device: torch.device) -> Tensor:
    dice = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (batch, 1), generator=dice)
    return text[starts + torch.arange(length)].long().to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(steps=200, batch=4, context=128, log_every=10).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()

    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", local % gpus) if gpus else torch.device("cpu")
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if gpus >= int(os.environ["LOCAL_WORLD_SIZE"]) else "gloo")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    training, held_out = text.tensor_split([len(text) * 9 // 10])

    torch.manual_seed(0)  # every rank starts from the same weights
    model, optimizer = compile_muon.initialize(DeepseekV3ForCausalLM(MODEL).to(device), config_for(world))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 10, 1, 2 * (1.02 - n / args.steps)))
    if rank == 0:
        print(optimizer.summary())
        print(f"{MODEL.n_routed_experts // math.gcd(world, 2)} of {MODEL.n_routed_experts} experts a rank")

    # Balance: the router adds e_score_correction_bias to its scores only to choose by them. DeepSeek-V3's balancing
    # without a loss is a hook on each router that counts choices, and after each step, with counts summed over ranks,
    #     bias += 0.001 * (counts.float().mean() - counts).sign()
    # The bias is a buffer, the same on every rank: nothing of it is sharded, and checkpoints hold it.
    tokens = args.batch * args.context * world  # of a step

    def tell(step: int, loss: float, seconds: float) -> None:
        metrics = {**optimizer.metrics(), **optimizer.totals()}
        pace = "compiled" if step == 1 else f"{args.log_every * tokens / seconds:,.0f} tokens/s"
        # Of what depends on the data, how many rows each expert gets, a graph cannot say how much it is.
        axes = {name.removeprefix("bytes_sent_"): sent // step for name, sent in metrics.items() if "sent_" in name}
        axes = axes or {"in all": metrics["bytes_sent"] // step}  # one axis
        sent = ", ".join(f"{axis} {count:,}" for axis, count in axes.items())
        print(f"step {step:5}   loss {loss:.3f}   grad norm {metrics['grad_norm']:.2f}   {pace}   sent a step: {sent}")

    began = time.perf_counter()
    for step in range(args.steps):
        batch = windows(training, args.batch, args.context, step * world + rank, device)
        loss = model(input_ids=batch, labels=batch).loss  # the model shifts the labels itself
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step == 0 or (step + 1) % args.log_every == 0:
            now, seconds = loss.item(), time.perf_counter() - began
            began = time.perf_counter()
            if rank == 0:
                tell(step + 1, now, seconds)

    # Experts answer the tokens of all ranks of their group, so every rank evaluates, as often as the others.
    model.eval()
    with torch.no_grad():
        batches = [windows(held_out, args.batch, args.context, i * world + rank, device) for i in range(4)]
        total = sum(model(input_ids=batch, labels=batch).loss for batch in batches) / (4 * world)
    if world > 1:
        dist.all_reduce(total)
    if rank == 0:
        print(f"held out: {total.item():.3f} nats per byte")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
