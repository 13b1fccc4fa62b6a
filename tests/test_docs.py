"""The pages run: Python is executed as it stands, JSON is loaded, commands are parsed, links lead somewhere.

Blocks of a page share a namespace, in order, in one process without a process group. What a page takes for granted (a
model of the reader's, data, a config.json) it finds in STAND_INS. Code is generated for none of them: Inductor has
tests of its own.
"""

import argparse
import dataclasses
import importlib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import compile_muon
from compile_muon import backend
from compile_muon.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
}
LINKED = PAGES | {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "CHANGELOG.md", *sorted((ROOT / "benchmarks").glob("*.md")))
}
LANGUAGES = {"python", "json", "bash", "text", "mermaid"}
#: the marker on the line above a block
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
#: around tables that docs/settings.py writes
TABLE = re.compile(r"<!-- (?:settings: [\w -]+|end of settings) -->")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block: ``line`` is that of its first line of code, from 1; ``language`` the info string; ``code`` as the
    reader sees it; ``marker`` the comment on the line above, or ""."""

    page: str
    line: int
    language: str
    code: str
    marker: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether nothing says otherwise."""
        return not self.marker


def blocks_of(page: str, text: str) -> Iterator[Block]:
    """The fenced blocks of a page; ValueError for one that does not end, or a marker that nobody knows."""
    lines = text.splitlines()
    start = None
    for number, line in enumerate(lines, 1):
        if start is None:
            if found := re.fullmatch(r"( *)```+(\S*)", line):
                start, (indent, language) = number + 1, found.groups()
                above = lines[number - 2] if number > 1 else ""
                marker = above if above.startswith("<!--") else ""
        elif line.startswith(f"{indent}```"):
            code = "".join(f"{line.removeprefix(indent)}\n" for line in lines[start - 1 : number - 1])
            yield Block(page, start, language, code, marker)
            start = None
        if start is None and line.startswith("<!--") and not NOT_RUN.fullmatch(line) and not TABLE.fullmatch(line):
            raise ValueError(f"{page}:{number}: unknown marker {line}")
    if start is not None:
        raise ValueError(f"{page}:{start}: a block without an end")


BLOCKS = [block for page, text in PAGES.items() for block in blocks_of(page, text)]


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def test_blocks_are_of_a_known_kind():
    assert {block.language for block in BLOCKS} == LANGUAGES
    assert not [block.place for block in BLOCKS if block.marker and block.language not in ("python", "bash")]


def test_few_blocks_are_not_run():
    trl = ["docs/how-to/trl.md"] * 3
    pages = ["docs/how-to/meshes.md", "docs/how-to/pipeline.md", "docs/how-to/sequence.md", *trl]
    assert [block.page for block in BLOCKS if not block.runs] == pages


def test_unknown_markers_and_open_blocks_are_found():
    for text in ("<!-- skip -->\n```python\n1\n```\n", "<!-- not run: -->\n", "```python\n1\n"):
        with pytest.raises(ValueError, match=r"page:\d: "):
            list(blocks_of("page", text))
    (block,) = blocks_of("page", "<!-- not run: far away -->\n```python\n1\n```\n")
    assert not block.runs and block.line == 3


