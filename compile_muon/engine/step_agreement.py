"""The agreement of ranks in a step: equal hyperparameters, visits, and copies of tensors.

A digest of the first two, and every ``check_replicas`` steps one of the copies, ride on the step's all-reduce, each
rank's in its own place, so every rank reads all. Only if digests differ do ranks exchange the facts behind them, for an
error that names the difference; nothing has been written then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from compile_muon.agreement.compare import by_rank, compare, differing, gather_objects, ranks_named, worded
from compile_muon.agreement.frame_log import FrameLog, Visit, frame_label
from compile_muon.engine.dtensors import edits_of, local_tensor
from compile_muon.engine.owner_states import method_of_matrix
from compile_muon.engine.sharded_param import ShardedParam
from compile_muon.engine.step_checks import StepChecks
from compile_muon.errors import LedgerError, listed
from compile_muon.passes.fingerprint import fingerprint

__all__ = ["Agreement", "Copies"]

_WORD = 24  # bits of an integer that fp32 holds exactly


@dataclass(frozen=True)
class Copies:
    """Fingerprints of tensors that all ranks must hold alike; experts and tensor-parallel slices are not among them."""

    names: tuple[str, ...]  # of the tensors
    fingerprints: Tensor  # ``[len(names)]`` int64, on the device

    @classmethod
    @torch.no_grad()
    def of(cls, sharded_params: Sequence[ShardedParam], state: Mapping[Any, Mapping[str, Any]]) -> Copies | None:
        """Return the fingerprints of weights at stages 0 to 2, and of gradients and states of unsharded parameters;
        None if there are none. ``state``: of the optimizer."""
        held: dict[str, Tensor] = {}
        stale = []
        for sharded in sharded_params:
            if sharded.spec.layout.model_parallel:
                continue  # ranks hold different parts
            if sharded.resident is not None:
                sharded.await_refresh()
                # An edit is gathered at the next read, by a collective that ranks without the edit would not join here;
                # a stale copy has the fingerprint 0.
                stale += [len(held)] if edits_of(sharded.param) != sharded.refreshed_at else []
                held[sharded.name] = sharded.resident
            elif not sharded.spec.layout.sharded:
                held[sharded.name] = sharded.local
                if sharded.grad is not None:
                    held[f"gradient of {sharded.name}"] = sharded.local_grad
                slots, method = state.get(sharded.param, {}), method_of_matrix(sharded)
                own = {"step", *(() if method is None else (state.name for state in method.owned))}  # or of one rank
                held |= {f"{slot} of {sharded.name}": local_tensor(slots[slot]) for slot in slots if slot not in own}
        if not held:
            return None
        found = fingerprint([tensor.detach() for tensor in held.values()])
        if stale:
            found[stale] = 0
        return cls(tuple(held), found)

    def numbers(self) -> Tensor:
        """Return a digest of all fingerprints, as integers in fp32 on the device."""
        word = fingerprint([self.fingerprints])
        mask = 2**_WORD - 1
        return torch.cat([(word >> shift) & mask for shift in range(0, 64, _WORD)]).float()


@dataclass(frozen=True)
class Agreement:
    """This rank's half of a step's agreement."""

    step: int  # number of the step, from 1
    settings: Mapping[str, str]  # hyperparameters on the host, by name
    scalars: Mapping[str, Tensor]  # hyperparameters that are tensors
    log: FrameLog  # visits since the last step
    copies: Copies | None  # None in steps that compare none

    def put(self, checks: StepChecks) -> None:
        """Add the digest of facts that the host knows to the step's numbers."""
        text = repr((self.step, sorted(self.settings.items()))).encode()
        digest = hashlib.blake2b(text + self.log.digest(), digest_size=6).digest()
        checks.add_each("agreement", [float(int.from_bytes(half, "big")) for half in (digest[:3], digest[3:])])

    def measure(self, checks: StepChecks) -> None:
        """Add the numbers that are on the device."""
        for name, scalar in self.scalars.items():
            checks.add_each(name, scalar.detach().float().reshape(1))
        if self.copies is not None:
            checks.add_each("copies", self.copies.numbers())

    def check(self, checks: StepChecks, group: dist.ProcessGroup) -> None:
        """Raise LedgerError on every rank if the ranks differ, naming the difference and the ranks."""
        rows = zip(*(checks.numbers(name).values() for name in self.scalars), strict=True)
        if found := differing([dict(zip(self.scalars, row, strict=True)) for row in rows]):
            raise self._error(f"on hyperparameters: {worded(found)}", _SETTINGS)
        if len(set(checks.each("agreement"))) > 1:
            raise self._explain(group)
        if self.copies is not None and len(set(checks.each("copies"))) > 1:
            raise self._name_copies(group, self.copies)

    def _error(self, what: str, remedy: str) -> LedgerError:
        return LedgerError(f"ranks disagree in step {self.step} {what}: nothing was updated; {remedy}")

    def _explain(self, group: dist.ProcessGroup) -> LedgerError:
        if found := compare({"steps": str(self.step), **self.settings}, group):
            return self._error(f"on hyperparameters: {worded(found)}", _SETTINGS)
        return self._error(_first_difference(gather_objects(self.log.visits(), group)), _VISITS)

    def _name_copies(self, group: dist.ProcessGroup, copies: Copies) -> LedgerError:
        found = compare(dict(zip(copies.names, copies.fingerprints.tolist(), strict=True)), group)
        said = []
        for name, rows in found.items():
            usual = max(rows, key=rows.count)
            said.append(f"{name} on {ranks_named([rank for rank, row in enumerate(rows) if row != usual])}")
        return self._error(f"on what all hold a copy of: {listed(said)} is not what the other ranks have", _COPIES)


_SETTINGS = "give every rank the same hyperparameters and let each call its scheduler as often"
_VISITS = (
    "what was exchanged since the last step belongs to other parameters than it was taken for; run the same modules in "
    "the same order on every rank"
)
_COPIES = "go back to the last checkpoint, and do on every rank what is done to weights on one"


def _first_difference(everyone: Sequence[Mapping[int, Visit]]) -> str:
    """Describe the first visit at which the ranks' frame logs differ."""
    start = max(min(log, default=0) for log in everyone)
    known = [{i: visit._replace(frame="") for i, visit in log.items() if i >= start} for log in everyone]
    found = differing(known)
    if not found:
        return f"on a visit more than {max(map(len, known))} visits ago"
    number = min(found)
    return f"on visit {number + 1} of a frame: {by_rank(_described([log.get(number) for log in everyone]))}"


def _described(visits: Sequence[Visit | None]) -> list[str]:
    """Describe each rank's visit, with the first parameter or detail in which they differ."""
    found = [visit for visit in visits if visit is not None]
    place = next(iter(differing([dict(enumerate(visit.names)) for visit in found])), None)
    detail = next(iter(differing([dict(enumerate(visit.details)) for visit in found])), None)
    texts = []
    for visit in visits:
        if visit is None:
            texts.append("none any more")
            continue
        frame = frame_label(visit.frame) or "eager code"
        if place is not None:
            what = f" at {visit.names[place]}" if place < len(visit.names) else f", without a parameter {place + 1}"
        elif detail is not None:
            what = f" at {visit.names[min(detail, len(visit.names) - 1)]} ({' '.join(visit.details[detail:][:1])})"
        else:
            what = f" of {visit.names[0]}"
        texts.append(f"{visit.half} of {frame}{what}")
    return texts
