"""The faults of ``ranks``, in which one rank does something else than the others: each a small function with a name.

A function is called on the faulty rank alone, at the place of its decorator: before the step, instead of the forward
and backward of a micro-batch, instead of ``optimizer.step()`` or ``zero_grad()``, or while model and optimizer are
made.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from .ranks import Training

__all__ = ["FAULTS", "Fault"]

#: seconds that a rank stays away before it comes back: well under the time-out
AWAY = 2.0
#: the parameter that faults edit, in one entry of the last row that the rank holds
EDITED = "blocks.1.up.weight"


@dataclass(frozen=True)
class Fault:
    """A fault of one rank."""

    name: str  # on the command line and in the report
    place: str  # "between" steps, "batch", "update", "zero_grad"; or "settings", "model", "mode" when all is made
    act: Callable[[Any], Any]  # of the training; returns arguments of the optimizer at "settings", of Net at "model"
    lost: bool = False  # the faulty rank is no survivor, and need not report an error
    legitimate: bool = False  # training must go on as if nothing had happened
    everywhere: dict[str, Any] = field(default_factory=dict)  # arguments of the optimizer on all ranks
    # The same edit in one process that trains on all batches, of its training and the faulty rank; None if the process
    # is to train without the fault.
    twin: Callable[[Any, int], None] | None = None
    twin_from: int = 0  # lowest stage at which ``twin`` is the same edit
    link: bool = False  # the rank needs a network of its own
    quick: bool = False  # among the few of --quick


FAULTS: dict[str, Fault] = {}


def fault(name: str, place: str = "between", **facts: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Enter a function into :data:`FAULTS`."""

    def entered(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
        FAULTS[name] = Fault(name, place, act, **facts)
        return act

    return entered


# ------------------------------------------------------------------------------------------------- a rank is lost


def kill(_: object = None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def in_forward(t: Training, act: Callable[[], None]) -> None:
    """Call ``act`` between two blocks of the next forward."""
    t.model.between = lambda index, x: act() if index == 2 else None


def in_backward(t: Training, act: Callable[[], None]) -> None:
    """Call ``act`` between two blocks of the next backward."""

    def hook(index: int, x: Tensor) -> None:
        if index == 2:
            x.register_hook(lambda _: act())

    t.model.between = hook


def within_step(t: Training, act: Callable[[], None]) -> None:
    """Call ``act`` after half of the calls of Python functions in a step."""
    calls: list[int] = [0, 0]

    def profiled(limit: float) -> None:
        def note(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                calls[0] += 1
                if calls[0] >= limit:
                    sys.setprofile(None)
                    act()

        calls[0] = 0
        sys.setprofile(note)

    profiled(t.calls_of_a_step / 2)
    t.optimizer.step()
    sys.setprofile(None)


@fault("killed between steps", lost=True)
def killed_between(t: Training) -> None:
    kill()


@fault("killed in forward", lost=True)
def killed_in_forward(t: Training) -> None:
    in_forward(t, kill)


@fault("killed in backward", lost=True, quick=True)
def killed_in_backward(t: Training) -> None:
    in_backward(t, kill)


@fault("killed in step", "update", lost=True)
def killed_in_step(t: Training) -> None:
    within_step(t, kill)


@fault("ended with code 0", lost=True)
def exited(t: Training) -> None:
    os._exit(0)


@fault("raised between steps", lost=True)
def raised_between(t: Training) -> None:
    raise ValueError("on purpose")


def fail() -> None:
    raise ValueError("on purpose")


@fault("raised in forward", lost=True)
def raised_in_forward(t: Training) -> None:
    in_forward(t, fail)


@fault("raised in backward", lost=True, quick=True)
def raised_in_backward(t: Training) -> None:
    in_backward(t, fail)


@fault("raised in step", "update", lost=True)
def raised_in_step(t: Training) -> None:
    within_step(t, fail)


@fault("stopped for good", lost=True, quick=True)
def stopped(t: Training) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@fault("stopped for good in backward", lost=True)
def stopped_in_backward(t: Training) -> None:
    in_backward(t, lambda: os.kill(os.getpid(), signal.SIGSTOP))


@fault("link cut", link=True)
def cut(t: Training) -> None:
    subprocess.run(["ip", "link", "set", t.interface, "down"], check=True)


# --------------------------------------------------------------------------------------------- a rank comes back


@fault("nothing", legitimate=True)
def nothing(t: Training) -> None:
    """Do nothing: if this row is not "right", the machine is too busy for the time-out."""


@fault("stopped and continued in time", legitimate=True)
def stopped_and_continued(t: Training) -> None:
    subprocess.Popen(["sh", "-c", f"sleep {AWAY}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


@fault("slow, in time", legitimate=True, quick=True)
def slow(t: Training) -> None:
    time.sleep(AWAY)


@fault("link cut and mended in time", link=True, legitimate=True)
def cut_and_mended(t: Training) -> None:
    down, up = (f"ip link set {t.interface} {state}" for state in ("down", "up"))
    subprocess.Popen(["sh", "-c", f"{down}; sleep {AWAY}; {up}"])
    time.sleep(0.2)


# ------------------------------------------------------------------------------------------ it runs something else


@fault("forward under no_grad", "batch", lost=True)
def forward_under_no_grad(t: Training) -> None:
    with torch.no_grad():
        loss = t.forward(0)
    loss.backward()


@fault("one more forward under no_grad", quick=True)
def one_more_evaluation(t: Training) -> None:
    with torch.no_grad():
        t.forward(0)


@fault("one more forward")
def one_more_forward(t: Training) -> None:
    t.forward(0)


@fault("one more forward and backward")
def one_more_batch(t: Training) -> None:
    t.forward(0).backward()


@fault("no forward and backward", "batch")
def no_batch(t: Training) -> None:
    pass


@fault("no step", "update", quick=True)
def no_step(t: Training) -> None:
    pass


@fault("one more step", "update")
def one_more_step(t: Training) -> None:
    t.optimizer.step()
    t.optimizer.step()


@fault("no zero_grad", "zero_grad")
def no_zero_grad(t: Training) -> None:
    pass


@fault("one more micro-batch", "batch", everywhere={"gradient_accumulation_steps": 2})
def one_more_micro_batch(t: Training) -> None:
    for micro in range(t.micros + 1):
        t.forward(micro).backward()


@fault("one micro-batch less", "batch", everywhere={"gradient_accumulation_steps": 2})
def one_micro_batch_less(t: Training) -> None:
    t.forward(0).backward()


@fault("a longer batch", legitimate=True)
def longer_batch(t: Training) -> None:
    t.longer = True


@fault("two equal blocks swapped", quick=True)
def swapped(t: Training) -> None:
    t.model.order = [0, 2, 1, 3]


@fault("a block used twice, another not")
def used_twice(t: Training) -> None:
    t.model.order = [0, 1, 1, 3]


@fault("not compiled", "mode")
def not_compiled(t: Training) -> None:
    pass


# ----------------------------------------------------------------------------------------- it has other settings


def group(t: Training, algorithm: str) -> dict[str, Any]:
    return next(group for group in t.optimizer.param_groups if group["algorithm"] == algorithm)


@fault("other lr of the Muon group", quick=True)
def other_lr(t: Training) -> None:
    group(t, "muon")["lr"] *= 2


@fault("other lr of the AdamW group")
def other_adamw_lr(t: Training) -> None:
    group(t, "adamw")["lr"] *= 2


@fault("other momentum")
def other_momentum(t: Training) -> None:
    group(t, "muon")["momentum"] = 0.8


@fault("other weight decay")
def other_weight_decay(t: Training) -> None:
    group(t, "muon")["weight_decay"] = 0.5


@fault("other betas")
def other_betas(t: Training) -> None:
    group(t, "adamw")["betas"] = (0.8, 0.9)


@fault("made with another stage", "settings")
def other_stage(t: Training) -> dict[str, Any]:
    return {"stage": (t.stage + 1) % 4}


@fault("made with another lr", "settings")
def made_with_lr(t: Training) -> dict[str, Any]:
    return {"lr": 0.04}


@fault("made with another param_dtype", "settings")
def other_param_dtype(t: Training) -> dict[str, Any]:
    return {"param_dtype": "bfloat16"}


@fault("made with another reduce_dtype", "settings")
def other_reduce_dtype(t: Training) -> dict[str, Any]:
    return {"reduce_dtype": "bfloat16"}


@fault("made with other ns_steps", "settings")
def other_ns_steps(t: Training) -> dict[str, Any]:
    return {"ns_steps": 4}


@fault("made with another nesterov", "settings")
def other_nesterov(t: Training) -> dict[str, Any]:
    return {"nesterov": False}


@fault("made with another update", "settings", quick=True)
def other_update(t: Training) -> dict[str, Any]:
    return {"update": "step"}


@fault("made with another gradient_clipping", "settings")
def other_clipping(t: Training) -> dict[str, Any]:
    return {"gradient_clipping": 0.01}


@fault("made with another gradient_accumulation_steps", "settings")
def other_accumulation(t: Training) -> dict[str, Any]:
    return {"gradient_accumulation_steps": 2}


@fault("made with other muon_params", "settings")
def other_muon_params(t: Training) -> dict[str, Any]:
    return {"muon_params": ["blocks.*.up.weight"]}


@fault("another parameter's name", "model")
def other_name(t: Training) -> dict[str, Any]:
    return {"last": "tail"}


@fault("another parameter's shape", "model")
def other_shape(t: Training) -> dict[str, Any]:
    return {"inner": 16}


@fault("other weights at the start", "model", legitimate=True)
def other_weights(t: Training) -> dict[str, Any]:
    torch.manual_seed(99)
    return {}


# --------------------------------------------------------------------------------------------- it edits something


def shard(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def last_row(t: Training, faulty: int) -> int:
    """Return the row of the whole matrix that is the last one of the faulty rank's shard."""
    rows = t.parameter(EDITED).shape[0]
    return min((faulty + 1) * -(-rows // t.ranks), rows) - 1


def twin_edits_weight(t: Training, faulty: int) -> None:
    t.parameter(EDITED).data[last_row(t, faulty), 0] += 0.5


def twin_edits_momentum(t: Training, faulty: int) -> None:
    t.optimizer.state[t.parameter(EDITED)]["momentum_buffer"].data[last_row(t, faulty), 0] += 0.5


def twin_edits_gradient(t: Training, faulty: int) -> None:
    gradient = t.parameter(EDITED).grad
    assert gradient is not None
    gradient.data[last_row(t, faulty), 0] += 0.5


@fault("a weight edited through .data", twin=twin_edits_weight, twin_from=1)
def weight_edited(t: Training) -> None:
    shard(t.parameter(EDITED)).data[-1, 0] += 0.5


@fault("a weight edited in place", twin=twin_edits_weight, twin_from=1)
def weight_edited_in_place(t: Training) -> None:
    with torch.no_grad():
        shard(t.parameter(EDITED))[-1, 0] += 0.5


@fault("a momentum edited", twin=twin_edits_momentum, twin_from=1)
def momentum_edited(t: Training) -> None:
    shard(t.optimizer.state[t.parameter(EDITED)]["momentum_buffer"]).data[-1, 0] += 0.5


@fault("a gradient edited", "update", twin=twin_edits_gradient, twin_from=1)
def gradient_edited(t: Training) -> None:
    gradient = t.parameter(EDITED).grad
    assert gradient is not None
    shard(gradient).data[-1, 0] += 0.5
    t.optimizer.step()


@fault("an infinite gradient", "update", quick=True)
def infinite_gradient(t: Training) -> None:
    gradient = t.parameter(EDITED).grad
    assert gradient is not None
    shard(gradient).data[-1, 0] = torch.inf
    t.optimizer.step()


@fault("a gradient missing", "update")
def gradient_missing(t: Training) -> None:
    t.parameter(EDITED).grad = None
    t.optimizer.step()


# Only ``check_replicas`` can notice these edits, at stages 0 to 2; at stage 3 there are no copies to compare.
for _name in ("a weight edited through .data", "a weight edited in place", "a momentum edited", "a gradient edited"):
    _compared = f"{_name}, copies compared"
    FAULTS[_compared] = replace(FAULTS[_name], name=_compared, everywhere={"check_replicas": 1})
