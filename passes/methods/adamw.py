"""AdamW: torch's functional implementation, on the shards."""

from collections.abc import Mapping, MutableMapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim.adamw import adamw

from .method import DECAY, LR, ElementMethod, Rate, State


def _step(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[MutableMapping[str, Tensor]],
    group: Mapping[str, Any],
    found_inf: Tensor | None,
    *,
    fused: bool | None = None,
) -> None:
    # The fused kernel rounds once where ``foreach`` rounds after every operation.
    fused = True if params[0].is_cuda else fused
    lr = group["lr"]
    if fused and isinstance(lr, Tensor):
        lr = lr.float()  # the fused kernel reads no other dtype
    adamw(
        params,
        grads,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        fused=fused,
        found_inf=found_inf if fused else None,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=lr,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


ADAMW = ElementMethod(
    "adamw",
    "torch.optim.AdamW",
    (LR, Rate("betas", None), Rate("eps", None), *DECAY),
    (
        State("step", "step count", each="parameter"),
        State("exp_avg", "first moment"),
        State("exp_avg_sq", "second moment"),
    ),
    step=_step,
    on_host=partial(_step, fused=True),
    withholds=True,
    constants=("weight_decay",),
)