class MyModel(nn.Module):
    """A reader's model: tokens and targets to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 16), nn.Linear(16, 31, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def tokens() -> Tensor:
    return torch.randint(0, 31, (4, 8))


def loop() -> dict[str, Any]:
    """What a loop needs."""
    return {
        "MyModel": MyModel, "batches": [(tokens(), tokens()) for _ in range(3)],
        "dataset": torch.utils.data.TensorDataset(tokens(), tokens()), "my_schedule": lambda step: 1 / (1 + step),
        "log": print,
    }  # fmt: skip


def trained() -> dict[str, Any]:
    """A sharded model in the midst of its training."""
    model, optimizer = compile_muon.initialize(MyModel(), "config.json")
    return {
        "model": model, "optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "loader": Loader(), "losses": [3.4], "steps": 200, "x": tokens(), "y": tokens(),
    }  # fmt: skip


class Loader:
    """A loader that goes on where it was."""

    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def small_gpt2() -> Any:
    """The config of a GPT-2 of Transformers."""
    from transformers import GPT2Config

    return GPT2Config(vocab_size=31, n_positions=8, n_embd=16, n_layer=1, n_head=2)


def hugging_face() -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, TrainingArguments

    samples = [{"input_ids": row, "labels": row} for row in tokens()]
    return {
        "model": AutoModelForCausalLM.from_config(small_gpt2()),
        "args": TrainingArguments("out", max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to=[]),
        "data": samples, "more": samples, "loader": torch.utils.data.DataLoader(samples, batch_size=2),
    }  # fmt: skip


def weights() -> dict[str, Any]:
    model = hugging_face()["model"]
    model, optimizer = compile_muon.initialize(model, "config.json")
    return {"model": model, "config": small_gpt2()}


def long_sequences() -> dict[str, Any]:
    ids = tokens()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    batch = {"ids": ids, "labels": ids, "positions": positions, "vocab_size": small_gpt2().vocab_size}
    return {"make_model": MyModel, "model": hugging_face()["model"], **batch}


def two_columns() -> dict[str, Any]:
    """What both columns of the page need; FSDP2 wants a process group, of one rank here."""
    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/store", rank=0, world_size=1)

    def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch, batch)

    return {
        "make_model": MyModel, "batches": [[tokens() for _ in range(2)]] * 2, "loss_of": loss_of,
        "folder": "checkpoint", "log": lambda loss, norm: print(loss.item(), norm.item()),
    }  # fmt: skip


class SingleDeviceMuonWithAuxAdam(torch.optim.Optimizer):
    """What the optimizer of that name in KellerJordan/Muon does, from its formulas and defaults. Its Newton-Schulz is
    in bfloat16, whose rounding hides what a wrong momentum or scale would do."""

    dtype = torch.bfloat16

    def __init__(self, param_groups: list[dict[str, Any]]) -> None:
        muon = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
        adam = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
        super().__init__([{**(muon if group["use_muon"] else adam), **group} for group in param_groups], {})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                update = self._muon(param, group) if group["use_muon"] else self._adam(param, group)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)

    def _muon(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        average = self.state[param].setdefault("average", torch.zeros_like(param))
        average.lerp_(param.grad, 1 - group["momentum"])
        x = param.grad.lerp(average, group["momentum"]).to(self.dtype)
        tall = x.shape[0] > x.shape[1]
        x = x.T if tall else x
        x = x / (x.norm() + 1e-7)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return (x.T if tall else x).float() * max(1, param.shape[0] / param.shape[1]) ** 0.5

    def _adam(self, param: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        found = []
        for name, power, beta in zip(("first", "second"), (1, 2), group["betas"], strict=True):
            moment = state.setdefault(name, torch.zeros_like(param)).lerp_(param.grad**power, 1 - beta)
            found.append(moment / (1 - beta ** state["step"]))
        return found[0] / (found[1].sqrt() + group["eps"])


class Wide(MyModel):
    """With matrices that are not square, where `ns_method="auto"` takes the Gram form."""

    def __init__(self) -> None:
        super().__init__()
        inner = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(2)]
        self.blocks = nn.ModuleList(inner)


def two_optimizers() -> dict[str, Any]:
    """What is there before a page's own optimizer, and a module of another project."""
    sys.modules["muon"] = cast(Any, SimpleNamespace(SingleDeviceMuonWithAuxAdam=SingleDeviceMuonWithAuxAdam))
    return {"make_model": Wide, "batches": loop()["batches"], "device": "cpu"}


