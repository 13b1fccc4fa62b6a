"""Flags of offloaded states that are not finite, computed when they are written or fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.passes.norms import not_finite


class NotFinite:
    """Flags of offloaded states: ``[]`` tensors on ``device``, not 0 if a state has a number that is not finite.
    ``labels``: the name of each state in errors, by names of parameter and state."""

    def __init__(self, labels: Mapping[str, Mapping[str, str]], device: torch.device) -> None:
        self._labels, self._device = labels, device
        self._wrong: dict[tuple[str, str], Tensor] = {}
        self._moved: dict[str, tuple[int, Tensor]] = {}  # number of the fetch that moved a momentum, and its flag

    def look(self, own: Sequence[ShardedParam], provided: Sequence[Mapping[str, Tensor]], *, more: bool) -> None:
        """Note which of these states are not finite; ``more``: they are further rows of states seen before."""
        by_label: dict[str, dict[ShardedParam, Tensor]] = {}
        for sharded, views in zip(own, provided, strict=True):
            for name, label in self._labels[sharded.name].items():
                if name in views:
                    by_label.setdefault(label, {})[sharded] = views[name]
        for label, tensors in by_label.items():
            flags = not_finite(list(tensors.values()))
            if flags.device.type != self._device.type:
                flags = flags.pin_memory().to(self._device, non_blocking=True)
            for sharded, flag in zip(tensors, flags.unbind(), strict=True):
                earlier_flag = self._wrong.get((sharded.name, label)) if more else None
                self._wrong[sharded.name, label] = flag if earlier_flag is None else torch.maximum(earlier_flag, flag)

    def moved(self, sharded: ShardedParam, flag: Tensor) -> None:
        """Note the flag of a momentum that was moved when it was fetched; the step decides whether to keep it."""
        self._moved[sharded.name] = sharded.fetches, flag

    def kept(self, fetches: Mapping[ShardedParam, int]) -> list[ShardedParam]:
        """Return the parameters whose momentum was moved by exactly this fetch, and count their flags from now on."""
        moved_params = []
        for sharded, number in fetches.items():
            fetch_of_flag, flag = self._moved.get(sharded.name, (-1, None))
            if fetch_of_flag == number and flag is not None:
                moved_params.append(sharded)
                self._wrong[sharded.name, "momentum"] = flag
        self._moved.clear()
        return moved_params

    def of(self, sharded: ShardedParam, label: str) -> Tensor | None:
        """Return the flag of one state; None if it is not offloaded."""
        if label not in self._labels.get(sharded.name, {}).values():
            return None
        flag = self._wrong.get((sharded.name, label))
        return torch.zeros((), device=self._device) if flag is None else flag

    def clear(self) -> None:
        """Drop all flags: the states were replaced, or a step is given up."""
        self._wrong.clear()
        self._moved.clear()
