"""torchtitan's trainer beyond test_trainers.py: groups, attentions, files, and beside its own FSDP2 and AdamW."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import on_torchtitan
from support.harness import RanksOf, on_ranks
from support.on_torchtitan import fit, launched, trained, training
from support.trainers import check, plain
from torch.distributed.device_mesh import init_device_mesh

import compile_muon

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install compile_muon[torchtitan]")

ADAMW = {
    "type": "AdamW",
    "params": {"lr": 0.003, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "adamw_decay_vectors": True},
}


@pytest.mark.full
def test_groups_of_torchtitan_are_groups_of_the_optimizer(ranks: RanksOf, tmp_path: Path) -> None:
    """The first pattern that is found in a name has it."""
    slow, fast = {"lr": 0.001, "betas": (0.8, 0.9)}, {"lr": 0.01, "weight_decay": 0.0}
    groups = [
        ("tok_|lm_head", "AdamW", slow | {"fused": False}),
        ("attention[.]", "DistMuon", fast),
        (".*", "AdamW", {}),
    ]
    expected = plain(on_torchtitan, [2] * on_torchtitan.STEPS, groups=[
        {"params": ["tok_embeddings.weight", "lm_head.weight"], "method": "adamw", **slow},
        {"params": ["*.attention.*"], "method": "muon", **fast, "name": "attention"},
        {"params": ["*norm.weight", "*.feed_forward.*"], "method": "adamw", "name": "rest"},
    ])  # fmt: skip
    for run in ranks(2).run(fit, folder=str(tmp_path), stage=2, groups=groups):
        check(run, expected)


@pytest.mark.parametrize("kind", ["sdpa", pytest.param("flex", marks=pytest.mark.full)])
@on_ranks(2)
def test_each_attention_of_torchtitan_sees_all_positions(kind: str) -> None:
    """Grouped heads, fewer of keys than of ranks; FlexAttention, which has no backward on CPUs, with its mask."""
    with launched() as titan, torch.no_grad():
        from compile_muon.integrations.context_parallel import exchange_heads  # behind what says that there is no GPU

        attention = {"sdpa": titan.ScaledDotProductAttention, "flex": titan.FlexAttention}[kind]
        model = titan.built(titan.llama(dim=32, heads=4, keys=1, attention=attention), seed=3)
        rank, world = dist.get_rank(), dist.get_world_size()
        tokens = titan.batch_of(0, 2, 32)[:, :-1]
        positions = (torch.arange(32) % 20).expand(2, 32)  # two documents
        whole = model(tokens, positions, model.get_attention_masks(positions) if kind == "flex" else None)
        exchange_heads(model, init_device_mesh("cpu", (world,)))
        masks = model.get_attention_masks(positions) if kind == "flex" else None
        own = [x.chunk(world, 1)[rank] for x in (tokens, positions, whole)]
        found = model(own[0], positions=own[1], attention_masks=None if masks is None else "what was cut of it")
    assert float((found - own[2]).abs().max()) < 1e-5 * float(own[2].abs().max())


@pytest.mark.full
def test_bfloat16_is_what_torchtitan_says(ranks: RanksOf, tmp_path: Path) -> None:
    """``mixed_precision_param``: weights used in bfloat16, as FSDP2 would, masters and losses in float32."""
    more = {"training": training(2, mixed_precision_param="bfloat16")}
    found = ranks(2).run(fit, folder=str(tmp_path / "ours"), stage=2, optimizer=ADAMW, **more)[0]
    with launched() as titan:  # FSDP2 and AdamW, on one rank: Gloo has no reduction that torchtitan asks for
        theirs = trained(titan.config(str(tmp_path), checkpoint={"enable": False}, **more))
    assert found.losses == pytest.approx(theirs.losses, rel=1e-3)
    assert found.norms == pytest.approx(theirs.norms, rel=1e-2)
    assert found.losses != pytest.approx(plain(on_torchtitan, [2] * 4, optimizer=ADAMW).losses, rel=1e-5)
    assert all(value.dtype == torch.float32 for value in found.weights.values())


def refused(sections: dict[str, Any], muon: dict[str, Any]) -> compile_muon.ConfigError:
    from compile_muon.integrations.torchtitan import with_muon

    with launched() as titan, pytest.raises(compile_muon.ConfigError) as caught:
        if "activation_checkpoint" in sections:
            sections["activation_checkpoint"] = titan.MemoryBudgetAC.Config()
        with_muon(titan.config("", **sections), muon)
    return caught.value


REFUSED: dict[str, dict[str, Any]] = {
    "parallelism": {
        "tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "context_parallel_load_balancer": "ptrr",
        "expert_parallel_degree": 2, "data_parallel_replicate_degree": 2, "spmd_backend": "full_dtensor",
        "fsdp_reshard_after_forward": "never",
    },
    "training": {"enable_cpu_offload": True}, "compile": {"enable": True}, "debug": {"spmd_typechecking": True},
}  # fmt: skip


def test_what_cannot_be_honoured_is_refused_in_one_error() -> None:
    sections = {**REFUSED, "activation_checkpoint": {}}
    sections["parallelism"] = {**REFUSED["parallelism"], "context_parallel_degree": 2}
    twice = {"gradient_clipping": 1.0, "bf16": {"enabled": True}}
    error = refused(sections, {**twice, "zero_optimization": {"stag": 3}})
    named = {part.field.removesuffix("components").removesuffix("enable") for part in error.errors}
    paths = {f"{section}.{name}".removesuffix("enable") for section, names in REFUSED.items() for name in names}
    assert named == paths | {"activation_checkpoint", "zero_optimization.stag"}
    assert all(part.remedy for part in error.errors)
    assert refused({"training": {"disable_cuda_graphs": False}}, {}).field == "training.disable_cuda_graphs"
    assert [part.field for part in refused({}, twice).errors] == ["bf16.enabled", "gradient_clipping"]
    two_ways = refused({}, {"sequence_parallel": {"size": 2}})
    assert two_ways.field == "sequence_parallel.size" and "context_parallel_degree" in two_ways.remedy


def test_the_command_line_keeps_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``--module`` names any module of functions that give configurations; the rest are torchtitan's options."""
    (tmp_path / "my_registry.py").write_text(
        "from support import titan_parts\nfrom compile_muon.integrations.torchtitan import with_muon\n"
        "def small():\n    return with_muon(titan_parts.config(''), {'zero_optimization': {'stage': 3}})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with launched():
        from torchtitan.config import ConfigManager

        from compile_muon.integrations.torchtitan import parallelize

        line = ["--module", "my_registry", "--config", "small", "--training.steps", "9"]
        config = ConfigManager().parse_args(line)
    assert config.training.steps == 9 and config.model_spec.parallelize_fn is parallelize
    assert config.optimizer.muon_config == {"zero_optimization": {"stage": 3}}
