"""What ``optimizer.step()`` does outside of compiled code, as graphs: the survey, the writes, the refresh.

The same operations on tensors of the same shapes; Python between them, and the numbers on the host, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, GraphModule

from compile_muon.passes import Half
from compile_muon.passes.inline import inline
from compile_muon.passes.simulate import Played
from compile_muon.passes.spec import ParamSpec, decode_dtype
from compile_muon.passes.torch_private import fresh_context
from compile_muon.passes.work import Category, Work
from compile_muon.runtime.account import Account
from compile_muon.runtime.replicas import gathered_alone, gathers, last_gather, packed, unpacked
from compile_muon.runtime.survey import not_finite, squares

__all__ = ["commit_graph", "refresh_graph", "survey_graph"]

_c10d = torch.ops._c10d_functional


class _Sketch:
    """A graph of inputs, and of what functions make of them."""

    def __init__(self) -> None:
        self._fake = FakeTensorMode()
        self._gm = GraphModule(torch.nn.Module(), Graph())
        self._output = self._gm.graph.output(())

    def inputs(self, name: str, tensors: Sequence[Tensor]) -> list[torch.fx.Node]:
        found = []
        for number, like in enumerate(tensors):
            with self._gm.graph.inserting_before(self._output):
                node = self._gm.graph.placeholder(f"{name}_{number}")
            node.meta["val"] = self._fake.from_tensor(like.detach(), static_shapes=True)
            found.append(node)
        return found

    def add(
        self, function: Callable[..., Sequence[Tensor]], inputs: Sequence[torch.fx.Node], work: Work | None = None
    ) -> list[torch.fx.Node]:
        with fresh_context(self._fake):
            return inline(self._gm, self._output, function, inputs, work)

    def done(
        self, name: str, *, counted: bool = True, drops: tuple[str, ...] = (), finished_by_forward: bool = False
    ) -> Played:
        self._gm.recompile()
        return Played(
            self._gm,
            Half.STEP,
            name,
            drops=drops,
            eager=True,
            counted=counted,
            finished_by_forward=finished_by_forward,
        )


def survey_graph(muon: Sequence[Account], adamw: Sequence[Account], group: str | None) -> Played:
    """Norms of gradients, finiteness of state, their sums over the ranks, and the wait for them.

    Args:
        group: name of that of all ranks; None for one rank.
    """
    sketch = _Sketch()
    gradients = sketch.inputs("gradient", [account.local for account in (*muon, *adamw)])
    state = sketch.inputs("momentum", [account.momentum for account in muon])
    state += sketch.inputs("moment", [account.local for account in adamw for _ in range(2)])

    def survey(*tensors: Tensor) -> list[Tensor]:
        given, kept = tensors[: len(gradients)], tensors[len(gradients) :]
        found = torch.cat([squares(given), *([not_finite(kept)] if kept else [])])
        return [found if group is None else _c10d.wait_tensor(_c10d.all_reduce(found, "sum", group))]

    sketch.add(survey, [*gradients, *state], Work(Category.SURVEY, 0))
    return sketch.done("survey", counted=False)


def commit_graph(muon: Sequence[Account], adamw: Sequence[Account]) -> Played:
    """The writes of ``commit_muon`` and ``commit_adamw``, a tensor at a time."""
    sketch = _Sketch()
    for account in muon:
        assert account.spec.muon is not None
        local = account.local
        direction = torch.empty(local.shape, dtype=decode_dtype(account.spec.muon.dtype), device=local.device)
        sketch.add(
            _write_muon, sketch.inputs(account.name.replace(".", "_"), [local, account.momentum, local, direction])
        )
    for account in adamw:
        sketch.add(_write_adamw, sketch.inputs(account.name.replace(".", "_"), [account.local] * 4))
    return sketch.done("commit")


def _write_muon(param: Tensor, momentum: Tensor, gradient: Tensor, direction: Tensor) -> list[Tensor]:
    momentum.lerp_(gradient, 0.1)
    return [param.mul_(0.9).add_(direction, alpha=0.1)]


def _write_adamw(param: Tensor, gradient: Tensor, first: Tensor, second: Tensor) -> list[Tensor]:
    """The operations of ``torch.optim.adamw`` on one tensor."""
    param.mul_(0.9)
    first.lerp_(gradient, 0.1)
    second.mul_(0.9).addcmul_(gradient, gradient, value=0.1)
    denominator = (second.sqrt() / 0.9).add_(1e-8)
    return [param.addcdiv_(first, denominator, value=-0.1)]


def _start(specs: Sequence[ParamSpec], *tensors: Tensor) -> list[Tensor]:
    """As ``replicas.Refresh.start`` of tensors: what is under way, of the pieces and the replicas that take them."""
    pieces, replicas = tensors[: len(specs)], tensors[len(specs) :]
    axis, widths = last_gather(specs)
    flat = packed(specs, pieces).view(-1)
    if gathered_alone(specs[0]):
        return [_c10d.all_gather_into_tensor_out(flat, axis.size, axis.group, out=replicas[0].view(-1))]
    if specs[0].layout.pairwise:
        splits = [sum(widths)] * axis.size
        return [_c10d.all_to_all_single(flat, splits, splits, axis.group)]
    return [_c10d.all_gather_into_tensor(flat, axis.size, axis.group)]


def _finish(specs: Sequence[ParamSpec], under_way: Tensor, *replicas: Tensor) -> list[Tensor]:
    """As ``replicas.Refresh.finish``."""
    received = _c10d.wait_tensor(under_way)
    if gathered_alone(specs[0]):
        return [received]
    weights = unpacked(specs, received, replicas)
    return [replica.copy_(weight) for replica, weight in zip(replicas, weights, strict=True)]


def refresh_graph(accounts: Sequence[Account]) -> Played:
    """What ``start_refresh`` gathers, and behind all that, how each gather is finished by whoever reads a weight."""
    sketch = _Sketch()
    started = []
    for number, bucket in enumerate(gathers(accounts)):
        specs = [account.spec for account in bucket]
        work = Work(Category.REFRESH, number)
        pieces = sketch.inputs(f"piece_{number}", [account.local for account in bucket])
        replicas = sketch.inputs(f"replica_{number}", [a.replica for a in bucket if a.replica is not None])
        (under_way,) = sketch.add(partial(_start, specs), [*pieces, *replicas], work)
        started.append((specs, under_way, replicas, work))
    for specs, under_way, replicas, work in started:
        sketch.add(partial(_finish, specs), [under_way, *replicas], work)
    return sketch.done("refresh", drops=("exchange",), finished_by_forward=True)
