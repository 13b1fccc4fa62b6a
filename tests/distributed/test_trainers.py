"""Trainers of other libraries beside a plain loop: clipped, accumulated, evaluated, saved, gone on with, refused."""

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.harness import RanksOf
from support.reference import refusal
from support.trainers import Run, check, plain, trainer

LIBRARIES = ("accelerate", "lightning", "transformers", "torchtitan")
#: world, stage, compiled
FITS = ((2, 3, False), (1, 2, True), (2, 1, True), (2, 3, True), (2, 0, False), (2, 2, False), (3, 3, False))
#: world, stage, compiled; two ranks share a sequence
SHARED = ((2, 2, False), (2, 3, True), (2, 1, False), (4, 2, False))


@pytest.fixture(scope="module")
def fitted(ranks: RanksOf, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """The folder that the first of :data:`FITS` leaves, and what its ranks found; of each library once."""

    @functools.cache
    def of(library: str) -> tuple[Path, list[Run]]:
        folder, (world, stage, compiled) = tmp_path_factory.mktemp(library), FITS[0]
        return folder, ranks(world).run(trainer(library).fit, folder=str(folder), stage=stage, compiled=compiled)

    return of


def cases(default: set[tuple[str, Any]], full: set[tuple[str, Any]], every: tuple[Any, ...]) -> list[Any]:
    """Each case of each library: of the default tier, of the full one, or of campaigns."""
    marks = {True: (), False: pytest.mark.campaign}
    return [
        pytest.param(name, *case, marks=pytest.mark.full if (name, case) in full else marks[(name, case) in default])
        for name in LIBRARIES
        for case in every
    ]


@pytest.mark.parametrize(
    ("library", "world", "stage", "compiled"),
    cases(
        {(name, FITS[0]) for name in LIBRARIES[:3]} | {("lightning", FITS[1]), ("torchtitan", FITS[1])},
        {("accelerate", FITS[1]), *((name, FITS[2]) for name in LIBRARIES if name != "lightning")},
        FITS,
    ),
)
def test_a_fit_is_a_plain_loop(
    ranks: RanksOf, tmp_path: Path, fitted: Any, library: str, world: int, stage: int, compiled: bool
) -> None:
    job = trainer(library)
    expected = plain(job, [world] * job.STEPS)
    assert job.LIMITS[world] < max(expected.norms)
    fit = {"folder": str(tmp_path), "stage": stage, "compiled": compiled}
    first = (world, stage, compiled) == FITS[0]
    folder, runs = fitted(library) if first else (tmp_path, ranks(world).run(job.fit, **fit))
    for run in runs:
        check(run, expected)
        assert bool(run.totals["directions_speculated"]) is compiled and not run.totals["skipped_steps"]
        if run.sent and stage == 1 < world:  # one reduction each, of two micro-batches and of the epoch's last one
            assert run.sent[-1] - run.sent[-2] == run.sent[-2] - run.sent[-3] > 0
    if hasattr(job, "saved"):
        checkpoints, values = job.saved(folder)
        assert checkpoints == job.CHECKPOINTS and values
        assert all(torch.equal(value, run.weights[name]) for name, value in values.items() if name in run.weights)


@pytest.mark.parametrize("others", [
    pytest.param(((2, 3), (1, 0)), marks=pytest.mark.full),
    pytest.param(((2, 3), (1, 0), (3, 1)), marks=pytest.mark.campaign),
])  # fmt: skip
@pytest.mark.parametrize("library", LIBRARIES)
def test_a_run_goes_on_bit_for_bit_and_on_another_world(
    ranks: RanksOf, tmp_path: Path, fitted: Any, library: str, others: tuple[tuple[int, int], ...]
) -> None:
    job, (saved, (whole, *_)) = trainer(library), fitted(library)
    assert any("momentum_buffer" in name and value.any() for name, value in whole.state.items())
    for world, stage in others:
        expected = plain(job, [2] * job.SAVED + [world] * (job.STEPS - job.SAVED))
        folder = shutil.copytree(saved, tmp_path / f"on {world}")
        for run in ranks(world).run(job.fit, folder=str(folder), stage=stage, resume=True):
            check(run, expected, job.SAVED)
            assert run.state.keys() == whole.state.keys()
            assert all(torch.equal(run.state[name], value) for name, value in whole.state.items())
            if world == 2:
                assert (run.losses, run.norms) == (whole.losses[job.SAVED :], whole.norms[job.SAVED :])
                assert all(torch.equal(run.weights[name], value) for name, value in whole.weights.items())


@pytest.mark.parametrize(
    ("library", "world", "stage", "compiled"),
    cases(
        {("lightning", SHARED[0])},
        {("accelerate", SHARED[0]), ("transformers", SHARED[2]), ("torchtitan", SHARED[1]), ("torchtitan", SHARED[2])},
        SHARED,
    ),
)
def test_ranks_that_share_sequences_train_as_half_as_many(
    ranks: RanksOf, tmp_path: Path, library: str, world: int, stage: int, compiled: bool
) -> None:
    job = trainer(library)
    expected = plain(job, [world // 2] * job.STEPS, shared=2)
    for run in ranks(world).run(job.fit, folder=str(tmp_path), stage=stage, compiled=compiled, shared=2):
        check(run, expected)


OTHERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("accelerate", {"mixed_precision": "bf16"}, {"dtype": torch.bfloat16}),
    ("lightning", {"precision": "bf16-mixed"}, {"dtype": torch.bfloat16}),
    ("lightning", {"gradient_clip_algorithm": "value"}, {"clip": torch.nn.utils.clip_grad_value_}),
]


@pytest.mark.parametrize(
    ("library", "settings", "other"),
    [("lightning", {"thawed": True}, {"thaw": ("up", 3)}), *(pytest.param(*o, marks=pytest.mark.full) for o in OTHERS)],
)
def test_other_settings_train_as_a_plain_loop_too(
    ranks: RanksOf, tmp_path: Path, library: str, settings: dict[str, Any], other: dict[str, Any]
) -> None:
    job = trainer(library)
    expected = plain(job, [2] * job.STEPS, **other)
    for run in ranks(2).run(job.fit, folder=str(tmp_path), stage=1, compiled="thawed" not in settings, **settings):
        check(run, expected)


REFUSED = [
    ("accelerate", "mixed_precision='fp16'", "mixed_precision = 'fp16': scales the loss .*use \"bf16\""),
    ("accelerate", "dynamo_backend='eager'", "dynamo_backend = 'EAGER': would compile the model a second time"),
    ("accelerate", "fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2)",
     r"Accelerator\(fsdp_plugin=...\).* shards the model too; leave it out"),
    ("accelerate", "parallelism_config=ParallelismConfig(dp_replicate_size=1)", r"\(parallelism_config=...\).* shards"),
    ("accelerate", "kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)]",
     "comm_hook = 'bf16': there is no DDP to hook"),
    ("accelerate", "given={'gradient_accumulation_steps': 2}", "gradient_accumulation_steps = 2: is the accelerator's"),
    ("lightning", "CONFIG, lambda m: torch.optim.AdamW(m.parameters())", "'AdamW': .*return trainer.strategy.muon"),
    ("lightning", "None, lambda m: torch.optim.AdamW(m.parameters())", r"'AdamW': is another .*MuonZero\(self"),
    ("lightning", "None, lambda m: None", "None: makes no optimizer, and neither does the strategy"),
    ("lightning", "None, lambda m: compile_muon.MuonZero(m.model.up, muon_params=['weight'])", "'model.embed.weight, "),
    ("lightning", "None, lambda m: m.trainer.strategy.muon", "is made from MuonZeroStrategy"),
    ("lightning", "config_of(2, sequence_parallel={'size': 2, 'blocks': ['blocks']}), lambda m: None",
     "sequence_parallel.size = 2: is checked where a causal language model"),
    ("transformers", "torch_compile=True", "Arguments.torch_compile = True: would compile .*\"compile\": true"),
    ("transformers", "auto_find_batch_size=True", "TrainingArguments.auto_find_batch_size = True"),
    ("transformers", "optim='adafactor'", "Arguments.optim = 'adafactor': is another optimizer, or .*; leave it out"),
    ("transformers", "save_on_each_node=True", "TrainingArguments.save_on_each_node = True: .* share output_dir"),
    ("transformers", "bf16_full_eval=True", "Arguments.bf16_full_eval = True: scales the loss or casts weights"),
    ("transformers", "weight_decay=0.01", r'weight_decay = 0.01: is not .*, 0.1, .* "weight_decay": "auto"'),
    ("transformers", "adam_beta2=0.9", r'TrainingArguments.adam_beta2 = 0.9: is not .*, 0.95, .* "betas": "auto"'),
    ("transformers", "gradient_accumulation_steps=3, config={'gradient_accumulation_steps': 2}", "contradicts"),
    ("transformers", "max_grad_norm=0.5, config={'gradient_clipping': 0.1}",
     "gradient_clipping = 0.1: contradicts TrainingArguments.max_grad_norm = 0.5"),
    ("transformers", "config={'mesh': {'tensor': 2}}", "mesh.tensor = 2: needs the same batches on its ranks"),
    ("transformers", "config={'sequence_parallel': {'inputs': 'sharded'}}", "inputs = 'sharded': cannot be: loaders "),
    ("transformers", "optimizers=(torch.optim.SGD([torch.zeros(1)]), None)", "optimizers = 'SGD': is another"),
    ("torchtitan", "shared.context_parallel_degree = 2; shared.context_parallel_load_balancer = 'headtail'",
     "^parallelism.context_parallel_load_balancer = 'headtail': deals positions out"),
    ("torchtitan", "shared.context_parallel_degree = 2; config.model_spec.model = llama(heads=1).model",
     "^parallelism.context_parallel_degree = 2: does not divide the 1 heads of layers.0.attention"),
    ("torchtitan", "shared.context_parallel_degree = 2; "
     "config.optimizer.muon_config['optimizer'] = {'type': 'Muon', 'params': {'qk_clip': 9.0}}",
     "qk_clip = 9.0: notes the logits of all heads"),
    ("torchtitan", "config.optimizer.muon_config['gradient_accumulation_steps'] = 3",
     "contradicts training.global_batch_size = 8"),
    ("torchtitan", "config.optimizer.param_groups = 2 * default_adamw(lr=1.0).param_groups",
     r"^optimizer.param_groups = '\.\*': is found in the name of no parameter that patterns before it have left"),
    ("torchtitan", "config.optimizer.param_groups = [ParamGroupConfig(pattern='.*', optimizer_name='Adam')]",
     r"groups\[\.\*\].method = 'Adam'"),
    ("torchtitan", "config.optimizer = default_adamw(lr=1.0)", "^optimizer = 'another': has not sharded the model"),
    ("torchtitan", "config.model_spec = llama(); config.parallelism.spmd_backend = 'partial_dtensor'",
     "^model_spec.parallelize_fn = 'another function': has sharded the model already"),
]  # fmt: skip


def refused(library: str, **change: Any) -> str:
    """What is said on a rank to settings, or to a run that goes on from a checkpoint."""
    job = trainer(library)
    return refusal(lambda: job.fit(stage=3, resume=True, **change) if "folder" in change else job.build(**change))


@pytest.mark.parametrize(("library", "change", "said"), REFUSED, ids=[f"{row[0]} {row[1][:40]}" for row in REFUSED])
def test_what_cannot_be_honoured_is_refused(ranks: RanksOf, library: str, change: str, said: str) -> None:
    trainer(library)
    for message in ranks(2 if library == "torchtitan" or "sequence" in change else 1).run(
        refused, library=library, change=change
    ):
        assert re.search(said, message), message


def shorten(path: Path, end: bytes = b"") -> None:
    path.write_bytes(path.read_bytes()[:-1] + end)


def spoil(folder: Path) -> None:
    shorten(next(folder.iterdir()), b"\x99")


def double(folder: Path) -> None:
    shutil.copytree(folder, f"{folder}_1")


def mix(state: Path) -> None:
    """As if a save over this one was killed before its commit."""
    for path in (state.parent / "checkpoint_0").iterdir():
        if path.is_file():
            shutil.copy(path, state)


def take_adamw(path: Path) -> None:
    values = torch.load(path, weights_only=True)
    values["optimizer_states"][0] = torch.optim.AdamW([torch.zeros(1)]).state_dict()
    torch.save(values, path)


STATE = "checkpoints/checkpoint_1"
LONGER = [("accelerate", how) for how in ("mixed", "missing", "manifest")]
#: what is done to which checkpoint, and what is said to it
DAMAGE: dict[tuple[str, str], tuple[str, Callable[[Path], Any], str]] = {
    ("accelerate", "foreign"): (f"{STATE}/muon_zero", shutil.rmtree, r"has no .*; load .* was saved after prepare\(\)"),
    ("accelerate", "mixed"): (STATE, mix, "step 4: custom_checkpoint_0.pkl, .*scheduler.bin: is damaged, missing"),
    ("accelerate", "missing"): (f"{STATE}/random_states_0.pkl", Path.unlink, "random_states_0.pkl: is damaged"),
    ("accelerate", "file"): (f"{STATE}/scheduler.bin", shorten, "scheduler.bin: is damaged"),
    ("accelerate", "manifest"): (f"{STATE}/muon_zero/accelerate-4.json", shorten, "accelerate-4.json: "),
    ("accelerate", "shard"): (f"{STATE}/muon_zero/step-4/tensors", spoil, "tensors/shard-"),
    ("accelerate", "two models"): (f"{STATE}/muon_zero", double, "muon_zero_1: is of a model that is not prepared"),
    ("lightning", "foreign"): ("epoch=0.ckpt", take_adamw, "not loaded: rank 0: it is not optimizer state of MuonZero"),
    ("lightning", "missing"): ("epoch=0.ckpt", Path.unlink, "epoch=0.ckpt: was not loaded: "),
    ("lightning", "folder"): ("epoch=0.ckpt", lambda path: (path.unlink(), path.mkdir()), "it is a folder, as FSDP's"),
    ("transformers", "foreign"): ("checkpoint-4/muon_zero", shutil.rmtree, "has no optimizer state of MuonZero"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("library", "how"), [pytest.param(*each, marks=pytest.mark.full if each in LONGER else ()) for each in DAMAGE]
)
def test_a_checkpoint_that_is_not_whole_is_refused(
    ranks: RanksOf, tmp_path: Path, fitted: Any, library: str, how: str
) -> None:
    path, damage, said = DAMAGE[library, how]
    folder = shutil.copytree(fitted(library)[0], tmp_path / "copy")
    damage(folder / path)
    for message in ranks(2).run(refused, library=library, folder=str(folder)):
        assert re.search(said, message), message


@pytest.mark.full
def test_the_package_imports_no_trainer() -> None:
    code = "import compile_muon.integrations, sys; assert not {'tyro', *sys.argv[1:]} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code, *LIBRARIES], check=True)
