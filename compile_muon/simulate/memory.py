"""Count the live bytes while graphs run, by category, from the order of their nodes alone.

Memory lives from the node that allocates it to its last reader, views included; an output outlives the graph; the input
of a collective lives until its wait. What forward saves for backward is freed at its last reader there. A CUDA graph
allocates from a private pool, which keeps the most that was ever live in it. Results inside a fused kernel take no
memory, and generated code computes a pointwise result in the place of an input that nothing else reads. The allocator's
rounding and cache do not count.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from compile_muon.passes.collectives import is_collective, is_wait
from compile_muon.passes.joint.move import BRING_BACK, MOVE_OUT
from compile_muon.passes.language.work import Category, work_of
from compile_muon.passes.lowering.aliases import base, nbytes
from compile_muon.passes.pipeline import GraphKind
from compile_muon.simulate.fusion import Kernel, is_pointwise
from compile_muon.simulate.machine import Machine
from compile_muon.simulate.newton_schulz import Call
from compile_muon.simulate.played import SimulatedGraph

_OF_WORK = {
    Category.GATHER: "gathered",
    Category.REFRESH: "gathered",
    Category.REDUCE: "gradients",
    Category.EXCHANGE: "exchange",
    Category.CHECKS: "step",
}


@dataclass(frozen=True)
class LiveBytes:
    """Bytes that are live at one time."""

    # The caller's resident categories, "gathered" (weights), "activations" (saved for backward), "intermediates" (other
    # results of forward and backward; in a language model mostly logits), "gradients", "exchange" (matrices,
    # directions and their buffers), "step" (AdamW and norms) and "pools" (idle bytes of CUDA graphs' private pools).
    by_category: Mapping[str, int] = field(default_factory=dict)
    largest: str = ""  # of the intermediates: operation, shape, dtype and bytes; empty without any

    @property
    def total(self) -> int:
        return sum(self.by_category.values())


@dataclass(eq=False)
class _Storage:
    """Memory that a node allocates."""

    pool: str
    category: str
    nbytes: int
    maker: Node
    readers: int = 0  # graph outputs saved for backward that show it

    def __str__(self) -> str:
        value = self.maker.meta["val"]
        name = getattr(getattr(self.maker.target, "overloadpacket", None), "__name__", self.maker.name)
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{name.strip('_')} {list(map(int, value.shape))} {dtype}, {self.nbytes / 2**30:.2f} GiB"


class Memory:
    """The live bytes while graphs run one after the other.

    `resident` are bytes by category that are live all the time; `machine` runs Newton-Schulz.
    """

    def __init__(self, resident: Mapping[str, int], machine: Machine) -> None:
        #: bytes by category, of the allocator's common pool ("") and of each private one
        self._live = defaultdict[str, Counter[str]](Counter, {"": Counter(resident)})
        #: bytes that each private pool has had live at most
        self._most: Counter[str] = Counter()
        self._machine = machine
        self._saved: dict[str, list[_Storage | None]] = {}
        self._persistent: dict[str, list[_Storage]] = {}
        self._returned: dict[tuple[str, GraphKind], list[_Storage]] = {}
        self._intermediates: dict[_Storage, None] = {}
        self._peak, self._largest = Counter(resident), ""
        #: bytes outside of private pools, and all, at the peak
        self._reached = (self._peak.total(), self._peak.total())

    @property
    def peak(self) -> LiveBytes:
        """The most so far: pools are always full, so it is reached when most is live outside of them."""
        outside, live = self._reached
        idle = {"pools": self._most.total() - (live - outside)} if self._most else {}
        return LiveBytes({**self._peak, **idle}, self._largest)

    def run(self, played: SimulatedGraph, kernels: Mapping[Node, Kernel], *, generated: bool, last: bool) -> None:
        """Count the bytes of one run of a graph; `kernels`: each by the node in whose place it runs.

        `generated`: by Inductor, whose results may take the place of inputs. `last`: of the step's runs of this graph.
        """
        gm, kind, frame = played.gm, played.kind, played.frame
        for live in self._live.values():
            for category in played.drops:
                live[category] = 0
        # Replayed forward and backward graphs share a private pool; those of the step have another.
        pool = "" if not played.replayed else "step" if kind is GraphKind.STEP else "model"
        place = {node: i for i, node in enumerate(gm.graph.nodes)}
        kernel_results = {node for kernel in kernels.values() for node in kernel.results}
        computed: dict[Node, list[int]] = {}  # places of the kernels that compute a node: an inlined one in each reader
        for first, kernel in kernels.items():
            for node in kernel.nodes:
                computed.setdefault(node, []).append(place[first])
        outputs = [node for node in tree_leaves(gm.graph.output_node().args) if isinstance(node, Node)]
        saved = outputs[played.user_outputs :] if kind is GraphKind.FORWARD else []
        output_memory, saved_memory = {base(node) for node in outputs}, {base(node) for node in saved}
        storages: dict[Node, _Storage] = {}
        allocated: dict[int, list[_Storage]] = {}
        last_read: dict[Node, int] = {}
        for node in gm.graph.nodes:
            memory = base(node)
            if (
                memory.op != "call_function"
                or memory.target is MOVE_OUT
                or (memory in computed and memory not in kernel_results)
            ):
                continue
            if memory not in storages and _is_tensor(memory):
                category = _category(memory, kind, saved_memory, output_memory)
                storages[memory] = _Storage(pool, category, nbytes(memory), memory)
                maker = _maker(memory)
                allocated.setdefault(min(computed.get(maker, [place[maker]])), []).append(storages[memory])
        # The inputs of a backward graph are first the values that forward saved, in that order.
        from_forward = self._saved.pop(frame, ()) if kind is GraphKind.BACKWARD else ()
        inputs = filter(_is_tensor, gm.graph.find_nodes(op="placeholder"))
        storages |= {node: storage for storage, node in zip(from_forward, inputs, strict=False) if storage is not None}
        for node in gm.graph.nodes:
            for shown in node.all_input_nodes:
                last_read[base(shown)] = max(last_read.get(base(shown), -1), _until(node, computed, place))
        freed: dict[int, list[_Storage]] = {}
        for memory, storage in storages.items():
            if memory not in output_memory or memory.op == "placeholder":
                freed.setdefault(last_read.get(memory, place[memory]), []).append(storage)
        replaced: dict[int, list[_Storage]] = {}
        for first, kernel in kernels.items() if generated else ():
            at = place[first]
            replaced[at] = _replaced(kernel, storages, freed.get(at, []))
            freed[at] = [storage for storage in freed.get(at, []) if storage not in replaced[at]]
        for node, i in place.items():
            self._free(replaced.get(i, ()))
            self._step(node, pool, allocated.get(i, ()), freed.get(i, ()))
        if played.again:
            persistent_inputs = gm.graph.find_nodes(op="placeholder")[-len(played.persistent) :]
            storages |= dict(zip(persistent_inputs, self._persistent.get(frame, ()), strict=False))
        if saved:
            self._saved[frame] = [storages.get(base(node)) for node in saved if _is_tensor(node)]
            for value in filter(None, self._saved[frame]):
                value.readers += 1
        if played.persistent and not played.again:
            self._persistent[frame] = [storages[base(outputs[place])] for place in played.persistent]
        for weight in self._persistent.get(frame, ()) if kind is GraphKind.FORWARD else ():
            weight.readers += (not played.again) - last  # later forwards are another reader, until the last has run
        # The run of the next micro-batch adds to these gradients, or replaces them: only one copy stays live.
        for storage in self._returned.get((frame, kind), ()):
            self._live[storage.pool][storage.category] -= storage.nbytes
        returned = [memory for memory in output_memory - saved_memory if memory.op == "call_function"]
        self._returned[frame, kind] = [storages[memory] for memory in returned if memory in storages]

    def _step(self, node: Node, pool: str, new_storages: Sequence[_Storage], freed: Sequence[_Storage]) -> None:
        for storage in new_storages:
            self._live[storage.pool][storage.category] += storage.nbytes
            if storage.category == "intermediates":
                self._intermediates[storage] = None
        is_newton_schulz = node.target is torch.ops.muon_zero.newton_schulz.default
        extra = Call(node, self._machine).workspace_bytes() if is_newton_schulz else 0
        live = self._live[pool]
        if extra:
            live["exchange"] += extra
        if pool:
            self._most[pool] = max(self._most[pool], live.total())
        reached = self._live[""].total(), sum(pool_live.total() for pool_live in self._live.values())
        if reached > self._reached:
            self._reached, self._peak = reached, Counter[str]()
            for pool_live in self._live.values():
                self._peak.update(pool_live)
            self._largest = str(max(self._intermediates, key=lambda storage: storage.nbytes, default=""))
        if extra:
            live["exchange"] -= extra
        self._free(freed)

    def _free(self, storages: Iterable[_Storage]) -> None:
        for storage in storages:
            storage.readers -= 1
            if storage.readers <= 0:
                self._live[storage.pool][storage.category] -= storage.nbytes
                self._intermediates.pop(storage, None)


def _replaced(kernel: Kernel, storages: Mapping[Node, _Storage], freed: Sequence[_Storage]) -> list[_Storage]:
    """Return the storages whose memory pointwise results of a kernel take: its last reader frees them."""
    inputs = {base(source) for node in kernel.nodes for source in node.all_input_nodes}
    reusable_inputs = [x for x in inputs if x in storages and storages[x] in freed and storages[x].readers <= 1]
    replaced = []
    for result in filter(is_pointwise, kernel.results):
        for memory in reusable_inputs:
            if nbytes(memory) == nbytes(result) and memory.meta["val"].dtype == result.meta["val"].dtype:
                reusable_inputs.remove(memory)
                replaced.append(storages[memory])
                break
    return replaced


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _maker(memory: Node) -> Node:
    """Return the node that allocates `memory`: for an item of a list, the op that returns the list."""
    source = memory.args[0] if not isinstance(memory.target, torch._ops.OpOverload) and memory.args else None
    return source if isinstance(source, Node) else memory


def _until(reader: Node, computed: Mapping[Node, list[int]], place: Mapping[Node, int]) -> int:
    """Return the place in the graph at which `reader` has read its inputs: its kernel's, or a collective's wait."""
    if is_collective(reader):
        return max((place[user] for user in reader.users if is_wait(user)), default=place[reader])
    return max(computed.get(reader, [place[reader]]))


def _category(memory: Node, kind: GraphKind, saved: Collection[Node], returned: Collection[Node]) -> str:
    work = work_of(memory)
    if work is not None:
        return _OF_WORK[work.category]
    if memory in saved or memory.target is BRING_BACK or any(user.target is MOVE_OUT for user in memory.users):
        return "activations"
    if kind is GraphKind.STEP:
        return "step"
    if kind is not GraphKind.BACKWARD:
        return "intermediates"
    reduced = any((of := work_of(user)) is not None and of.category is Category.REDUCE for user in memory.users)
    return "gradients" if reduced or memory in returned else "intermediates"
