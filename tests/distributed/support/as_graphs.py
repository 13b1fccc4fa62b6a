"""CUDA graphs without a GPU: what they would hold is run once more, on what was recorded."""

from typing import Any

import pytest
import torch

from compile_muon import backend
from compile_muon.engine.recorded import StepGraphCache
from compile_muon.passes import GraphKind


class AsGraphs(StepGraphCache):
    """A replay runs the launches on what the recording was given, and writes what it found to where that one did. They
    find groups as they were when it was recorded: numbers that a graph would have kept."""

    recordings = 0
    replays = 0

    def address(self, tensor: torch.Tensor) -> int:
        return 0  # a CPU graph would not hold gradients in place

    def run(self, step: Any, launch: Any, checks: Any, used: Any) -> Any:
        self.launch = launch
        return super().run(step, launch, checks, used)

    def _record(self, step: Any, launch: Any, given: Any, values: Any) -> Any:
        self.recordings += 1
        groups = step.optimizer.param_groups
        held = [{name: value for name, value in group.items() if name != "params"} for group in groups]
        launched, recorded = launch(given), [True]

        def replay() -> None:
            self.replays += 1
            if recorded:  # a graph does nothing while it is recorded
                recorded.clear()
                return
            now = [{**group} for group in groups]
            for group, kept in zip(groups, held, strict=True):
                group.update(kept)
            found = self.launch(given)
            for group, own in zip(groups, now, strict=True):
                group.update(own)
            launched.norm.copy_(found.norm)
            for (_, vector), (_, own) in zip(launched.checks._reduced, found.checks._reduced, strict=True):
                vector.copy_(own)

        return self.recording(step, replay, given, values, launched, lambda: None)


def outputs_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward graphs write what they return to the same memory in each call, as CUDA graphs do."""
    lower_and_compile = backend.lower_and_compile

    def lowered(*args: Any, **kwargs: Any) -> Any:
        run, traffic = lower_and_compile(*args, **kwargs)
        if args[2].kind is not GraphKind.BACKWARD:
            return run, traffic
        places: dict[int, torch.Tensor] = {}

        def call(given: list[Any]) -> list[Any]:
            found = run(given)
            tensors = [(i, x) for i, x in enumerate(found) if isinstance(x, torch.Tensor)]
            kept = {i: places.setdefault(i, torch.empty_like(x)).copy_(x).detach() for i, x in tensors}
            return [kept.get(i, x) for i, x in enumerate(found)]

        call._boxed_call = True
        return call, traffic

    monkeypatch.setattr(backend, "lower_and_compile", lowered)
