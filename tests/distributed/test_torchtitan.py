"""torchtitan's trainer with ``with_muon`` beside a plain loop, and beside its own FSDP2 and AdamW, on several ranks."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.harness import Ranks
from support.reference import full
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import compile_muon

pytest.importorskip("torchtitan", reason="torchtitan is not installed: pip install compile_muon[torchtitan]")

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, ACCUMULATED, BATCH, LENGTH, RATE, SEED = 4, 2, 2, 8, 0.02, 7
LIMITS = {1: 0.82, 2: 0.6, 3: 0.5}  # some steps are clipped, some are not
MUON = {"type": "Muon", "params": {"lr": RATE, "adam_lr": 0.003, "weight_decay": 0.1, "ns_dtype": "fp32"}}
ADAMW = {
    "type": "AdamW",
    "params": {"lr": 0.003, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "adamw_decay_vectors": True},
}


@contextlib.contextmanager
def launched() -> Iterator[Any]:
    """torchtitan's classes, in the environment that torchrun gives a rank; one process has a group of its own."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        import torchtitan_on_cpu  # noqa: F401
    finally:
        sys.path.remove(str(EXAMPLES))
    from support import titan_parts

    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    there = {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world)}
    # The trainer's last words are two seconds of sleep.
    awake = types.SimpleNamespace(sleep=lambda _: None, perf_counter=time.perf_counter)
    try:
        with mock.patch.dict(os.environ, there), mock.patch("torchtitan.trainer.time", awake):
            yield titan_parts
    finally:
        gc.enable()  # the trainer collects garbage by itself
        if alone:
            dist.destroy_process_group()


def settings(world: int, **training: Any) -> dict[str, Any]:
    """As many batches a step as ``plain`` takes, on as many ranks as there are."""
    return {"training": {"global_batch_size": BATCH * ACCUMULATED * world, "max_norm": LIMITS[world], **training}}


def config_of(
    titan: Any,
    folder: str,
    stage: int,
    *,
    optimizer: Any = MUON,
    compiled: bool = False,
    groups: Any = (),
    **sections: Any,
) -> Any:
    from compile_muon.integrations.torchtitan import with_muon

    sections = sections if "training" in sections else {**settings(dist.get_world_size()), **sections}
    compile_ = {"codegen": "eager"} if compiled else False
    muon = {"optimizer": optimizer, "zero_optimization": {"stage": stage}, "compile": compile_}
    names = ("pattern", "optimizer_name", "optimizer_kwargs")
    own = [titan.ParamGroupConfig(**dict(zip(names, group, strict=True))) for group in groups]
    return with_muon(titan.config(folder, **sections), muon, own)


def weights(model: Any) -> dict[str, Tensor]:
    found = {name: full(param.detach()).clone() for name, param in model.named_parameters()}
    return {name.replace("_checkpoint_wrapped_module.", ""): value for name, value in found.items()}


Run = tuple[list[float], list[float], list[float], dict[str, Tensor]]


def run(config: Any) -> Run:
    trainer = config.build()
    trainer.train()
    heard, model = trainer.metrics_processor, trainer.model_parts[0]
    if hasattr(trainer.optimizers, "muon"):
        metrics, muon_config = trainer.optimizers.muon.totals(), trainer.config.optimizer.muon_config
        assert bool(metrics["compiled_graphs"]) == bool(muon_config["compile"] or metrics["directions_in_step"])
        assert bool(metrics["directions_speculated"]) == bool(muon_config["compile"])
        blocks = [type(block).__name__ for block in model.layers.values()]
        assert ("CheckpointWrapper" in blocks) == (trainer.config.activation_checkpoint is not None)
    found = heard.losses, heard.norms, heard.validated, weights(model)
    trainer.close()
    return found


def train(folder: str, stage: int, **given: Any) -> Run:
    with launched() as titan:
        for name in ("activation_checkpoint", "loss"):
            if name in given:
                given[name] = eval(given[name], vars(titan))
        return run(config_of(titan, folder, stage, **given))


