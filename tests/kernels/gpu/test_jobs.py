"""Which kernels a call will launch, and their compilation before it does, without a GPU."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.fx import Graph, GraphModule, Node

triton = pytest.importorskip("triton", reason="Triton is not installed")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402

from compile_muon.kernels.gpu import apply, fingerprint, momentum, newton_schulz, normalize  # noqa: E402
from compile_muon.kernels.gpu.jobs import Job, NoDevice, compile_job, jobs_of  # noqa: E402
from compile_muon.kernels.gpu.launch import noting  # noqa: E402
from compile_muon.kernels.gpu.tiles import load_tables  # noqa: E402
from compile_muon.kernels.newton_schulz import make_plan  # noqa: E402
from compile_muon.kernels.ops import arguments  # noqa: E402
from compile_muon.passes import ahead  # noqa: E402
from compile_muon.passes.fingerprint import FINGERPRINT_OF_ROWS  # noqa: E402
from compile_muon.passes.momentum import MOMENTUM_UPDATES  # noqa: E402

TARGET = GPUTarget("cuda", 90, 32)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is asked of a device is answered for sm_90."""
    products = newton_schulz.Products(load_tables()["sm_90"], 132)
    monkeypatch.setattr(newton_schulz, "_products_on", lambda device: products if device.type == "cuda" else None)
    for module in ("compile_muon.kernels.dispatch", "compile_muon.passes.ahead"):
        monkeypatch.setattr(f"{module}.triton_kernels", lambda: newton_schulz)
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDevice(TARGET))
    yield


def test_one_kernel_serves_lists_of_any_length(tmp_path: Path) -> None:
    """Each pattern of sizes and alignments would be compiled by itself."""
    with noting(torch.device("cuda")) as launches:
        for sizes in ([1], [3, 16, 64], [5] * 16, range(1, 20), [1 << 20, 7]):
            fingerprint.fingerprint([(meta(n, dtype=torch.int32), min(n, 7)) for n in sizes], golden=1, factor=1)
    assert {job.name for job in jobs_of(launches, TARGET, tmp_path)} == {"sums_kernel", "mix_kernel"}
    assert len(jobs_of(launches, TARGET, tmp_path)) == 2 and len(launches) == 6 + 6

    with noting(torch.device("cuda")) as launches:
        for count, size in ((1, 64), (3, 16), (8, 1 << 20), (11, 4096), (2, 31), (9, 1)):
            params = [meta(size) for _ in range(count)]
            apply.apply_updates(params, params, lr=0.1, weight_decay=0.1, scales=[1.0] * count)
    assert [job.constants["WIDE"] for job in jobs_of(launches, TARGET, tmp_path)] == [True, False]


def test_one_kernel_serves_all_that_begin_elsewhere_than_at_multiples_of_16_bytes(tmp_path: Path) -> None:
    memory, words = torch.zeros(64), torch.zeros(64, dtype=torch.int64)
    formula = {"golden": 1, "factor": 1}
    with noting(torch.device("cuda")) as launches:
        for begins in ([0, 1], [1, 0], [3, 4, 5], [6]):
            vectors, rows = [memory[i : i + 30] for i in begins], [memory[i : i + 30].view(5, 6) for i in begins]
            apply.apply_updates(vectors, vectors, lr=0.1, weight_decay=0.1, scales=[1.0] * len(begins))
            fingerprint.fingerprint([(x.view(torch.int32), 5) for x in vectors], **formula)
            fingerprint.finish([words[i : i + 30] for i in begins], **formula)
            dtypes = {"dtype": torch.bfloat16, "wide": torch.float32}
            momentum.momentum_updates(rows, rows, vectors, nesterov=True, **dtypes, **formula)
    names = [job.name for job in jobs_of(launches, TARGET, tmp_path)]
    assert sorted(names) == ["apply_kernel", "mix_kernel", "momentum_kernel", "sums_kernel"]


