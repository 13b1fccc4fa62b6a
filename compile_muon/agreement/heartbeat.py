"""The heartbeat: every rank's status, in the store of the process group.

A thread of each rank publishes its status, ten times a second in a small world, over a store connection of its own. A
stopped rank reads all statuses twice, a few beats apart, to tell living ranks from silent ones.

A failed Gloo collective raises, and the error quotes the statuses. NCCL ends the process instead: there the thread logs
them shortly before the group's time-out.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from compile_muon.agreement.compare import by_rank, ranks_named
from compile_muon.errors import PeerError
from compile_muon.passes.torch_private import timeout_of

#: beats per second of all ranks together; a TCPStore takes a hundred times as many
_BEATS = 500.0
_SHORTEST_INTERVAL = 0.1
#: in worlds up to this size every rank caches the statuses, in case the store dies with its host
_SMALL_WORLD = 64
_REMEMBER_EVERY = 1.0
#: time-out of the store: one that does not answer within it is gone
_STORE_SECONDS = 1.5
#: seconds that ranks wait for each other where the group has no time-out
_LONGEST = 1800.0
#: part of the group's time-out after which a rank logs its wait, where the backend would end the process
_PATIENCE = 0.9


def backend_of(group: dist.ProcessGroup, device: torch.device | str) -> str:
    """Return the name of the backend that ``group`` uses on ``device``, such as ``"gloo"``."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    return backends.get(torch.device(device).type, "")


class Entry(NamedTuple):
    """The status of one rank."""

    step: int  # the current step, from 1
    where: str  # half, frame and module, as in "backward of frame 2 (blocks.4)"; empty at first
    inside: bool  # whether the rank is there, or has gone on to the loop's own code
    collectives: int  # started before
    raised: str = ""  # the error it left with; "PeerError" if it has waited in vain
    ended: bool = False  # whether its optimizer or process has ended
    beat: int = 0  # grows while the rank lives
    changes: int = 0  # changes between training, evaluation and reading, see :meth:`RankStatus.change`


class Heartbeat:
    """This rank's access to the statuses of the ranks of ``group``. ``store`` is a connection of its own to the group's
    store: another connection may be blocked by a wait. ``device``: of the group's collectives."""

    def __init__(self, store: dist.Store, group: dist.ProcessGroup, device: torch.device) -> None:
        self._rank, self._world = group.rank(), group.size()
        self._store = store
        self._lock = threading.Lock()  # of the connection
        self._beat = 0
        self._last = Entry(1, "", False, 0)
        self._seen: dict[int, Entry] = {}
        self._remembered = 0.0
        self.stopped = threading.Event()
        # Seconds between beats.
        self.interval = max(_SHORTEST_INTERVAL, self._world / _BEATS)
        # Number of this optimizer on the group, by this rank's count. Counted in the store, since the process may have
        # optimizers on other groups.
        self.number = self._store.add(f"muon_zero/{self._rank}/optimizers", 1)
        self._store.set_timeout(timedelta(seconds=_STORE_SECONDS))
        self.meet([self.number] * self._world)
        timeout = timeout_of(group, device)
        speaks = backend_of(group, device) == "gloo" or timeout is None
        self.patience = float("inf") if speaks or timeout is None else _PATIENCE * timeout.total_seconds()
        self._timeout = _LONGEST if timeout is None else timeout.total_seconds()
        self._meetings: dist.Store | None = None

    def meet(self, numbers: Collection[int]) -> None:
        """Set every rank's ``number``: a rank where an optimizer once failed to be made counts otherwise."""
        self._keys = [f"muon_zero/{rank}/status/{number}" for rank, number in enumerate(numbers)]

    def publish(self, entry: Entry) -> bool:
        """Write this rank's status; return False if the store or the process group is gone."""
        # The lock's holder may be waiting for a store that never answers.
        if self.stopped.is_set() or not dist.is_initialized() or not self._lock.acquire(timeout=_STORE_SECONDS):
            return False
        try:
            self._beat += 1
            self._last = entry._replace(beat=self._beat)
            self._store.set(self._keys[self._rank], json.dumps(self._last))
        except (RuntimeError, ValueError):
            return False
        finally:
            self._lock.release()
        return True

    def first(self, key: str, value: str) -> str:
        """Return the value that the first rank gave for ``key``, without waiting for others."""
        with self._lock:
            return self._store.compare_set(f"{self._keys[0]}/{key}", "", value).decode()

    def end(self, beats: threading.Thread) -> None:
        """Publish the end of the optimizer or the process, and join ``beats``, the publishing thread."""
        self.publish(self._last._replace(inside=False, ended=True))
        self.stopped.set()
        # A thread that returns from the store during interpreter shutdown ends the process by std::terminate: exit
        # code -6 of a training that went well.
        if beats is not threading.current_thread():
            beats.join(2 * _STORE_SECONDS)

    def read(self) -> dict[int, Entry] | None:
        """Return the statuses of the ranks that have published one; None if the store is gone."""
        # Bounded: a read over a cut connection, with the lock held, may never return.
        if not dist.is_initialized() or not self._lock.acquire(timeout=_STORE_SECONDS):
            return None
        try:
            there = dict(enumerate(self._keys))
            if not self._store.check(self._keys):
                there = {rank: key for rank, key in there.items() if self._store.check([key])}
            texts = self._store.multi_get(list(there.values()))
        except (RuntimeError, ValueError):
            return None
        finally:
            self._lock.release()
        return {rank: Entry(*json.loads(text)) for rank, text in zip(there, texts, strict=True)}

    def meet_at(self, entry: Entry) -> None:
        """Wait, by the store and not by a collective, until every rank has made as many changes as ``entry``. PeerError
        if another rank is in a collective instead, or none comes within the group's time-out."""
        if self._meetings is None:
            store: Any = self._store
            self._meetings = cast("dist.Store", store.clone())  # a wait would block the other connection
        self.publish(entry)
        key = f"{self._keys[0]}/change"
        deadline = time.monotonic() + self._timeout
        try:
            if self._meetings.add(f"{key}/{entry.changes}", 1) == self._world:
                self._meetings.set(f"{key}/{entry.changes}/all", "")
                for old in (f"{key}/{entry.changes - 1}", f"{key}/{entry.changes - 1}/all"):
                    self._meetings.delete_key(old)  # all ranks have passed it
                return
        except RuntimeError:  # the store is gone: the next collective will raise
            return
        while True:
            try:
                self._meetings.wait([f"{key}/{entry.changes}/all"], timedelta(seconds=_STORE_SECONDS))
                return
            except RuntimeError:
                statuses = self.read()
            if statuses is None:
                return
            late = time.monotonic() > deadline
            if late or any(_elsewhere(other, entry) for other in statuses.values()):
                raise PeerError(report(self._world, {**statuses, self._rank: entry}, list(statuses)))

    def remember(self) -> None:
        """Cache everyone's statuses now and then, in case the store dies with its host."""
        now = time.monotonic()
        if self._world <= _SMALL_WORLD and now - self._remembered >= _REMEMBER_EVERY:
            self._remembered = now
            self._seen = self.read() or self._seen

    def ask(self, entry: Entry) -> str:
        """Publish the status of this rank, which waits in vain, and return where all ranks are; takes a few beats."""
        readings: list[dict[int, Entry] | None] = []

        def read_twice() -> None:
            self.publish(entry)
            readings.append(self.read())
            time.sleep(3 * self.interval + 0.2)
            self.publish(entry)
            readings.append(self.read())

        thread = threading.Thread(target=read_twice, daemon=True)
        thread.start()
        thread.join(4 * self.interval + 2 * _STORE_SECONDS)
        first, second = (*readings, None, None)[:2]
        if first is not None and second is not None:
            alive = [rank for rank, at in second.items() if rank not in first or at.beat != first[rank].beat]
            return report(self._world, second, alive)
        known = report(self._world, {**self._seen, self._rank: entry}, [self._rank])
        return (
            "the store of the process group is gone with the process that hosts it (rank 0, or torchrun's agent) or "
            f"with the connection to it. Going by what is remembered, {known}"
        )


