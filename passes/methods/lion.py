"""Lion: steps by the sign of an average of gradients; one state a parameter, where AdamW has two.

c = b1 M + (1 - b1) G,   W <- (1 - lr weight_decay) W - lr sign(c),   M <- b2 M + (1 - b2) G
"""

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from .method import DECAY, LR, ElementMethod, Rate, State, multiply


def _step(
    params: list[Tensor],
    grads: list[Tensor],
    states: list[MutableMapping[str, Tensor]],
    group: Mapping[str, Any],
    found_inf: Tensor | None,
) -> None:
    momenta = [state["exp_avg"] for state in states]
    near, far = group["betas"]
    mixed = torch._foreach_lerp(momenta, grads, 1 - near)
    torch._foreach_sign_(mixed)
    multiply(params, 1 - group["lr"] * group["weight_decay"])
    multiply(mixed, -group["lr"])
    torch._foreach_add_(params, mixed)
    torch._foreach_lerp_(momenta, grads, 1 - far)


LION = ElementMethod(
    "lion",
    "arXiv 2302.06675",
    (LR, Rate("betas", (0.9, 0.99), meaning="factors of the average in the step, and of the one that is kept"), *DECAY),
    (State("exp_avg", "first moment"),),
    step=_step,
)
