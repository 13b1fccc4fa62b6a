"""Which states that are offloaded are not finite, as known since they were written or fetched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.passes.norms import not_finite

__all__ = ["NotFinite"]


class NotFinite:
    """Flags of states, ``[]`` on the device, not 0 of those with a number that is not finite.

    Args:
        labels: what errors call the states of each parameter, by the names of both.
        device: that computes.
    """

    def __init__(self, labels: Mapping[str, Mapping[str, str]], device: torch.device) -> None:
        self._labels, self._device = labels, device
        self._wrong: dict[tuple[str, str], Tensor] = {}
        self._moved: dict[str, tuple[int, Tensor]] = {}  # which fetch, and its flag since

    def look(self, own: Sequence[ShardedParam], provided: Sequence[Mapping[str, Tensor]], *, more: bool) -> None:
        """Note which of these states are not finite.

        Args:
            more: whether these are further rows.
        """
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
                known = self._wrong.get((sharded.name, label)) if more else None
                self._wrong[sharded.name, label] = flag if known is None else torch.maximum(known, flag)

    def moved(self, sharded: ShardedParam, flag: Tensor) -> None:
        """A momentum was moved when it was fetched; whether to keep it is not known yet."""
        self._moved[sharded.name] = sharded.fetches, flag

    def kept(self, fetches: Mapping[ShardedParam, int]) -> list[ShardedParam]:
        """Those whose momentum of this fetch was moved, and is kept."""
        found = []
        for sharded, number in fetches.items():
            made, flag = self._moved.get(sharded.name, (-1, None))
            if made == number and flag is not None:
                found.append(sharded)
                self._wrong[sharded.name, "momentum"] = flag
        self._moved.clear()
        return found

    def of(self, sharded: ShardedParam, label: str) -> Tensor | None:
        """The flag of one state; None if it is not offloaded."""
        if label not in self._labels.get(sharded.name, {}).values():
            return None
        found = self._wrong.get((sharded.name, label))
        return torch.zeros((), device=self._device) if found is None else found

    def clear(self) -> None:
        """States are others now, or a step is given up."""
        self._wrong.clear()
        self._moved.clear()