class GPT(MyModel):
    """Returns logits and loss, as nanoGPT's does; the head is tied."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return x, super().forward(x, y)


def nanogpt() -> dict[str, Any]:
    names = {"learning_rate": 3e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "grad_clip": 1.0}
    numbers = {"gradient_accumulation_steps": 2, "max_iters": 2, "log_interval": 1, "eval_interval": 1}
    made = {"GPT": GPT, "gptconf": None, "get_batch": lambda split: (tokens(), tokens()), "log": print}
    numbers |= {"best_val_loss": 9.0, "master_process": True}
    return names | numbers | made | {"device": "cpu", "dtype": "float32", "out_dir": "out", "get_lr": lambda n: 3e-4}


def lightning() -> dict[str, Any]:
    pairs = torch.utils.data.TensorDataset(tokens(), tokens())
    return {"MyModel": MyModel, "loader": torch.utils.data.DataLoader(pairs, batch_size=2)}


def simulated() -> dict[str, Any]:
    x = tokens()
    return {"make_model": MyModel, "tokens": x, "targets": x, "json": json, "file": open("trace.json", "w")}  # noqa: SIM115


def kernels() -> dict[str, Any]:
    x, params = torch.randn(8, 4), [torch.randn(4, 4)]
    return {"x": x, "grad": x, "momentum": torch.zeros_like(x), "params": params, "updates": [params[0].clone()]}


#: pages that train with a trainer, whose Python takes longest
TRAINERS = ("transformers", "accelerate", "lightning")

#: page to what is there before its first block
STAND_INS: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": loop, "docs/index.md": loop, "docs/start/training.md": loop,
    "docs/start/from-torch-muon.md": two_optimizers, "docs/start/from-nanogpt.md": nanogpt,
    "docs/start/fine-tuning.md": lambda: {name: hugging_face()["model"] for name in ("model", "base")},
    "docs/start/from-fsdp2.md": two_columns,
    "docs/how-to/checkpoints.md": trained, "docs/how-to/weights.md": weights, "docs/how-to/averages.md": loop,
    "docs/how-to/methods.md": lambda: {"make_model": MyModel},
    "docs/how-to/offload.md": lambda: {"make_model": MyModel}, "docs/how-to/sequence.md": long_sequences,
    "docs/how-to/profiling.md": trained, "docs/how-to/transformers.md": hugging_face,
    "docs/how-to/accelerate.md": hugging_face, "docs/how-to/peft.md": hugging_face,
    "docs/how-to/lightning.md": lightning, "docs/how-to/torchtitan.md": dict, "docs/how-to/write-a-pass.md": dict,
    "docs/how-to/write-an-extension.md": dict, "docs/reference/configuration.md": loop,
    "docs/reference/host-time.md": dict, "docs/reference/machines.md": simulated, "docs/reference/kernels.md": kernels,
}  # fmt: skip
#: a page of loops that stand each by itself, with the library that each imports first
LIBRARIES = "docs/how-to/libraries.md"
#: first imports of those that take long
SLOW = ("from trl", "from sentence_transformers", "import ray")
#: page to programs that stand side by side on it, block by block
COLUMNS = {"docs/start/from-fsdp2.md": 2}
#: page to a library that `make test` does without
OPTIONAL = {"docs/how-to/torchtitan.md": "torchtitan"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to run in, with a config.json; whatever a page leaves in the process goes."""
    (tmp_path / "config.json").write_text('{"compile": {"codegen": "eager"}, "zero_optimization": {"stage": 3}}')
    monkeypatch.chdir(tmp_path)
    compile_frame = backend.compile_frame

    def without_inductor(gm: Any, inputs: Any, options: Any, *rest: Any) -> Any:
        return compile_frame(gm, inputs, dataclasses.replace(options, codegen="eager"), *rest)

    monkeypatch.setattr(backend, "compile_frame", without_inductor)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, inputs, **kwargs: gm.forward)
    torch.manual_seed(0)
    with mock.patch.dict(os.environ):  # Lightning leaves a LOCAL_RANK, for which Accelerate starts a process group
        yield tmp_path
    sys.modules.pop("muon", None)
    if dist.is_initialized():
        dist.destroy_process_group()
    torch._dynamo.reset()


