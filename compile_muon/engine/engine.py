"""One optimizer at work: what checkpoints, plans and integrations may name of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compile_muon.agreement.status import RankStatus
from compile_muon.engine.hooks import Hooks
from compile_muon.engine.ledger import Ledger
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.state_provider import StateProvider
from compile_muon.engine.step import Step
from compile_muon.mesh import Mesh

if TYPE_CHECKING:
    from compile_muon.agreement.together import Ranks

__all__ = ["Engine"]

E = TypeVar("E")


@dataclass(eq=False)
class Engine:
    """The parts of a :class:`~compile_muon.MuonZero` at work; ``optimizer.engine``.

    An optimizer has parameter groups, state and what users call; the engine has what a step is made by. It lives as
    long as its optimizer, and its parts stay the same objects.

    Args:
        ledger: what happened to each parameter since the last step, and what frames are asked for.
        step: facts, directions and writes of ``optimizer.step()``.
        model: the module that was sharded.
        assignments: by name, which method trains a parameter, and why: each a
            :class:`~compile_muon.model.assignment.Assignment`. What is unfrozen is added.
        mesh: of ranks, and ``group`` all of them; None for one process.
        extensions: the features that it has, each a :class:`~compile_muon.Extension`.
        hyper: ``[2]`` fp32 on the device, ``(1 - momentum, momentum)`` of the first Muon group.
        compares: whether there are other ranks to compare anything with.
        meeting: of all checkpointers, once there was one: a process group has threads, and stays.
    """

    ledger: Ledger
    step: Step
    model: nn.Module
    assignments: dict[str, Any]
    mesh: Mesh | None
    group: dist.ProcessGroup | None
    extensions: Sequence[object]
    hyper: Tensor
    compares: bool
    meeting: Ranks | None = None

    @property
    def hooks(self) -> Hooks:
        """What the extensions do, by occasion."""
        return self.ledger.hooks

    def extension(self, kind: type[E]) -> E | None:
        """The first of this class, or of one derived from it; None if there is none."""
        return next((each for each in self.extensions if isinstance(each, kind)), None)

    @property
    def params(self) -> list[ShardedParam]:
        """The sharded parameters, in the order of the model, frozen ones included."""
        return self.ledger.sharded_params

    @property
    def device(self) -> torch.device:
        """The device of parameters and collectives."""
        return self.hyper.device

    @property
    def status(self) -> RankStatus:
        """What this rank is doing, for the others to read."""
        return self.ledger.status

    @property
    def state_provider(self) -> StateProvider:
        """Of the states that are not resident."""
        return self.step.state_provider
