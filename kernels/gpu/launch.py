"""A kernel launch as a value: made by the launchers of this package, then run, or compiled without a GPU."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launch"]


@dataclass(frozen=True)
class Launch:
    """``kernel[(programs,)](*arguments, **constants)`` on the device of ``on``.

    Args:
        kernel: a Triton kernel.
        programs: how many.
        on: a tensor of the device.
        arguments: of the kernel, at run time.
        constants: its constexprs and Triton's num_warps and num_stages.
    """

    kernel: Any
    programs: int
    on: Tensor
    arguments: tuple[Any, ...]
    constants: dict[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        if not self.programs:
            return
        with torch.cuda.device_of(self.on):  # Triton launches on the current device, whatever its arguments are on
            self.kernel[(self.programs,)](*self.arguments, **self.constants)

    def compile(self) -> Any:
        """The compiled kernel that ``run`` would start, for the target of Triton's active driver."""
        return self.kernel.warmup(*self.arguments, grid=(self.programs,), **self.constants)
