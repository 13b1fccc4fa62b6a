"""MuonClip beside its formula: heads whose logits grew too large, over micro-batches and ranks."""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from support.harness import RanksOf
from support.reference import full, world_and_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.attention import flex_attention
from torch.utils.checkpoint import checkpoint

import compile_muon
from compile_muon import UnsupportedModelError
from compile_muon.config import SequenceParallelConfig, config_from_kwargs
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.passes.dynamo import logits as logits_pass
from compile_muon.passes.dynamo.logits import largest_logits

WIDTH, SIZE = 12, 4


class Attention(nn.Module):
    """Queries and keys of 3 heads and 1, or as many; each projection by itself, fused, or kept [in, out]; biases."""

    def __init__(self, kind: str, keys: int, own_mask: bool, flex: bool = False) -> None:
        super().__init__()
        self.kind, self.keys, self.own_mask, self.flex = kind, keys, own_mask, flex
        self.embedding = nn.Embedding(16, WIDTH)
        if kind == "fused":
            self.qkv = nn.Linear(WIDTH, (3 + 2 * keys) * SIZE)
        elif kind == "turned":
            self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(WIDTH, n * SIZE) / 3) for n in (3, keys, keys))
            self.bq = nn.Parameter(torch.randn(3 * SIZE))
        else:
            self.q_proj = nn.Linear(WIDTH, 3 * SIZE)
            self.k_proj, self.v_proj = (nn.Linear(WIDTH, keys * SIZE) for _ in range(2))
        if kind == "normed":
            self.q_norm = nn.RMSNorm(SIZE)
        if kind == "shifted":  # each entry of each head of queries
            self.shift = nn.Parameter(torch.ones(3, 1, SIZE))
        self.merge = nn.Linear(3 * SIZE, WIDTH)
        self.head = nn.Linear(WIDTH, 16, bias=False)

    def projected(self, h: Tensor) -> list[Tensor]:
        if self.kind == "fused":
            parts = self.qkv(h).split([3 * SIZE, self.keys * SIZE, self.keys * SIZE], -1)
        elif self.kind == "turned":
            parts = (h @ self.wq + self.bq, h @ self.wk, h @ self.wv)
        else:
            parts = (self.q_proj(h), self.k_proj(h), self.v_proj(h))
        q, k, v = (part.unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in parts)
        if self.kind == "normed":
            q = self.q_norm(q)
        turn = torch.arange(h.shape[1], dtype=h.dtype)[:, None] / 7  # a rotation of sorts
        q, k = (torch.cat([x[..., :2] * turn.cos() - x[..., 2:] * turn.sin(), x[..., 2:]], -1) for x in (q, k))
        q = q + self.shift if self.kind == "shifted" else q
        return [q, k, v] if self.own_mask else [q, *(x.repeat_interleave(3 // self.keys, 1) for x in (k, v))]

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens)
        q, k, v = self.projected(h)
        if self.flex:
            seen = flex_attention.create_block_mask(lambda b, h, i, j: i >= j, None, None, 9, 9, device="cpu")
            made = flex_attention.flex_attention(q, k, v, block_mask=seen, scale=0.7, enable_gqa=True)
        elif self.own_mask:
            mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.7, enable_gqa=True)
        else:
            made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(h + self.merge(made.transpose(1, 2).flatten(-2)))


def batch(step: int, micro: int, rank: int) -> Tensor:
    return torch.randint(0, 16, (3, 9), generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))


