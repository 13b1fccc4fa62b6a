"""The frame ledger: which gradients are owed, and which backward may carry the update.

A frame has a backward exactly if AOTAutograd partitioned its joint graph. Each forward visit of a partitioned frame
owes one backward visit for every parameter it reads. A parameter is *settled* when nothing is owed for it any more, and
the settled moment that ends the step's last micro-batch is its *boundary*: only there may a compiled backward
orthogonalize, and only if the parameter was read exactly once since it was last settled (autograd sums the
contributions of several reads before anyone can see them apart). Everything else stays a raw gradient, and
``optimizer.step()`` finishes it.

The update in backward is a transaction: the graph returns the new momentum, the ledger keeps it as *pending*, and only
``step()`` commits it. A backward whose gradients are thrown away (``autograd.grad`` for an input, an exception, a
non-finite step) therefore leaves no trace.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compile_muon.config.compile_options import FrameOptions
from compile_muon.errors import LedgerError
from compile_muon.passes import Lowering
from compile_muon.passes.collectives import Traffic
from compile_muon.passes.spec import ParamSpec
from compile_muon.passes.torch_private import accumulator_of, current_backward, will_execute

__all__ = [
    "Decision",
    "Ledger",
    "ParamState",
    "Pending",
    "edited_error",
    "edits_of",
    "like_parameter",
    "local_tensor",
    "samples_differ",
    "state_of",
]

_STATE_ATTRIBUTE = "_muon_zero_state"
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def local_tensor(tensor: Tensor) -> Tensor:
    """The shard behind a DTensor; a plain tensor is its own shard."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def edits_of(tensor: Tensor) -> int:
    """Grows with every edit in place that PyTorch counts; what a DTensor does to itself does not count on its shard."""
    return tensor._version + (tensor._local_tensor._version if isinstance(tensor, DTensor) else 0)


def edited_error(name: str) -> LedgerError:
    """For a direction in ``.grad`` that is not what backward delivered."""
    return LedgerError(
        f"the gradient of {name!r} was edited between backward and step(), but it already is a Muon direction and "
        "scaling it would scale the update; clip with gradient_clipping=..., or edit gradients under update='step'"
    )


def samples_differ(states: Sequence[ParamState]) -> Tensor:
    """Whether some entries are not what autograd delivered, bit by bit (NaN is NaN); a bool tensor, not read here.

    Args:
        states: one or more, with a pending update that has a sample.
    """
    now = torch.cat([state.sample() for state in states])
    then = torch.cat([state.pending.sample for state in states])  # type: ignore[union-attr,misc]
    return (now.view(_BITS[now.itemsize]) != then.view(_BITS[then.itemsize])).any()


def like_parameter(param: Tensor, shard: Tensor) -> Tensor:
    """``shard`` as the kind of tensor that ``param.grad`` is."""
    if not isinstance(param, DTensor):
        return shard
    return DTensor.from_local(
        shard, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )


@dataclass(frozen=True)
class _Snapshot:
    """A gradient as it was: the object (held weakly, since ids are reused) and how often it was edited."""

    tensor: weakref.ref[Tensor]
    edits: int

    @staticmethod
    def of(grad: Tensor) -> _Snapshot:
        return _Snapshot(weakref.ref(grad), edits_of(grad))

    def still(self, grad: Tensor | None) -> bool:
        """Whether ``grad`` is that object, unedited."""
        if grad is None or self.tensor() is not grad:
            return False
        return self.edits == edits_of(grad)

    def added_to(self, grad: Tensor | None) -> bool:
        """Whether ``grad`` is that object with a single edit, which autograd made just now (not zeroed before)."""
        return grad is not None and self.tensor() is grad and edits_of(grad) == self.edits + 1


@dataclass(frozen=True)
class Arrival:
    """A tensor on its way through autograd: the same memory, unedited, or autograd has added something to it."""

    address: int
    version: int

    @staticmethod
    def of(grad: Tensor) -> Arrival:
        shard = local_tensor(grad)
        return Arrival(shard.data_ptr(), shard._version)


@dataclass
class Pending:
    """An update that a backward computed and ``step()`` has not committed yet.

    Args:
        momentum: new momentum of the shard.
        norm_squared: 0-dim, squared norm of the raw gradient shard behind the direction.
        direction: what the compiled graph returned, to recognize it when autograd brings it to the parameter.
        delivered: the direction as autograd wrote it to ``.grad``; None until then.
        sample: some of its entries then, where it is a DTensor: ``torch._foreach_mul_``, with which
            ``clip_grad_norm_`` scales, does not count as an edit of those.
    """

    momentum: Tensor
    norm_squared: Tensor
    direction: Arrival | None = None
    delivered: _Snapshot | None = None
    sample: Tensor | None = None


