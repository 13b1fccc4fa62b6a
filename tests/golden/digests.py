"""The digest and the summary of a graph, and the differences between two summaries in words.

A digest depends on the order, targets, arguments, shapes, dtypes, strides and buckets of nodes, not on their names. A
second digest leaves out the order.
"""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import ndiff
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from compile_muon.passes.collectives import axis_of_group, bytes_sent, collectives, is_wait
from compile_muon.passes.language.work import work_of

#: the products that places of collectives refer to
_PRODUCTS = {
    "aten.mm": "matmul",
    "aten.addmm": "matmul",
    "aten.bmm": "matmul",
    "muon_zero.newton_schulz": "newton_schulz",
}

Summary = dict[str, Any]


def summary(gm: GraphModule, groups: Mapping[str, str]) -> Summary:
    """The entry that is stored for a graph; ``groups``: of each process group by name its axis and ranks, which are the
    same in every process."""
    nodes = list(gm.graph.nodes)
    place = {node: str(number) for number, node in enumerate(nodes)}
    lines, content, kinds = [], {}, defaultdict(list)
    for number, node in enumerate(nodes):
        lines.append(_line(node, groups, lambda source: f"%{place[source]}"))
        # Inputs are what they are by their place.
        position = str(number) if node.op == "placeholder" else ""
        content[node] = _hash([position, _line(node, groups, content.__getitem__)])
        kinds[_name(node)].append(_line(node, groups, lambda source: _value(source.meta.get("val"))))
    return {
        "digest": _hash(lines),
        "unordered": _hash(sorted(content.values())),
        "ops": {name: f"{len(each)} {_hash(sorted(each))[:6]}" for name, each in sorted(kinds.items())},
        "collectives": list(_collectives(gm, groups)),
    }


def _hash(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _name(node: Node) -> str:
    if node.op != "call_function":
        return node.op
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _line(node: Node, groups: Mapping[str, str], source: Callable[[Node], str]) -> str:
    # An input's name says nothing.
    arguments = (node.args, node.kwargs) if node.op != "placeholder" else ()
    work = work_of(node)
    part = "" if work is None else f"{work.category.value} {work.bucket} {work.nbytes} {sorted(work.needs)}"
    return " ".join(
        [_name(node), *(_argument(each, groups, source) for each in arguments), _value(node.meta.get("val")), part]
    )


def _argument(argument: Any, groups: Mapping[str, str], source: Callable[[Node], str]) -> str:
    if isinstance(argument, Node):
        return source(argument)
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(_argument(each, groups, source) for each in argument)}]"
    if isinstance(argument, Mapping):
        return f"{{{', '.join(f'{key}: {_argument(each, groups, source)}' for key, each in sorted(argument.items()))}}}"
    if isinstance(argument, str):  # ranges have the number of a frame in their names
        return groups.get(argument, repr(re.sub(r"^frame\d+", "frame", argument)))
    return str(argument)


def _value(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{list(value.stride())}@{value.device.type}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    return type(value).__name__ if value is None or not isinstance(value, (int, float)) else str(value)


def _collectives(gm: GraphModule, groups: Mapping[str, str]) -> Iterator[str]:
    """Collectives in order: purpose, kind, group, bytes, and behind which products each starts and ends."""
    behind, seen, last = {}, Counter[str](), "the start"
    for node in gm.graph.nodes:
        behind[node] = last
        if (product := _PRODUCTS.get(_name(node))) is not None:
            seen[product] += 1
            last = f"{product} {seen[product]}"
    for node, kind in collectives(gm):
        work, group = work_of(node), node.args[-1]
        what = "the model's" if work is None else f"{work.category.value} {work.bucket}:"
        waits = ", ".join(behind[user] for user in node.users if is_wait(user))
        sent = bytes_sent(node, kind, axis_of_group(group))
        yield f"{what} {kind} over {groups[group].split(' ')[0]}, {sent} bytes, behind {behind[node]}, to {waits}"


def differences(old: Summary, new: Summary) -> list[str]:
    """Differences in words, of collectives each line that is gone or new; none where graphs are the same."""
    if old["digest"] == new["digest"]:
        return []
    said = list(_operations(old["ops"], new["ops"]))
    said += [line for line in ndiff(old["collectives"], new["collectives"]) if line[0] in "-+"]
    if old["unordered"] == new["unordered"]:
        said.append("same nodes, other order")
    return said or ["the same operations read other nodes"]


def _operations(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    counts, otherwise = [], []
    for name in sorted({*old, *new}):
        (before, shape), (after, other) = (ops.get(name, "0 ").split(" ") for ops in (old, new))
        if change := int(after) - int(before):
            counts.append(f"{change:+d} {name}")
        elif shape != other:
            otherwise.append(name)
    if counts:
        yield ", ".join(counts)
    if otherwise:
        yield f"other arguments, shapes or strides of {', '.join(otherwise)}"
