"""Pipeline stages decide over a step as one: with the gradient norm of all stages, and all refuse or skip it together.

Each stage has an optimizer of its own, whose ranks have agreed before, in :mod:`compile_muon.engine.step_checks`. Then
one rank of each stage gathers a few numbers from one rank of each other stage.

How many gathers a step has must not depend on one stage: its matrices may all have a direction from backward while
another stage makes directions in the step, which are checked after. So each stage says in the first gather what follows
for it if the norm is over the limit of ``gradient_clipping``, and what if it is not; the gather tells which. A second
gather follows exactly if some stage goes on to make directions.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from compile_muon.agreement.compare import by_rank, differing, gather_objects
from compile_muon.agreement.heartbeat import backend_of
from compile_muon.agreement.status import RankStatus
from compile_muon.config import ZeroConfig
from compile_muon.engine import Extension
from compile_muon.engine.decision import Decision, Facts, decide, over
from compile_muon.engine.hooks import NormGroup
from compile_muon.errors import LedgerError, config_error, raise_all
from compile_muon.passes.torch_private import collective_failed

#: settings that decide over a step: stages that differ in them would run different collectives
_SHARED = ("gradient_clipping", "nonfinite", "max_skipped_steps")
_REMEDY = (
    "pass the group of one rank of each stage, such as mesh['pipeline'], and as mesh= the data-parallel ranks of this "
    "stage, such as mesh['shard']"
)


class Outlook(IntEnum):
    """A stage's course after the first gather."""

    READY = 0  # it has all directions
    LATER = 1  # it makes some, which may turn out not to be finite
    WRONG = 2  # it has something that is not finite


def _outlook(decision: Decision) -> Outlook:
    if decision.wrong:
        return Outlook.WRONG
    return Outlook.LATER if decision.make else Outlook.READY


class _Told(NamedTuple):
    """The numbers that a stage sends to the others."""

    step: float  # number of the step, from 1
    refused: float = 0.0  # 1 if the stage raises
    norm: float = 0.0  # of the stage's gradients
    under: float = Outlook.READY  # if the norm of all stages is under the limit
    over: float = Outlook.READY  # if it is over the limit


