"""AdamW computed by the host needs no device: its numbers are compared with torch's, from gradients to weights."""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from alone import group_of
from cases import FEW, Case
from torch import Tensor
from torch.optim.adamw import adamw

__all__ = ["host_adamw"]

#: steps of a case, and the index of the skipped one
STEPS, SKIPPED = 4, 1


def host_adamw(training_of: Callable[[Case], Any]) -> dict[str, bool]:
    """Return by case, in words, whether weights and moments equal torch's bitwise, a skipped step included."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        disk = {"device": "nvme", "nvme_path": folder}  # on one rank: others would have to report their disks
        for stage, world, settings in ((3, 4, {}), (0, 1, disk)):
            for masters in (True, False):
                offload = FEW | settings | {"masters": masters, "adamw_on": "cpu"}
                case = Case(stage, world, params={"checks": "next_step", "offload": offload})
                with group_of(case.world, case.rank):
                    name = f"AdamW on the host is torch's: {offload['device']}, masters {masters}"
                    results[name] = _is_torchs(training_of(case))
    return results


def _is_torchs(training: Any) -> bool:
    optimizer = training.optimizer
    params = [(group, param) for group in optimizer.param_groups if "betas" in group for param in group["params"]]
    for _, param in params:  # memory that no kernel has filled
        states = optimizer.state[param]
        weight = _memory(states.get("master_weight", param)).normal_(std=0.02)
        _memory(param).copy_(weight)
        _memory(states["step"]).zero_()
    equal = True
    for number in range(STEPS):
        expected: list[tuple[Tensor, dict[str, Tensor]]] = []

        def gradients(loss: Tensor, number: int = number, expected: Any = expected) -> None:
            for group, param in params:
                grad, states = _memory(param.grad), optimizer.state[param]
                grad.copy_(torch.randn(grad.shape))
                reference = {name: _memory(value).clone() for name, value in states.items()}
                reference.setdefault("master_weight", _memory(param).clone())
                expected.append((param, reference))
                if number != SKIPPED:
                    _step(group, grad, reference)

        with _skipped() if number == SKIPPED else nullcontext():
            training.step(gradients)
        for param, reference in expected:
            states = optimizer.state[param]
            actual = {"master_weight": _memory(param)} | {name: _memory(value) for name, value in states.items()}
            equal &= all(torch.equal(actual[name], reference[name]) for name in reference)
            equal &= torch.equal(_memory(param), reference["master_weight"].to(param.dtype))
    return equal


def _step(group: Any, grad: Tensor, own: dict[str, Tensor]) -> None:
    weight, (near, far) = own["master_weight"], group["betas"]
    adamw(
        [weight], [grad.to(weight.dtype)], [own["exp_avg"]], [own["exp_avg_sq"]], [], [own["step"]], fused=True,
        amsgrad=False, beta1=near, beta2=far, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        maximize=False,
    )  # fmt: skip


def _memory(tensor: Any) -> Tensor:
    """Return this rank's part of a tensor as a host tensor over the same memory, which is the host's."""
    local = getattr(tensor, "_local_tensor", tensor)
    raw = torch.frombuffer((ctypes.c_char * local.nbytes).from_address(local.data_ptr()), dtype=torch.uint8)
    return raw.view(local.dtype).view(local.shape)


@contextmanager
def _skipped() -> Iterator[None]:
    """Make every step inside the block find a number that is not finite, on the device."""
    from compile_muon.engine.step_checks import StepChecks

    original = StepChecks.found_inf

    def found_inf(self: StepChecks) -> Tensor:
        flag = original(self)
        _memory(flag).fill_(1.0)
        return flag

    StepChecks.found_inf = found_inf  # type: ignore[method-assign]
    try:
        yield
    finally:
        StepChecks.found_inf = original  # type: ignore[method-assign]