def _elsewhere(other: Entry, entry: Entry) -> bool:
    """Return whether a rank has passed this change by: it is in a collective at or after this point, or has ended."""
    gone_on = (other.step, other.collectives) >= (entry.step, entry.collectives)
    return other.changes < entry.changes and (other.ended or (other.inside and gone_on))


def report(world: int, statuses: Mapping[int, Entry], alive: Collection[int]) -> str:
    """Return where each rank is, beginning with those for whom the others wait.

    ``statuses``: by rank, without ranks that have published none. ``alive``: ranks that have just published one.

    >>> lost, waiting = Entry(3, "backward of frame 2 (blocks.4)", True, 7), Entry(3, "forward of frame 5", True, 9)
    >>> print(report(3, {0: waiting, 1: lost, 2: waiting}, [0, 2]))
    rank 1 was last seen in step 3, backward of frame 2 (blocks.4); ranks 0, 2 wait in step 3, forward of frame 5
    (collectives before: 7 on rank 1, 9 on ranks 0, 2)
    """
    ranks_of: dict[tuple[int, str], list[int]] = {}
    for rank in range(world):
        ranks_of.setdefault(_sentence(statuses.get(rank), rank in alive), []).append(rank)
    sentences = []
    for (_, text), ranks in sorted(ranks_of.items()):
        verb, _, rest = text.partition(" ")
        singular, _, plural = verb.partition("/")
        sentences.append(f"{ranks_named(ranks)} {singular if len(ranks) == 1 else plural} {rest}")
    before = [statuses[rank].collectives if rank in statuses else 0 for rank in range(world)]
    counted = f"\n(collectives before: {by_rank(before)})" if len(set(before)) > 1 else ""
    return "; ".join(sentences) + counted


def _sentence(entry: Entry | None, alive: bool) -> tuple[int, str]:
    """Return the urgency of a rank's status, and a predicate with its verb as ``singular/plural``."""
    if entry is None:
        return 0, "has/have not come so far"
    place = f"step {entry.step}, {entry.where}" if entry.where else f"step {entry.step}"
    at = f"in {place}" if entry.inside or not entry.where else f"after {place}"
    if entry.raised == PeerError.__name__:
        return 3, f"waits/wait {'in' if entry.inside else 'no more, after'} {place}"
    if entry.raised:
        return 1, f"raised/raised {entry.raised} in {place}"
    if entry.ended:
        return 1, f"ended/ended {at}"
    if not alive:
        return 1, f"was/were last seen {at}"
    if not entry.inside:
        return 2, f"runs/run the loop's own code {at}"
    return 3, f"waits/wait {at}"
