"""What every distributed run is compared with: one unsharded fp32 model trained on the averaged gradient.

:class:`Reference` uses nothing of compile_muon, so an error in it cannot hide on both sides of a comparison.
"""

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

import compile_muon
from compile_muon.config import ExpertParallelConfig, SequenceParallelConfig, config_from_kwargs

#: where models train that are compared; their references stay on the host. One GPU serves several ranks.
DEVICE = torch.device(os.environ.get("COMPILE_MUON_TEST_DEVICE", "cpu"))
if DEVICE.type == "cuda":
    torch.backends.cudnn.allow_tf32 = False  # of convolutions; products of float32 matrices are exact by default

#: relative Frobenius
PARAMETER_TOLERANCE = 1e-5
DIRECTION_TOLERANCE = 1e-4
GRADIENT_TOLERANCE = 1e-5

# AdamW divides by |g| + eps: with the usual 1e-8, rounding noise in a gradient that is zero in exact arithmetic (a key
# bias, say) becomes a step of full length in a random direction, on any two machines, with or without us.
ADAMW_EPS = 1e-4
LR, MOMENTUM, DECAY = 0.02, 0.95, 0.1
ADAMW_LR, BETAS = 3e-4, (0.9, 0.95)

#: name -> (batch, rows, cols)
Matrices = Mapping[str, tuple[int, int, int]]
#: (model, batch) -> loss
Loss = Callable[[nn.Module, Any], Tensor]
#: (step, micro-batch, rank) -> batch
Data = Callable[[int, int, int], Any]


def decayed_apart(params: list[nn.Parameter], stacked: Collection[nn.Parameter] = ()) -> list[dict[str, Any]]:
    """AdamW's groups: vectors do not decay, nor do those that are ``stacked``, of experts say."""
    found = {id(param) for param in stacked} | {id(param) for param in params if param.ndim < 2}
    matrices, vectors = [p for p in params if id(p) not in found], [p for p in params if id(p) in found]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def hidden_matrices(model: nn.Module, *, exclude: tuple[str, ...], stacks: tuple[str, ...] = ()) -> Matrices:
    """Views of all parameters of 2 or more dimensions but those named like ``exclude``; ``stacks`` are per expert."""
    views: dict[str, tuple[int, int, int]] = {}
    for name, param in model.named_parameters():
        if param.ndim < 2 or any(word in name for word in exclude):
            continue
        if any(word in name for word in stacks):
            views[name] = (param.shape[0], param.shape[1], param.shape[2])
        else:
            views[name] = (1, param.shape[0], param[0].numel())
    return views


def newton_schulz(matrix: Tensor) -> Tensor:
    """Five steps with Keller Jordan's coefficients, for one matrix or a stack of them."""
    wide = matrix if matrix.shape[-2] <= matrix.shape[-1] else matrix.mT
    x = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide is matrix else x.mT


@dataclass
class Reference:
    """Muon and AdamW by the book; ``model`` is trained in place. ``matrices``: who gets Muon, and how each is viewed.
    ``clip``: global norm. ``slices``: 1, or the mistake of ZeRO systems: Newton-Schulz on each of so many row parts."""

    model: nn.Module
    matrices: Matrices
    clip: float | None = None
    slices: int = 1
    directions: dict[str, Tensor] = field(default_factory=dict)
    norm: float = 0.0

    def __post_init__(self) -> None:
        self.named = dict(self.model.named_parameters())
        self.momentum = {name: torch.zeros_like(self.named[name]) for name in self.matrices}
        rest = [param for name, param in self.named.items() if name not in self.matrices and param.requires_grad]
        biases = [param for name, param in self.named.items() if name.endswith("bias")]
        self.adamw = torch.optim.AdamW(
            decayed_apart(rest, biases), lr=ADAMW_LR, betas=BETAS, eps=ADAMW_EPS, weight_decay=DECAY
        )
        self.lr = LR
        self.gradients: dict[str, Tensor] = {}

    def _direction(self, update: Tensor, view: tuple[int, int, int]) -> Tensor:
        if self.slices > 1 and update.shape[0] > 1:
            parts = update.reshape(view[0] * view[1], view[2]).chunk(self.slices)
            return torch.cat([newton_schulz(part) for part in parts]).reshape(update.shape)
        return newton_schulz(update.reshape(view)).reshape(update.shape)

    @torch.no_grad()
    def step(self) -> None:
        """One step on the gradients in ``.grad``, which are dropped."""
        params = [p for p in self.named.values() if p.grad is not None]
        self.gradients = {name: p.grad.clone() for name, p in self.named.items() if p.grad is not None}
        grads = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
        self.norm = float(grads)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(params, self.clip)
        for name, view in self.matrices.items():
            param, buffer = self.named[name], self.momentum[name]
            if param.grad is None:
                continue
            buffer.lerp_(param.grad, 1 - MOMENTUM)
            self.directions[name] = self._direction(param.grad.lerp(buffer, MOMENTUM), view)
            param.mul_(1 - self.lr * DECAY).add_(self.directions[name], alpha=-self.lr * self.scale(name))
        self.adamw.step()
        self.model.zero_grad()

    def scale(self, name: str) -> float:
        """The factor on lr of a matrix."""
        _, rows, cols = self.matrices[name]
        return max(1.0, rows / cols) ** 0.5

    def train_step(self, step: int, data: Data, loss: Loss, *, world: int, micro: int, used: int | None = None) -> None:
        """One step on the mean over all ranks and micro-batches of ``step``; ``used``: only the first so many."""
        for k in range(micro if used is None else used):
            for rank in range(world):
                (loss(self.model, data(step, k, rank)) / micro / world).backward()
        self.step()


