"""Pipeline stages with an optimizer each train as the unsharded model does, and go on or stop together."""

import contextlib
import io
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness import RanksOf
from support.reference import (
    ADAMW_EPS,
    ADAMW_LR,
    BETAS,
    DECAY,
    LR,
    MOMENTUM,
    Reference,
    full,
    hidden_matrices,
    relative_error,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional as F

import compile_muon
from compile_muon.extensions.pipeline import PipelineStages

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
#: What each stage has: the embedding, blocks, the head. The stages share 4 ranks.
EVEN, NO_MATRIX, FOUR = ("e0", "12h"), ("e", "012h"), ("e", "0", "1", "2h")
STEPS, MICRO, VOCABULARY, WIDTH = 3, 3, 16, 8
#: Gradient norms are between 1.5 and 2.5.
BITES, NEVER = 0.5, 50.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """The whole, or what is left of it for a stage: the parts keep their names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(3)})
        self.head: nn.Module | None = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            h = block(h)
        return h if self.head is None else self.head(h)


def whole() -> Net:
    torch.manual_seed(0)
    return Net()


def part(has: str) -> Net:
    """What a stage has of it."""
    net = whole()
    for name in list(net.blocks):
        if name not in has:
            del net.blocks[name]
    net.embed = net.embed if "e" in has else None
    net.head = net.head if "h" in has else None
    return net


def batch(step: int, micro: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + rank)
    return torch.randint(0, VOCABULARY, (2, 6), generator=generator)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Trained:
    """This rank's stage of a pipeline. ``parts``: what each stage has. ``schedule``: of :data:`SCHEDULES`.
    ``compiled``: by our backend. ``scale``: how the mean over micro-batches comes about: in the schedule, after the
    last backward, or in the loss. ``settings``: of MuonZero."""

    def __init__(
        self, *, parts: tuple[str, ...] = EVEN, schedule: str = "gpipe", compiled: bool = True, scale: bool = False,
        **settings: Any,
    ) -> None:  # fmt: skip
        self.shards = dist.get_world_size() // len(parts)
        mesh = init_device_mesh("cpu", (len(parts), self.shards), mesh_dim_names=("pipeline", "shard"))
        self.stage, self.rank = mesh.get_local_rank("pipeline"), mesh.get_local_rank("shard")
        self.module, self.last = part(parts[self.stage]), self.stage == len(parts) - 1
        group = mesh.get_group("pipeline")
        options: dict[str, Any] = {"gradient_accumulation_steps": MICRO, **settings}
        self.optimizer = compile_muon.MuonZero(
            self.module, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, adamw_lr=ADAMW_LR, adamw_betas=BETAS,
            adamw_eps=ADAMW_EPS, adamw_weight_decay=DECAY, ns_dtype="float32", mesh=mesh["shard"],
            norm_group=mesh["pipeline"] if compiled else group, **options,
        )  # fmt: skip
        if compiled:
            self.module.compile(backend="muon_zero", options={"codegen": "eager"})
        self.named = dict(self.module.named_parameters())
        pipelined = PipelineStage(self.module, self.stage, len(parts), torch.device("cpu"), group=group)
        loss = loss_of if scale else lambda logits, tokens: loss_of(logits, tokens) / MICRO
        self.schedule = SCHEDULES[schedule](pipelined, MICRO, loss_fn=loss, scale_grads=scale)
        self.gathers = 0
        stages = self.optimizer.engine.extension(PipelineStages)
        stages._gather = partial(self._counted, stages._gather)

    def _counted(self, gather: Callable[..., Any], *args: Any) -> Any:
        self.gathers += 1
        return gather(*args)

    def backward(self, step: int) -> None:
        """All micro-batches of ``step``."""
        tokens = torch.cat([batch(step, micro, self.rank) for micro in range(MICRO)])
        given = ((tokens,) if self.stage == 0 else (), {"target": tokens} if self.last else {})
        self.schedule.step(*given[0], **given[1])

    def step(self) -> str:
        """The optimizer's; what it says if it raises."""
        try:
            self.optimizer.step()
        except compile_muon.MuonZeroError as error:
            return f"{type(error).__name__}: {error}"
        self.optimizer.zero_grad()
        return ""

    def state(self) -> list[Tensor]:
        """Everything a step writes, this rank's."""
        held = [param.detach() for param in self.named.values()]
        held += [value for slots in self.optimizer.state.values() for value in slots.values()]
        return [full(value).clone() for value in held]


class Expected(Reference):
    """The unsharded model, fed with the batches of all data-parallel ranks."""

    def __init__(self, clip: float | None) -> None:
        model = whole()
        super().__init__(model, hidden_matrices(model, exclude=("embed", "head")), clip)

    def backward(self, step: int, shards: int) -> None:
        """All micro-batches of ``step``."""
        for micro in range(MICRO):
            for rank in range(shards):
                tokens = batch(step, micro, rank)
                (loss_of(self.model(tokens), tokens) / MICRO / shards).backward()


def train(*, clip: float | None, edited: str = "", **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train beside the unsharded model, where the loop doubles the gradient of ``edited``; ``settings`` are
    :class:`Trained`'s. What is out of tolerance, and the optimizer's metrics with all norms and the gathers of
    stages."""
    mine, expected = Trained(gradient_clipping=clip, **settings), Expected(clip)
    far: dict[str, Any] = {}
    norms, gathers = [], []
    for step in range(STEPS):
        mine.backward(step)
        expected.backward(step, mine.shards)
        for named in (mine.named, expected.named):
            if edited in named:
                named[edited].grad.mul_(2)
        before = mine.gathers
        assert mine.step() == ""
        gathers.append(mine.gathers - before)
        expected.step()
        norms.append(mine.optimizer.metrics()["grad_norm"])
        if float(mine.optimizer.grad_norm) != torch.tensor(norms[-1], dtype=torch.float32):
            far["grad_norm"] = (float(mine.optimizer.grad_norm), norms[-1])
        if not abs(norms[-1] / expected.norm - 1) <= 1e-5:
            far[f"norm of step {step}"] = norms[-1] / expected.norm - 1
    errors = {name: relative_error(full(param), expected.named[name]) for name, param in mine.named.items()}
    far |= {name: error for name, error in errors.items() if not error <= 1e-5}
    if mine.optimizer.engine.ledger.balance():
        far["visits owed"] = mine.optimizer.engine.ledger.balance()
    return far, {
        **mine.optimizer.metrics(), **mine.optimizer.totals(), "norms": norms, "gathers": gathers,
        "matrices": len(mine.optimizer.engine.step.muon),
    }  # fmt: skip


def check(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """No rank is out of tolerance, and all have the same norms and gathers; the metrics by rank."""
    for rank, (far, _) in enumerate(found):
        assert not far, f"rank {rank}: {far}"
    metrics = [each for _, each in found]
    for name in ("norms", "gathers"):
        assert all(each[name] == metrics[0][name] for each in metrics), [each[name] for each in metrics]
    return metrics


@pytest.mark.parametrize(
    ("stage", "schedule", "compiled", "clip", "update", "scale"),
    [
        (2, "1f1b", True, NEVER, "backward", False),
        pytest.param(1, "gpipe", True, NEVER, "auto", True, marks=pytest.mark.full),
        pytest.param(3, "1f1b", True, BITES, "step", False, marks=pytest.mark.full),
    ],
)
def test_stages_train_as_the_whole_model(
    ranks: RanksOf, stage: int, schedule: str, compiled: bool, clip: float, update: str, scale: bool
) -> None:
    settings = {"stage": stage, "schedule": schedule, "compiled": compiled, "update": update, "scale": scale}
    holds = compiled and update != "step" and clip != BITES and not scale
    for each in check(ranks(4).run(train, clip=clip, **settings)):
        assert {norm > clip for norm in each["norms"]} == {clip == BITES}
        made = each["matrices"] * STEPS
        assert (each["directions_used"], each["directions_in_step"]) == ((made, 0) if holds else (0, made))
        assert each["gathers"] == [1 if holds else 2] * STEPS


def test_a_stage_without_matrices(ranks: RanksOf) -> None:
    found = ranks(4).run(train, clip=BITES, parts=NO_MATRIX, stage=3, update="backward", compiled=False)
    for rank, each in enumerate(check(found)):
        assert each["matrices"] == (0, 6)[rank // 2] and each["gathers"] == [2] * STEPS


@pytest.mark.full
def test_directions_that_hold_on_one_stage_alone(ranks: RanksOf) -> None:
    settings = {"stage": 1, "clip": NEVER, "update": "backward", "schedule": "1f1b"}
    found = ranks(4).run(train, edited="blocks.0.up.weight", **settings)
    for rank, each in enumerate(check(found)):
        late = STEPS * (rank < 2)
        assert (each["directions_used"], each["directions_in_step"]) == (each["matrices"] * STEPS - late, late)
        assert each["gathers"] == [2] * STEPS


@pytest.mark.full
def test_four_stages_of_one_rank(ranks: RanksOf) -> None:
    check(ranks(4).run(train, parts=FOUR, compiled=False, stage=2, clip=None, edited="blocks.1.up.weight"))


def spoil(mine: Trained, what: str) -> None:
    """Put something that is not finite where only some ranks of one stage see it."""
    if what == "gradient" and (mine.stage, mine.rank) == (1, 1):
        mine.named["blocks.2.up.weight"].grad.to_local()[0, 0] = float("nan")
    elif what == "rate" and mine.stage == 0:
        mine.optimizer.param_groups[0]["lr"] = float("inf")
    elif what == "held" and mine.stage == 1:
        sharded = next(sharded for sharded in mine.optimizer.engine.step.muon if sharded.name == "blocks.1.up.weight")
        made = sharded.speculations.current
        sharded.speculations.make(made._replace(direction=made.direction * float("inf")))
    elif what == "late" and mine.stage == 0:  # the other stage has its directions
        mine.named["blocks.0.up.weight"].grad.mul_(2)
        graphs = mine.optimizer.engine.step.step_graphs
        made = graphs.orthogonalize

        def diverging(*args: Any) -> Any:
            directions, *more = made(*args)
            graphs.orthogonalize = made
            return [direction * float("inf") for direction in directions], *more

        graphs.orthogonalize = diverging


NAMED = {
    "gradient": "gradient of blocks.2.up.weight = inf or nan on rank 1 of pipeline stage 1",
    "rate": "rate of muon lr = inf or nan on every rank of pipeline stage 0",
    "held": "direction of blocks.1.up.weight = inf or nan on every rank of pipeline stage 1",
    "late": "direction of blocks.0.up.weight = inf or nan on every rank of pipeline stage 0",
}


def not_finite(kinds: list[str], nonfinite: str, compiled: bool) -> tuple[dict[str, str], dict[str, float]]:
    """Train; every second step is spoiled, and writes nothing. What these steps say if they raise. That the next goes
    well says that no stage has left a collective behind."""
    mine = Trained(stage=2, compiled=compiled, update="backward", nonfinite=nonfinite, gradient_clipping=NEVER)
    expected = Expected(NEVER)
    said = {}
    for step, what in enumerate(kinds):
        before = mine.state()
        mine.backward(2 * step)
        spoil(mine, what)
        said[what] = mine.step()
        assert all(torch.equal(*pair) for pair in zip(before, mine.state(), strict=True))
        mine.optimizer.zero_grad()
        if mine.optimizer.engine.step.muon:
            mine.optimizer.param_groups[0]["lr"] = LR
        mine.backward(2 * step + 1)
        assert mine.step() == ""
        expected.backward(2 * step + 1, mine.shards)
        expected.step()
    far = {name: relative_error(full(param), expected.named[name]) for name, param in mine.named.items()}
    assert max(far.values()) <= 1e-5, far
    return said, {**mine.optimizer.metrics(), **mine.optimizer.totals()}


@pytest.mark.full
def test_what_is_not_finite_on_one_stage_is_an_error_on_all(ranks: RanksOf) -> None:
    outcomes = ranks(4).run(not_finite, kinds=list(NAMED), nonfinite="error", compiled=True)
    for rank, (found, metrics) in enumerate(outcomes):
        for number, (what, said) in enumerate(found.items()):
            stage = int(NAMED[what][-1])
            other = f"pipeline stage {stage} (rank {2 * stage + rank % 2}) found inf or nan, and itself says where"
            expected = NAMED[what] if rank // 2 == stage else other
            assert said.startswith(f"NonFiniteError: {expected}: nothing was updated in step {number + 1}; "), said
        assert metrics["skipped_steps"] == 0


def test_what_is_not_finite_on_one_stage_is_left_out_on_all(ranks: RanksOf) -> None:
    for said, metrics in ranks(4).run(not_finite, kinds=["gradient", "late"], nonfinite="skip", compiled=False):
        assert said == {"gradient": "", "late": ""} and metrics["skipped_steps"] == 2


def fails(*_: Any) -> Any:
    raise RuntimeError("out of memory")


def refuses(kinds: list[str], parts: tuple[str, ...], micro: int = MICRO) -> dict[str, str]:
    """What a step says on this rank where another cannot go on; the next step goes well on all."""
    settings: dict[str, Any] = {"compiled": micro > MICRO, "gradient_accumulation_steps": micro}
    mine = Trained(parts=parts, stage=1, update="step", **settings)
    optimizer, module, found = mine.optimizer, mine.module, {}
    odd = mine.rank == mine.shards - 1
    graphs = optimizer.engine.step.step_graphs
    orthogonalize = graphs.orthogonalize
    for number, what in enumerate(kinds):
        mine.backward(number)
        before = mine.state()
        if what == "model" and mine.stage == 0 and odd:
            module.extra = nn.Parameter(torch.ones(2))
        elif what == "missing" and mine.stage == 1 and odd:
            mine.named["head.weight"].grad = None
        elif what == "rates" and mine.stage == 1 and odd:
            optimizer.param_groups[-1]["lr"] /= 2
        elif what == "sums" and mine.stage == 0:
            mine.named["embed.weight"].grad.mul_(2)
        elif what == "later" and mine.stage == 1:
            graphs.orthogonalize = fails
        elif what == "steps" and mine.stage == 0:
            optimizer.loaded(7)
        try:
            found[what] = mine.step()
        except RuntimeError as error:
            found[what] = str(error)
        assert all(torch.equal(*pair) for pair in zip(before, mine.state(), strict=True))
        if hasattr(module, "extra"):
            del module.extra
        graphs.orthogonalize = orthogonalize
        optimizer.param_groups[-1]["lr"] = ADAMW_LR
        optimizer.loaded(number)
        optimizer.zero_grad()
        mine.backward(number)
        assert mine.step() == ""
    return found


REFUSALS = {
    "model": (0, r"UnsupportedModelError: .*extra|LedgerError: .*by another rank"),
    "missing": (1, r"LedgerError: gradient of head\.weight = None on rank 1 only"),
    "rates": (1, r"LedgerError: ranks disagree on hyperparameters: adamw_no_decay lr"),
    "later": (1, "out of memory"),
    "sums": (0, r"LedgerError: gradient of 'embed\.weight' was edited"),
}


@pytest.mark.full
def test_what_one_stage_refuses_all_refuse(ranks: RanksOf) -> None:
    *most, sums = REFUSALS
    found = ranks(4).run(refuses, kinds=[*most, "steps"], parts=EVEN)
    # One micro-batch more than comes: at stage 1 there are sums left, to be reduced in the step.
    for said, more in zip(found, ranks(4).run(refuses, kinds=[sums], parts=EVEN, micro=MICRO + 1), strict=True):
        said |= more
    for rank, said in enumerate(found):
        for what, (stage, own) in REFUSALS.items():
            other = f"LedgerError: step() was refused by pipeline stage {stage} (rank {2 * stage + rank % 2}), whose"
            assert re.match(own if rank // 2 == stage else re.escape(other), said[what]), said[what]
        steps = "LedgerError: pipeline stages are in different steps (8 on stage 0, 5 on stage 1): nothing was updated"
        assert said["steps"].startswith(steps), said["steps"]


def test_a_stage_of_one_rank_refuses_for_all(ranks: RanksOf) -> None:
    first, *others = ranks(4).run(refuses, kinds=["model"], parts=FOUR)
    assert first["model"].startswith("UnsupportedModelError: extra")
    said = "LedgerError: step() was refused by pipeline stage 0 (rank 0), whose own error says why: nothing was updated"
    assert all(found["model"].startswith(said) for found in others), others


def waits() -> str:
    """What the first stage says of a second that does not come."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    groups = [dist.new_group([first, first + 2], timeout=timedelta(seconds=1.5)) for first in range(2)]
    module = part(EVEN[rank // 2])
    config = {"optimizer": {"type": "Muon"}, "zero_optimization": {"stage": 1}, "compile": False}
    _, optimizer = compile_muon.initialize(module, config, mesh=mesh["shard"], norm_group=groups[rank % 2])
    for param in module.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    said = ""
    if rank < 2:
        try:
            optimizer.step()
        except compile_muon.PeerError as error:
            said = str(error)
    else:
        time.sleep(2.5)
    dist.barrier()
    return said


@pytest.mark.full
def test_a_stage_that_does_not_come_is_named(ranks: RanksOf) -> None:
    first, second, *_ = ranks(4).run(waits)
    for said in (first, second):
        assert "rank 1 runs the loop's own code after step 1, the decision of the pipeline stages" in said, said
        assert "rank 0 waits in step 2, the decision of the pipeline stages" in said, said


def refused(norm_group: Any, **settings: Any) -> str:
    """What MuonZero says; nothing has changed then."""
    module = part(EVEN[dist.get_rank() // 2 if dist.is_initialized() else 0])
    try:
        compile_muon.MuonZero(module, norm_group=norm_group, **settings)
    except compile_muon.ConfigError as error:
        assert all(type(param) is nn.Parameter for param in module.parameters())
        return str(error)
    return "no error"


def do_not_fit() -> dict[str, str]:
    """What it says of groups and settings that do not fit, on the ranks that have them."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    shard, pipeline, three, zero = mesh["shard"], mesh["pipeline"], dist.new_group([0, 2, 3]), dist.new_group([0])
    found = {
        "own": refused(shard, mesh=shard),
        "world": refused(pipeline),
        "both": refused(mesh, mesh=shard),
        "text": refused("pipeline", mesh=shard),
        "settings": refused(
            pipeline, mesh=shard, **({"gradient_clipping": 1.0, "nonfinite": "skip"} if rank < 2 else {})
        ),
        "no matrix": refused(pipeline, mesh=shard, muon_params=lambda name, param: False),
    }
    if rank != 1:
        found["other"] = refused(three, mesh=shard)
    if rank != 0:
        found["outside"] = refused(zero, mesh=shard)
        found["mesh outside"] = refused(DeviceMesh("cpu", [0], _init_backend=False), mesh=shard)
    return found


SAID = {
    "own": r"norm_group = \[(0, 1|2, 3)\]: has several ranks of one stage's own group; pass the group of one rank of ",
    "world": r"norm_group = \[(0, 2|1, 3)\]: has several ranks of one stage's own group; .*as mesh= the data-parallel",
    "other": r"norm_group = \[0, 2, 3\]: has several ranks of one stage's own group; pass",
    "both": r"norm_group = DeviceMesh.*: has 2 dimensions; pass the group of one rank of each stage",
    "outside": r"norm_group = .*: this rank is no member of it; pass",
    "mesh outside": r"norm_group = DeviceMesh.*: this rank is no member of it; pass",
    "text": r"norm_group = 'pipeline': is no process group; pass",
    "no matrix": r"model = '2 parts': no stage has a parameter for Muon; set param.use_muon",
    "settings": r"2 settings are wrong:\n  gradient_clipping = '1.0 on rank 0, None on rank 1': differs between "
    r"pipeline stages .*; give every stage the same\n  nonfinite = ",
}


def test_groups_that_do_not_fit_are_refused(ranks: RanksOf) -> None:
    found = ranks(4).run(do_not_fit)
    assert set().union(*found) == set(SAID)
    for texts in found:
        assert all(re.match(SAID[case], text) for case, text in texts.items()), texts


def test_a_single_process_has_no_stages() -> None:
    said = r"norm_group = 'pipeline': is given, and there is no process group; call .*init_process_group"
    assert re.match(said, refused("pipeline"))


PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "pipeline.md"
#: The ranks have met, and Inductor has tests of its own.
HERE = {"dist.init_process_group()\n": "", '"muon_zero")': '"muon_zero", options={"codegen": "eager"})'}


def run_page(code: str) -> str:
    """What it prints on this rank."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"__name__": "page"})
    return printed.getvalue()


@pytest.mark.full
def test_the_page_runs_as_it_stands(ranks: RanksOf) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for there, here in HERE.items():
        assert there in code
        code = code.replace(there, here)
    printed = ranks(4).run(run_page, code=code)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", "".join(printed))]
    assert len(losses) == 10 and losses[-1] < 0.8 * losses[0], printed
