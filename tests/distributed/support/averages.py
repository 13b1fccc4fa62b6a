"""An extension: averages of the weights."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon import Extension
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.step_checks import StepChecks
from compile_muon.passes.norms import not_finite

DECAY = 0.75


class Averages(Extension):
    """Of all trained weights, in float32; how far they are from the weights is a metric."""

    unrecorded = None

    def __init__(self) -> None:
        self.distance: Tensor | None = None

    def state(self, sharded: ShardedParam) -> Mapping[str, Tensor]:
        """Begins with the weights."""
        return {"average": sharded.local.detach().to(torch.float32, copy=True)}

    def facts(self, checks: StepChecks) -> None:
        """An average that is not finite stops the step."""
        sharded_params = self.engine.step.sharded_params.values()
        checks.add_wrong(
            "average", [a.name for a in sharded_params], not_finite([self.kept(a, "average") for a in sharded_params])
        )

    def after_commit(self, found_inf: Tensor | None) -> None:
        """Move each toward its weight, in every step that is written."""
        weight = 1 - DECAY if found_inf is None else (1 - DECAY) * (1 - found_inf)
        squares = []
        for sharded in self.engine.step.sharded_params.values():
            now, average = sharded.local.detach().float(), self.kept(sharded, "average")
            average.lerp_(now, weight)
            squares.append((now - average).square().sum() / sharded.spec.layout.copies)
        self.distance = torch.stack(squares).sum()
        if self.engine.group is not None:
            dist.all_reduce(self.distance, group=self.engine.group)

    def metrics(self) -> Mapping[str, float]:
        """Over all ranks."""
        return {"average_distance": float("nan") if self.distance is None else float(self.distance.sqrt())}
