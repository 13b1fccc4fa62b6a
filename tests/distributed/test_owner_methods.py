"""Methods that keep states at the owners of matrices, or have several graphs, beside what their papers say.

Gradients are multiples of 1/8 here, so that every world has the same to the bit: of a gram of less than full rank any
basis of the null space is one of eigenvectors, and which one comes out hangs on the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import books
from support.exact import HEADS, SETTINGS, STEPS, TOLERANCE, Exact, gradients, made, saved, train
from support.harness import Ranks
from support.reference import DECAY, LR, MOMENTUM, newton_schulz, relative_error, world_and_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from compile_muon.passes.methods import matrix_method


def by_the_book(way: str, steps: int = STEPS) -> dict[str, Tensor]:
    found = {}
    for place, (name, weight) in enumerate(Exact().named_parameters()):
        if name == "vector":
            continue
        several = []
        for number, own in enumerate(weight.detach().unbind() if weight.ndim == 3 else [weight.detach()]):
            grads = [gradients(step)[place] for step in range(steps)]
            grads = [grad[number] for grad in grads] if weight.ndim == 3 else grads
            if way == "soap":
                several.append(books.soap(own, grads, lr=LR, decay=DECAY, every=3))
            elif way == "muown":
                several.append(books.muown(newton_schulz, own, grads, lr=LR, decay=DECAY, momentum=MOMENTUM))
            elif way == "dion2":
                several.append(books.dion2(newton_schulz, own, grads, lr=LR, decay=DECAY, keep=MOMENTUM, fraction=0.4))
            else:
                blocks = HEADS.get(name, {"heads": 1})["heads"]
                factor = 0.5  # of what has one block, too
                several.append(
                    books.muonbp(newton_schulz, own, grads, lr=LR, decay=DECAY, momentum=MOMENTUM, period=3,
                                 factor=factor, blocks=blocks)
                )  # fmt: skip
        found[name] = torch.stack(several) if weight.ndim == 3 else several[0]
    return found


def errors(way: str, compiled: bool = False, spoiled: bool = False, **settings: Any) -> dict[str, float]:
    found = train(*made(way, **settings), range(STEPS), compiled=compiled, spoiled=spoiled)
    return {name: relative_error(found[name], weight) for name, weight in by_the_book(way).items()}


def briefly(way: str, folder: str) -> dict[str, dict[str, float]]:
    """A case of each kind."""
    file = {"device": "nvme", "nvme_path": folder, "masters": True, "buffer_bytes": 1}
    return {
        "step": errors(way, stage=1, update="step", offload="cpu"),
        "compiled": errors(way, compiled=True, spoiled=True, stage=3, nonfinite="skip", checks="next_step"),
        "masters in a file": errors(way, stage=3, update="step", param_dtype=torch.bfloat16, offload=file),
    }


def everywhere(way: str, folder: str) -> dict[str, dict[str, float]]:
    found = {f"stage {stage}": errors(way, stage=stage, update="step") for stage in (0, 1, 2, 3)}
    found["compiled"] = errors(way, compiled=True, stage=3)
    torch._dynamo.reset()
    for checks in ("in_step", "next_step"):
        found[checks] = errors(way, spoiled=True, stage=2, update="step", nonfinite="skip", checks=checks)
    found["offloaded"] = errors(way, stage=3, update="step", offload="cpu")
    found["in a file"] = errors(way, stage=1, update="step", offload={"device": "nvme", "nvme_path": folder})
    world, looks = world_and_rank()[0], matrix_method(way).project is not None  # at weights, ahead of Newton-Schulz
    if not looks and world < 4:
        return found
    rounded = {"update": "step", "param_dtype": torch.bfloat16}  # which every gradient here fits
    offloaded = {"cpu": {"device": "cpu"}, "nvme": {"device": "nvme", "nvme_path": folder}}
    for stage, where in ((1, "cpu"), (3, "nvme")):
        masters = {"offload": {**offloaded[where], "masters": True, "buffer_bytes": 1}}
        found[f"offloaded masters, stage {stage}"] = errors(way, stage=stage, **rounded, **masters)
    if world > 1:
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        for over in ("shard", "all"):
            on = {"mesh": mesh, "shard_state_over": over}
            found[f"replicas {over}"] = errors(way, stage=3, update="step", **on)
            found[f"replicas {over}, offloaded masters"] = errors(way, stage=2, **rounded, **masters, **on)
            if world == 4:
                found[f"replicas {over}, compiled"] = errors(way, compiled=True, stage=3, **on)
                torch._dynamo.reset()
    return found


@pytest.mark.parametrize(
    ("way", "world", "cases"),
    [
        *((way, 2, briefly) for way in SETTINGS),
        *(pytest.param(way, 2, everywhere, marks=pytest.mark.full) for way in SETTINGS),
        pytest.param("muown", 4, everywhere, marks=pytest.mark.full),  # replicas in compiled frames, too
        *(pytest.param(way, 4, everywhere, marks=pytest.mark.campaign) for way in SETTINGS if way != "muown"),
        *(pytest.param(way, 1, everywhere, marks=pytest.mark.campaign) for way in SETTINGS),
    ],
)
def test_a_method_is_what_its_paper_says(
    ranks: Callable[[int], Ranks], tmp_path: Path, way: str, world: int, cases: Callable[..., Any]
) -> None:
    for found in ranks(world).run(cases, way=way, folder=str(tmp_path)):
        for case, own in found.items():
            assert all(error <= TOLERANCE for error in own.values()), (case, own)


# ------------------------------------------------------------------------------------------------------ tensor slices

SLICES = {"wide": 1, "tall": 0, "square": 1, "stack": 2, "vector": 0}


class Sliced(Exact):
    """The same with slices of rows and of columns, as parallelize_module makes them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        for name, param in list(self.named_parameters()):
            placed = distribute_tensor(param.detach(), mesh, [Shard(SLICES[name])])
            self.register_parameter(name, nn.Parameter(placed))

    def forward(self, *given: Tensor) -> Tensor:
        own = [distribute_tensor(x, self.mesh, [Shard(dim)]) for x, dim in zip(given, SLICES.values(), strict=True)]
        total = super().forward(*own)
        assert isinstance(total, DTensor)
        return total.full_tensor()


