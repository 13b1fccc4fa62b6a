"""The backend as torch.compile sees it: found, checked, compiled once, and right on models nobody here foresaw."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from functorch.compile import make_boxed_func
from support.compiled import EAGER, Net, Plain, X
from support.harness import compiled
from support.reference import train_step
from torch import nn

from compile_muon import ConfigError, MuonZero, MuonZeroError, initialize

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def built(cls=Net, **settings):
    torch.manual_seed(0)
    model = cls()
    return model, MuonZero(model, **{"ns_dtype": "float32", "ns_method": "standard", **settings})


def assert_same(model, reference, atol=1e-6):
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), atol=atol, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def train(run, optimizer, steps=3):
    for i in range(steps):
        run(X * (i + 1) / 2).square().mean().backward()
        optimizer.step()
        assert optimizer.engine.ledger.balance() == 0
        optimizer.zero_grad()


def check_against_eager(
    cls=Net,
    *,
    loss=lambda out: out.square().mean(),
    batches=None,
    atol=1e-6,
    compiled=None,
    wrap=lambda run: run,
    **options,
):
    """Train compiled (by ``compiled``, else by torch.compile with ``options``) and unsharded, either model through
    ``wrap``, and compare; returns the model, its optimizer, and the unsharded model."""
    model, optimizer = built(cls)
    torch.manual_seed(0)
    plain = cls()
    reference = Plain(plain, optimizer.config, [r.name for r in optimizer.summary().rows if r.algorithm == "muon"])
    run = wrap(compiled(model) if compiled else torch.compile(model, backend="muon_zero", options=EAGER, **options))
    for x in batches or [X * (i + 1) / 2 for i in range(3)]:
        for target, opt in ((run, optimizer), (wrap(plain), reference)):
            loss(target(x)).backward()
            opt.step()
            opt.zero_grad()
        assert optimizer.engine.ledger.balance() == 0
    assert_same(model, plain, atol)
    return model, optimizer, plain


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"options": {"codgen": "eager"}}, ("'eager'", "is not an option of muon_zero; did you mean 'codegen'?")),
        ({"options": {"zzz": 1}}, ("zzz", "use one of", "codegen", "dump")),
        ({"options": {"bucket_mb": 0}}, ("options['bucket_mb'] = 0: lies outside (0, inf)",)),
        ({"mode": "max-autotune"}, ("mode = 'max-autotune'",)),
    ],
)
def test_bad_options_and_modes(given, parts):
    from compile_muon.backend import muon_zero

    gm = torch.fx.symbolic_trace(lambda x: x + 1)
    with pytest.raises(ConfigError) as caught:
        muon_zero(gm, [torch.ones(1)], **given)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.fixture
def uncompiled(monkeypatch):
    """Graphs that reach Inductor's code generation run as they are, since C++ takes seconds each; whether each was to
    be recorded."""
    import torch._inductor.compile_fx as inductor

    asked = []

    def running(gm, inputs, **kwargs):
        asked.append(torch._inductor.config.triton.cudagraphs)
        return make_boxed_func(gm.forward)

    monkeypatch.setattr(inductor, "compile_fx_inner", running)
    return asked


def test_reduce_overhead_records_every_graph_as_cuda_graphs(uncompiled):
    """Inductor is asked for it for forward, and for backward, which is compiled later."""
    model, optimizer = built()
    train(torch.compile(model, backend="muon_zero", mode="reduce-overhead"), optimizer)
    assert uncompiled == [True, True]
    assert not torch._inductor.config.triton.cudagraphs


def test_unsharded_model_compiles_plainly_with_one_warning(uncompiled):
    torch.manual_seed(0)
    model = Net()
    run = torch.compile(model, backend="muon_zero")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(X).square().mean().backward()
        run(X)
    ours = [str(w.message) for w in caught if "muon_zero" in str(w.message)]
    assert len(ours) == 1, ours
    assert uncompiled == [False, False]
    assert "compile_muon.MuonZero(model, ...)" in ours[0]
    assert "never sharded" in ours[0]
    plain = copy.deepcopy(model)
    plain.zero_grad()
    plain(X).square().mean().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=1e-6, rtol=1e-5)


def test_dump_folder(tmp_path):
    model, optimizer = built()
    run = torch.compile(model, backend="muon_zero", options={**EAGER, "dump": tmp_path / "graphs"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(run, optimizer, steps=1)
    assert not [w for w in caught if "muon_zero" in str(w.message)]
    names = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    for graph, passes in {
        "joint": ["before", "deduplicate", "recompute"],
        "forward": ["before", "deduplicate", "lower", "schedule", "await_refresh", "verify"],
        "backward.speculate": ["before", "deduplicate", "insert_orthogonalize", "lower", "schedule", "room", "verify"],
    }.items():
        found = [n.split(".")[-2] for n in names if f".{graph}" in n]
        assert [f.split("_", 1)[1] for f in found][: len(passes)] == passes, (graph, names)
    text = {n.split(".", 1)[1]: (tmp_path / "graphs" / n).read_text() for n in names}
    before = next(t for n, t in text.items() if n.startswith("backward.speculate") and ".00_" in n)
    after = next(t for n, t in text.items() if n.startswith("backward.speculate") and "lower" in n)
    assert "muon_zero.reduce_grad" in before and "muon_zero.newton_schulz" not in before
    assert "muon_zero.reduce_grad" not in after and "muon_zero.newton_schulz" in after
    assert all("def forward(" in t for t in text.values())


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Net() for _ in range(4))
        for block in self.blocks:
            block.head = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.emb(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_identical_blocks_compile_once(tmp_path):
    def regionally(model):
        for block in model.blocks:
            block.compile(backend="muon_zero", options={**EAGER, "dump": tmp_path})
        return model

    check_against_eager(Blocks, compiled=regionally)
    frames = {path.name.split(".")[0] for path in tmp_path.iterdir()}
    backward = {path.name for path in tmp_path.iterdir() if "backward" in path.name and "lower" in path.name}
    assert len(frames - {f for f in frames if f.startswith("step")}) == 1, frames
    assert len(backward) == 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("codegen", ["eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_no_recompilation_after_two_steps(codegen, tmp_path):
    """lr and momentum change, micro-batches accumulate, the last batch counts once: nothing compiles again."""
    model, optimizer = built(gradient_accumulation_steps=2)
    run = torch.compile(model, backend="muon_zero", options={"codegen": codegen, "dump": tmp_path})

    def step(i):
        optimizer.param_groups[0]["lr"] = 0.02 / (i + 1)
        optimizer.param_groups[1]["lr"] = 1e-3 / (i + 1)
        optimizer.param_groups[0]["momentum"] = 0.95 - 0.01 * (i % 7)
        optimizer.param_groups[0]["weight_decay"] = 0.1 * (i % 3)
        for k in range(2):
            (run(X * (k + 1)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    for i in range(2):
        step(i)
    before = compiled(), written(tmp_path)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for i in range(8):
            step(i)
    assert (compiled(), written(tmp_path)) == before


def written(folder):
    """What the passes dumped, and when: every lowering rewrites its files."""
    return sorted((path.name, path.stat().st_mtime_ns) for path in folder.iterdir())


class Breaks(Net):
    def forward(self, x):
        h = torch.tanh(self.a(x))
        torch._dynamo.graph_break()
        return self.head(torch.tanh(self.b(h)))


class Scalar(Net):
    """Outputs a Python-shaped mix: a 0-dim loss, None, and a tensor without gradient."""

    def forward(self, x):
        out = super().forward(x)
        return out.square().mean(), None, out.detach().argmax(-1)


class Buffers(Net):
    def __init__(self):
        super().__init__()
        # No bias: its gradient in front of a batch norm is rounding noise, which AdamW scales up to whole steps.
        self.a = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.head(torch.tanh(self.b(self.norm(self.a(x)))))


@pytest.mark.parametrize("cls", [Breaks, Buffers, Scalar])
def test_models(cls):
    loss = {"loss": lambda out: out[0]} if cls is Scalar else {}
    _, optimizer, _ = check_against_eager(cls, **loss)
    assert optimizer.traffic.matrices == 3 * len(optimizer.engine.step.muon)


def test_initialize_compiles_in_place_and_keeps_type_and_keys():
    torch.manual_seed(0)
    model, optimizer = initialize(Net(), {"compile": {"codegen": "eager"}, "zero_optimization": {"stage": 3}})
    train(model, optimizer)
    assert optimizer.traffic.matrices == 6
    assert isinstance(model, Net) and type(model).__name__ == "Net" and isinstance(model.a, nn.Linear)
    assert list(model.state_dict()) == list(Net().state_dict())


@pytest.mark.full
def test_sequential_roots_are_compiled_whole_however_many_there_are():
    """Dynamo begins no frame in PyTorch's own files: each read of a weight used to become a graph, until it gave up."""
    torch._dynamo.reset()
    for layers in range(2, 2 + torch._dynamo.config.recompile_limit + 2):
        torch.manual_seed(0)
        model, optimizer = initialize(
            nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))), {"compile": {"codegen": "eager"}}
        )
        plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        plain.load_state_dict(model.state_dict())
        x = torch.randn(3, 4)
        for _ in range(2):
            loss = model(x).square().mean()
            torch.testing.assert_close(loss, plain(x).square().mean())
            train_step(optimizer, loss)
            plain.load_state_dict(model.state_dict())
        assert optimizer.totals()["compiled_graphs"] == 2 and isinstance(model, nn.Sequential)


