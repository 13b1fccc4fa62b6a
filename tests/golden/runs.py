"""Three steps of each cell on one rank, by the compile_muon of one tree.

`python runs.py TREE OUT PATTERN RANK WORLD STORE`. Two commits run this same file: it uses only what users have.
"""

import contextlib
import logging
import sys
import time
import warnings
from collections.abc import Sequence
from fnmatch import fnmatch
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

STEPS = 3
_METHODS = ("normuon", "adamuon", "muonh", "heavy_ball", "dion2", "muonbp", "soap", "muown")
#: settings of MuonZero, beside `compiled`, and `mesh` of two ranks, which one rank skips
CELLS: dict[str, dict[str, Any]] = {
    **{f"stage {stage}, compiled": {"stage": stage, "compiled": True} for stage in range(4)},
    **{f"stage {stage}, uncompiled, 3 micro-batches": {"stage": stage, "micro": 3} for stage in range(4)},
    "stage 1, compiled, 3 micro-batches": {"stage": 1, "compiled": True, "micro": 3},
    "stage 3, compiled, 2 micro-batches, clipped": {
        "stage": 3, "compiled": True, "micro": 2, "gradient_clipping": 0.1
    },
    "stage 2, compiled, directions in step": {"stage": 2, "compiled": True, "update": "step"},
    "stage 2, compiled, offloaded": {"stage": 2, "compiled": True, "offload": "cpu"},
    "stage 3, uncompiled, weights in host memory": {"stage": 3, "offload_param": "cpu"},
    "stage 2, compiled, bfloat16": {"stage": 2, "compiled": True, "param_dtype": torch.bfloat16},
    "stage 2, uncompiled, heads": {"stage": 2, "muon_views": {"2.weight": {"heads": 3}}},
    "stage 2, uncompiled, 8 bits": {"stage": 2, "momentum_dtype": "8bit"},
    **{f"stage 2, uncompiled, {method}": {"stage": 2, "method": method} for method in _METHODS},
    "stage 3, compiled, normuon, lion": {"stage": 3, "compiled": True, "method": "normuon", "auxiliary": "lion"},
    "stage 1, compiled, soap": {"stage": 1, "compiled": True, "method": "soap"},
    "stage 3, compiled, replicate 2": {"stage": 3, "compiled": True, "mesh": {"replicate": 2, "shard": 1}},
    "stage 2, uncompiled, tensor 2": {"stage": 2, "mesh": {"shard": 1, "tensor": 2}},
}  # fmt: skip


def use(tree: Path) -> None:
    """Import compile_muon from a checkout, whichever is installed."""
    folders = {
        "compile_muon": tree / "compile_muon",
        "compile_muon.passes": tree / "passes",
        "compile_muon.kernels": tree / "kernels",
    }

    class Finder:
        @staticmethod
        def find_spec(name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
            folder = folders.get(name)
            return None if folder is None else spec_from_file_location(name, folder / "__init__.py")

    sys.meta_path.insert(0, Finder)


def run(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Losses, weights and states of this rank behind three steps."""
    import compile_muon

    settings = {"lr": 0.02, "adamw_lr": 0.01, "ns_dtype": "float32", **settings}
    compiled, micro, sizes = (settings.pop(name, None) for name in ("compiled", "micro", "mesh"))
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 12, bias=False), nn.LayerNorm(12), nn.Linear(12, 9), nn.Linear(9, 1)
    )
    if sizes is not None:
        settings["mesh"] = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if "tensor" in sizes:
            slices = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(model, settings["mesh"]["tensor"], slices)
            rank = 0
    optimizer = compile_muon.MuonZero(model, gradient_accumulation_steps=micro or 1, **settings)
    forward = torch.compile(model, backend="muon_zero", options={"codegen": "eager"}) if compiled else model
    tensors = {}
    for step in range(STEPS):
        for part in range(micro or 1):
            data = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            x = torch.randn(5, 6, generator=data).to(settings.get("param_dtype") or torch.float32)
            loss = forward(x).float().square().mean() / (micro or 1)
            loss.backward()
            tensors[f"loss of step {step}, micro-batch {part}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    tensors |= {f"weight {name}": value for name, value in model.state_dict().items()}
    states = optimizer.state_dict()
    names: dict[Any, str] = {}
    for group in states["param_groups"]:
        names |= zip(group["params"], group["param_names"], strict=True)
    for key, slots in states["state"].items():
        tensors |= {f"{slot} {names[key]}": value for slot, value in slots.items()} if key in names else {}
    return {name: _here(value).clone() for name, value in tensors.items() if isinstance(value, Tensor)}


def _here(value: Tensor) -> Tensor:
    """The part of a DTensor that this rank has."""
    return value.detach().to_local() if hasattr(value, "to_local") else value.detach()


def main(tree: str, out: str, pattern: str, rank: str, world: str, store: str) -> None:
    """Run the cells that fit; save the tensors of each, or its error, and its seconds of CPU."""
    use(Path(tree))
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    if world != "1":
        shared = dist.FileStore(store, int(world))
        dist.init_process_group("gloo", store=shared, rank=int(rank), world_size=int(world))
    results = {}
    for name, settings in CELLS.items():
        if fnmatch(name, pattern) and not (world == "1" and "mesh" in settings):
            began = time.process_time()
            result: dict[str, Tensor] | str = ""
            try:
                result = run(dict(settings))
            except Exception as error:
                result = f"{type(error).__name__}: {error}"
            torch._dynamo.reset()
            results[name] = result, time.process_time() - began
    torch.save(results, out)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
