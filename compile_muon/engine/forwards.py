"""Running forwards of a model, by thread: inside one, a module's attribute is the whole weight, outside the parameter.

Inside are the model's calls, and the methods that a user names (:func:`compile_muon.forward_methods`). Compiled code is
always inside.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from compile_muon.engine.dtensors import has_memory
from compile_muon.errors import UnsupportedModelError, listed
from compile_muon.passes.torch_private import current_backward, never_a_frame, unobserved


class Forwards(threading.local):
    """The running forwards of one model in this thread."""

    def __init__(self) -> None:
        self.depth = 0  # nested calls
        # (name, tensor without memory that shares the edit count, this count at the read) of each gathered weight that
        # these calls read.
        self.read: list[tuple[str, Tensor, int]] = []

    def __reduce__(self) -> Any:
        """Copy as a new object: no forward is running there."""
        return Forwards, ()

    @property
    def inside(self) -> bool:
        """Whether a forward is running. Activation checkpointing runs one again in backward, on an autograd thread,
        with gradients on."""
        return self.depth > 0 or (current_backward() >= 0 and torch.is_grad_enabled())

    def note(self, name: str, unsharded: Tensor) -> None:
        """Note the read of a gathered copy of the weight ``name``."""
        if not self.depth or unsharded.is_inference() or not has_memory(unsharded):
            return
        with unobserved():  # selective checkpointing would count these operators
            counter = unsharded.detach()  # shares the edit count
            counter.data = unsharded.new_empty(0)
        self.read.append((name, counter, counter._version))

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.depth:
            return
        read, self.read = self.read, []
        if error[0] is None:
            written = dict.fromkeys(name for name, counter, edits in read if counter._version != edits)
            if written:
                raise written_in_forward(list(written))


# Dynamo must not compile them as frames of their own.
never_a_frame(Forwards.__enter__)
never_a_frame(Forwards.__exit__)


def written_in_forward(names: list[str]) -> UnsupportedModelError:
    """Return the error for weights that their module writes inside forward."""
    return UnsupportedModelError(
        f"{listed(names)}: its module writes to the weight inside forward (max_norm, a clamp, a quantizer), which is a "
        "gathered copy there and loses the edit; compute with a new tensor (w = f(self.weight)), or write to the "
        "parameter between steps"
    )
