"""Operators that take the host 13 microseconds a call, where those of ``torch.library.custom_op`` take 90."""

from collections.abc import Callable
from typing import Any

import torch

#: operators are unregistered when this object is freed
_LIBRARY = torch.library.Library("muon_zero", "FRAGMENT")


def operator(
    schema: str, function: Callable[..., Any], fake: Callable[..., Any], *, calls_python: bool = False
) -> torch._ops.OpOverload:
    """Register ``function`` as the operator ``muon_zero::schema`` of every device, and ``fake`` for fake tensors.

    A replayed CUDA graph would skip a call into Python: with ``calls_python`` Inductor runs it between CUDA graphs.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.cudagraph_unsafe,) if calls_python else ())
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"muon_zero::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.muon_zero, name).default
