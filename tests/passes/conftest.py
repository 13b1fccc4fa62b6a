"""What the pass tests share: ranks without processes, and the graphs of one training step before they are lowered."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.testing._internal.distributed import multi_threaded_pg
from torch.testing._internal.distributed.fake_pg import FakeStore

from compile_muon.config.machine import load_costs
from compile_muon.passes import (
    JOINT_PASSES,
    LOWERING_PASSES,
    BackwardRequest,
    GraphKind,
    PassContext,
    PassOptions,
    Purpose,
    reduced_grads,
    run_passes,
)
from compile_muon.passes.torch_private import autograd_cache_disabled


@contextlib.contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """This process as `rank` of `world`, under torch's fake process group: collectives send nothing."""
    if world == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_threads(world: int, body: Callable[[int, str], Any]) -> list[Any]:
    """`body(rank, group name)` on `world` threads with real collectives between them; results in rank order."""
    results: list[Any] = [None] * world
    errors: list[BaseException] = []
    store = dist.HashStore()

    def worker(rank: int) -> None:
        dist.init_process_group(backend="threaded", rank=rank, world_size=world, store=store)
        try:
            results[rank] = body(rank, dist.group.WORLD.group_name)
        except BaseException as error:
            errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)  # wakes the threads that wait for this one
        finally:
            dist.destroy_process_group()

    multi_threaded_pg._install_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    try:
        threads = [threading.Thread(target=worker, args=(rank,)) for rank in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        multi_threaded_pg._uninstall_threaded_pg()
    if errors:
        raise errors[0]
    return results


@dataclass
class Captured:
    """The graphs of one frame, markers in place: ``joint`` as AOTAutograd traced it, ``rewritten`` by the joint passes,
    ``forward`` and ``backward`` by the partitioner. The first ``user_outputs`` of `forward` are the model's; the rest
    is saved."""

    joint: GraphModule
    rewritten: GraphModule
    forward: GraphModule
    backward: GraphModule
    user_outputs: int
    _lowered: dict[Any, Any] = field(default_factory=dict)

    def request(self, purpose: Purpose, **given: bool) -> BackwardRequest:
        """`purpose` for every gradient that allows it, see :meth:`BackwardRequest.of`."""
        return BackwardRequest.of(reduced_grads(self.backward), purpose, **given)

    def lowered(
        self,
        kind: GraphKind,
        request: BackwardRequest | Purpose = Purpose.REDUCE,
        passes: Any = LOWERING_PASSES,
        **options: Any,
    ) -> tuple[GraphModule, PassContext]:
        """A copy of one half after `passes`; shared between tests unless the passes are a test's own."""
        if isinstance(request, Purpose):
            request = self.request(request)
        if passes is LOWERING_PASSES:
            key = (kind, request if kind is GraphKind.BACKWARD else None, *sorted(options.items()))
            if key not in self._lowered:
                self._lowered[key] = self._lower(kind, request, passes, **options)
            return self._lowered[key]
        return self._lower(kind, request, passes, **options)

    def _lower(
        self, kind: GraphKind, request: BackwardRequest, passes: Any, **options: Any
    ) -> tuple[GraphModule, PassContext]:
        ctx = PassContext(kind, options=PassOptions(**options), costs=load_costs("cpu"), user_outputs=self.user_outputs)
        if kind is GraphKind.BACKWARD:
            ctx.request = request
        gm = copy.deepcopy(self.forward if kind is GraphKind.FORWARD else self.backward)
        return run_passes(gm, passes, ctx), ctx


def capture(
    model: nn.Module, *inputs: torch.Tensor, joint_passes: Any = JOINT_PASSES, reshard_after_forward: bool = True
) -> Captured:
    """Trace one training step of a sharded model through the joint passes and the partitioner."""
    found: dict[str, Any] = {}

    def partition(gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        found["joint"] = copy.deepcopy(gm)
        ctx = PassContext(GraphKind.JOINT, options=PassOptions(reshard_after_forward=reshard_after_forward))
        gm = run_passes(gm, joint_passes, ctx)
        found["rewritten"] = copy.deepcopy(gm)
        found["user_outputs"] = kwargs["num_fwd_outputs"]
        found["forward"], found["backward"] = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        return copy.deepcopy(found["forward"]), copy.deepcopy(found["backward"])

    def compiler(gm: GraphModule, _: Any) -> Callable[..., Any]:
        return make_boxed_func(gm.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition, decompositions={})
    with autograd_cache_disabled():
        torch.compile(model, backend=backend, fullgraph=True)(*inputs)
    return Captured(**found)


# pytest's importlib mode keeps test files from importing each other: what they share comes as fixtures.


@pytest.fixture
def world() -> Callable[[int, int], contextlib.AbstractContextManager[None]]:
    """`with world(rank, size):`, see :func:`fake_world`."""
    return fake_world


@pytest.fixture
def threads() -> Callable[[int, Callable[[int, str], Any]], list[Any]]:
    """`threads(size, body)`, see :func:`on_threads`."""
    return on_threads


@pytest.fixture
def trace() -> Iterator[Callable[..., Captured]]:
    """`trace(model, *inputs)`, see :func:`capture`."""
    yield capture
    torch._dynamo.reset()
