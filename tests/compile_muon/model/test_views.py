"""Views of a model's parameters: as users say them, and as known modules have them."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, FalconConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, Phi3Config

from compile_muon import ConfigError, MuonZero

SMALL = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
SMALL |= {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def views_of(model: nn.Module, **settings: Any) -> dict[str, Any]:
    """Dim, and the rows or columns of each matrix, by the end of the parameter's name."""
    optimizer = MuonZero(model, update="step", **settings)
    found = {}
    for sharded in optimizer.engine.params:
        if sharded.spec.muon is not None and (view := sharded.spec.muon.view) is not None:
            numbers = torch.arange(sharded.param.shape[view.dim])
            shape = (-1, 1) if view.dim == 0 else (1, -1)
            parts = [one.flatten().tolist() for part in view.cut(numbers.view(shape)) for one in part]
            found[".".join(sharded.name.split(".")[-2:])] = (view.dim, parts)
    return found


def runs(*sizes: int) -> list[list[int]]:
    return [part.tolist() for part in torch.arange(sum(sizes)).split(list(sizes))]


def test_heads_and_fused_projections_of_transformers() -> None:
    torch.manual_seed(0)
    llama = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, num_key_value_heads=2))
    assert views_of(llama, per_head_muon=True, split_fused=True) == {
        "q_proj.weight": (0, runs(*[4] * 4)),
        "k_proj.weight": (0, runs(4, 4)),
        "v_proj.weight": (0, runs(4, 4)),
    }
    for per_head, parts in ((False, runs(16, 8, 8)), (True, runs(*[4] * 8))):
        phi = AutoModelForCausalLM.from_config(Phi3Config(**SMALL, num_key_value_heads=2))
        found = views_of(phi, per_head_muon=per_head, split_fused=True)
        assert found == {"qkv_proj.weight": (0, parts), "gate_up_proj.weight": (0, runs(24, 24))}
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_embd=16, n_head=4, n_layer=1, vocab_size=32))
    assert views_of(gpt2, split_fused=True) == {"c_attn.weight": (1, runs(16, 16, 16))}  # [in, out] there


def test_projections_whose_parts_take_turns() -> None:
    """By ``view(..., heads, 3 * size)`` of GPT-NeoX, and ``view(..., key_heads, queries + 2, size)`` of Falcon."""
    neox = AutoModelForCausalLM.from_config(GPTNeoXConfig(**SMALL))
    rows = torch.arange(48).view(4, 3, 4)
    expected = [rows[:, part].flatten().tolist() for part in range(3)]
    assert views_of(neox, split_fused=True) == {"query_key_value.weight": (0, expected)}
    settings = {key: value for key, value in SMALL.items() if key != "intermediate_size"}
    new = FalconConfig(**settings, num_kv_heads=2, new_decoder_architecture=True)
    falcon = AutoModelForCausalLM.from_config(new)
    rows = torch.arange(32).view(2, 4, 4)
    queries, keys, values = rows[:, :2].reshape(-1, 4), rows[:, 2], rows[:, 3]
    expected = [x.tolist() for part in (queries, keys, values) for x in part]
    assert views_of(falcon, per_head_muon=True) == {"query_key_value.weight": (0, expected)}


class Fused(nn.Module):
    """Attention over a fused projection, whose parts stand in ``order``."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.num_heads, self.hidden_size, self.order = 2, 8, order
        self.qkv = nn.Linear(8, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = dict(zip(self.order, self.qkv(x).unflatten(-1, (3, 2, 4)).unbind(-3), strict=True))
        q, k, v = (parts[name].transpose(1, 2) for name in "qkv")
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


class Gated(nn.Module):
    """A gate and what it is for, one behind the other or by turns."""

    def __init__(self, turns: bool) -> None:
        super().__init__()
        self.turns, self.gate_up_proj, self.down = turns, nn.Linear(8, 12), nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.gate_up_proj(x)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.turns else both.chunk(2, -1)
        return self.down(nn.functional.silu(gate) * up)


def test_a_cut_by_a_name_is_one_that_the_modules_arithmetic_has() -> None:
    parts = {"right": Fused("qkv"), "other": Fused("qvk"), "gate": Gated(turns=False), "turns": Gated(turns=True)}
    optimizer = MuonZero(nn.ModuleDict(parts), update="step", split_fused=True)
    found = {row.name: row.reason for row in optimizer.summary().rows}
    for name, cut in (("right.qkv", "as 3 matrices"), ("gate.gate_up_proj", "as 2 matrices")):
        assert cut in found[f"{name}.weight"]
    for name in ("other.qkv", "turns.gate_up_proj"):
        assert "left whole: its parts are not known" in found[f"{name}.weight"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.conv = nn.Conv2d(2, 4, 3)
        self.norm = nn.LayerNorm(8)


def test_torchs_own_attention_patterns_and_attributes() -> None:
    model = Model()
    model.down.weight.muon_view = {"heads": 3, "dim": 1}
    found = views_of(model, split_fused=True, muon_views={"up*": {"split": [8, 4]}, "down*": {"heads": 2}})
    assert found == {
        "attention.in_proj_weight": (0, runs(8, 8, 8)),
        "up.weight": (0, runs(8, 4)),
        "down.weight": (1, runs(4, 4, 4)),
    }
    optimizer = MuonZero(Model(), muon_views={"up*": {"heads": 3}})
    (row,) = [row for row in optimizer.summary().rows if row.name == "up.weight"]
    assert row.reason.endswith("as 3 matrices (muon_views 'up*')")


@pytest.mark.parametrize(
    ("views", "said"),
    [
        ({"up*": {"heads": 5}}, r"muon_views\[up\*\] = {'heads': 5}: does not fit up.weight, \[12"),
        ({"norm*": {"heads": 2}}, r"muon_views\[norm\*\] = {'heads': 2}: matches no matrix"),
        ({"up*": {"head": 2}}, r"muon_views\[up\*\] = {'head': 2}: is no view"),
        ({"conv*": {"heads": 2}}, r"is for parameters of two dimensions, and conv.weight is \[4"),
        (["up"], r"muon_views = \['up'\]: must be a mapping of patterns"),
    ],
)
def test_mistakes(views: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        MuonZero(Model(), muon_views=views)
