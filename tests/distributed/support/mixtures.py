"""Small mixtures of experts of Transformers."""

from typing import Any

import torch
from torch import Tensor

SMALL = dict(
    vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
    max_position_embeddings=32, experts_implementation="eager", use_cache=False,
)  # fmt: skip


def tiny(kind: str, **settings: Any) -> Any:
    import transformers

    own: dict[str, dict[str, Any]] = {
        "Mixtral": dict(intermediate_size=16, num_local_experts=8, num_experts_per_tok=2),
        "Qwen3Moe": dict(
            moe_intermediate_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True, head_dim=16,
        ),
        "DeepseekV3": dict(
            moe_intermediate_size=16, intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3, n_group=4,
            topk_group=2, routed_scaling_factor=2.5, first_k_dense_replace=0, q_lora_rank=8, kv_lora_rank=8,
            qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, num_key_value_heads=2,
        ),
        "GptOss": dict(
            intermediate_size=16, num_local_experts=8, num_experts_per_tok=2, head_dim=16, sliding_window=8,
            layer_types=["sliding_attention", "full_attention"], attn_implementation="eager",
        ),
    }  # fmt: skip
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **own[kind], **settings})
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("bias", "gate.weight", "router.weight")):
                value.normal_(std=0.3)  # gates that choose, biases that count
    return model


def tokens_of(rank: int, length: int = 6) -> Tensor:
    dice = torch.Generator().manual_seed(rank)
    return torch.randint(1, 61, (2, length), generator=dice)