def world_and_rank() -> tuple[int, int]:
    """``(1, 0)`` where there is no process group."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def train_step(optimizer: Any, loss: Tensor) -> None:
    """Backward, the optimizer's step, and no gradients behind it."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: Any = None) -> dict[str, Tensor]:
    """Whole weights, and states where the optimizer is given."""
    named = {name.replace("_checkpoint_wrapped_module.", ""): param for name, param in model.named_parameters()}
    whole = {name: full(param.detach()).clone() for name, param in named.items()}
    for name, param in named.items() if optimizer is not None else ():
        whole |= {f"{name} {slot}": full(value).clone() for slot, value in optimizer.state[param].items()}
    return whole


def full(tensor: Tensor | None) -> Tensor:
    """The whole of a sharded tensor, on the host; collective."""
    if not isinstance(tensor, DTensor):
        return tensor.cpu()
    if tensor.device.type == "cpu" and (tensor.requires_grad or torch.is_inference_mode_enabled()):
        return tensor.full_tensor()  # autograd goes through it, and in inference mode nothing else can be made of it
    # Gathered on the host wherever it is, and so by Gloo, whose gather of several tensors reads those on a GPU as if
    # they were on the host; from_local() would move back.
    return DTensor(tensor.detach().to_local().cpu(), tensor._spec, requires_grad=False).full_tensor()


