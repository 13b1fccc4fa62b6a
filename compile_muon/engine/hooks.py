"""What the features of one optimizer do, by occasion: what the core loops over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from compile_muon.engine.peers import Peers
from compile_muon.engine.state_provider import StateProvider
from compile_muon.passes import GraphPass

if TYPE_CHECKING:
    from compile_muon.engine.sharded_param import ShardedParam
    from compile_muon.engine.step_checks import StepChecks

__all__ = ["Hooks"]


@dataclass(frozen=True, eq=False)
class Hooks:
    """Of each hook of :class:`~compile_muon.engine.extension.Extension`, those that are overridden.

    Args:
        dynamo_passes: of all extensions.
        state_provider: of states; by default all are resident.
        peers: that decide with this optimizer; by default there are none.
        unrecorded: why no step is in a CUDA graph; None if it may be.
    """

    dynamo_passes: tuple[GraphPass, ...] = ()
    before_forward: tuple[Callable[[frozenset[str], Sequence[Tensor]], None], ...] = ()
    told: tuple[Callable[..., None], ...] = ()
    dropped: tuple[Callable[[ShardedParam], None], ...] = ()
    before_step: tuple[Callable[[], None], ...] = ()
    check: tuple[Callable[[], None], ...] = ()
    facts: tuple[Callable[[StepChecks], None], ...] = ()
    why_not_finite: tuple[Callable[[], tuple[str, str] | None], ...] = ()
    after_commit: tuple[Callable[[Tensor | None], None], ...] = ()
    state: tuple[Callable[[ShardedParam], Mapping[str, Tensor]], ...] = ()
    loaded: tuple[Callable[[], None], ...] = ()
    metrics: tuple[Callable[[], Mapping[str, float]], ...] = ()
    totals: tuple[Callable[[], Mapping[str, int]], ...] = ()
    state_provider: StateProvider = field(default_factory=StateProvider)
    peers: Peers = field(default_factory=Peers)
    unrecorded: str | None = None
