"""The overridden hooks of one optimizer's extensions, over which the core loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from compile_muon.engine.peers import NormGroup
from compile_muon.engine.state_provider import StateProvider
from compile_muon.passes import GraphPass

if TYPE_CHECKING:
    from compile_muon.engine.sharded_param import ShardedParam


@dataclass(frozen=True, eq=False)
class Hooks:
    """The overridden hooks, by name of the method of :class:`~compile_muon.engine.extension.Extension`."""

    dynamo_passes: tuple[GraphPass, ...] = ()  # of all extensions
    before_forward: tuple[Callable[[frozenset[str], Sequence[Tensor]], None], ...] = ()
    notify: tuple[Callable[..., None], ...] = ()
    dropped: tuple[Callable[[ShardedParam], None], ...] = ()
    before_step: tuple[Callable[[], None], ...] = ()
    check: tuple[Callable[[], None], ...] = ()
    facts: tuple[Callable[..., None], ...] = ()
    why_not_finite: tuple[Callable[[], tuple[str, str] | None], ...] = ()
    after_commit: tuple[Callable[[Tensor | None], None], ...] = ()
    state: tuple[Callable[[ShardedParam], Mapping[str, Tensor]], ...] = ()
    loaded: tuple[Callable[[], None], ...] = ()
    metrics: tuple[Callable[[], Mapping[str, float]], ...] = ()
    totals: tuple[Callable[[], Mapping[str, int]], ...] = ()
    state_provider: StateProvider = field(default_factory=StateProvider)  # by default all states are resident
    peers: NormGroup = field(default_factory=NormGroup)  # none by default
    unrecorded: str | None = None  # why no step is in a CUDA graph; None if steps may be
