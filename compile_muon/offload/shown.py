"""Offloaded state as users and checkpoints see it: entries of the optimizer's state, which they may write to.

With offloaded master weights the parameters, which users may write to as well, are rounded copies of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from compile_muon.agreement.together import host_mesh
from compile_muon.engine.dtensors import edits_of, local_tensor
from compile_muon.engine.hooks import MASTER
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.states import as_state, states_of_owners
from compile_muon.offload.device_buffers import DeviceBuffers
from compile_muon.offload.layout import OffloadLayout


class OffloadedStateView:
    """The offloaded states in ``optimizer.state``; ``device`` computes the steps."""

    def __init__(
        self,
        optimizer: Optimizer,
        sharded_params: Iterable[ShardedParam],
        layout: OffloadLayout,
        buffers: DeviceBuffers,
        device: torch.device,
    ) -> None:
        self._optimizer, self._layout, self._buffers, self._device = optimizer, layout, buffers, device
        self._tensors: dict[ShardedParam, dict[str, Tensor]] = {sharded: {} for sharded in sharded_params}
        # `edits_of` the parameter when it was last rounded to its master weight; -1 before the first.
        self._rounded_at = {sharded: -1 for sharded in self._tensors if sharded.spec.master}
        self._meshes: dict[DeviceMesh, DeviceMesh] = {}
        self.behind = False  # a step has stored new tensors, or broke off before all of them were shown

    @torch.no_grad()
    def follow(self) -> None:
        """Write parameters that were edited into their master weights, where these do not round to them."""
        for sharded, rounded_at in self._rounded_at.items():
            if edits_of(sharded.param) == rounded_at:
                continue
            for chunk in self._layout.chunks_of[sharded.name]:
                self._buffers.forget(chunk.buckets["masters"])
            master = self._buffers.current(self._layout.kept[sharded.name][MASTER])
            param = sharded.local.detach().to(master.device)
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))
            self._rounded_at[sharded] = edits_of(sharded.param)

    def show(self) -> None:
        """Put the stored tensors into the optimizer's state."""
        for sharded, shown_states in self._tensors.items():
            for name, slot in self._layout.kept[sharded.name].items():
                tensor = self._buffers.current(slot)
                if name not in shown_states or local_tensor(shown_states[name]) is not tensor:
                    shown_states[name] = self._state(sharded, name, tensor)
            slots = self._optimizer.state[sharded.param]
            slots.update(shown_states)
            if self._device.type != "cpu" and not isinstance(slots, _Settled):
                self._optimizer.state[sharded.param] = _Settled(self._buffers.settle, slots)
        self.behind = False
        self.seen()

    def _state(self, sharded: ShardedParam, name: str, tensor: Tensor) -> Tensor:
        if name in (state.name for state in states_of_owners(sharded)):
            return tensor
        mesh = None
        if isinstance(sharded.param, DTensor) and self._device.type != "cpu" and tensor.device != self._device:
            mesh = host_mesh(sharded.param.device_mesh, self._meshes)
        return as_state(sharded, tensor, "element" if tensor.shape == sharded.local.shape else "row", mesh)

    def take_back(self) -> bool:
        """Copy tensors that users put in place of the shown ones, and shown ones that are behind, into the stored ones;
        return whether any were."""
        changed = False
        for sharded, shown_states in self._tensors.items():
            slots = self._optimizer.state[sharded.param]
            states = {**slots}
            for name, tensor in shown_states.items():
                if states.get(name) is tensor and not self.behind:
                    continue
                self._buffers.settle()
                # A deleted state begins at zero, a deleted master weight at its parameter's values.
                anew = sharded.local.detach() if name == MASTER else torch.zeros_like(local_tensor(tensor))
                stored = self._buffers.current(self._layout.kept[sharded.name][name])
                stored.copy_(local_tensor(states.get(name, anew)))
                slots[name] = tensor
                changed = True
        return changed

    def seen(self) -> None:
        """Count all edits until now as known, and parameters as rounded to their masters."""
        self._seen = self._edits()
        self._rounded_at = {sharded: edits_of(sharded.param) for sharded in self._rounded_at}

    @property
    def edited(self) -> bool:
        """Whether a shown tensor was written to since :meth:`seen`."""
        return self._edits() != self._seen

    def _edits(self) -> list[int]:
        # `_version` is torch's private edit counter, which autograd checks saved tensors by.
        return [local_tensor(tensor)._version for shown in self._tensors.values() for tensor in shown.values()]


class _Settled(dict[str, Tensor]):
    """The states of one parameter; reads wait until copies from the GPU to host memory have ended. ``{**slots}`` copies
    the dict without waiting."""

    def __init__(self, settle: Callable[[], None], slots: Mapping[str, Tensor]) -> None:
        super().__init__(slots)
        self._settle = settle

    def __getitem__(self, name: str) -> Tensor:
        self._settle()
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self._settle()
        return super().get(name, default)

    def items(self) -> Any:
        self._settle()
        return super().items()

    def values(self) -> Any:
        self._settle()
        return super().values()

    def __reduce__(self) -> tuple[type[dict[str, Tensor]], tuple[dict[str, Tensor]]]:
        self._settle()
        return dict, ({**self},)
