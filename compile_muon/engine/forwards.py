"""Whether a thread is inside a forward of a model: there the attribute of a module is the whole weight.

Outside it is the parameter. The model's own calls enter and leave, the outermost and those within it, and so do the
methods that a user names (:func:`compile_muon.forward_methods`). Compiled code is always inside.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from compile_muon.engine.dtensors import has_memory
from compile_muon.errors import UnsupportedModelError, listed
from compile_muon.passes.torch_private import current_backward, never_a_frame, unobserved

__all__ = ["Forwards", "written_in_forward"]


class Forwards(threading.local):
    """The forwards of one model that are under way, of each thread.

    Attributes:
        depth: how many calls are under way, one within the other.
        read: of each gathered weight that these calls have read, its name, a tensor that counts its edits and has none
            of its memory, and their number then.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.read: list[tuple[str, Tensor, int]] = []

    def __reduce__(self) -> Any:
        """Copies, too, begin outside."""
        return Forwards, ()

    @property
    def inside(self) -> bool:
        """Whether a forward is under way. A checkpoint runs it again in backward, on a thread of autograd's, with
        gradients on."""
        return self.depth > 0 or (current_backward() >= 0 and torch.is_grad_enabled())

    def note(self, name: str, whole: Tensor) -> None:
        """A gathered copy of the weight ``name`` is read."""
        if not self.depth or whole.is_inference() or not has_memory(whole):
            return
        with unobserved():  # selective checkpoints count what a region computes
            counter = whole.detach()  # counts with it from here on
            counter.data = whole.new_empty(0)
        self.read.append((name, counter, counter._version))

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.depth:
            return
        read, self.read = self.read, []
        if error[0] is None:
            written = dict.fromkeys(name for name, counter, before in read if counter._version != before)
            if written:
                raise written_in_forward(list(written))


# They run beside code that Dynamo compiles.
never_a_frame(Forwards.__enter__)
never_a_frame(Forwards.__exit__)


def written_in_forward(names: list[str]) -> UnsupportedModelError:
    """For weights that a module writes to while it runs."""
    return UnsupportedModelError(
        f"{listed(names)}: its module writes to the weight inside forward (max_norm, a clamp, a quantizer), which is a "
        "gathered copy there and loses the edit; compute with a new tensor (w = f(self.weight)), or write to the "
        "parameter between steps"
    )