def on_slices(way: str) -> dict[str, dict[str, float]]:
    found, world = {}, world_and_rank()[0]
    sizes = (world // 2, 2)
    offloaded: dict[str, Any] = {"param_dtype": torch.bfloat16, "offload": {"device": "cpu", "masters": True}}
    for stage, where in ((0, {}), (3, {}), (3, offloaded))[0 if world > 2 else 2 :]:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor"))
        model = Sliced(mesh["tensor"])
        _, optimizer = made(way, model, mesh=mesh, stage=stage, update="step", **where)
        weights = train(model, optimizer, range(STEPS), sharing=2)
        own, case = by_the_book(way), f"stage {stage}{', offloaded masters' if where else ''}"
        found[case] = {name: relative_error(weights[name], weight) for name, weight in own.items()}
    return found


@pytest.mark.parametrize(
    ("way", "world"),
    [
        *((way, 2) for way in SETTINGS),
        pytest.param("soap", 4, marks=pytest.mark.full),
        *(pytest.param(way, 4, marks=pytest.mark.campaign) for way in SETTINGS if way != "soap"),
    ],
)
def test_slices_of_rows_and_columns(ranks: Callable[[int], Ranks], way: str, world: int) -> None:
    for found in ranks(world).run(on_slices, way=way):
        for case, own in found.items():
            assert all(error <= TOLERANCE for error in own.values()), (case, own)


def test_gains_are_of_what_weights_are() -> None:
    """Loaded behind the optimizer, and scaled between two steps as MuonClip does: no step takes that back."""
    model, optimizer = made("muown", stage=0, update="step")
    plain = {name: param.detach().clone() * 3 for name, param in Exact().named_parameters()}
    model.load_state_dict(plain)
    first = train(model, optimizer, range(1))
    settings = {"lr": LR, "decay": DECAY, "momentum": MOMENTUM}
    book = books.muown(newton_schulz, plain["wide"], [gradients(0)[0]], **settings)
    assert relative_error(first["wide"], book) <= TOLERANCE
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
        optimizer.param_groups[0]["lr"] = 0.0
    halved = train(model, optimizer, range(1, 2))
    assert relative_error(halved["wide"], first["wide"] / 2) <= TOLERANCE


@pytest.mark.parametrize(
    ("way", "worlds"),
    [("soap", (1, 2)), *(pytest.param(way, (2, 1, 4), marks=pytest.mark.full) for way in SETTINGS)],
)
def test_states_follow_their_matrices_to_other_owners(
    ranks: Callable[[int], Ranks], tmp_path: Path, way: str, worlds: tuple[int, ...]
) -> None:
    folder, *before = str(tmp_path), *worlds[:-1]
    for part, world in enumerate(before):
        ranks(world).run(saved, folder=folder, way=way, first=2 * part, last=2 * part + 2, stage=3 - part)
    last = ranks(worlds[-1]).run(saved, folder=folder, way=way, first=2 * len(before), last=STEPS, stage=1)
    for found in last:
        for name, weight in by_the_book(way).items():
            assert relative_error(found[name], weight) <= TOLERANCE, name
