"""Whole steps as CUDA graphs, on a CPU: what a graph would hold is run, once it is recorded, on what was recorded."""

import copy
import dataclasses
from contextlib import nullcontext

import pytest
import torch
from support.as_graphs import AsGraphs, outputs_in_place
from support.averages import Averages
from torch import nn

from compile_muon import LedgerError, MuonZero
from compile_muon.config import CompileConfig
from compile_muon.passes.methods import METHODS, ElementMethod, MatrixMethod

pytestmark = pytest.mark.filterwarnings("ignore:cuda_graphs = True. there are none on a CPU")


@pytest.fixture(autouse=True)
def compiled_anew():
    """Dynamo compiles one function a few times only."""
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8)
        self.hidden = nn.Linear(8, 12)
        self.head = nn.Linear(12, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.head(torch.tanh(self.hidden(self.frozen(x))))


class Run:
    """A training, its steps recorded or not."""

    def __init__(self, recorded, *extensions, **settings):
        torch.manual_seed(0)
        self.model = Net()
        given = {"ns_dtype": "float32", "checks": "next_step", "nonfinite": "skip", "weight_decay": 0.1}
        self.optimizer = MuonZero(self.model, extensions=extensions, **(given | settings))
        self.params = dict(self.model.named_parameters())
        self.optimizer.engine.step.recorded = recorded
        options = {"codegen": "eager", "cuda_graphs": True}
        self.compiled = torch.compile(self.model, backend="muon_zero", options=options)

    def step(self, x):
        self.compiled(x).square().mean().backward()
        self.optimizer.step()
        norm = self.optimizer.grad_norm
        self.optimizer.zero_grad()
        return norm

    def held(self):
        states = self.optimizer.state_dict()["state"]
        return [p.detach().clone() for p in self.model.parameters()] + [
            torch.as_tensor(value).clone() for key in sorted(states) for value in states[key].values()
        ]


@pytest.mark.parametrize(
    "settings",
    [{"update": "backward"}, pytest.param({"update": "step", "gradient_clipping": 0.05}, marks=pytest.mark.full)],
)
def test_replayed_steps_write_the_bits_of_launched_ones(settings):
    """Schedules, clipping, a step that is left out, loading, edits, unfreezing; and what an extension writes."""
    runs = [Run(recorded, Averages(), **settings) for recorded in (None, AsGraphs())]
    batches = torch.randn(14, 5, 8, generator=torch.Generator().manual_seed(1))
    batches[5] = torch.nan
    kept, norms = [None, None], [[], []]
    for number, x in enumerate(batches):
        for which, run in enumerate(runs):
            for group in run.optimizer.param_groups:
                group["lr"] = 0.02 / (number + 1)
                if "momentum" in group and number > 2:
                    group["momentum"], group["weight_decay"] = 0.9 + 0.005 * number, 0.01 * number
            if number == 4:
                kept[which] = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
            if number == 8:
                run.model.load_state_dict(kept[which][0])
                run.optimizer.load_state_dict(kept[which][1])
            if number == 9:
                with torch.no_grad():
                    run.params["hidden.weight"].mul_(1.5)
            if number == 10:
                for name in ("weight", "bias"):
                    run.params[f"frozen.{name}"].requires_grad_(True)
            norms[which].append(run.step(x))
        for one, other in zip(*(run.held() for run in runs), strict=True):
            assert torch.equal(one, other), number
    for one, other in zip(*norms, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert [run.optimizer.totals()["skipped_steps"] for run in runs] == [1, 1]
    for name in ("directions_used", "directions_in_step", "newton_schulz_matrices"):
        assert len({run.optimizer.totals()[name] for run in runs}) == 1, name
    assert runs[1].optimizer.engine.step.recorded.replays >= 8


def test_what_a_replay_finds_is_that_steps_own():
    """Errors name their step, edits are counted, and a rate that no launch reads anew is recorded anew."""
    graphs = AsGraphs()
    run = Run(graphs, nonfinite="error")
    x = torch.randn(5, 8)
    for _ in range(3):
        run.step(x)
    assert (len(graphs), graphs.replays) == (1, 2)
    edits = run.params["hidden.weight"]._version
    run.compiled(x).square().mean().backward()
    run.params["hidden.weight"].grad.data.mul_(2)
    run.optimizer.step()
    assert graphs.replays == 3 and run.params["hidden.weight"]._version > edits
    with pytest.raises(LedgerError, match=r"hidden\.weight was edited .* nothing was updated in step 4"):
        run.optimizer.check()
    run.optimizer.zero_grad()
    run.optimizer.param_groups[-1]["betas"] = (0.8, 0.9)
    for _ in range(3):
        run.step(x)
    assert (len(graphs), graphs.replays) == (2, 5)
    run.optimizer.release()
    assert not len(graphs)
    for _ in range(3):
        run.step(x)
    assert (len(graphs), graphs.replays) == (1, 7)


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_accumulation_steps": 3, "update": "backward"},
        {"gradient_accumulation_steps": 1},  # and accumulate()
    ],
)
def test_gradients_are_added_up_out_of_the_way_of_replays(settings, monkeypatch):
    found, graphs = [], AsGraphs()
    for recorded in (None, graphs):
        run = Run(recorded, **settings)
        for batch in torch.randn(5, 3, 5, 8, generator=torch.Generator().manual_seed(1)):
            for number, x in enumerate(batch):
                told = settings["gradient_accumulation_steps"] == 1 and number < 2
                with run.optimizer.accumulate() if told else nullcontext():
                    run.compiled(x).square().mean().backward()
            run.optimizer.step()
            run.optimizer.zero_grad()
        found.append(run.held())
        outputs_in_place(monkeypatch)
    assert all(map(torch.equal, *found))
    assert graphs.replays >= 2