@dataclass(eq=False)
class ParamState:
    """One parameter's tensors and its line in the ledger.

    Args:
        name: qualified name in the model.
        param: the ``nn.Parameter`` users see (a DTensor where sharded).
        spec: static facts; ``text`` is their encoding.
        state: momentum of the shard (Muon) or an empty tensor; passed to every marker, identifies the parameter.
        hyper: ``[2]`` fp32 ``(1 - momentum, momentum)``.
        replica: full weight in compute dtype (stages 1 and 2), else None.
    """

    name: str
    param: nn.Parameter
    spec: ParamSpec
    state: Tensor
    hyper: Tensor
    replica: Tensor | None
    ledger: Ledger
    distributed: bool = False
    text: str = ""
    owed: int = 0
    reads: int = 0
    settled: int = 0
    eager_read: bool = False
    reduced: bool = False
    unreduced: Tensor | None = None
    undelivered: Tensor | None = None
    pending: Pending | None = None
    stale_direction: _Snapshot | None = None
    refreshed_at: int = -1
    backward: int = -1
    _accumulator: Any = None

    def __post_init__(self) -> None:
        self.text = self.spec.encode()
        self.refreshed_at = edits_of(self.param)
        setattr(self.state, _STATE_ATTRIBUTE, weakref.ref(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamState:
        """The account of a copied module (an average of weights, say): its own tensors, under a ledger of its own."""
        ledger = copy.deepcopy(self.ledger, memo)
        tensors = {name: copy.deepcopy(getattr(self, name), memo) for name in ("param", "state", "replica")}
        copied = replace(self, ledger=ledger, pending=None, stale_direction=None, _accumulator=None, **tensors)
        copied.close()
        ledger.states.append(copied)
        memo[id(self)] = copied
        return copied

    @property
    def local(self) -> Tensor:
        """The master shard."""
        return local_tensor(self.param)

    @property
    def local_grad(self) -> Tensor:
        """The shard of ``param.grad``, of a parameter that has one."""
        assert self.param.grad is not None
        return local_tensor(self.param.grad)

    @property
    def momentum(self) -> Tensor:
        """Momentum of the shard; only Muon parameters have one."""
        return self.state

    def gradient(self) -> Tensor | None:
        """The local gradient shard, or None."""
        return None if self.param.grad is None else self.local_grad

    def forget_dropped(self, backward: int) -> None:
        """``.grad`` is gone, so whoever dropped it dropped what belongs to it.

        Not between the visits of one ``backward``: autograd writes ``.grad`` after the last of them. If it raised
        before that, it delivered nothing.
        """
        if self.backward == backward:
            return
        self.backward = backward
        self.undelivered = None
        if self.param.grad is None:
            self.settled = 0
            self.reduced = False
            self.unreduced = None
            self.pending = None

    def sample(self) -> Tensor:
        """Up to 128 entries of the local gradient, spread over it."""
        entries = self.local_grad.reshape(-1)
        return entries[:: max(1, entries.numel() // 64)]

    def keep_unreduced(self, grad: Tensor) -> None:
        """Stage 1: a gradient of the whole weight, this rank's share; it counts once autograd delivers."""
        self.undelivered = grad if self.undelivered is None else self.undelivered.add_(grad)

    def take_unreduced(self) -> Tensor | None:
        """The sum of all that was kept; it leaves the parameter."""
        earlier, latest = self.unreduced, self.undelivered
        self.unreduced = self.undelivered = None
        return latest if earlier is None else earlier if latest is None else earlier.add_(latest)

    @property
    def gradient_is_ours(self) -> bool:
        """Whether an update lowering can account for what ``.grad`` holds now.

        At stages 0, 2 and 3 it takes ``.grad`` as the sum of earlier micro-batches. At stage 1 of several ranks that
        sum is kept unreduced, and ``.grad`` holds zeros between boundaries; anything else there came from elsewhere.
        """
        if self.param.grad is None or not self.spec.accumulates:
            return True
        return self.unreduced is not None and not self.reduced

    def receives(self) -> bool:
        """Whether the backward under way will add to ``.grad`` (``autograd.grad`` for other tensors does not)."""
        if self._accumulator is None:
            self._accumulator = accumulator_of(self.param)
        return will_execute(self._accumulator)

    def note_direction(self) -> None:
        """``.grad`` holds the direction of a step that is done; another backward must not add to it."""
        self.stale_direction = None if self.param.grad is None else _Snapshot.of(self.param.grad)

    def close(self) -> None:
        """Forget everything about the step that ended."""
        self.owed = self.reads = self.settled = 0
        self.eager_read = self.reduced = False
        self.unreduced = self.undelivered = None
        self.pending = None


def state_of(tensor: object) -> ParamState | None:
    """The parameter whose ``state`` tensor this is, or None."""
    reference = getattr(tensor, _STATE_ATTRIBUTE, None)
    return None if reference is None else reference()


@dataclass(frozen=True)
class Decision:
    """What a backward visit does.

    Args:
        lowering: variant of the backward graph to run.
        with_prior: whether sums of earlier micro-batches go in.
        receives: per parameter, whether autograd will deliver what the graph returns for it.
    """

    lowering: Lowering
    with_prior: bool
    receives: tuple[bool, ...]


@dataclass(eq=False)
class Ledger:
    """Balances visits for the parameters of one optimizer.

    Args:
        accumulation_steps: settled micro-batches per step, or None when unknown.
        update_in_backward: whether a backward may orthogonalize at all.
        states: the optimizer's parameters.
        traffic: what compiled graphs, steps and refreshes of this process sent so far.
        accumulating: inside :meth:`accumulate`.
        refresh: gathers the resident weights anew (stages 1 and 2).
        before_backward: called before a backward graph runs.
        options: of the frame compiled last, eager code before one is; the step graph uses them too.
    """

    accumulation_steps: int | None
    update_in_backward: bool
    states: list[ParamState] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    accumulating: bool = False
    refresh: Callable[[], None] | None = None
    before_backward: Callable[[], None] | None = None
    options: FrameOptions = FrameOptions(codegen="eager")

    # ------------------------------------------------------------------ visits

    def visit_forward(self, state: ParamState) -> None:
        """A partitioned frame that trains this parameter ran forward: a backward visit is owed."""
        state.owed += 1
        state.reads += 1

    def visit_backward(self, states: Sequence[ParamState], updates: Sequence[bool]) -> Decision:
        """A partitioned frame is about to run backward: settle, and choose the lowering.

        Args:
            states: parameters whose gradients the frame produces.
            updates: which of them the frame could orthogonalize.
        Raises:
            LedgerError: a gradient arrives for a parameter whose update is already made, or whose ``.grad`` still
                holds the previous step's direction.
        """
        receives = tuple(state.receives() for state in states)
        backward = current_backward()
        for state, receiving in zip(states, receives, strict=True):
            if receiving:
                state.forget_dropped(backward)
                self._refuse_late_gradient(state)
        if self.before_backward is not None:
            self.before_backward()
        candidates = [i for i, update in enumerate(updates) if update]
        clean = bool(candidates) and all(self._is_clean(states[i]) and receives[i] for i in candidates)
        settled = [self._settle(state, receiving) for state, receiving in zip(states, receives, strict=True)]
        # Where autograd delivers to no parameter, autograd.grad may have asked for gradients: they must be whole.
        lowering = self._choose(states, all(settled), clean) if any(receives) else Lowering.REDUCE
        for state, receiving in zip(states, receives, strict=True):
            state.reduced = state.reduced or (receiving and lowering is Lowering.REDUCE)
        return Decision(lowering, self._has_prior(states, updates, lowering), receives)

    @staticmethod
    def _is_clean(state: ParamState) -> bool:
        """Read once, by frames the ledger sees, nothing foreign in ``.grad``, and no hook that expects a gradient."""
        if len(state.param._backward_hooks or ()) > 1:  # one is :meth:`arriving`
            return False
        return state.owed == 1 and state.reads == 1 and not state.eager_read and state.gradient_is_ours

    def _settle(self, state: ParamState, receiving: bool) -> bool:
        """Pay one owed visit; returns whether that settled the parameter's micro-batch."""
        settled = state.owed == 1
        state.owed = max(0, state.owed - 1)
        if settled:
            state.reads = 0
            state.settled += receiving and not self.accumulating
        return settled

    def _choose(self, states: Sequence[ParamState], settled: bool, can_update: bool) -> Lowering:
        if self.accumulating:
            return Lowering.ACCUMULATE
        if self.accumulation_steps is None:
            # Without a known boundary every backward reduces: `.grad` is then right whenever step() comes.
            return Lowering.REDUCE
        if not settled or any(state.settled < self.accumulation_steps for state in states):
            return Lowering.ACCUMULATE
        return Lowering.UPDATE if self.update_in_backward and can_update else Lowering.REDUCE

    @staticmethod
    def _has_prior(states: Sequence[ParamState], updates: Sequence[bool], lowering: Lowering) -> bool:
        if lowering is Lowering.ACCUMULATE:
            return False
        unreduced = any(state.unreduced is not None or state.undelivered is not None for state in states)
        raw = lowering is Lowering.UPDATE and any(
            state.param.grad is not None for state, update in zip(states, updates, strict=True) if update
        )
        return unreduced or raw

    @staticmethod
    def _refuse_late_gradient(state: ParamState) -> None:
        if state.pending is not None:
            raise LedgerError(
                f"a gradient for {state.name!r} arrived after its Muon update of this step was made in backward; "
                "tell the optimizer about every micro-batch: gradient_accumulation_steps=N, "
                "`with optimizer.accumulate():` around all but the last, or update='step'; where step() raised or was "
                "left out on purpose, call optimizer.zero_grad() to drop what the backward made"
            )
        Ledger.check_fresh(state)

    @staticmethod
    def check_fresh(state: ParamState) -> None:
        """Raise if ``.grad`` is the direction of the previous step: it is no gradient."""
        if state.stale_direction is not None and state.stale_direction.still(state.param.grad):
            raise LedgerError(
                f"the gradient of {state.name!r} still holds the Muon direction of the previous step; "
                "call optimizer.zero_grad() between step() and the next backward"
            )

    def read_eagerly(self, state: ParamState) -> None:
        """A weight was read outside a compiled graph: its gradient arrives on a path the ledger does not see."""
        self.keep_fresh(state)
        if torch.is_grad_enabled() and state.param.requires_grad:
            state.eager_read = True

    def arriving(self, state: ParamState, grad: Tensor) -> None:
        """Autograd has summed the gradient of ``state.param``, perhaps from outside the compiled graphs alone; a
        direction must be the only summand.

        Raises:
            LedgerError: the parameter also got a gradient from outside the compiled graphs in the same backward.
        """
        state.forget_dropped(current_backward())
        pending = state.pending
        if pending is None or pending.delivered is not None or pending.direction in (None, Arrival.of(grad)):
            return
        raise LedgerError(
            f"{state.name!r} got a gradient beside its Muon update, from a use of the parameter outside the model "
            "(a penalty over model.parameters(), say); set update='step'"
        )

    def delivered(self, state: ParamState) -> None:
        """Autograd finished writing ``state.param.grad``: what was kept counts, a direction looks like this."""
        state.unreduced = state.take_unreduced()
        if state.pending is not None and state.pending.delivered is None and state.param.grad is not None:
            state.pending.delivered = _Snapshot.of(state.param.grad)
            state.pending.sample = state.sample().clone() if state.distributed else None
        elif state.stale_direction is not None and state.stale_direction.added_to(state.param.grad):
            raise LedgerError(
                f"a gradient of {state.name!r} was added to the Muon direction of the previous step; "
                "call optimizer.zero_grad() between step() and the next backward"
            )

    def check_untouched(self, state: ParamState) -> None:
        """Raise if the direction in ``.grad`` is not what backward delivered."""
        if state.pending is None or state.param.grad is None:
            return
        if state.pending.delivered is None or not state.pending.delivered.still(state.param.grad):
            raise edited_error(state.name)

    def add_gradient(self, state: ParamState, shard: Tensor) -> None:
        """Add a raw gradient of the local shard to ``.grad``."""
        gradient = state.gradient()
        if gradient is not None:
            gradient.add_(shard)
        else:
            state.param.grad = like_parameter(state.param, shard)

    def keep_fresh(self, state: ParamState) -> None:
        """Refresh the resident weights if a shard was edited since they were gathered (a loaded checkpoint, say)."""
        if state.replica is not None and edits_of(state.param) != state.refreshed_at and self.refresh is not None:
            self.refresh()

    def count(self, traffic: Traffic) -> None:
        """Add what a graph sent and computed."""
        self.traffic = self.traffic + traffic

    # ------------------------------------------------------------------ step

    @contextlib.contextmanager
    def accumulate(self) -> Iterator[None]:
        """Backwards inside are not the step's last: gradients only accumulate."""
        before, self.accumulating = self.accumulating, True
        try:
            yield
        finally:
            self.accumulating = before

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        """No optimizer steps a copied module: its gradients stay raw, its resident weights follow its shards."""
        from compile_muon.runtime.replicas import refresh_replicas

        copied = Ledger(accumulation_steps=None, update_in_backward=False, options=self.options)
        copied.refresh = lambda: copied.count(refresh_replicas(copied.states))
        memo[id(self)] = copied
        return copied

    def balance(self) -> int:
        """Visits still owed, over all parameters."""
        return sum(state.owed for state in self.states)

    def close(self) -> None:
        """End of a step: visits left over are closed."""
        for state in self.states:
            state.close()