def plain(world: int, optimizer: Any = MUON, groups: Any = None) -> Run:
    """The same by hand, in one process on the batches of all ranks."""
    with launched() as titan:
        spec = titan.llama()
        spec.model.update_from_config(config=titan.config(""))
        with torch.device("meta"):
            model = spec.model.build()
        torch.manual_seed(SEED)
        model.to_empty(device="cpu").init_weights()
    given = {"optimizer": optimizer, "gradient_accumulation_steps": None}
    model, muon = compile_muon.initialize(model, given, groups=groups)
    warmup = torch.optim.lr_scheduler.LambdaLR(muon, lambda done: (0.5, 1.0, 1.0, 0.5, 0.0)[done])
    found: tuple[list[float], list[float], list[float]] = ([], [], [])
    for step in range(STEPS):
        total, batches = 0.0, world * ACCUMULATED
        for batch in range(batches):
            tokens = titan.batch_of(step * batches + batch, BATCH, LENGTH)
            loss = loss_of(model, tokens) / batches
            loss.backward()
            total += loss.item()
        found[0].append(total)
        found[1].append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LIMITS[world])))
        muon.step()
        muon.zero_grad()
        warmup.step()
        if step == 0 or step % 2 == 1:
            with torch.no_grad():
                each = [loss_of(model, titan.batch_of(500 + rank, BATCH, LENGTH)).item() for rank in range(world)]
            found[2].append(sum(each) / world)
    return *found, weights(model)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def same(found: Run, expected: Run) -> None:
    for mine, theirs in zip(found[:3], expected[:3], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    assert found[3].keys() == expected[3].keys()
    for name, value in expected[3].items():
        torch.testing.assert_close(found[3][name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("world", "stage", "given"),
    [
        pytest.param(2, 0, {}, marks=pytest.mark.campaign),
        pytest.param(
            2,
            1,
            {"loss": "ChunkedLossWrapper.Config(num_chunks=4)", "activation_checkpoint": "FullAC.Config()"},
            marks=pytest.mark.full,
        ),
        pytest.param(
            2,
            3,
            {
                "compiled": True,
                "loss": "ChunkedLossWrapper.Config(num_chunks=2)",
                "activation_checkpoint": "SelectiveAC.Config()",
            },
            marks=pytest.mark.campaign,
        ),
        (1, 2, {"compiled": True}),
    ],
)
def test_the_trainer_trains_as_a_plain_loop(
    ranks: Callable[[int], Ranks], tmp_path: Path, world: int, stage: int, given: dict[str, Any]
) -> None:
    expected = plain(world)
    assert min(expected[1]) < LIMITS[world] < max(expected[1])
    for found in ranks(world).run(train, folder=str(tmp_path), stage=stage, **given):
        same(found, expected)


@pytest.mark.full
def test_groups_of_torchtitan_are_groups_of_the_optimizer(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """The first pattern that is found in a name has it."""
    slow, fast = {"lr": 0.001, "betas": (0.8, 0.9)}, {"lr": 0.01, "weight_decay": 0.0}
    groups = [
        ("tok_|lm_head", "AdamW", slow | {"fused": False}),
        ("attention[.]", "DistMuon", fast),
        (".*", "AdamW", {}),
    ]
    expected = plain(2, groups=[
        {"params": ["tok_embeddings.weight", "lm_head.weight"], "method": "adamw", **slow},
        {"params": ["*.attention.*"], "method": "muon", **fast, "name": "attention"},
        {"params": ["*norm.weight", "*.feed_forward.*"], "method": "adamw", "name": "rest"},
    ])  # fmt: skip
    for found in ranks(2).run(train, folder=str(tmp_path), stage=2, groups=groups):
        same(found, expected)


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "stage", "given"),
    [
        (2, 3, {"compiled": True}),
        (2, 1, {"loss": "ChunkedLossWrapper.Config(num_chunks=2)", "activation_checkpoint": "FullAC.Config()"}),
        pytest.param(4, 2, {}, marks=pytest.mark.campaign),
    ],
)
def test_ranks_that_share_a_context_train_as_one(
    ranks: Callable[[int], Ranks], tmp_path: Path, world: int, stage: int, given: dict[str, Any]
) -> None:
    """torchtitan gives the two of a group the same batch, and cuts it; each has some of the heads."""
    batches, shared = world // 2, {"context_parallel_degree": 2}
    for found in ranks(world).run(
        train, folder=str(tmp_path), stage=stage, parallelism=shared, **settings(batches), **given
    ):
        same(found, plain(batches))


def attended(kind: str) -> tuple[float, float]:
    """Largest difference of a decoder's outputs to those of all positions on one rank, and of what they are made of."""
    with launched() as titan, torch.no_grad():
        from compile_muon.integrations.context_parallel import exchange_heads  # behind what says that there is no GPU

        model, rank, world = titan.decoder(kind), dist.get_rank(), dist.get_world_size()
        tokens = titan.batch_of(0, 2, 32)[:, :-1]
        positions = (torch.arange(32) % 20).expand(2, 32)  # two documents
        whole = model(tokens, positions, model.get_attention_masks(positions) if kind == "flex" else None)
        exchange_heads(model, init_device_mesh("cpu", (world,)))
        masks = model.get_attention_masks(positions) if kind == "flex" else None
        own = [x.chunk(world, 1)[rank] for x in (tokens, positions, whole)]
        found = model(own[0], positions=own[1], attention_masks=None if masks is None else "what was cut of it")
    return float((found - own[2]).abs().max()), float(own[2].abs().max())


@pytest.mark.parametrize("kind", ["sdpa", pytest.param("flex", marks=pytest.mark.full)])
def test_each_attention_of_torchtitan_sees_all_positions(ranks: Callable[[int], Ranks], kind: str) -> None:
    """Grouped heads, fewer of keys than of ranks; FlexAttention, which has no backward on CPUs, with its mask."""
    for difference, size in ranks(2).run(attended, kind=kind):
        assert difference < 1e-5 * size


# ------------------------------------------------------------------------------------------- beside torchtitan's own


def train_theirs(folder: str, batches: int, **sections: Any) -> Run:
    """FSDP2 and AdamW, on one rank."""
    with launched() as titan:
        training = {"global_batch_size": BATCH * batches, "max_norm": LIMITS[2]}
        return run(titan.config(folder, training=training, checkpoint={"enable": False}, **sections))


@pytest.mark.full
def test_adamw_trains_as_theirs(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Beside FSDP2 and ``torch.optim.AdamW``, on one rank: Gloo has no reduction that torchtitan asks for."""
    found = ranks(2).run(train, folder=str(tmp_path / "ours"), stage=2, optimizer=ADAMW)[0]
    losses, norms, _, held = train_theirs(str(tmp_path / "theirs"), 2 * ACCUMULATED)
    same((found[0], found[1], [], found[3]), (losses, norms, [], held))


@pytest.mark.full
def test_bfloat16_is_what_torchtitan_says(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """``mixed_precision_param``: weights used in bfloat16, as FSDP2 would, masters and losses in float32."""
    given = {"optimizer": ADAMW, "training": {**settings(2)["training"], "mixed_precision_param": "bfloat16"}}
    found = ranks(2).run(train, folder=str(tmp_path / "ours"), stage=3, **given)[0]
    with launched() as titan:
        training = {**settings(2)["training"], "mixed_precision_param": "bfloat16"}
        losses, norms, _, _ = run(titan.config(str(tmp_path), training=training, checkpoint={"enable": False}))
    assert found[0] == pytest.approx(losses, rel=1e-3)
    assert found[1] == pytest.approx(norms, rel=1e-2)
    assert found[0] != pytest.approx(plain(2, ADAMW)[0], rel=1e-5)
    assert all(value.dtype == torch.float32 for value in found[3].values())


# ------------------------------------------------------------------------------------------------- going on


def state_of(trainer: Any) -> dict[str, Tensor]:
    """Whole weights and optimizer state, by the names in torchtitan's checkpoints."""
    state = {**trainer.checkpointer.states["model"].state_dict(), **trainer.optimizers.state_dict()}
    return {name: full(value).clone() for name, value in state.items() if isinstance(value, Tensor)}


def go_on(folder: str, stage: int, resume: bool) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Twelve sentences a step on any number of ranks; what step 3 begins with, and losses and norms."""
    with launched() as titan:
        from torchtitan.trainer import Trainer

        seen: dict[int, dict[str, Tensor]] = {}
        step = Trainer.train_step

        def train_step(self: Any, batches: Any) -> None:
            seen[self.step] = state_of(self)
            step(self, batches)

        training = {"global_batch_size": 12, "max_norm": 0.5}
        config = config_of(titan, folder, stage, training=training)
        config.checkpoint.load_step = 2 if resume else -1
        with mock.patch.object(Trainer, "train_step", train_step):
            losses, norms, _, _ = run(config)
        return seen[3], losses, norms


@pytest.mark.parametrize(
    "others",
    [
        pytest.param(((2, 3), (1, 0)), marks=pytest.mark.full),
        pytest.param(((2, 3), (3, 1), (1, 0)), marks=pytest.mark.campaign),
    ],
)
def test_a_run_goes_on_bit_for_bit_and_on_another_world(
    ranks: Callable[[int], Ranks], tmp_path: Path, others: tuple[tuple[int, int], ...]
) -> None:
    began, losses, norms = ranks(2).run(go_on, folder=str(tmp_path), stage=3, resume=False)[0]
    assert any("momentum_buffer" in name for name in began) and any(value.any() for value in began.values())
    for world, stage in others:
        for found, later, norms_later in ranks(world).run(go_on, folder=str(tmp_path), stage=stage, resume=True):
            assert found.keys() == began.keys()
            assert all(torch.equal(found[name], value) for name, value in began.items())
            assert later == (losses[2:] if world == 2 else pytest.approx(losses[2:], rel=1e-5, abs=1e-5))
            assert norms_later == (norms[2:] if world == 2 else pytest.approx(norms[2:], rel=1e-5, abs=1e-5))


@pytest.mark.campaign
def test_weights_load_without_this_library(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """torchtitan's checkpoint and its Hugging Face export, bit for bit, in a process that has never seen it."""
    export = {"checkpoint": {"last_save_in_hf": True, "last_save_model_only": True}}
    held = ranks(2).run(train, folder=str(tmp_path), stage=2, **export)[0][3]
    torch.save(held, tmp_path / "held.pt")
    folders = [str(EXAMPLES), str(Path(__file__).parent)]
    code = (
        f"import sys; sys.path[:0] = {folders}; import torchtitan_on_cpu; "
        f"from support import titan_parts; titan_parts.load('{tmp_path}')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def train_from_a_seed(folder: str) -> list[float]:
    with launched() as titan:
        return run(config_of(titan, folder, 3))[0]


@pytest.mark.campaign
def test_a_seed_checkpoint_begins_a_run(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """Made as ``torchtitan.train`` does it, with another seed."""
    with launched() as titan:
        checkpoint = {"create_seed_checkpoint": True}
        trainer = config_of(titan, str(tmp_path), 3, checkpoint=checkpoint, debug={"seed": 11}).build()
        trainer.checkpointer.save(curr_step=0, last_step=True)
        trainer.close()
    seeded = ranks(2).run(train_from_a_seed, folder=str(tmp_path))[0]
    other = ranks(2).run(train, folder=str(tmp_path / "new"), stage=3, debug={"seed": 11})[0]
    assert seeded == other[0] and seeded != pytest.approx(plain(2)[0])


# ------------------------------------------------------------------------------------------------- refusals


def refused(given: dict[str, Any], muon: dict[str, Any] | None = None) -> compile_muon.ConfigError:
    from compile_muon.integrations.torchtitan import with_muon

    with launched() as titan, pytest.raises(compile_muon.ConfigError) as caught:
        if "activation_checkpoint" in given:
            given["activation_checkpoint"] = eval(given["activation_checkpoint"], vars(titan))
        with_muon(titan.config("", **given), muon or {})
    return caught.value


REFUSED: list[tuple[str, Any]] = [
    ("parallelism.tensor_parallel_degree", 2),
    ("parallelism.pipeline_parallel_degree", 2),
    ("parallelism.context_parallel_load_balancer", "ptrr"),
    ("parallelism.expert_parallel_degree", 2),
    ("parallelism.data_parallel_replicate_degree", 2),
    ("parallelism.spmd_backend", "full_dtensor"),
    ("parallelism.fsdp_reshard_after_forward", "never"),
    ("training.enable_cpu_offload", True),
    ("compile.enable", True),
    ("debug.spmd_typechecking", True),
]


def test_what_cannot_be_honoured_is_refused_in_one_error() -> None:
    given: dict[str, Any] = {
        "activation_checkpoint": "MemoryBudgetAC.Config()",
        "parallelism": {"context_parallel_degree": 2},
    }
    for path, value in REFUSED:
        section, name = path.split(".")
        given.setdefault(section, {})[name] = value
    error = refused(given, {"gradient_clipping": 1.0, "bf16": {"enabled": True}, "zero_optimization": {"stag": 3}})
    named = {part.field.removesuffix("components").removesuffix("enable") for part in error.errors}
    expected = {path.removesuffix("enable") for path, _ in REFUSED} | {
        "activation_checkpoint",
        "zero_optimization.stag",
    }
    assert named == expected
    for part in error.errors:
        assert part.remedy
    graphs = refused({"training": {"disable_cuda_graphs": False}})
    assert graphs.field == "training.disable_cuda_graphs"
    twice = refused({}, {"gradient_clipping": 1.0, "bf16": {"enabled": True}})
    assert [part.field for part in twice.errors] == ["bf16.enabled", "gradient_clipping"]
    two_ways = refused({}, {"sequence_parallel": {"size": 2}})
    assert two_ways.field == "sequence_parallel.size" and "context_parallel_degree" in two_ways.remedy


def built(change: str) -> str:
    """What a trainer says to a configuration that was changed after ``with_muon``, as the command line would."""
    with launched() as titan:
        config = config_of(titan, "", 3, checkpoint={"enable": False})
        names = {**vars(titan), "config": config, "integration": sys.modules["compile_muon.integrations.torchtitan"]}
        exec(change, names)
        with pytest.raises(compile_muon.ConfigError) as caught:
            config.build().train()
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            "config.parallelism.tensor_parallel_degree = 2",
            "parallelism.tensor_parallel_degree = 2: compile_muon shards",
        ),
        ("config.training.disable_cuda_graphs = False", "training.disable_cuda_graphs = False: replays"),
        (
            "shared = config.parallelism; shared.context_parallel_degree = 2; "
            "shared.context_parallel_load_balancer = 'headtail'",
            "parallelism.context_parallel_load_balancer = 'headtail': deals positions out",
        ),
        (
            "config.parallelism.context_parallel_degree = 2; config.model_spec.model = llama(heads=1).model",
            "parallelism.context_parallel_degree = 2: does not divide the 1 heads of layers.0.attention",
        ),
        (
            "config.parallelism.context_parallel_degree = 2; "
            "config.optimizer.muon_config['optimizer'] = {'type': 'Muon', 'params': {'qk_clip': 9.0}}",
            "qk_clip = 9.0: notes the logits of all heads",
        ),
        (
            "config.optimizer.muon_config['gradient_accumulation_steps'] = 3",
            "contradicts training.global_batch_size = 8",
        ),
        (
            "config.optimizer.param_groups = 2 * default_adamw(lr=1.0).param_groups",
            "optimizer.param_groups = '.*': is found in the name of no parameter that patterns before it have left",
        ),
        (
            "config.optimizer.param_groups = [ParamGroupConfig(pattern='.*', optimizer_name='Adam')]",
            "groups[.*].method = 'Adam'",
        ),
        ("config.optimizer = default_adamw(lr=1.0)", "optimizer = 'another': has not sharded the model"),
        (
            "config.model_spec = llama(); config.parallelism.spmd_backend = 'partial_dtensor'",
            "model_spec.parallelize_fn = 'another function': has sharded the model already",
        ),
    ],
)
def test_a_command_line_is_refused_before_training(ranks: Callable[[int], Ranks], change: str, said: str) -> None:
    for message in ranks(2).run(built, change=change):
        assert message.startswith(said) or said in message


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


@pytest.mark.full
def test_the_package_does_not_import_torchtitan() -> None:
    code = "import compile_muon.integrations, sys; assert not {'torchtitan', 'tyro'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