def test_a_gradient_that_somebody_keeps_is_not_written_again(monkeypatch):
    outputs_in_place(monkeypatch)
    run = Run(AsGraphs(), gradient_accumulation_steps=2)
    places, kept = set(), []
    for x in torch.randn(6, 5, 8):
        for _ in range(2):
            run.compiled(x).square().mean().backward()
        grad = run.params["hidden.weight"].grad
        places.add(grad.data_ptr())
        if len(kept) < 2:
            kept.append((grad, grad.clone()))
        run.optimizer.step()
        run.optimizer.zero_grad()
        del grad
    assert all(torch.equal(*pair) for pair in kept)
    assert len(places) == 3


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"checks": "in_step"}, "checks='in_step'"),
        ({"gradient_clipping": 1.0}, "set update='step'"),
        ({"momentum_dtype": "bfloat16"}, "states are not resident"),
        ({"lr": torch.tensor(0.02)}, "are tensors"),
        ({"method": "soap"}, " in phases 'first', 'turn' of method 'soap'"),
    ],
)
def test_what_is_no_graph_says_why(settings, why):
    optimizer = Run(AsGraphs(), **settings).optimizer
    soap = "method" in settings  # some of its phases alone
    assert soap or why in optimizer.engine.step.outside
    assert optimizer.summary().outside is optimizer.summary().launched is None  # of a configuration without graphs
    optimizer.config = dataclasses.replace(optimizer.config, compile=CompileConfig(cuda_graphs=True))
    assert "in no CUDA graph" + soap * why in str(optimizer.summary())


#: settings of methods, and how many graphs their steps are
METHODS_HERE = {
    **{method.name: ({"method": method.name}, 1) for method in METHODS if isinstance(method, MatrixMethod)},
    **{method.name: ({"auxiliary": method.name}, 1) for method in METHODS if isinstance(method, ElementMethod)},
    "cautious": ({"rates": {"cautious_decay": True}}, 1),
    "cautious, lion": ({"auxiliary": "lion", "rates": {"cautious_decay": True}}, 1),
    "muonbp": (
        {
            "method": "muonbp",
            "muon_views": {"hidden.weight": {"heads": 2}},
            "rates": {"period": 3, "block_lr_factor": 0.7},
        },
        2,
    ),
    "soap": ({"method": "soap", "rates": {"basis_every": 4}}, 1),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in ("muonbp", "soap", "cautious, lion") else pytest.mark.full)
        for n in METHODS_HERE
    ],
)
def test_schedules_of_every_method_need_no_other_graph(name):
    """A graph holds no rate that changes in each step, nor the step's number: replays write the bits of launches."""
    settings, kinds = METHODS_HERE[name]
    runs = [Run(recorded, **settings) for recorded in (None, AsGraphs())]
    batches = torch.randn(15, 5, 8, generator=torch.Generator().manual_seed(1))
    batches[6] = torch.nan
    for number, x in enumerate(batches):
        for run in runs:
            for group in run.optimizer.param_groups:
                group["lr"] = 0.02 / (number + 1)
                if "momentum" in group:
                    group["momentum"] = 0.9 + 0.005 * number
                if "weight_decay" in group and group["algorithm"] != "adamw":
                    group["weight_decay"] = 0.1 + 0.01 * number
            run.step(x)
        for one, other in zip(*(run.held() for run in runs), strict=True):
            assert torch.equal(one, other), number
    assert [run.optimizer.totals()["skipped_steps"] for run in runs] == [1, 1]
    graphs = runs[1].optimizer.engine.step.recorded
    assert (graphs.recordings, len(graphs)) == (kinds, kinds)
    # The first of a kind is launched, and what waits for the host: the first step, and one in four with basis_every=4.
    assert graphs.replays == len(batches) - kinds - (4 if name == "soap" else 0)
    launched = runs[1].optimizer.engine.step.launched
    assert launched == ("'first', 'turn' of method 'soap'" if name == "soap" else None)


def test_kinds_of_steps_that_take_turns_do_not_drive_each_other_out():
    """More of them than graphs that are kept: those that are stay, and the others are launched."""

    class Turns(AsGraphs):
        turn = 0

        def address(self, tensor):
            return self.turn

    graphs = Turns()
    run = Run(graphs)
    for number in range(36):
        graphs.turn = number % 12
        run.step(torch.randn(5, 8))
    assert (graphs.recordings, len(graphs), graphs.replays) == (8, 8, 16)
    for number in range(24):  # what does not come any more makes room
        graphs.turn = 12 + number // 2
        run.step(torch.randn(5, 8))
    assert graphs.recordings > 8 and len(graphs) == 8 and graphs.gave_up is None


def test_a_step_that_is_never_alike_is_given_up():
    class Elsewhere(AsGraphs):
        def address(self, tensor):
            return id(object()) + self._missed

    graphs = Elsewhere()
    run = Run(graphs)
    with pytest.warns(UserWarning, match="stays outside of CUDA graphs"):
        for _ in range(18):
            run.step(torch.randn(5, 8))
    assert graphs.left_out(run.optimizer.engine.step) and not len(graphs)
