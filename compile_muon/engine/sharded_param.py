"""One sharded parameter: its tensors, its visits, the sums it keeps, the speculation on its gradient."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from compile_muon.agreement.status import TRAINING
from compile_muon.engine.dtensor_parameter import part_of, raw_gradient
from compile_muon.engine.dtensors import contiguous_stride, edits_of, like_parameter, local_tensor
from compile_muon.engine.speculation import Speculations, memory_of
from compile_muon.engine.sums import UnreducedSums
from compile_muon.engine.visits import Visits
from compile_muon.passes.eager_traffic import traffic_of_reduction
from compile_muon.passes.language.holder import hold, holder_of
from compile_muon.passes.language.spec import ParamSpec, decode_dtype
from compile_muon.passes.torch_private import accumulators_of, current_backward, storage_holders, will_execute

__all__ = ["ShardedParam", "receiving", "sharded_param_of"]


class Refreshing(Protocol):
    """A gather of resident weights, under way."""

    def finish(self) -> None:
        """Wait for it, and write what came."""


@dataclass(eq=False)
class ShardedParam:
    """Everything the engine knows of one parameter.

    Args:
        name: qualified name in the model; ``key`` is its bytes.
        param: the ``nn.Parameter`` users see (a DTensor where sharded).
        spec: static facts; ``text`` is their encoding, as markers carry it.
        momentum: of the shard (Muon), or an empty tensor, for AdamW and where it is not resident. Every
            marker takes it: it identifies the parameter to the graphs, which get the module's own tensors.
        momentum_buffer: the same memory as the kind of tensor ``param`` is, for the optimizer's state. Never the object
            itself: what users save must not carry the sharded parameter with it.
        hyper: fp32 ``(1 - momentum, momentum)`` and the rates that its method is given, one tensor for all that share
            these.
        resident: what is resident of the weight in compute dtype (``Layout.resident``): all of it (stages 1 and 2), or
            this rank's slice; else None.
        ledger: the :class:`~compile_muon.engine.ledger.Ledger` of the optimizer that owns the parameter. It knows its
            parameters, and they are not made of it.
        group: of all ranks that hold a part of the parameter or another one of the optimizer; None for one process.
        placed: mesh, placements and shape of the DTensor that its module reads; None where it reads a plain tensor.
        visits, sums, speculations: what happened to it since the last step.
        rates: what ``hyper`` holds behind its first number.
        owners: of each share of its matrices, where its method keeps states at them.
        now: ``spec`` as the step under way has it, where its method has several graphs.
        fetches: how often graphs asked for the momentum, where it is not resident.
        refreshed_at: edits of the parameter when its resident weight was last gathered, or is being gathered.
        refresh: what is gathering the resident weight, until it is waited for.
        accumulated: where gradients of micro-batches are added up, if CUDA graphs are replayed meanwhile.
        entered: which of these graphs it is: the phase, and whether it is one matrix whatever its view.
        tags: names of attributes that users set on the parameter, as of the latest read outside of frames: those of
            frames carry them too.
    """

    name: str
    param: nn.Parameter
    spec: ParamSpec
    momentum: Tensor
    hyper: Tensor
    resident: Tensor | None
    ledger: Any
    group: dist.ProcessGroup | None = None
    placed: tuple[DeviceMesh, tuple[Placement, ...], tuple[int, ...]] | None = None
    text: str = ""
    visits: Visits = field(default_factory=Visits)
    sums: UnreducedSums = field(default_factory=UnreducedSums)
    speculations: Speculations = field(default_factory=Speculations)
    rates: tuple[float, ...] = ()
    owners: tuple[int, ...] = ()
    fetches: int = 0
    refreshed_at: int = -1
    refresh: Refreshing | None = None
    accumulated: Tensor | None = None
    entered: tuple[Any, bool] | None = None
    tags: tuple[str, ...] = ()
    momentum_buffer: Tensor = field(init=False)
    now: ParamSpec = field(init=False)
    _watched: bool = False
    _holders: int = 0

    def __post_init__(self) -> None:
        self.text, self.now = self.spec.encode(), self.spec
        self.refreshed_at = edits_of(self.param)
        self._hold_momentum()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParam:
        """The parameter of a copied module (an average of weights, say): its own tensors, under a ledger of its own."""
        self.await_refresh()
        names = ("ledger", "param", "resident")
        own: dict[str, Any] = {name: copy.deepcopy(getattr(self, name), memo) for name in names}
        own |= {"visits": Visits(), "sums": UnreducedSums(), "speculations": Speculations()}
        own["accumulated"] = None
        copied = replace(self, momentum=self.momentum.detach().clone(), _watched=False, entered=None, **own)
        copied.ledger.join(copied)
        memo[id(self)] = copied
        return copied

    @property
    def distributed(self) -> bool:
        """Whether ``param`` is a DTensor."""
        return isinstance(self.param, DTensor)

    @property
    def local(self) -> Tensor:
        """The master shard."""
        return local_tensor(self.param)

    @property
    def grad(self) -> Tensor | None:
        """``param.grad`` as autograd keeps it: what users read is a tensor that sees their edits, and takes longer."""
        return raw_gradient(self.param)

    @property
    def local_grad(self) -> Tensor:
        """The shard of ``param.grad``, of a parameter that has one."""
        grad = self.grad
        assert grad is not None
        return local_tensor(grad)

    def as_read(self, part: Tensor) -> Tensor:
        """What this rank's model has of the parameter, as the kind of tensor that its module reads."""
        if self.placed is None:
            return part
        mesh, placements, shape = self.placed
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=contiguous_stride(shape)
        )

    def take_up(self, spec: ParamSpec, hyper: Tensor, rates: tuple[float, ...]) -> None:
        """Be trained from now on, as ``spec`` says; it was frozen. Graphs that hold the old spec are compiled anew."""
        self.spec, self.text, self.now, self.entered = spec, spec.encode(), spec, None
        self.hyper, self.rates = hyper, rates
        if spec.muon is not None:
            local = self.local.detach()
            self.momentum = torch.zeros_like(local) if spec.muon.resident_momentum else local.new_empty(0)
            self._hold_momentum()

    def _hold_momentum(self) -> None:
        """Be found by :attr:`momentum`, and have the tensor that users see of it."""
        own = self.spec.muon is None or self.spec.muon.resident_momentum
        seen = part_of(self.param, "momentum_buffer", like_parameter(self.param, self.momentum.detach()))
        self.momentum_buffer = seen if own else self.momentum
        hold(self.momentum, self)

    @property
    def factor(self) -> float:
        """The momentum in :attr:`hyper`."""
        return self.rates[0] if self.rates else 0.0

    def use_rates(self, rates: tuple[float, ...]) -> None:
        """:attr:`hyper` holds these from now on."""
        self.rates = rates

    def own(self, owners: tuple[int, ...]) -> None:
        """Where states at owners are, for good."""
        self.owners = owners

    def enter(self, phase: Any, *, joined: bool) -> None:
        """The graph that the next step takes, see :class:`~compile_muon.passes.methods.MatrixMethod`."""
        if self.entered != (phase, joined):
            self.now = self.spec.in_step(phase, joined=joined, owners=self.owners)
            self.entered = phase, joined

    def begin_refresh(self, refresh: Refreshing) -> None:
        """The resident weight will be what ``refresh`` brings, and is no longer what autograd has saved of it."""
        assert self.resident is not None
        self.refresh = refresh
        self.note_refreshed()
        torch.autograd.graph.increment_version(self.resident)

    def note_refreshed(self) -> None:
        """The resident weight is, or will be, that of the shards as they are."""
        self.refreshed_at = edits_of(self.param)

    def tag(self, names: tuple[str, ...]) -> None:
        """Users have set these attributes on the parameter."""
        self.tags = names

    def end_refresh(self) -> None:
        """It has come."""
        self.refresh = None

    def place_gradient(self) -> None:
        """``.grad`` as the parameter is placed, which a gradient of eager code may not be; collective then."""
        param, grad = self.param, self.grad
        if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
            return
        if grad._spec.placements != param._spec.placements:
            param.grad = grad.redistribute(placements=param.placements)

    def add_gradient(self, shard: Tensor) -> None:
        """Add an averaged gradient of the shard to ``.grad``."""
        if self.grad is not None:
            self.local_grad.add_(shard)
        else:
            self.param.grad = like_parameter(self.param, shard)

    def receives(self) -> bool:
        """Whether the backward under way will add to ``.grad`` (``autograd.grad`` for other tensors does not)."""
        return receiving([self])[0]

    def await_refresh(self, read: Tensor | None = None) -> None:
        """Return when the resident weight is that of the shards at the latest :func:`~.resident.start_refresh`.

        Args:
            read: the resident weight, or a copy, which then is written anew.
        """
        if self.refresh is not None:
            self.refresh.finish()
        if read is not None and self.resident is not None and read.data_ptr() != self.resident.data_ptr():
            read.copy_(self.resident)

    def fetch(self, grad: Tensor, out: Tensor) -> Tensor:
        """Write the momentum, which is elsewhere, to ``out``; a direction is made of it and ``grad``."""
        self.fetches += 1
        return self.ledger.hooks.state_provider.fetch(self, grad, out)

    def tell(self, what: str, *facts: Any) -> None:
        """See :class:`~compile_muon.passes.language.holder.Holder`: extensions are told."""
        for told in self.ledger.hooks.told:
            told(self, what, *facts)

    def to_reduce(self, grad: Tensor) -> Tensor | None:
        """See :class:`~.passes.language.holder.Holder`: stage 1 keeps sums until a step's last micro-batch."""
        # Where a graph of the gradient is asked for, or it goes elsewhere than to .grad, it must be whole.
        if not self.spec.layout.accumulates or torch.is_grad_enabled() or not self.receives():
            return grad
        call = current_backward()
        self.begin_backward(call)
        if self.ledger.keeps(self, call):
            self.sums.keep(call, grad.to(decode_dtype(self.spec.dtype), copy=True))
            return None
        return grad + self.sums.take(call) if self.sums.available(call) else grad

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Around the reduction of a backward that no graph of this backend runs."""
        self.visits.eager = True
        detail = "reduce" if self.grad is None else "reduce and add to .grad"
        with self.ledger.status.at("an eager backward", "", [self.name]):
            self.ledger.status.change(TRAINING)
            yield
        if not self.spec.layout.everyone.alone:
            self.ledger.count(traffic_of_reduction(self.text))
            self.ledger.frame_log.note("backward", "", [self.name], [detail])

    def begin_backward(self, call: int) -> None:
        """A gradient is on its way; where ``.grad`` is gone, whoever dropped it dropped what belongs to it."""
        grad = self.grad
        if grad is None and call != self.visits.current:
            self._drop()
        self.sums.begin(call, grad, self.name)

    def watch(self) -> None:
        """Have autograd say when it writes ``.grad``: at stage 1, where a step must know of edits without asking the
        device, or where a replay would overwrite it. The hooks hold the sharded parameter weakly."""
        if self._watched or not self.param.requires_grad:
            return
        later = self.ledger.checks_later and self.spec.muon is not None
        if not (self.spec.layout.accumulates or later or self.ledger.replays_between):
            return
        self._watched = True
        reference = weakref.ref(self)

        def arriving(grad: Tensor) -> None:
            if sharded := reference():
                if sharded.spec.layout.accumulates:  # of others no sum is kept that an edit would spoil
                    sharded.begin_backward(current_backward())
                sharded.compare(grad)

        def delivered(_: Tensor) -> None:
            if sharded := reference():
                if len(sharded.param._backward_hooks or ()) > 1:  # one behind ours may have returned another gradient
                    sharded.compare(sharded.grad)
                sharded.keep_gradient()
                sharded.sums.deliver(current_backward(), sharded.grad)

        if self.spec.layout.accumulates or later:
            Tensor.register_hook(self.param, arriving)
        self.param.register_post_accumulate_grad_hook(delivered)

    def compare(self, grad: Tensor | None) -> None:
        """Discard a direction unless ``grad``, which autograd adds to ``.grad``, is the very gradient that its graph
        returned: other visits of the backward, a penalty, a hook or another backward make another one."""
        made = self.speculations.current
        if made is not None and (grad is None or made.gradient != memory_of(local_tensor(grad))):
            self.ledger.discarded([self], "edited")

    def keep_gradient(self) -> None:
        """Move a gradient to which more will be added out of a CUDA graph, which writes the next one to its place. It
        comes to the same memory in each step, unless somebody holds that of the last."""
        if not self.ledger.replays_between or self.grad is None or self.ledger.is_last(self):
            return
        grad, kept = self.local_grad.detach(), self.accumulated
        if kept is not None and kept.data_ptr() == grad.data_ptr():
            return
        if kept is None or kept.stride() != grad.stride() or storage_holders(kept) > self._holders:
            kept = self.accumulated = torch.empty_like(grad)
            self._holders = storage_holders(kept)
        kept.copy_(grad)
        self.param.grad = like_parameter(self.param, kept.detach())

    def drop_gradient(self) -> None:
        """``zero_grad()``: what was made from the gradient goes with it; what forward visits are owed stays."""
        self._drop()
        self.sums.close()
        self.speculations.drop()

    def _drop(self) -> None:
        self.visits.drop()
        for dropped in self.ledger.hooks.dropped:
            dropped(self)

    def close(self) -> None:
        """End of a step."""
        self.drop_gradient()
        self.visits.close()


def receiving(sharded_params: Iterable[ShardedParam]) -> list[bool]:
    """Of each, whether the backward under way will add to its ``.grad``."""
    # Asked anew each time: torch.utils.swap_tensors exchanges what is behind a tensor, its autograd node included.
    return [
        node is not None and will_execute(node) for node in accumulators_of(sharded.param for sharded in sharded_params)
    ]


def sharded_param_of(tensor: object) -> ShardedParam | None:
    """The sharded parameter whose ``momentum`` this very tensor is, or None."""
    holder: Any = holder_of(tensor)
    return holder