class PipelineStages(NormGroup, Extension):
    """This rank's access to the other stages; ``group``: one rank of each stage, whose place is the stage's number."""

    unrecorded = "pipeline stages decide together"

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.peers = self
        self._group, self._device = group, device
        self._status = RankStatus(group, device)
        self._owes = False  # the others wait for another gather of this stage
        self.wrong: list[int] = []  # stages with something that is not finite, by the latest gather

    @classmethod
    def of(
        cls,
        norm_group: dist.ProcessGroup | DeviceMesh,
        stage_group: dist.ProcessGroup | None,
        device: torch.device,
        settings: ZeroConfig,
        *,
        muon: bool,
    ) -> PipelineStages | None:
        """Meet the other stages; None where there are none. Collective over ``norm_group``, one rank of each stage.

        ``stage_group``: the ranks of this stage, None for this rank alone. ``settings`` must agree on all stages in
        `_SHARED`. ``muon``: this stage has a matrix for Muon; at least one must. A ConfigError is raised on every
        member, and nothing is changed.
        """
        group = _resolved(norm_group)
        # In a simulated group ("fake", for dry runs of large worlds) no other rank ever answers.
        if group.size() == 1 or backend_of(group, device) == "fake":
            return None
        self = cls(group, device)
        with self._status.at("the meeting of the pipeline stages"):
            self._meet(stage_group, settings, muon=muon)
        return self

    def _meet(self, stage_group: dist.ProcessGroup | None, settings: ZeroConfig, *, muon: bool) -> None:
        heartbeat = self._status.heartbeat
        ranks = [dist.get_rank()] if stage_group is None else dist.get_process_group_ranks(stage_group)
        shared = {name: getattr(settings, name) for name in _SHARED}
        gathered = gather_objects((ranks, shared, 0 if heartbeat is None else heartbeat.number, muon), self._group)
        ranks_by_stage, settings_by_stage, optimizer_numbers, has_matrices = zip(*gathered, strict=True)
        if len(set().union(*ranks_by_stage)) < sum(map(len, ranks_by_stage)):
            group_ranks = dist.get_process_group_ranks(self._group)
            raise config_error("norm_group", group_ranks, "has several ranks of one stage's own group", _REMEDY)
        differences = differing(settings_by_stage)
        problem = "differs between pipeline stages (their places in norm_group are called ranks here)"
        raise_all(
            config_error(n, by_rank(values), problem, "give every stage the same") for n, values in differences.items()
        )
        if not any(has_matrices):
            remedy = "set param.use_muon = True on a matrix, widen muon_params, or use torch.optim.AdamW"
            raise config_error("model", f"{len(ranks_by_stage)} parts", "no stage has a parameter for Muon", remedy)
        if heartbeat is not None:
            heartbeat.meet(optimizer_numbers)

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Enclose a step: a stage that raises still takes part in the gather the others wait for."""
        self._status.step, self._owes, self.wrong = number, True, []
        try:
            yield
        except Exception as error:
            # After a failed collective of this stage's own ranks a gather would only delay the error by its timeout.
            if self._owes and not collective_failed(error):
                with contextlib.suppress(Exception):
                    self._gather(_Told(number, refused=1.0))
            raise

    def confer(self, facts: Facts) -> Facts:
        """Run the step's first gather; the total norm is bit for bit the same on every rank of every stage."""
        under, beyond = (_outlook(decide(replace(facts, total=norm))) for norm in (0.0, math.inf))
        rows = self._checked(_Told(self._status.step, 0.0, facts.norm, under, beyond))
        # fsum is exact, so the order of the stages does not matter.
        total = math.sqrt(math.fsum(row.norm * row.norm for row in rows))
        follows = [row.over if over(facts.limit, total) else row.under for row in rows]
        self.wrong = [stage for stage, what in enumerate(follows) if what == Outlook.WRONG]
        self._owes = not self.wrong and Outlook.LATER in follows
        return replace(facts, total=total)

    def confirm(self, *, wrong: bool) -> None:
        """Run the step's second gather, where there is one."""
        if self._owes:
            what = Outlook.WRONG if wrong else Outlook.READY
            rows = self._checked(_Told(self._status.step, 0.0, 0.0, what, what))
            self.wrong = [stage for stage, row in enumerate(rows) if row.under == Outlook.WRONG]

    def here(self) -> str:
        """Name this stage, for an error."""
        return f" of pipeline stage {self._group.rank()}"

    def elsewhere(self) -> str:
        """Name the other stages with something that is not finite; empty if there are none."""
        return self._named([stage for stage in self.wrong if stage != self._group.rank()])

    def _named(self, stages: Sequence[int]) -> str:
        ranks = [f"{stage} (rank {dist.get_global_rank(self._group, stage)})" for stage in stages]
        return f"pipeline stage{'s' * (len(stages) > 1)} {', '.join(ranks)}" if stages else ""

    def _checked(self, local_row: _Told) -> list[_Told]:
        rows = self._gather(local_row)
        step = self._status.step
        refused = [stage for stage, row in enumerate(rows) if row.refused]
        if refused:
            raise LedgerError(
                f"step() was refused by {self._named(refused)}, whose own error says why: nothing was updated in step "
                f"{step}, on no stage"
            )
        steps = [int(row.step) for row in rows]
        if len(set(steps)) > 1:
            text = ", ".join(f"{number} on stage {stage}" for stage, number in enumerate(steps))
            raise LedgerError(
                f"pipeline stages are in different steps ({text}): nothing was updated; call optimizer.step() as often "
                "on every stage, and load the same checkpoint on all"
            )
        return rows

    def _gather(self, local_row: _Told) -> list[_Told]:
        """Return the numbers of every stage."""
        self._owes = False
        with self._status.at("the decision of the pipeline stages (a rank is a place in norm_group)"):
            local = torch.tensor(local_row, dtype=torch.float32, device=self._device)
            gathered = [torch.empty_like(local) for _ in range(self._group.size())]
            dist.all_gather(gathered, local, group=self._group)
            return [_Told(*row) for row in torch.stack(gathered).tolist()]


def _resolved(norm_group: Any) -> dist.ProcessGroup:
    """Return the process group behind the user's argument; raise if this rank is no member of one."""
    if not (dist.is_available() and dist.is_initialized()):
        raise config_error(
            "norm_group", norm_group, "is given, and there is no process group",
            "call torch.distributed.init_process_group() first, or leave it out in a single process",
        )  # fmt: skip
    outside = "this rank is no member of it"
    if isinstance(norm_group, DeviceMesh):
        if norm_group.ndim != 1:
            raise config_error("norm_group", norm_group, f"has {norm_group.ndim} dimensions", _REMEDY)
        if norm_group.get_coordinate() is None:
            raise config_error("norm_group", norm_group, outside, _REMEDY)
        return norm_group.get_group()
    if norm_group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group returns there
        raise config_error("norm_group", norm_group, outside, _REMEDY)
    if not isinstance(norm_group, dist.ProcessGroup):
        raise config_error("norm_group", norm_group, "is no process group", _REMEDY)
    return norm_group
