"""One sharded parameter: its tensors, its visits, the sums it keeps, the speculation on its gradient.

Tensors of a sharded parameter, and the writers of each. S: the shape of this rank's piece, ``layout.local_shape``:

local             S, master dtype, the shard. Writers: ``step()``; users between steps (:func:`.edits_of` counts edits)
resident          the weight in compute dtype, whole or a slice. Writers: refreshes. Where compute and master dtype
                  are the same, ``local`` is a view of its rows
momentum          S, state dtype, or empty. Writers: ``step()``; ``own_momenta``, for a state that users loaded
momentum_buffer   the memory of ``momentum``, as ``optimizer.state`` has it
graph_scalars     fp32 scalars. Writer: ``OptimizerState.sync_momentum``
grad              S, the averaged gradient. Writers: autograd; users; the engine where it reduces or clips
sums.delivered    ``layout.shape``, this rank's unreduced gradient (stage 1). Writers: backwards of micro-batches
speculations      S, a direction. Writers: backward graphs; ``step()`` reads it
accumulated       S, the memory of ``grad`` where CUDA graphs replay. Writer: ``keep_gradient``
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from compile_muon.agreement.status import TRAINING
from compile_muon.engine.dtensor_parameter import part_of, raw_gradient
from compile_muon.engine.dtensors import contiguous_stride, edits_of, like_parameter, local_tensor
from compile_muon.engine.gradient import Speculation, Speculations, UnreducedSums, Visits, memory_of
from compile_muon.passes.eager_traffic import traffic_of_reduction
from compile_muon.passes.exchange import transfers
from compile_muon.passes.language.holder import hold, holder_of
from compile_muon.passes.language.spec import ParamSpec, decode_dtype
from compile_muon.passes.torch_private import accumulators_of, current_backward, storage_holders, will_execute


@dataclass(eq=False)
class ShardedParam:
    """The engine's record of one parameter."""

    name: str  # qualified name in the model
    param: nn.Parameter  # the parameter users see: a DTensor where sharded
    spec: ParamSpec  # static facts; ``text`` is their encoding in markers
    # The ``state`` of markers, by which graphs find this object. Empty for AdamW, and where the momentum is offloaded.
    momentum: Tensor
    # fp32 ``(1 - momentum, momentum)``, then the method's ``graph_rates``; one tensor for all parameters that share it
    graph_scalars: Tensor
    resident: Tensor | None  # the whole weight (stages 1 and 2), this rank's slice (stage 3 with HFSDP), or None
    ledger: Any  # the :class:`~compile_muon.engine.ledger.Ledger`, which imports this module
    group: dist.ProcessGroup | None = None  # all ranks of the optimizer; None for one process
    # Mesh, placements and whole shape of the DTensor that the model had and still reads; None for a plain tensor.
    placed: tuple[DeviceMesh, tuple[Placement, ...], tuple[int, ...]] | None = None
    text: str = ""
    visits: Visits = field(default_factory=Visits)
    sums: UnreducedSums = field(default_factory=UnreducedSums)
    speculations: Speculations = field(default_factory=Speculations)
    rates: tuple[float, ...] = ()  # numbers in ``graph_scalars[1:]``
    owners: tuple[int, ...] = ()  # owner of each ``exchange.shares.Share``, where the method keeps states at owners
    fetches: int = 0  # fetches of the offloaded momentum so far: the number of the latest
    refreshed_at: int = -1  # ``edits_of(param)`` at the latest refresh, finished or running
    refresh: Any = None  # the running :class:`~compile_muon.engine.resident.Refresh`, or None
    accumulated: Tensor | None = None  # gradient buffer of micro-batches outside the memory of CUDA graphs
    entered: tuple[Any, bool] | None = None  # arguments of :meth:`enter` that made ``now``
    # Names of attributes users set on the parameter, as of the latest read outside frames; frames copy them to reads.
    tags: tuple[str, ...] = ()
    # A tensor object of its own: users save it, and the holder attached to ``momentum`` must not be saved with it.
    momentum_buffer: Tensor = field(init=False)
    now: ParamSpec = field(init=False)  # ``spec`` as this step's graph has it: with its phase and owners
    _watched: bool = False  # whether :meth:`watch` has registered its hooks
    _holders: int = 0  # references to the storage of ``accumulated`` when it was made

    def __post_init__(self) -> None:
        self.text, self.now = self.spec.encode(), self.spec
        self.refreshed_at = edits_of(self.param)
        self._hold_momentum()

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParam:
        """Copy the parameter with a copied module (averaged weights, say): own tensors, under the copied ledger."""
        self.await_refresh()
        names = ("ledger", "param", "resident")
        copied_fields: dict[str, Any] = {name: copy.deepcopy(getattr(self, name), memo) for name in names}
        copied_fields |= {"visits": Visits(), "sums": UnreducedSums(), "speculations": Speculations()}
        copied_fields["accumulated"] = None
        copied = replace(self, momentum=self.momentum.detach().clone(), _watched=False, entered=None, **copied_fields)
        copied.ledger.sharded_params.append(copied)
        memo[id(self)] = copied
        return copied

    @property
    def distributed(self) -> bool:
        """Whether ``param`` is a DTensor."""
        return isinstance(self.param, DTensor)

    @property
    def local(self) -> Tensor:
        """The master shard, a plain tensor."""
        return local_tensor(self.param)

    @property
    def grad(self) -> Tensor | None:
        """``param.grad`` as autograd keeps it, without the Python property of :class:`.ShardedParameter`."""
        return raw_gradient(self.param)

    @property
    def local_grad(self) -> Tensor:
        """The shard of ``param.grad``, which must exist."""
        grad = self.grad
        assert grad is not None
        return local_tensor(grad)

    def as_read(self, part: Tensor) -> Tensor:
        """Return ``part``, this rank's part of the parameter, as the kind of tensor that the module reads."""
        if self.placed is None:
            return part
        mesh, placements, shape = self.placed
        return DTensor.from_local(
            part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=contiguous_stride(shape)
        )

    def take_up(self, spec: ParamSpec, graph_scalars: Tensor, rates: tuple[float, ...]) -> None:
        """Train a formerly frozen parameter as ``spec`` says. Graphs that hold the old spec recompile."""
        self.spec, self.text, self.now, self.entered = spec, spec.encode(), spec, None
        self.graph_scalars, self.rates = graph_scalars, rates
        if spec.muon is not None:
            local = self.local.detach()
            self.momentum = torch.zeros_like(local) if spec.muon.resident_momentum else local.new_empty(0)
            self._hold_momentum()

    def _hold_momentum(self) -> None:
        """Attach this object to :attr:`momentum` as its holder, and make :attr:`momentum_buffer` of the same memory."""
        is_resident = self.spec.muon is None or self.spec.muon.resident_momentum
        buffer = part_of(self.param, "momentum_buffer", like_parameter(self.param, self.momentum.detach()))
        self.momentum_buffer = buffer if is_resident else self.momentum
        hold(self.momentum, self)

    def enter(self, phase: Any, *, joined: bool) -> None:
        """Choose the graph of the next step by ``phase`` and ``joined`` of :class:`~.passes.methods.MatrixMethod`."""
        if self.entered != (phase, joined):
            self.now = self.spec.in_step(phase, joined=joined, owners=self.owners)
            self.entered = phase, joined

    def place_gradient(self) -> None:
        """Redistribute ``.grad`` as the parameter is placed; collective if eager code left it otherwise placed."""
        param, grad = self.param, self.grad
        if not isinstance(param, DTensor) or not isinstance(grad, DTensor):
            return
        if grad._spec.placements != param._spec.placements:
            param.grad = grad.redistribute(placements=param.placements)

    def complete_gradient(self) -> None:
        """Make ``.grad`` the averaged gradient, placed as the parameter is. At stage 1 a step ahead of the last
        micro-batch reduces the sum kept so far."""
        self.place_gradient()
        if not self.spec.layout.accumulates:
            return
        self.sums.check(self.grad, self.name)
        if self.sums.delivered is not None:
            self.add_gradient(transfers.reduce_grad(self.sums.delivered, self.spec))
            self.ledger.count(traffic_of_reduction(self.text))
            self.speculations.drop()
        self.sums.close()

    def candidate(self) -> Speculation | None:
        """Return the direction of backward, if rates and momentum are those that it was made with."""
        made = self.speculations.current
        if made is None or (made.rates, made.edits) != (self.rates, edits_of(self.momentum_buffer)):
            return None
        return made

    def add_gradient(self, shard: Tensor) -> None:
        """Add an averaged gradient of the shard to ``.grad``."""
        if self.grad is not None:
            self.local_grad.add_(shard)
        else:
            self.param.grad = like_parameter(self.param, shard)

    def await_refresh(self, weight: Tensor | None = None) -> None:
        """Wait for the running refresh. ``weight``: the resident weight or, where Inductor copied it at the start of
        the graph, this copy, which then gets the refreshed weight."""
        if self.refresh is not None:
            self.refresh.finish()
        if weight is not None and self.resident is not None and weight.data_ptr() != self.resident.data_ptr():
            weight.copy_(self.resident)

    def fetch(self, grad: Tensor, out: Tensor) -> Tensor:
        """Write the offloaded momentum to ``out`` for the direction of ``grad``; see :class:`~.holder.Holder`."""
        self.fetches += 1
        return self.ledger.hooks.state_provider.fetch(self, grad, out)

    def notify(self, what: str, *facts: Any) -> None:
        """Pass ``facts`` of kind ``what`` on to the extensions; see :class:`~.passes.language.holder.Holder`."""
        for hook in self.ledger.hooks.notify:
            hook(self, what, *facts)

    def to_reduce(self, grad: Tensor) -> Tensor | None:
        """Return the gradient that an eager backward reduces; None where stage 1 keeps it as an unreduced sum."""
        # Where a graph of the gradient is asked for, or it goes elsewhere than to .grad, it must be whole.
        if not self.spec.layout.accumulates or torch.is_grad_enabled() or not receiving([self])[0]:
            return grad
        call = current_backward()
        self.begin_backward(call)
        if self.ledger.keeps(self, call):
            self.sums.keep(call, grad.to(decode_dtype(self.spec.dtype), copy=True))
            return None
        return grad + self.sums.take(call) if self.sums.available(call) else grad

    @contextmanager
    def reducing(self) -> Iterator[None]:
        """Return the context in which an eager backward reduces: sets the status, counts traffic, logs the visit."""
        self.visits.eager = True
        detail = "reduce" if self.grad is None else "reduce and add to .grad"
        with self.ledger.status.at("an eager backward", "", [self.name]):
            self.ledger.status.change(TRAINING)
            yield
        if not self.spec.layout.everyone.alone:
            self.ledger.count(traffic_of_reduction(self.text))
            self.ledger.frame_log.note("backward", "", [self.name], [detail])

    def begin_backward(self, call: int) -> None:
        """Note that a gradient is arriving. If ``.grad`` is gone, drop what belonged to it."""
        grad = self.grad
        if grad is None and call != self.visits.current:
            self._drop()
        self.sums.begin(call, grad, self.name)

    def watch(self) -> None:
        """Register autograd hooks on ``.grad`` where the engine must notice its writes: unreduced sums (stage 1),
        checks that are read in the next step, or CUDA graphs whose replay would overwrite it."""
        if self._watched or not self.param.requires_grad:
            return
        compares = self.ledger.checks_later and self.spec.muon is not None
        if not (self.spec.layout.accumulates or compares or self.ledger.replays_between):
            return
        self._watched = True
        reference = weakref.ref(self)  # hooks live as long as the parameter, which this object holds

        def arriving(grad: Tensor) -> None:
            if sharded := reference():
                if sharded.spec.layout.accumulates:  # the only layout with a sum that an edit would spoil
                    sharded.begin_backward(current_backward())
                sharded.compare(grad)

        def delivered(_: Tensor) -> None:
            if sharded := reference():
                if len(sharded.param._backward_hooks or ()) > 1:  # a hook behind ours may have replaced it
                    sharded.compare(sharded.grad)
                sharded.keep_gradient()
                sharded.sums.deliver(current_backward(), sharded.grad)

        if self.spec.layout.accumulates or compares:
            Tensor.register_hook(self.param, arriving)
        self.param.register_post_accumulate_grad_hook(delivered)

    def compare(self, grad: Tensor | None) -> None:
        """Discard the direction unless ``grad``, which autograd adds to ``.grad``, is in the memory that the graph
        returned, without edits. Several visits of a backward, a penalty, a hook or another backward change that."""
        speculation = self.speculations.current
        if speculation is not None and (grad is None or speculation.gradient != memory_of(local_tensor(grad))):
            self.ledger.discarded([self], "edited")

    def keep_gradient(self) -> None:
        """Copy a gradient that micro-batches add to out of a CUDA graph's memory, which its next replay overwrites."""
        if not self.ledger.replays_between or self.grad is None or self.ledger.is_last(self):
            return
        grad, buffer = self.local_grad.detach(), self.accumulated
        if buffer is not None and buffer.data_ptr() == grad.data_ptr():
            return
        # The same buffer in each step keeps addresses, unless a user holds the last step's gradient.
        if buffer is None or buffer.stride() != grad.stride() or storage_holders(buffer) > self._holders:
            buffer = self.accumulated = torch.empty_like(grad)
            self._holders = storage_holders(buffer)
        buffer.copy_(grad)
        self.param.grad = like_parameter(self.param, buffer.detach())

    def drop_gradient(self) -> None:
        """Drop everything made from the gradient (``zero_grad()``); backward visits still owed stay."""
        self._drop()
        self.sums.close()
        self.speculations.drop()

    def _drop(self) -> None:
        self.visits.drop()
        for dropped in self.ledger.hooks.dropped:
            dropped(self)

    def close(self) -> None:
        """End a step."""
        self.drop_gradient()
        self.visits.close()


def receiving(sharded_params: Iterable[ShardedParam]) -> list[bool]:
    """Return whether the current backward will add to each ``.grad``; ``autograd.grad`` for other tensors does not."""
    # Never cached: torch.utils.swap_tensors exchanges the autograd node of a tensor as well.
    return [
        node is not None and will_execute(node) for node in accumulators_of(sharded.param for sharded in sharded_params)
    ]


def sharded_param_of(tensor: object) -> ShardedParam | None:
    """Return the sharded parameter whose ``momentum`` is this very tensor object, or None."""
    holder: Any = holder_of(tensor)
    return holder