def rows(*numbers):
    return [torch.randn(n, 6, generator=torch.Generator().manual_seed(n)) for n in numbers]


@pytest.mark.parametrize("mark", [pytest.param(True, marks=pytest.mark.full), None])
def test_dynamic_shapes(mark):
    """Batches of changing length: a symint among the saved values, and no recompilation per length."""
    check_against_eager(batches=rows(5, 7, 4, 9, 3), dynamic=mark)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= (1 if mark else 2)


def test_recompile_limit_falls_back_to_eager_and_stays_right():
    """Ranks of tensors the frame has not seen exhaust the limit; later frames run eagerly on the markers themselves."""
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        _, optimizer, _ = check_against_eager(batches=rows(5, 7, 4, 9, 3, 5), dynamic=False)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    assert optimizer.traffic.matrices == 6 * 2


def test_autocast():
    def in_autocast(run):
        def call(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return run(x).float()

        return call

    _, optimizer, _ = check_against_eager(wrap=in_autocast, atol=2e-3)
    assert all(state.param.dtype is torch.float32 for state in optimizer.engine.step.muon)


def test_an_edit_through_data_is_seen_by_the_next_forward_in_lower_precision():
    """Weights in bfloat16 are made of the masters in each forward: PyTorch counts no such edit of a plain tensor."""
    model, optimizer = built(param_dtype="bf16")
    run = torch.compile(model, backend="muon_zero", options=EAGER)
    x = X.bfloat16()
    train(lambda _: run(x), optimizer, steps=1)
    before = run(x)
    for param in model.parameters():
        param.data.zero_()
    after = run(x)
    assert before.abs().sum() > 0 and after.abs().sum() == 0


def test_inference_frames_leave_no_account():
    model, optimizer = built()
    run = torch.compile(model, backend="muon_zero", options=EAGER)
    with torch.no_grad():
        want = run(X)
    with torch.inference_mode():
        assert torch.equal(run(X), want)
    assert optimizer.engine.ledger.balance() == 0


def test_a_missing_compiler_is_one_sentence_that_names_the_doctor():
    model, _ = initialize(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), {"compile": True})
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",), "fx_graph_cache": False}),
        pytest.raises(MuonZeroError, match="needs a C.. compiler: .*no-such-compiler.*muon doctor") as caught,
    ):
        model(torch.randn(2, 4))
    assert type(caught.value.inner_exception).__name__ == "InvalidCxxCompiler"
    assert len(caught.traceback) < 10  # none of torch's eighty lines


def test_two_models_train_side_by_side_as_if_alone():
    """In two threads, which compile one after the other; backward and step graphs of both are there by then."""
    settings = ({"stage": 2, "momentum": 0.9}, {"stage": 3, "momentum": 0.5, "nesterov": False, "lr": 0.05})

    def in_place(**settings):
        model, optimizer = built(**settings)
        model.compile(backend="muon_zero", options=EAGER)
        return model, optimizer

    made, alone = ([in_place(**each) for each in settings] for _ in range(2))
    for pair in alone:
        train(*pair, 2)
        train(*pair, 10)
    for pair in made:
        train(*pair, 2)
    with ThreadPoolExecutor(2) as threads:
        for done in [threads.submit(train, *pair, 10) for pair in made]:
            done.result()
    assert [optimizer.totals()["directions_used"] for _, optimizer in made] == [24, 24]
    for (model, _), (expected, _) in zip(made, alone, strict=True):
        assert all(map(torch.equal, model.parameters(), expected.parameters()))