def test_what_a_graph_will_launch(on_h100: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Newton-Schulz, momenta and fingerprints, for the device's architecture; nothing is on "meta" by itself."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    plan = arguments(make_plan("auto", "jordan", 5, "bfloat16", "cpu", 1e-7))

    def graph(device: str, *, norms: bool = False) -> GraphModule:
        graph = Graph()

        def given(name: str, *shape: int) -> Node:
            node = graph.placeholder(name)
            with torch._subclasses.FakeTensorMode():
                node.meta["val"] = torch.empty(shape, device=device)
            return node

        shapes = ((1024, 4096), (1024, 1024), (4096, 1024), (1024, 4096))
        inputs = [given(f"x{i}", *shape) for i, shape in enumerate(shapes)]
        rows = [given(f"norms{i}", shape[0]) for i, shape in enumerate(shapes)] if norms else []
        hypers = [given("hyper", 2)] * len(inputs)
        made = graph.call_function(torch.ops.muon_zero.newton_schulz.default, (inputs, *plan[:-1], rows))
        updates = graph.call_function(MOMENTUM_UPDATES, (inputs, inputs, hypers, [], True, "bfloat16", "float32"))
        graph.output((made, updates, graph.call_function(FINGERPRINT_OF_ROWS, (inputs,))))
        return GraphModule({}, graph)

    jobs = ahead.kernels_of(graph("cuda"))
    names = {job.name for job in jobs}
    assert {"grouped_symmetric_kernel", "grouped_product_kernel", "product_kernel", "divide_kernel"} < names
    assert {"partial_norms_kernel", "mix_kernel", "momentum_kernel"} < names
    with_norms = [job.name for job in ahead.kernels_of(graph("cuda", norms=True)) if job not in jobs]
    assert with_norms == ["partial_norms_kernel"]
    assert len(jobs) <= 17 and all(job.target == TARGET and job.cache == tmp_path for job in jobs)
    assert not ahead.kernels_of(graph("cpu"))
    for job in jobs:
        job.file.parent.mkdir(exist_ok=True)
        job.file.write_text("compiled\n")
    assert not ahead.kernels_of(graph("cuda")), "what somebody has compiled is not compiled again"


def division(tmp_path: Path) -> Job:
    x, out = meta(2, 64, 128), meta(2, 64, 128, dtype=torch.bfloat16)
    launch = normalize.divide(x, meta(2, 2, 4), out, eps=1e-7, safety=1.0)
    (job,) = jobs_of([launch, launch], TARGET, tmp_path)
    return job


def test_a_launch_finds_what_was_compiled_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = division(tmp_path)
    kernel = normalize.divide_kernel
    compile_job(job)
    assert job.done and not isinstance(triton.runtime.driver._active, NoDevice)

    found = []
    monkeypatch.setattr(triton.runtime.driver, "_active", NoDevice(TARGET))
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path)
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
        kernel.device_caches.clear()
        x, out = torch.empty(2, 64, 128), torch.empty(2, 64, 128, dtype=torch.bfloat16)
        for given, result, safety in ((x, out, 1.02), (x.mT, out.view(2, 128, 64), 1.0)):
            launch = normalize.divide(given, torch.empty(2, 2, 4), result, eps=1e-5, safety=safety)
            launch.kernel.warmup(*launch.arguments, grid=(1,), **launch.constants)
    kernel.device_caches.clear()
    assert found == [True, False], "strides that are compiled for are not those of the job"


def test_what_another_rank_compiles_is_waited_for(tmp_path: Path) -> None:
    import fcntl

    job = division(tmp_path)
    job.file.parent.mkdir(parents=True)
    waiting = threading.Thread(target=compile_job, args=(job,))
    with job.file.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        file.write("compiled\n")
    waiting.join(20)
    assert not waiting.is_alive() and [path.name for path in tmp_path.iterdir()] == ["compile_muon"]
