"""Master weights that are offloaded; parameters are rounded copies of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compile_muon.config import Config
from compile_muon.engine.dtensors import edits_of
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import MASTER
from compile_muon.errors import config_error
from compile_muon.offload.device_buffers import DeviceBuffers
from compile_muon.offload.layout import OffloadLayout
from compile_muon.passes.language.spec import ParamSpec

__all__ = ["Masters", "check_master"]


class Masters:
    """Those of one optimizer, as parameters are edited.

    Args:
        sharded_params: of parameters with states that are offloaded.
        layout, buffers: of these states.
    """

    def __init__(self, sharded_params: Sequence[ShardedParam], layout: OffloadLayout, buffers: DeviceBuffers) -> None:
        self._layout, self._buffers = layout, buffers
        # Edits of the parameter when it was last rounded to its master weight; -1: as given, or filled since.
        self._rounded_at = dict.fromkeys((sharded for sharded in sharded_params if sharded.spec.master), -1)

    @torch.no_grad()
    def follow(self) -> None:
        """Master weights of parameters that were edited become these, where they are not rounded to them."""
        for sharded, rounded_at in self._rounded_at.items():
            if edits_of(sharded.param) == rounded_at:
                continue
            for chunk in self._layout.chunks_of[sharded.name]:
                assert chunk.masters is not None
                self._buffers.forget(chunk.masters)
            master = self._buffers.current(self._layout.kept[sharded.name].masters[MASTER])
            param = sharded.local.detach().to(master.device)
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.to(master.dtype)))
        self.note()

    def note(self) -> None:
        """Parameters are rounded to their master weights as these are now."""
        for sharded in self._rounded_at:
            self._rounded_at[sharded] = edits_of(sharded.param)


def check_master(name: str, spec: ParamSpec, config: Config) -> None:
    """Raise what forbids to keep only a rounded copy of this parameter, whose gradient then has its dtype.

    Raises:
        ConfigError: naming it.
    """
    remedy = "leave masters out, so that gradients are float32"
    if spec.reduce_dtype != spec.dtype:
        problem = f"makes the gradient of {name} {spec.dtype}, and reduce_dtype is {spec.reduce_dtype}"
    elif config.zero.micro_batches > 1:
        problem = f"makes the gradient of {name} {spec.dtype}, which micro-batches do not add up in"
    elif config.muon.qk_clip is not None:
        problem, remedy = "keeps weights where qk_clip does not scale them", "leave one of them out"
    else:
        return
    raise config_error("OffloadConfig.masters", True, problem, remedy)