def placed(batch: Any) -> Any:
    """Its tensors where models train."""
    return tree_map(lambda x: x.to(DEVICE) if isinstance(x, Tensor) else x, batch)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance; nan where anything is."""
    return float((actual.detach() - expected.detach()).norm() / expected.detach().norm().clamp(min=1e-12))


@dataclass
class Report:
    """How far a run is from its reference, in relative errors. ``parameters``: each after the last step.
    ``directions``: the largest of each Muon direction over the steps. ``norms``: the largest of
    ``optimizer.grad_norm``. ``gradients``: the largest of what ``.grad`` holds before a step, relative to its norm or a
    thousandth of all. ``balance``: visits the ledger still counts after the last step. ``misplaced``: directions that
    were not made where ``update`` says. ``noise``: of the fp32 reference itself against fp64, if asked for."""

    parameters: dict[str, float]
    directions: dict[str, float]
    norms: float
    gradients: float
    balance: int
    misplaced: int
    noise: dict[str, float]

    def problems(self) -> dict[str, float]:
        """Everything out of tolerance."""
        far = {n: e for n, e in self.parameters.items() if not e <= self._tolerance(n)}
        far |= {f"direction {n}": e for n, e in self.directions.items() if not e <= DIRECTION_TOLERANCE}
        far |= {"grad_norm": self.norms} if not self.norms <= PARAMETER_TOLERANCE else {}
        far |= {"gradients": self.gradients} if not self.gradients <= GRADIENT_TOLERANCE else {}
        far |= {"directions misplaced": self.misplaced} if self.misplaced else {}
        return far | ({"visits owed": self.balance} if self.balance else {})

    def check(self) -> None:
        """An AssertionError where anything is out of tolerance."""
        if self.problems():
            raise AssertionError(self.problems())

    def _tolerance(self, name: str) -> float:
        # Two fp32 runs, each its noise away from the truth, may be twice that apart.
        return max(PARAMETER_TOLERANCE, 2 * self.noise.get(name, 0.0))


def _directions_of_step(
    before: dict[str, Tensor], after: Mapping[str, Tensor], reference: Reference
) -> dict[str, Tensor]:
    """What step() moved the matrices along, from the parameters alone."""
    lr = reference.lr
    return {n: (p * (1 - lr * DECAY) - full(after[n])) / (lr * reference.scale(n)) for n, p in before.items()}


def train(
    model: nn.Module, matrices: Matrices, loss: Loss, data: Data, *, steps: int, codegen: str | None = None,
    reshard_after_forward: bool = True, cuda_graphs: bool = False, slices: int = 1, used: int | None = None,
    compiled: Callable[[nn.Module], Any] | None = None, by_context: bool = False, dynamic: bool | None = None,
    measure_noise: bool = False, unsharded: nn.Module | None = None, sharing: int = 1,
    experts: ExpertParallelConfig | None = None, sequence: SequenceParallelConfig | None = None, **settings: Any,
) -> Report:  # fmt: skip
    """Train ``model`` with MuonZero next to its reference, different data on each rank (``sharing`` neighbouring ranks:
    the same). Without ``codegen`` only ``update="backward"`` is compiled, by "eager": the markers that run else do the
    same arithmetic and the same collectives, in a tenth of the time. ``compiled`` compiles instead of ``torch.compile``
    of the whole model. ``slices``, ``used``: mistakes for the reference to make. ``by_context``: tell the optimizer
    about micro-batches by ``accumulate()`` instead of their number. ``measure_noise``: also train a reference in fp64.
    ``unsharded``: the whole model, where ``model`` is a part of it. ``settings``: of MuonZero."""
    world, rank = (place // sharing for place in world_and_rank())
    micro = settings.get("gradient_accumulation_steps", 1)
    whole = copy.deepcopy(model) if unsharded is None else unsharded
    reference = Reference(whole, matrices, settings.get("gradient_clipping"), slices)
    exact = Reference(copy.deepcopy(whole).double(), matrices) if measure_noise else None
    if by_context:
        settings["gradient_accumulation_steps"] = 1
    model.to(DEVICE)
    mesh = settings.pop("mesh", None)
    config = config_from_kwargs(
        lr=LR, momentum=MOMENTUM, weight_decay=DECAY, adamw_lr=ADAMW_LR, adamw_betas=BETAS,
        adamw_eps=ADAMW_EPS, adamw_weight_decay=DECAY, ns_dtype="float32", **settings,
    )  # fmt: skip
    config = dataclasses.replace(
        config,
        expert_parallel=experts or ExpertParallelConfig(),
        sequence_parallel=sequence or SequenceParallelConfig(),
    )
    optimizer = compile_muon.MuonZero.from_config(model, config, mesh=mesh)
    chosen = {row.name for row in optimizer.summary().rows if row.algorithm == "muon"}
    assert chosen == set(matrices), f"Muon trains {chosen ^ set(matrices)} or does not, unlike the reference"
    if sequence is not None:
        rank, world = optimizer.data_place
    run: Any
    if codegen is None and settings.get("update") == "backward":
        codegen = "eager"
    if compiled is not None:
        run = compiled(model)
    elif codegen is None:
        run = model
    else:
        options = {"codegen": codegen, "reshard_after_forward": reshard_after_forward, "cuda_graphs": cuda_graphs}
        run = torch.compile(model, backend="muon_zero", options=options, dynamic=dynamic)
    named = dict(model.named_parameters())
    errors = dict.fromkeys(matrices, 0.0)
    norms = wrong = 0.0
    for step in range(steps):
        before = {name: full(named[name]).detach().clone() for name in matrices}
        for k in range(micro):
            last = k == micro - 1
            with optimizer.accumulate() if by_context and not last else contextlib.nullcontext():
                (loss(run, placed(data(step, k, rank))) / micro).backward()
        # what clip_grad_norm_ and loggers see
        gradients = {name: full(param.grad).clone() for name, param in named.items() if param.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        directions = _directions_of_step(before, named, reference)
        reference.train_step(step, data, loss, world=world, micro=micro, used=used)
        for name, grad in gradients.items():
            distance = float((grad - reference.gradients[name]).norm())
            wrong = max(wrong, distance / max(float(reference.gradients[name].norm()), 1e-3 * reference.norm))
        if exact is not None:
            exact.train_step(step, data, loss, world=world, micro=micro)
        assert set(directions) == set(reference.directions), set(directions) ^ set(reference.directions)
        for name, direction in directions.items():
            errors[name] = max(errors[name], relative_error(direction, reference.directions[name]))
        norms = max(norms, abs(float(optimizer.grad_norm) / reference.norm - 1))
    found = {name: relative_error(full(param), reference.named[name]) for name, param in named.items()}
    noise = {} if exact is None else {n: relative_error(p, exact.named[n]) for n, p in reference.named.items()}
    metrics = optimizer.totals()
    made = {"backward": metrics["directions_used"], "step": metrics["directions_in_step"]}
    update = settings.get("update", "auto")
    misplaced = 0 if update == "auto" else len(matrices) * steps - int(made[update])
    return Report(found, errors, norms, wrong, optimizer.engine.ledger.balance(), misplaced, noise)


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What an error of ours or of PyTorch says, or nothing."""
    try:
        call(*args, **kwargs)
    except (compile_muon.MuonZeroError, RuntimeError) as error:
        return str(error)
    return ""