def compiled(block: Block) -> Any:
    """The code, whose errors name lines of the page."""
    return compile("\n" * (block.line - 1) + block.code, ROOT / block.page, "exec")


def test_every_page_with_python_has_its_stand_ins():
    assert {block.page for block in of("python") if block.runs} == STAND_INS.keys() | {LIBRARIES}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.full] * (Path(page).stem in TRAINERS)) for page in STAND_INS]
)
@pytest.mark.filterwarnings("ignore")
def test_python_of_the_page_runs(page: str, place: Path) -> None:
    if page in OPTIONAL:
        pytest.importorskip(OPTIONAL[page])
    codes = [compiled(block) for block in of("python") if block.page == page and block.runs]
    assert codes
    given = STAND_INS[page]()
    columns = COLUMNS.get(page, 1)
    for column in range(columns):
        names = {**given, "__name__": "page"}
        for code in codes[column::columns]:
            exec(code, names)


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, id=block.place, marks=[pytest.mark.full] * block.code.startswith(SLOW))
        for block in of("python")
        if block.page == LIBRARIES
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_loop_of_a_library_runs(block: Block, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(re.findall(r"^(?:from|import) (\w+)", block.code, re.MULTILINE)[0])
    names: dict[str, Any] = {**lightning(), "folder": str(place / "run"), "__name__": "page"}
    if block.code.startswith(SLOW[:2]):
        monkeypatch.syspath_prepend(ROOT / "tests" / "distributed")
        preferences = importlib.import_module("support.preferences")
        preferences.small_language_model("base")
        names |= {"pairs": preferences.words("prompt", "chosen", "rejected"), "prompts": preferences.words("prompt")}
        names["sentences"] = preferences.words("anchor", "positive")
        names["reward"] = lambda completions, **_: [float(len(text)) for text in completions]
    exec(compiled(block), names)


@pytest.mark.filterwarnings("ignore")
def test_the_loop_of_the_page_goes_on_as_if_it_had_not_stopped(place: Path) -> None:
    page = "docs/start/from-nanogpt.md"
    codes = [compiled(block) for block in of("python") if block.page == page and block.runs]

    def trained(seed: int, iterations: int, folder: str) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        names = {**nanogpt(), "max_iters": iterations, "out_dir": folder, "__name__": "page"}
        for code in codes:
            exec(code, names)
        return [param.detach() for param in names["model"].parameters()]

    whole = trained(0, 4, "whole")
    trained(0, 2, "stopped")
    assert all(map(torch.equal, trained(1, 4, "stopped"), whole))


FIVE = ("ns_method", "ns_dtype", "adamw_betas", "adamw_weight_decay", "adamw_decay_vectors")


@pytest.mark.parametrize("argument", FIVE)
@pytest.mark.filterwarnings("ignore")
def test_each_of_the_five_arguments_is_needed(argument: str, place: Path) -> None:
    page = "docs/start/from-torch-muon.md"
    theirs, ours, equal = [block.code for block in of("python") if block.page == page][:3]
    without = "".join(line for line in ours.splitlines(keepends=True) if not line.strip().startswith(f"{argument}="))
    given = two_optimizers()
    exec(theirs, given)
    exec(without, given)
    with pytest.raises(AssertionError):
        exec(equal, given)


@pytest.mark.filterwarnings("ignore")
def test_groups_move_over_line_by_line(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's two blocks about KellerJordan/Muon, both in float32."""
    monkeypatch.setattr(SingleDeviceMuonWithAuxAdam, "dtype", torch.float32)
    page = "docs/start/from-torch-muon.md"
    given = {**two_optimizers(), "torch": torch, "compile_muon": compile_muon}
    theirs, ours = (block.code for block in of("python") if block.page == page and '"lr": 0.004' in block.code)
    exec(theirs, given)
    expected = {name: param.detach().clone() for name, param in given["theirs"].named_parameters()}
    exec(ours.replace('"bfloat16"', '"float32"'), given)
    torch.manual_seed(0)
    start = dict(Wide().named_parameters())
    for name, param in given["model"].named_parameters():
        moved, difference = (expected[name] - start[name]).norm(), (param - expected[name]).norm()
        assert moved > 0 and difference <= 1e-4 * moved, f"{name}: {difference / moved:.1e}"


@pytest.mark.parametrize("block", [block for block in of("python") if not block.runs], ids=lambda block: block.place)
def test_python_that_is_not_run_compiles(block: Block) -> None:
    compiled(block)


def test_an_error_in_a_block_names_its_line():
    (block,) = blocks_of("README.md", "# Page\n\n```python\nfine = 1\nfine / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compiled(block), {})
    assert caught.traceback[-1].lineno + 1 == 5 and str(caught.traceback[-1].path) == str(ROOT / "README.md")


@pytest.mark.parametrize("block", of("json"), ids=lambda block: block.place)
@pytest.mark.filterwarnings("ignore:no effect here", "ignore:optimizer.params.lr = ")
def test_json_is_a_config(block: Block) -> None:
    compile_muon.load_config(json.loads(block.code))


FOLDERS = ("benchmarks", "compile_muon", "docs", "examples", "kernels", "passes", "tests")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
EXTRAS = set(re.findall(r"^(\w+) = \[", PROJECT.partition("[project.optional-dependencies]")[2], re.MULTILINE))
#: programs of others, of which only the paths are looked at
OTHERS = {"kubectl", "nsys", "sbatch"}
#: variables of `make`, to the script whose options they are
SCRIPTS = {
    "BENCH_ARGS": "benchmarks/train_step.py", "GPU_ARGS": "benchmarks/gpu.py", "TRAIN_ARGS": "examples/train_gpt.py",
}  # fmt: skip


def commands(code: str) -> list[list[str]]:
    """The commands of a block, split as a shell does, without comments and variables in front."""
    found = []
    for line in re.sub(r"\\\n", " ", code).splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            found.append(words)
    return found


class NotACommand(Exception):
    """What is wrong with a command of a page."""


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command, as far as there is a parser; NotACommand: no such file, target, extra, option or program."""
    for word in words:
        if word.partition("/")[0] in FOLDERS and "/" in word and not (ROOT / word).exists():
            raise NotACommand(f"no file {word}")
    program, *rest = words
    if program == "make":
        check_make(rest)
    elif program == "pip":
        if any(word.partition("[")[0] == "compile_muon" for word in rest):
            raise NotACommand("no index has that name: a checkout is installed, '.[extra]'")
        for extra in re.findall(r"\.\[([^\]]*)\]", " ".join(rest)):
            if missing := set(extra.split(",")) - EXTRAS:
                raise NotACommand(f"no extra {missing}")
    elif program == "torchrun":
        check_torchrun(rest, monkeypatch)
    elif program == "python" and rest[0] == "-m":
        check_module(rest[1], rest[2:], monkeypatch)
    elif program == "python" and rest[0] == "-c":
        compile(rest[1], "<command>", "exec")
    elif program == "python":
        check_script(rest[0], rest[1:])
    elif program not in OTHERS and not (ROOT / program).is_file():
        raise NotACommand(f"no program {program}")


def check_make(rest: list[str]) -> None:
    for word in rest:
        name, given, value = word.partition("=")
        if not given and word not in TARGETS:
            raise NotACommand(f"make has no target {word}")
        if given and not re.search(rf"\b{name}\b", MAKEFILE):
            raise NotACommand(f"make has no variable {name}")
        if name in SCRIPTS:
            check_script(SCRIPTS[name], shlex.split(value))
        for path in shlex.split(value) if name == "PYTEST_ARGS" else ():
            if "/" in path and not (ROOT / path).exists():
                raise NotACommand(f"no file {path}")


def check_torchrun(rest: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import get_args_parser

    try:
        given = get_args_parser().parse_args(rest)
    except SystemExit:
        raise NotACommand("torchrun does not take that") from None
    if given.module:
        check_module(given.training_script, given.training_script_args, monkeypatch)
    else:
        check_script(given.training_script, given.training_script_args)


def check_module(module: str, rest: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m`: of ours by its own parser, which goes no further."""
    if module != "compile_muon":
        if not (ROOT / (module.removeprefix("compile_muon.").replace(".", "/") + ".py")).is_file():
            raise NotACommand(f"no module {module}")
        return

    class Parsed(Exception):
        pass

    def parse_only(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        parse_args(self, *args, **kwargs)
        raise Parsed

    parse_args = argparse.ArgumentParser.parse_args
    with monkeypatch.context() as patched:
        patched.setattr(argparse.ArgumentParser, "parse_args", parse_only)
        try:
            main(rest)
        except Parsed:
            return
        except SystemExit:
            raise NotACommand(f"python -m compile_muon does not take {rest}") from None
    raise NotACommand("python -m compile_muon has parsed nothing")


def check_script(script: str, rest: list[str]) -> None:
    """A script or a folder of ours: it exists, and its source knows each option, if it has a parser of its own."""
    script += "/__main__.py" if (ROOT / script / "__main__.py").is_file() else ""
    if not (ROOT / script).is_file():
        if script.partition("/")[0] in FOLDERS:
            raise NotACommand(f"no file {script}")
        return  # the reader's
    source = (ROOT / script).read_text(encoding="utf-8")
    if "add_argument(" not in source:
        return
    for word in rest:
        if found := re.match(r"--([a-z][\w-]*)", word):
            if not re.search(rf'"--{found[1]}"|\b{found[1].replace("-", "_")}\b', source):
                raise NotACommand(f"{script} has no option --{found[1]}")


@pytest.mark.parametrize("block", of("bash"), ids=lambda block: block.place)
def test_commands_parse(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    found = commands(block.code)
    assert found
    for words in found:
        check(words, monkeypatch)


#: commands in the text; those of ours may leave out arguments
_INLINE = re.compile(r"`((?:python (?:-m compile_muon|benchmarks|tests|examples)|make |torchrun )[^`]+)`")


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_text_parse(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = re.sub(r"^ *```.*?^ *```", "", PAGES[page], flags=re.MULTILINE | re.DOTALL)
    for command in _INLINE.findall(text):
        words = shlex.split(command)
        if words[1:3] == ["-m", "compile_muon"] and len(words) == 4:
            words.append("--help")  # which subcommand is meant, no more
            with pytest.raises(SystemExit) as ended:
                main(words[3:])
            assert ended.value.code == 0, command
        else:
            check(words, monkeypatch)


@pytest.mark.parametrize(
    "command",
    [
        "python -m compile_muon doktor", "python -m compile_muon plan MODEL --world 8",
        "torchrun --nproc-per-nodes 2 examples/train_gpt.py", "torchrun examples/train_gtp.py",
        "python benchmarks/faults.py --onli x", "make trian", "make train TRAIN_ARG=--steps",
        "make train TRAIN_ARGS=--stepps", "make test PYTEST_ARGS=tests/nothing", "pip install '.[nothing]'",
        "pip install 'compile_muon[transformers]'", "pythn examples/train_gpt.py",
        "sbatch examples/launch/slrum.sbatch",
    ],
)  # fmt: skip
def test_a_wrong_command_is_found(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotACommand):
        check(commands(command)[0], monkeypatch)


def without_code(text: str) -> str:
    return re.sub(r"^(`{3,}).*?^\1|`[^`\n]+`", "", text, flags=re.MULTILINE | re.DOTALL)


def headings(text: str) -> set[str]:
    """Anchors of a page, as code hosts make them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken(page: str, text: str) -> list[str]:
    """Links of a page that lead nowhere."""
    found = []
    for link in re.findall(r'(?:\]\(|<a href="|<img src=")([^)"\s]+)', without_code(text)):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in headings(target.read_text(encoding="utf-8"))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_somewhere(page: str) -> None:
    assert not broken(page, LINKED[page])


def test_a_broken_link_is_found():
    text = "[a](examples/nothing.py) [b](README.md#nothing) [c](README.md#stages) `[d](e)`"
    assert broken("README.md", text) == ["examples/nothing.py", "README.md#nothing"]


@pytest.mark.parametrize("page", LINKED)
def test_a_page_begins_with_its_question(page: str) -> None:
    title, paragraph = LINKED[page].split("\n\n")[:2]
    assert title.startswith("# ") and "\n" not in title
    assert re.split(r"(?<=[.?!])\s", paragraph)[0].endswith("?")


def test_every_page_is_in_the_navigation_and_by_its_title_in_the_list_of_pages():
    titles = {page: text.splitlines()[0].removeprefix("# ").lower() for page, text in PAGES.items() if "/" in page}
    del titles["docs/index.md"]  # the landing page
    site = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert set(titles) == set(re.findall(r"^ +- (docs/\S+\.md)$", site, re.MULTILINE))
    listed = PAGES["README.md"].partition("\n## Pages\n")[2].partition("\n## ")[0]
    assert titles == {
        page: name.lower() for name, page in re.findall(r"\[([^]]+)\]\((docs/[\w-]+/[\w-]+\.md)\)", listed)
    }


def test_every_public_name_is_in_the_reference():
    named = re.findall(r"^::: compile_muon\.(\w+)$", PAGES["docs/reference/api.md"], re.MULTILINE)
    assert sorted(named) == sorted(compile_muon.__all__)


def test_pages_that_the_sources_name_exist():
    missing = []
    for folder in FOLDERS:
        for source in (ROOT / folder).rglob("*"):
            if source.suffix in {".py", ".sh", ".sbatch", ".yaml"} and source.name != "test_affected.py":
                named = re.findall(r"\bdocs/[\w./-]+\.(?:md|png)\b", source.read_text(encoding="utf-8"))
                missing += [f"{source.relative_to(ROOT)}: {page}" for page in named if not (ROOT / page).exists()]
    assert not missing


#: pass on what PyTorch, a file format or a lower layer says, or reach no user
NOT_LISTED = {
    "agreement.heartbeat.meet_at", "agreement.status.__exit__", "agreement.status.meet", "agreement.together.agree",
    "backend.muon_zero", "checkpoint.values.read", "model.param_spec.muon_spec",
    "passes.methods.matrix_method", "passes.language.views.shape_of",
    "files.tensors._opened",
}  # fmt: skip


@pytest.mark.full
def test_every_message_is_listed(docs_script: Any) -> None:
    errors = docs_script("errors")
    assert errors.page() == PAGES["docs/reference/messages.md"], "python docs/errors.py renews it"
    assert set(errors.unlisted(errors.sources())) == {f"compile_muon.{name}" for name in NOT_LISTED}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: compile_muon.MuonZero(nn.LayerNorm(3)), lambda: compile_muon.MuonZero(MyModel(), lr=-1),
        lambda: compile_muon.MuonZero(MyModel(), muon_params=["nothing"]),
        lambda: compile_muon.load_config({"optimizer": {"params": {"muon_lrr": 1}}}),
        lambda: compile_muon.load_config("nowhere.json"), lambda: compile_muon.load_pretrained(MyModel(), "nowhere"),
    ],
)  # fmt: skip
def test_an_error_is_found_by_its_words(wrong: Callable[[], object]) -> None:
    with pytest.raises(compile_muon.MuonZeroError) as caught:
        wrong()
    said = re.sub(r"^[^:]*: ", "", str(caught.value).splitlines()[0])  # behind names of the user's
    words = re.findall(r"[\w'-]+", said)
    rows = [" ".join(re.findall(r"[\w'-]+", row)) for row in PAGES["docs/reference/messages.md"].splitlines()]
    assert any(" ".join(words[start : start + 3]) in row for start in range(5) for row in rows), said
