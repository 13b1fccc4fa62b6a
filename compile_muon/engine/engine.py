"""The engine: the parts of an optimizer that checkpoints, plans and integrations may name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compile_muon.agreement.status import RankStatus
from compile_muon.engine.hooks import Hooks, StateProvider
from compile_muon.engine.ledger import Ledger
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.step import Step
from compile_muon.mesh import Mesh

if TYPE_CHECKING:
    from compile_muon.agreement.together import Ranks

E = TypeVar("E")


@dataclass(eq=False)
class Engine:
    """The parts of a :class:`~compile_muon.MuonZero` that run a step, beside the groups, state and methods that users
    call; ``optimizer.engine``. It lives as long as its optimizer, and its parts stay the same objects."""

    ledger: Ledger  # visits since the last step, and the policy that frames ask
    model: nn.Module  # the sharded module
    ownership: Any  # :class:`~compile_muon.model.ownership.Ownership` of ``model``
    # By parameter name, the method and its reason, :class:`~compile_muon.model.assignment.Assignment`; grows when
    # parameters are unfrozen.
    assignments: dict[str, Any]
    mesh: Mesh | None  # None for one process
    group: dist.ProcessGroup | None  # all ranks of ``mesh``
    extensions: Sequence[Any]  # each a :class:`~compile_muon.Extension`
    graph_scalars: Tensor  # ``[2]`` fp32 on the device: scalars of the parameters outside configured groups
    compares: bool  # whether ranks compare facts; False for one process, and in a plan, where the others do not exist
    step: Step = field(init=False)  # runs ``optimizer.step()``
    meeting: Ranks | None = None  # one for all checkpointers: its process group has threads and is never freed

    @property
    def hooks(self) -> Hooks:
        """The overridden hooks of the extensions."""
        return self.ledger.hooks

    def extension(self, kind: type[E]) -> E | None:
        """Return the first extension of this class or a subclass, or None."""
        return next((each for each in self.extensions if isinstance(each, kind)), None)

    @property
    def params(self) -> list[ShardedParam]:
        """The sharded parameters in the order of the model, frozen ones included."""
        return self.ledger.sharded_params

    @property
    def device(self) -> torch.device:
        """The device of parameters and collectives."""
        return self.graph_scalars.device

    @property
    def status(self) -> RankStatus:
        """This rank's status, which other ranks read."""
        return self.ledger.status

    @property
    def state_provider(self) -> StateProvider:
        """The provider of states that are not resident."""
        return self.step.state_provider
