"""DeepSpeed's learning rate schedules, under its names and with its parameters, as schedulers of torch.

The formulas are those of ``deepspeed/runtime/lr_schedules.py`` in DeepSpeed 0.19.8. There the constructor sets the
rates of iteration -1, and the engine goes on to the next after each step of the optimizer: step n, from 0, is made with
the rates of iteration n - 1. The first two steps of a warm-up are therefore made with its lowest rate.

The peak of a schedule (``warmup_max_lr``, ``cycle_max_lr``; of the range test the start) is no field here: it is the
rate of each half of the optimizer, and :mod:`compile_muon.config.deepspeed` puts it there. Docstrings call it own rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from compile_muon.config import accept
from compile_muon.config.checked import Checked, setting
from compile_muon.errors import config_error
from compile_muon.passes.methods import MatrixMethod, method_names

Rates = float | tuple[float, float]


@accept.takes("a number from 0, or a list [muon, adamw] of them")
def check_rates(field: str, value: object) -> Rates:
    """Accept one rate for both halves, or a pair (Muon, AdamW)."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        muon, adamw = accept.two(field, value, "write one number, or the two of Muon and AdamW")
        return accept.real(field, muon), accept.real(field, adamw)
    return accept.real(field, value)


@accept.takes(accept.integers)
def _check_count(field: str, value: object, low: int) -> int:
    """Accept an integer, or an integral float: JSON writes large integers as 1e4, too."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return accept.integer(field, value, low)


@accept.takes("False")
def _check_momentum(field: str, value: object) -> bool:
    if accept.boolean(field, value):
        problem = "moves AdamW's first beta too, as DeepSpeed does by default, which is not done here"
        raise config_error(field, value, problem, 'write "cycle_momentum": false')
    return False


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Checked):
    """A learning rate schedule; each subclass is one of DeepSpeed's, under its name.

    Attributes:
        rate_key: both halves' rates (docs/reference/configuration.md#rates-in-a-schedule).
    """

    rate_key: ClassVar[str] = ""  #: DeepSpeed's name of them; "" if there is none
    low_key: ClassVar[str] = ""  #: field with both halves' lowest rates; "" if there is none
    rate_default: ClassVar[float | None] = None  #: DeepSpeed's default of rate_key; None keeps the optimizer's rates

    def rate(self, step: int, base_lr: float, low: float) -> float:
        """Return the rate of a half in optimizer step `step` (from 0).

        `base_lr` is the half's rate without a schedule, `low` its value of :attr:`low_key`.
        """
        raise NotImplementedError

    def build(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        """Build a scheduler, to be stepped after each step of `optimizer`, and set the rates of the first step.

        A param group belongs to Muon's half if its ``algorithm`` is a matrix method, else to AdamW's; a rate of 0 stays
        0. The scheduler's state dict holds the step and the groups' own rates, not this object's fields: a run may
        resume with a larger ``total_num_steps``.
        """
        shares: list[Callable[[int], float]] = []
        lowest: Rates = getattr(self, self.low_key, 0.0)
        for group in optimizer.param_groups:
            half = 0 if group.get("algorithm") in method_names(MatrixMethod) else 1
            own_rate = float(group.get("initial_lr", group["lr"]))
            low = lowest[half] if isinstance(lowest, tuple) else lowest
            # Unlike a lambda, a partial can be pickled, and LambdaLR's state dict holds an empty dict for it.
            shares.append(partial(self._share, own_rate, low))
        return LambdaLR(optimizer, shares)

    def _share(self, base_lr: float, low: float, step: int) -> float:
        return self.rate(step, base_lr, low) / base_lr if base_lr else 0.0


def _warmup(iteration: int, steps: int, kind: str) -> float:
    """Return the share of the warm-up that is done, from 0 to 1."""
    if iteration < 0 or iteration >= steps:
        return float(iteration > 0)
    return math.log(iteration + 1) / math.log(steps) if kind == "log" else iteration / steps


@dataclass(frozen=True, kw_only=True)
class WarmupLR(ScheduleConfig):
    """A warm-up to the own rate, which stays.

    Attributes:
        warmup_min_lr: where it starts.
        warmup_num_steps: steps up; 1 counts as 2.
        warmup_type: along a logarithm or a straight line.
    """

    rate_key: ClassVar[str] = "warmup_max_lr"
    low_key: ClassVar[str] = "warmup_min_lr"

    warmup_min_lr: Rates = setting(0.0, check_rates)
    warmup_num_steps: int = setting(1000, _check_count, low=1)
    warmup_type: str = setting("log", accept.choice, allowed=("log", "linear"))

    def rate(self, step: int, base_lr: float, low: float) -> float:
        return low + (base_lr - low) * self._height(step - 1, max(2, self.warmup_num_steps))

    def _height(self, iteration: int, steps: int) -> float:
        return _warmup(iteration, steps, self.warmup_type)


@dataclass(frozen=True, kw_only=True)
class WarmupDecayLR(WarmupLR):
    """A warm-up as :class:`WarmupLR`, then a straight line down to ``warmup_min_lr`` at iteration ``total_num_steps``.

    Attributes:
        total_num_steps: steps of the whole schedule, up and down.
    """

    rate_default: ClassVar[float | None] = 0.001

    total_num_steps: int = setting(None, _check_count, low=1)

    def _height(self, iteration: int, steps: int) -> float:
        if iteration < steps:
            return super()._height(iteration, steps)
        return max(0.0, (self.total_num_steps - iteration) / max(1, self.total_num_steps - steps))


@dataclass(frozen=True, kw_only=True)
class WarmupCosineLR(ScheduleConfig):
    """A warm-up to the own rate, then a cosine down, in shares of the own rate. The first step has rate 0.

    Attributes:
        total_num_steps: steps of the whole schedule, up and down.
        warmup_min_ratio: where it starts, as a share of the half's rate.
        warmup_num_steps: steps up; 1 counts as 2.
        cos_min_ratio: where it ends and stays, as a share of the half's rate.
        warmup_type: along a logarithm or a straight line.
    """

    total_num_steps: int = setting(None, _check_count, low=1)
    warmup_min_ratio: float = setting(0.0, accept.real)
    warmup_num_steps: int = setting(1000, _check_count, low=1)
    cos_min_ratio: float = setting(0.0001, accept.real)
    warmup_type: str = setting("log", accept.choice, allowed=("log", "linear"))

    def rate(self, step: int, base_lr: float, low: float) -> float:
        iteration, steps = step - 1, max(2, self.warmup_num_steps)
        if iteration < 0:
            return 0.0
        if iteration < steps:
            floor, height = self.warmup_min_ratio, _warmup(iteration, steps, self.warmup_type)
        else:
            done = min(1.0, (iteration - steps + 1) / max(1, self.total_num_steps - steps))
            floor, height = self.cos_min_ratio, (1 + math.cos(math.pi * done)) / 2
        return base_lr * (floor + (1 - floor) * height)


@dataclass(frozen=True, kw_only=True)
class OneCycle(ScheduleConfig):
    """A cycle from ``cycle_min_lr`` to the own rate and back, then a slow decay.

    Attributes:
        cycle_min_lr: where the cycle starts and ends.
        cycle_first_step_size: steps up.
        cycle_second_step_size: steps down; None for as many as up.
        cycle_first_stair_count: stairs up; 0 for none.
        cycle_second_stair_count: stairs down; 0 for none, None for as many as up.
        decay_lr_rate: decay of the rate after the cycle, as above.
        decay_step_size: steps that count as one of that decay; 0 for no decay.
        cycle_momentum: True is DeepSpeed's default. Has to be False: AdamW's betas stay as they are.
    """

    rate_key: ClassVar[str] = "cycle_max_lr"
    low_key: ClassVar[str] = "cycle_min_lr"

    cycle_min_lr: Rates = setting(None, check_rates)
    cycle_first_step_size: int = setting(2000, _check_count, low=1)
    cycle_second_step_size: int | None = setting(None, _check_count, none=True, low=0)
    cycle_first_stair_count: int = setting(0, _check_count, low=0)
    cycle_second_stair_count: int | None = setting(None, _check_count, none=True, low=0)
    decay_lr_rate: float = setting(0.0, accept.real)
    decay_step_size: int = setting(0, _check_count, low=0)
    cycle_momentum: bool = setting(True, _check_momentum)

    def rate(self, step: int, base_lr: float, low: float) -> float:
        first = self.cycle_first_step_size
        second = first if self.cycle_second_step_size is None else self.cycle_second_step_size
        if step - 1 >= first + second:
            decay = self.decay_lr_rate / self.decay_step_size if self.decay_step_size else 0.0
            return low / (1 + decay * (step - first - second))
        done, size, stairs = step % (first + second), first, self.cycle_first_stair_count
        if done > first:
            done, size = first + second - done, second
            stairs = stairs if self.cycle_second_stair_count is None else self.cycle_second_stair_count
        # Multiply first: done / size is rounded, and could fall just under its stair.
        return low + (base_lr - low) * (math.floor(done * stairs / size) / stairs if stairs else done / size)


@dataclass(frozen=True, kw_only=True)
class LRRangeTest(ScheduleConfig):
    """A rate that grows from the own rate without end, to find where training breaks.

    Attributes:
        lr_range_test_step_size: steps in which the rate grows once.
        lr_range_test_step_rate: how much it then grows, in rates of the half.
        lr_range_test_staircase: grow only once in so many steps, and not in each of them.
    """

    rate_key: ClassVar[str] = "lr_range_test_min_lr"
    rate_default: ClassVar[float | None] = 0.001

    lr_range_test_step_size: int = setting(2000, _check_count, low=1)
    lr_range_test_step_rate: float = setting(1.0, accept.real)
    lr_range_test_staircase: bool = setting(False, accept.boolean)

    def rate(self, step: int, base_lr: float, low: float) -> float:
        intervals = step / self.lr_range_test_step_size
        grown = math.floor(intervals) if self.lr_range_test_staircase else intervals
        return base_lr * (1 + self.lr_range_test_step_rate * grown)


#: Schedules by DeepSpeed's names.
SCHEDULES: dict[str, type[ScheduleConfig]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}
