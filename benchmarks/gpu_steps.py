"""The steps of `make gpu`: commands, time limits, parts and expected numbers."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from expected import Expected, held_times, list_ms, peak_gb, price, speed_up, step_ms, sustained_tflops


@dataclass(frozen=True)
class Part:
    """A part: steps that run together, in order; a step that may not end within `seconds` is dropped."""

    tells: str
    seconds: int
    steps: tuple[str, ...]


#: a GPU for fifteen minutes runs the first two, one for half an hour all of them
PARTS = {
    "lease": Part(
        "what is right, then what a step of 1 G parameters takes and where it goes", 520,
        ("right", "why-wrong", "tests", "lists", "step-8k", "contention", "step-65k", "profile"),
    ),
    "lease-2": Part(
        "two ranks over NCCL on this GPU, whole steps in CUDA graphs, memory, accesses out of bounds", 300,
        ("replayed", "nccl-first", "step-8k-graphs", "memory-1b", "sanitizer"),
    ),
    "more": Part(
        "several ranks over NCCL in full, momenta, links, products, large batches", 570,
        ("nccl", "step-8k-momenta", "calibrate", "products", "offsets"),
    ),
    "tune": Part("tiles for lists, and what they are worth", 570, ("tune", "lists-tuned", "step-8k-tuned")),
}  # fmt: skip

ONE_RANK = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1")
TWO_RANKS = (*ONE_RANK[:-1], "--nproc_per_node=2")
EXAMPLE = ("examples/train_gpt.py", "--steps", "30", "--width", "512", "--sample-bytes", "50")
# With the tests of campaigns, for which a GPU takes no time.
PYTEST = ("-m", "pytest", "-q", "-rs", "-m", "", "-o", "cpu_limit=600", "tests/kernels/gpu")
# Without the tests that compile ahead or interpret, which need no GPU.
ON_GPU = tuple(f"--ignore=tests/kernels/gpu/{name}" for name in ("test_ahead.py", "test_interpreter.py"))
# Tests run side by side, because each waits for the compiler.
WORKERS = str(max(2, min(14, (os.cpu_count() or 1) - 2)))
PARALLEL = ("-n", WORKERS) if importlib.util.find_spec("xdist") else ()
FILE_BY_FILE = (*PARALLEL, "--dist", "loadfile") if PARALLEL else ()  # a file starts its ranks once
#: few, because the kernels of waiting ranks share the GPU's time with all others
FEW_FILES = ("-n", "4", "--dist", "loadfile") if PARALLEL else ()
#: tests of tests/distributed that train on the device of COMPILE_MUON_TEST_DEVICE
TRAINED = ("training", "meshes", "methods", "offload", "sequence", "models", "checkpointing")
ON_NCCL = {"COMPILE_MUON_TEST_DEVICE": "cuda", "COMPILE_MUON_TEST_BACKEND": "nccl", "OMP_NUM_THREADS": "1"}
#: tests to run over NCCL: stages and both updates, CUDA graphs; replicas of shards; tensor slices and experts; heads
#: and rings; offload; checkpoints on other worlds; ranks that are lost, or differ
NCCL = (
    "tests/distributed/test_training.py",
    "tests/distributed/test_meshes.py",
    *(f"tests/distributed/test_model_parallel.py::test_shards_of_{what}" for what in ("tensor_slices", "experts")),
    "tests/distributed/test_sequence.py::test_two_ranks_of_one_sequence_train_as_one",
    "tests/distributed/test_sequence.py::test_keys_and_values_go_around",
    "tests/distributed/test_offload.py",
    "tests/distributed/test_checkpoint.py::test_a_run_goes_on_as_if_never_stopped",
    "tests/distributed/test_checkpoint.py::test_any_world_and_stage_loads_what_another_saved",
    "tests/distributed/test_failures.py::test_losing_a_rank_ends_the_others_within_the_timeout",
    "tests/distributed/test_agreement.py::test_other_hyperparameters_on_one_rank",
    "tests/distributed/test_agreement.py::test_blocks_in_another_order_on_one_rank",
)


@dataclass(frozen=True)
class Step:
    """A step: one command of this interpreter, run in the checkout's root."""

    name: str  # of the step, of its log and of its results
    seconds: float  # limit
    tells: str  # finding of the step, in words
    # Arguments of Python. {out} is the folder of the results, {tuned} that of a copy of the package, {caches} one that
    # parts share.
    command: tuple[str, ...]
    expected: tuple[Expected, ...] = ()  # numbers in the results, {out}/NAME.json
    needs: tuple[str, ...] = ()  # modules beside torch and Triton
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the driver's
    config: Mapping[str, object] | None = None  # the example's, by way of {out}/NAME.config.json
    tuned: bool = False  # runs with the copy of the package whose tiles the step "tune" has written
    several: bool = False  # ranks share this GPU over NCCL, which has to allow it: see shared_nccl.py
    timed: bool = False  # nothing else may run beside it
    numbers: bool = False  # compares numbers that the device computes, so it cannot be rehearsed
    rehearsed: tuple[str, ...] = ()  # added to the command in a rehearsal
    after: str = ""  # step that must not have failed
    if_failed: str = ""  # step that must have failed, or this one is skipped