def loss(run: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    return F.cross_entropy(run(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def largest(model: Attention, tokens: Tensor) -> Tensor:
    """Of each head, from the definition."""
    q, k, _ = model.projected(model.embedding(tokens))
    k = k if k.shape[1] == 3 else k.repeat_interleave(3, 1)
    logits = q.double() @ k.double().mT * (0.7 if model.own_mask else 1 / math.sqrt(SIZE))
    return logits.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -math.inf).amax((0, 2, 3))


#: name, dim, first row or column
Place = tuple[str, int, int]


def heads_of(model: Attention) -> tuple[list[Place], list[Place]]:
    """What projects queries, and keys: weights and biases."""
    if model.kind == "fused":
        return ([(f"qkv.{each}", 0, first) for each in ("weight", "bias")] for first in (0, 3 * SIZE))
    if model.kind == "turned":
        return [("wq", 1, 0), ("bq", 0, 0)], [("wk", 1, 0)]
    return ([(f"{part}_proj.{each}", 0, 0) for each in ("weight", "bias")] for part in "qk")


@torch.no_grad()
def scale(weights: dict[str, Tensor], places: list[Place], factors: Tensor) -> None:
    for name, dim, first in places:
        of_rows = factors.repeat_interleave(SIZE)
        rows = weights[name].narrow(dim, first, len(of_rows))
        rows.mul_(of_rows[:, None] if rows.ndim > dim + 1 else of_rows)


def train_nothing(run: Callable[[Tensor], Tensor], loud: Tensor, evaluates: bool) -> None:
    """Forwards that no step trains on: one without gradients, and one whose backward never comes."""
    if evaluates:  # one graph more
        with torch.no_grad():
            run(loud)
    run(loud)


def clipped(kind: str, keys: int, own_mask: bool, stage: int, micro: int, codegen: str, flex: bool) -> None:
    world, rank = world_and_rank()
    torch.manual_seed(0)
    whole = Attention(kind, keys, own_mask, flex)
    for place, heads in zip(heads_of(whole), (3, keys), strict=True):
        scale(dict(whole.named_parameters()), place, torch.arange(1.0, heads + 1) * 3)
    seen = torch.stack([largest(whole, batch(0, m, r)) for m in range(micro) for r in range(world)]).amax(0)
    threshold = float(seen.median())
    loud = max((batch(step, 0, 0) for step in range(20, 99)), key=lambda tokens: float(largest(whole, tokens).max()))
    assert largest(whole, loud).max() > seen.max()
    views = {"qkv.weight": {"split": [3 * SIZE, keys * SIZE, keys * SIZE]}} if kind == "fused" else {}
    after = []
    for clip in (None, threshold):
        model = copy.deepcopy(whole)
        optimizer = compile_muon.MuonZero(
            model, stage=stage, gradient_accumulation_steps=micro, ns_dtype="float32", muon_views=views,
            qk_clip=clip, qk_clip_alpha=0.3,
        )  # fmt: skip
        run = torch.compile(model, backend="muon_zero", options={"codegen": codegen})
        if clip is not None:
            with optimizer.accumulate():
                loss(run, loud).backward()
            optimizer.zero_grad()
            if world == 1:  # gradients that a step does not get
                torch.autograd.grad(loss(run, loud), list(model.parameters()))
        for m in range(micro):
            if clip is not None:
                train_nothing(run, loud, evaluates=not flex)
            (loss(run, batch(0, m, rank)) / micro).backward()
        optimizer.step()
        after.append({name: full(param).detach().clone() for name, param in model.named_parameters()})
    plain, found = after
    shared = (threshold / seen).clamp(max=1).float().view(keys, -1).amin(1)
    queries, key = heads_of(whole)
    scale(plain, queries, shared.repeat_interleave(3 // keys) ** 0.3)
    scale(plain, key, shared**0.7)
    assert (shared < 1).any()
    close(found, plain, optimizer, seen)
    whole.load_state_dict(found)  # what is resident has been scaled too
    torch.testing.assert_close(run(batch(9, 0, 0)), whole(batch(9, 0, 0)), rtol=1e-4, atol=1e-5)


def all_heads(case: tuple[Any, ...]) -> None:
    """On a CPU FlexAttention has a backward that is only kept from users: its products are unfused there."""
    with mock.patch.object(flex_attention, "_validate_device", lambda *tensors: None):
        clipped(*case)


QUERIES = "model.layers.0.self_attn.q_b_proj.weight"


def latent() -> nn.Module:
    """DeepSeek V3's attention (MLA): 4 heads of 6 entries of their own and 4 that keys share, values of 5."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    shape = dict(vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, first_k_dense_replace=1)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5)
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(**shape, **heads, q_lora_rank=8, kv_lora_rank=8, use_cache=False, pad_token_id=0)
    )
    with torch.no_grad():
        model.get_parameter(QUERIES).view(4, 10, -1).mul_(torch.arange(1.0, 5)[:, None, None] * 30)
    return model


def seen_by(model: nn.Module, tokens: Tensor) -> Tensor:
    """The largest logit of each head, of what attention is given."""
    found, plain = [], F.scaled_dot_product_attention

    def recording(q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: float, **kwargs: Any) -> Tensor:
        logits = q.double() @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).double().mT * scale
        found.append(logits.masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -math.inf).amax((0, 2, 3)))
        return plain(q, k, v, *args, scale=scale, **kwargs)

    with torch.no_grad(), mock.patch.object(F, "scaled_dot_product_attention", recording):
        model(tokens)
    return torch.stack(found).amax(0)


def beside(whole: Any, clip: float, stage: int, batches: list[Tensor], over: str = "") -> tuple[Any, Any, Any]:
    """Weights behind a step without clipping and with it, and the optimizer that did it. ``over``: "sequence" where two
    ranks share sequences, "tensor" where each has a part of the weights."""
    after = []
    for limit in (None, clip):
        model: Any = copy.deepcopy(whole)
        config, mesh = config_from_kwargs(stage=stage, ns_dtype="float32", qk_clip=limit, qk_clip_alpha=0.3), None
        if over == "sequence":
            config = dataclasses.replace(config, sequence_parallel=SequenceParallelConfig(2))
        elif over == "tensor":
            mesh = init_device_mesh("cpu", (world_and_rank()[0] // 2, 2), mesh_dim_names=("shard", "tensor"))
            plan = {f"{part}_proj": ColwiseParallel() for part in "qkv"} | {"o_proj": RowwiseParallel()}
            parallelize_module(model.model.layers[0].self_attn, mesh["tensor"], plan)
        optimizer = compile_muon.MuonZero.from_config(model, config, mesh=mesh)
        run = model if limit is None else torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
        tokens = batches[world_and_rank()[1] if len(batches) > 1 else 0]
        run(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        after.append({name: full(param).detach().clone() for name, param in model.named_parameters()})
    torch._dynamo.reset()
    return *after, optimizer


def close(found: dict[str, Tensor], plain: dict[str, Tensor], optimizer: compile_muon.MuonZero, seen: Tensor) -> None:
    for name, expected in plain.items():
        torch.testing.assert_close(found[name], expected, rtol=2e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}")
    assert optimizer.metrics()["max_logit"] == pytest.approx(float(seen.max()), rel=1e-5)


def latent_attention() -> None:
    """What is of a head is scaled."""
    whole = latent()
    batches = [batch(0, 0, rank) for rank in range(world_and_rank()[0])]
    seen = torch.stack([seen_by(whole, tokens) for tokens in batches]).amax(0)
    threshold = float(seen[:3].max()) / 2
    plain, found, optimizer = beside(whole, threshold, 3, batches)
    factor = (threshold / seen).clamp(max=1).float()
    assert (factor < 1).any() and (factor == 1).any()
    own, shared = plain[QUERIES].view(4, 10, -1).split([6, 4], 1)
    own.mul_(factor[:, None, None] ** 0.3)
    shared.mul_(factor[:, None, None])
    key = plain["model.layers.0.self_attn.kv_b_proj.weight"]
    key.view(4, 11, -1)[:, :6].mul_(factor[:, None, None] ** 0.7)
    close(found, plain, optimizer, seen)


def some_of_the_heads(over: str) -> None:
    """Two ranks see the logits of two of four heads each, of which two share a key head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=1, pad_token_id=0)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, attention_bias=True)
    whole: Any = LlamaForCausalLM(LlamaConfig(**shape, **heads, max_position_embeddings=32, use_cache=False))
    weights = {part: f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk"}
    biases = {part: name.replace("weight", "bias") for part, name in weights.items()}
    with torch.no_grad():
        whole.get_parameter(weights["q"]).view(4, 4, -1).mul_(torch.tensor([30.0, 60, 120, 60])[:, None, None])
        for name in biases.values():
            whole.get_parameter(name).normal_()
    tokens = batch(0, 0, 0)
    seen = seen_by(whole, tokens)
    threshold = float(seen.median())
    plain, found, optimizer = beside(whole, threshold, 2, [tokens], over)
    factor = (threshold / seen).clamp(max=1).float().view(2, 2).amin(1)
    assert len(set(factor.tolist())) == 2
    for part, rows, power in (("q", 8, 0.3), ("k", 4, 0.7)):
        plain[weights[part]].view(2, rows, -1).mul_(factor[:, None, None] ** power)
        plain[biases[part]].view(2, rows).mul_(factor[:, None] ** power)
    close(found, plain, optimizer, seen)


#: the function; kind, key heads, own mask, stage, micro-batches, codegen, flex; how many ranks
CASES = {
    "fused": (all_heads, {"case": ("fused", 1, False, 2, 1, "eager", False)}, 2),
    "turned": (all_heads, {"case": ("turned", 3, True, 2, 1, "eager", False)}, 1),
}
MORE = {
    "apart": (all_heads, {"case": ("apart", 1, True, 3, 2, "eager", False)}, 2),
    "fused, inductor": (all_heads, {"case": ("fused", 3, False, 2, 2, "inductor", False)}, 1),
    "flex attention": (all_heads, {"case": ("apart", 1, True, 2, 1, "eager", True)}, 2),
    "latent attention": (latent_attention, {}, 2),
    "sequences that ranks share": (some_of_the_heads, {"over": "sequence"}, 2),
    "weights that ranks share": (some_of_the_heads, {"over": "tensor"}, 2),
}


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_heads_over_the_threshold_are_scaled(ranks: RanksOf, name: str) -> None:
    function, given, world = (CASES | MORE)[name]
    ranks(world).run(function, **given)


class Checkpointed(Attention):
    """Its forward is run again in backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        return checkpoint(super().forward, tokens, use_reentrant=False)


@pytest.mark.parametrize("inside", [True, False])
def test_what_is_recomputed_is_noted_once_and_a_skipped_step_leaves_nothing(inside: bool) -> None:
    torch.manual_seed(0)
    model = (Checkpointed if inside else Attention)("apart", 3, own_mask=False)
    optimizer = compile_muon.MuonZero(model, qk_clip=0.5, update="step", nonfinite="skip")
    compiled = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    run = compiled if inside else lambda x: checkpoint(compiled, x, use_reentrant=False)
    quiet, loud = sorted((batch(step, 0, 0) for step in range(9)), key=lambda x: float(largest(model, x).max()))[::8]
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    loss(run, loud).backward()
    dict(model.named_parameters())["head.weight"].grad.fill_(math.nan)
    optimizer.step()
    assert optimizer.totals()["skipped_steps"] == 1
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    optimizer.zero_grad()
    expected = float(largest(model, quiet).max())
    assert expected < float(largest(model, loud).max())
    with mock.patch.object(ShardedParam, "notify", autospec=True, side_effect=ShardedParam.notify) as noted:
        loss(run, quiet).backward()
    assert noted.call_count == 1
    optimizer.step()
    assert optimizer.metrics()["max_logit"] == pytest.approx(expected, rel=1e-5)


def test_blocks_of_rows_see_what_all_rows_see(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(2, 4, 11, 3), torch.randn(2, 2, 7, 3)
    monkeypatch.setattr(logits_pass, "_BLOCK", 4)
    mask = torch.randn(2, 1, 11, 7)
    logits = 0.3 * q @ k.repeat_interleave(2, 1).mT
    for causal, given, expected in (
        (False, None, logits),
        (True, None, logits.masked_fill(~torch.ones(11, 7, dtype=torch.bool).tril(), -math.inf)),
        (False, mask, logits + mask),
        (False, mask > 0, logits.masked_fill(mask <= 0, -math.inf)),
        (False, mask[:, :, :1] > 0, logits.masked_fill(mask[:, :, :1] <= 0, -math.inf)),
    ):
        torch.testing.assert_close(largest_logits(q, k, given, 0.3, causal), expected.amax((0, 2, 3)))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("normed", r"a norm lies between projection and attention"),
        ("fused", "set split_fused, or say in muon_views"),
        ("frozen", r"train k_proj.weight, too, or leave qk_clip out"),
        ("shifted", "is added behind the projection and not scaled with it"),
        ("not compiled", "no compiled graph has noted a logit in backward"),
    ],
)
def test_what_cannot_be_scaled(kind: str, said: str) -> None:
    torch.manual_seed(0)
    model = Attention(kind, 3, own_mask=False)
    if kind == "frozen":
        model.k_proj.requires_grad_(False)
    plain = kind == "not compiled"
    optimizer = compile_muon.MuonZero(model, qk_clip=1.0, update="step" if plain else "auto")
    run = model if plain else torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    raised = UnsupportedModelError if plain else (UnsupportedModelError, torch._dynamo.exc.BackendCompilerFailed)
    with pytest.raises(raised, match=said):
        loss(run, batch(0, 0, 0)).backward()
        optimizer.step()