def _train(stage: int, how: str = "compiled", launcher: tuple[str, ...] = ONE_RANK) -> Step:
    compiled = {"eager": False, "graphs": {"cuda_graphs": True}}.get(how, True)
    return Step(
        f"train-{stage}-{how}",
        300,
        f"the example trains at stage {stage} in bfloat16: {how}",
        (*launcher, *EXAMPLE, "--out", "{out}/{name}"),
        needs=("rich", "matplotlib"),
        environment={"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        config={
            "compile": compiled,
            "optimizer": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.005}},
            "zero_optimization": {"stage": stage},
            "bf16": {"enabled": True},
        },
        rehearsed=("--sample-bytes", "0"),  # sampled bytes would depend on computed numbers
    )


_SHAPES = ("square 1024", "square 2048", "square 4096", "square 8192", "8B gate, up", "8B key, value", "experts")
_ALL_SHAPES = (*_SHAPES, "8B, all matrices")


def _newton_schulz(name: str, tells: str, shapes: Sequence[str], *, tuned: bool = False) -> Step:
    command = ("benchmarks/newton_schulz.py", "--shapes", *shapes, "--repeats", "3", "--json", "{out}/{name}.json")
    return Step(name, 600, tells, command, needs=("rich",), tuned=tuned, timed=True)


#: layers of a step in a rehearsal; more would be the same again
_FEW_LAYERS = ("--layers", "2")


def _one_billion(
    name: str,
    seconds: int,
    tells: str,
    contenders: Sequence[str],
    *more: str,
    expected: tuple[Expected, ...] = (),
    preset: str = "1b",
    tuned: bool = False,
) -> Step:
    """Make a step of contenders in turns on this card; three contenders take some 65 GB."""
    command = ("benchmarks/train_step.py", "--preset", preset, "--device", "cuda", "--dtype", "bfloat16", "--ranks")
    command += ("1", "--stages", "0", "--repeats", "1", "--timeout", str(seconds), "--caches", "{caches}/inductor")
    command += ("--contenders", *contenders, *more, "--json", "{out}/{name}.json")
    return Step(
        name, seconds, tells, command, expected, needs=("rich", "matplotlib"), tuned=tuned, timed=True,
        rehearsed=("--timeout", "3000", *_FEW_LAYERS), after="right",
    )  # fmt: skip


def _hopper(least: float, most: float) -> dict[str, tuple[float, float]]:
    """Expect the same span of an H100 and an H200."""
    return {"H100": (least, most), "H200": (least, most)}


_LIST = "1b, 20 matrices"
_OF_LISTS = (
    Expected("a list of the 1 G step, standard, bfloat16", list_ms(_LIST, "standard", "list"), _hopper(14, 17), "ms"),
    Expected("the same, replayed", list_ms(_LIST, "standard", "replayed"), _hopper(14, 17), "ms"),
    Expected("a list of the 1 G step, auto, float16", list_ms(_LIST, "auto", "list"), _hopper(8, 12), "ms"),
    Expected("the same, replayed", list_ms(_LIST, "auto", "replayed"), _hopper(8, 12), "ms"),
    Expected("a product of 8192 that goes on", sustained_tflops, _hopper(650, 690), "TFLOP/s"),
)


def _lists(name: str, tells: str, *, tuned: bool = False) -> Step:
    command = ("benchmarks/lists.py", "--cases", _LIST, "--json", "{out}/{name}.json")
    # A rehearsal's device claims a tenth of a millisecond for any call.
    rehearsed = ("--seconds", "0.001")
    return Step(name, 40, tells, command, _OF_LISTS, tuned=tuned, timed=True, rehearsed=rehearsed, after="right")


STEPS = (
    Step("right", 60, "every tile that ships, in launches for lists, to the bit",
         (*PYTEST[:-1], "tests/kernels/gpu/test_grouped.py", "-k", "shipped"), needs=("pytest",), numbers=True,
         timed=True),
    Step("why-wrong", 100, "what of lists is wrong",
         (*PYTEST[:-1], *PARALLEL, "tests/kernels/gpu/test_grouped.py"), needs=("pytest",), numbers=True, timed=True,
         if_failed="right"),
    Step("tests", 90, "everything else about the kernels",
         (*PYTEST, *ON_GPU, *PARALLEL, "-k", "not sanitizer and not 32_bit and not shipped"),
         needs=("pytest", "rich"), numbers=True, timed=True),
    _lists("lists", "whole Newton–Schulz as a step has it, beside a product of the same minute"),
    _one_billion("step-8k", 150, "8,192 tokens a step: Muon by defaults, and AdamW, in turns",
                 ("ours-muon-auto", "ours-adamw"), "--steps", "8", expected=(
                     Expected("Muon", step_ms("ours-muon-auto"), {"H100": (148, 156), "H200": (142, 152)}, "ms"),
                     Expected("AdamW", step_ms("ours-adamw"), {"H100": (106, 118), "H200": (100, 108)}, "ms"),
                 )),
    Step("contention", 30, "what Newton–Schulz takes while collectives hold multiprocessors",
         ("benchmarks/contention.py", "--json", "{out}/{name}.json"), (
             Expected("a list dealt in waves, 8 of 132 held", held_times("in waves", 8), _hopper(1, 1.2), "times"),
             Expected("a list dealt in waves, 16 held", held_times("in waves", 16), _hopper(1, 1.2), "times"),
             Expected("a list dealt in one wave, 16 held", held_times("list of 20", 16), _hopper(1, 2), "times"),
         ), timed=True, after="right"),
    _one_billion("step-65k", 150, "65,536 tokens a step: what Muon costs where people train",
                 ("ours-muon-auto", "ours-adamw"), "--micro-batches", "8", "--steps", "4", "--warmup", "1",
                 preset="1b-65k", expected=(
                     Expected("Muon / AdamW", price("ours-muon-auto", "ours-adamw"), _hopper(1, 1.06), ""),
                 )),
    Step("profile", 70, "where the step of 1 G parameters goes: ranges, and kernels by their time",
         ("benchmarks/profile_step.py", "--preset", "1b", "--json", "{out}/{name}.json", "--trace",
          "{out}/{name}.trace.json"), timed=True, rehearsed=_FEW_LAYERS, after="right"),
    Step("replayed", 50, "whole steps in CUDA graphs on two ranks, whose host waits for numbers in each of 200",
         (*TWO_RANKS, "benchmarks/replayed.py"), several=True, timed=True),
    Step("nccl-first", 50, "two ranks train as one does on the host: replayed steps, stages 0, 1 and 3",
         (*PYTEST[:3], "-rs", "-x", "-o", "cpu_limit=600", "tests/distributed/test_training.py", "-k",
          "steps_that_are_replayed"),
         needs=("pytest", "rich", "transformers"), several=True, environment=ON_NCCL, numbers=True, timed=True),
    _one_billion("step-8k-graphs", 110, "a step in CUDA graphs beside one that is launched",
                 ("ours-muon-auto", "ours-muon-graphs"), "--steps", "8"),
    _one_billion("memory-1b", 90, "peak memory beside the plan, with CUDA graphs, too",
                 ("ours-muon-auto", "ours-muon-graphs"), "--memory", "--steps", "1", expected=(
                     Expected("peak with Muon", peak_gb("ours-muon-auto"), _hopper(18.8, 19.6), "GB"),
                 )),
    # Without the caching allocator, which hides accesses out of bounds within its blocks.
    Step("sanitizer", 220, "no access out of bounds", (*PYTEST, "-k", "sanitizer"),
         needs=("pytest", "rich"), environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, numbers=True),
    Step("nccl", 210, "ranks over NCCL on this GPU train as one does on the host; who is lost, or differs, is named",
         ("-m", "pytest", "-q", "-rs", "-m", "not full and not campaign", "-o", "cpu_limit=600", *FEW_FILES, *NCCL),
         needs=("pytest", "rich", "transformers"), several=True, environment=ON_NCCL, numbers=True),
    Step("products", 80, "the kernels launch, are right, and win from some size on",
         ("benchmarks/products.py", "--json", "{out}/{name}.json"), (
             Expected("X Xᵀ at 8192, times as fast as torch", speed_up("X Xᵀ", 8192), _hopper(1.8, 2.2), ""),
             Expected("aX + BX at 8192, times as fast as torch", speed_up("aX + BX", 8192), _hopper(0.98, 1.15), ""),
         ), timed=True),
    _one_billion("step-8k-plain", 110, "the same of plain torch.compile with its Muon, and with AdamW",
                 ("plain-muon", "plain-adamw"), expected=(
                     Expected("plain torch, Muon", step_ms("plain-muon"), {"H100": (195, 215)}, "ms"),
                 )),
    Step("offsets", 120, "batches beyond 2³¹ elements", (*PYTEST, "-k", "32_bit"),
         needs=("pytest", "rich"), numbers=True),
    _one_billion("step-8k-momenta", 130, "momenta in bfloat16 and in 8 bits beside float32, in turns",
                 ("ours-muon-auto", "ours-muon-bfloat16", "ours-muon-8bit")),
    Step("calibrate", 120, "what the planner needs of this machine: rates, the link to the host, the disk",
         ("-m", "compile_muon", "calibrate", "--out", "{out}/{name}.json", "--disk", "{caches}"), timed=True),
    Step("tune", 270, "tiles and thresholds as measured in launches for lists; the checkout keeps its own",
         ("benchmarks/tune_tiles.py", "--lists", "--minutes", "4", "--write",
          "{tuned}/compile_muon/kernels/gpu/tiles.json", "--json", "{out}/tiles.json"),
         needs=("rich",), tuned=True, timed=True, rehearsed=("--minutes", "60", "--candidates", "3")),
    _lists("lists-tuned", "what the tuned tiles are worth", tuned=True),
    _one_billion("step-8k-tuned", 110, "the step with them", ("ours-muon-auto", "ours-adamw"), tuned=True),
    Step("training", 480, "several ranks on this GPU train as one does on the host: stages, methods, meshes, offload",
         ("-m", "pytest", "-q", "-rs", "-m", "not full and not campaign", "-o", "cpu_limit=600", *FILE_BY_FILE,
          "tests/passes/sequence/test_partial_attention.py",
          *(f"tests/distributed/test_{name}.py" for name in TRAINED)),
         needs=("pytest", "rich", "transformers"),
         environment={"COMPILE_MUON_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}, numbers=True),
    Step("convergence", 720, "Muon beside AdamW at the size of GPT-2 small: loss over tokens and over seconds",
         ("benchmarks/convergence.py", "--preset", "124m", "--json", "{out}/{name}.json"),
         needs=("rich", "matplotlib"), timed=True, rehearsed=("--steps", "20")),
    _train(0),
    _train(0, "eager"),
    _train(3),
    _train(3, "eager"),
    _train(3, "graphs"),
    _train(3, "two-ranks", TWO_RANKS),
    _newton_schulz("newton-schulz", "percent of peak, where cuBLAS and other libraries are faster", _ALL_SHAPES),
    _newton_schulz("newton-schulz-tuned", "what the tuned tiles are worth, beside them", _SHAPES, tuned=True),
)  # fmt: skip
