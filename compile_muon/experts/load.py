"""Origins of a model's tensors in a folder: a stored tensor, or for a stack of experts many stored single experts.

Transformers keeps the experts of a mixture as one stack, and stores most of them one by one, under other names. The
names come from its table, :func:`transformers.conversion_mapping.get_model_conversion_mapping`. Its loader would build
the whole stack; here every stored expert is a :class:`Block` of the stack, and a rank reads only the overlap of each
block with its shard.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import Any

from torch import Tensor, nn

from compile_muon.errors import listed
from compile_muon.files.tensors import Box, TensorFacts, common, indices_of, volume, within


@dataclass(frozen=True)
class Block:
    """A block of a model's tensor that one stored tensor fills."""

    stored: str  # name in the folder
    start: tuple[int, ...]  # of the block in the model's tensor
    shape: tuple[int, ...]  # of the block
    expert: bool = False  # whether the stored tensor is one expert, without the block's first dim of size 1


def boxes(blocks: Iterable[Block], region: Sequence[slice], local: Tensor) -> Iterator[Box]:
    """Yield the boxes to read from `blocks` into `local`, the shard that covers `region` of the model's tensor."""
    part = tuple(range(cut.start, cut.stop) for cut in region)
    for block in blocks:
        both = common(indices_of(block.start, block.shape), part)
        if not volume(both):
            continue
        target = local[within(both, part)]
        offsets = tuple(here.start - start for here, start in zip(both, block.start, strict=True))
        yield Box(block.stored, offsets[1:], target[0]) if block.expert else Box(block.stored, offsets, target)


class Experts:
    """The stored experts of one stack. `patterns`: the table's source patterns, in order (gate and up, for example).
    `dim`: dimension of the stack along which the sources are concatenated; ignored for one pattern."""

    def __init__(self, patterns: tuple[str, ...], dim: int) -> None:
        self.patterns, self.dim = patterns, dim
        self.stored: list[dict[int, str]] = [{} for _ in patterns]  # per pattern: expert's number -> name in the folder

    def blocks(
        self, shape: tuple[int, ...], facts: Mapping[str, TensorFacts]
    ) -> tuple[list[Block], list[str], list[str], list[str]]:
        """Return the blocks of a stack of `shape`, missing names, errors about shapes, and names beyond the stack. All
        patterns have equal shares of ``dim``, as gate and up have."""
        count, expected = shape[0], list(shape[1:])
        shares = len(self.patterns)
        if shares > 1:
            expected[self.dim - 1] //= shares
        stack_blocks, missing, misfits = [], [], []
        for place, stored in enumerate(self.stored):
            for expert in range(count):
                name = stored.get(expert)
                if name is None:
                    missing.append(self._name(place, expert))
                elif list(facts[name].shape) != expected:
                    misfits.append(f"{name}: has shape {list(facts[name].shape)}, an expert's in the model {expected}")
                else:
                    start = [expert] + [0] * len(expected)
                    if shares > 1:
                        start[self.dim] = place * expected[self.dim - 1]
                    stack_blocks.append(Block(name, tuple(start), (1, *expected), expert=True))
        surplus = [name for stored in self.stored for expert, name in stored.items() if expert >= count]
        return stack_blocks, missing, misfits, surplus

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Return whether a stack of `shape` can be concatenated from these patterns."""
        return self.dim < len(shape) and (len(self.patterns) == 1 or shape[self.dim] % len(self.patterns) == 0)

    def _name(self, place: int, expert: int) -> str:
        """Return the name that a missing expert would have, derived from one that is stored."""
        siblings = self.stored[place] or next(stored for stored in self.stored if stored)
        number, stored = next(iter(siblings.items()))
        words = stored.split(".")
        number_at = max((i for i, word in enumerate(words) if word == str(number)), default=None)
        tail = self.patterns[place].partition("*.")[2].replace("\\", "").rstrip("$").split(".")
        if number_at is None:
            return f"expert {expert} of {self.patterns[place]} beside {stored}"
        return ".".join([*words[:number_at], str(expert), *(words[number_at + 1 :] if self.stored[place] else tail)])


@dataclass
class Origins:
    """Origins of a model's tensors in a folder."""

    of: dict[str, str | Experts] = field(default_factory=dict)  # name in the model -> name in the folder, or experts
    problems: list[str] = field(default_factory=list)  # texts about unreadable or duplicate tensors
    refused: set[str] = field(default_factory=set)  # names in the model that `problems` are about
    unused: list[str] = field(default_factory=list)  # names in the folder without a tensor in the model


def origins_of(module: nn.Module, stored: Iterable[str], model_names: set[str]) -> Origins:
    """Map `model_names` to the names `stored` in a folder; read nothing. Names map to themselves if the folder has
    only the model's names, or the model has no table of Transformers."""
    stored = list(stored)
    expected = _expected(module)
    unused = [name for name in stored if name not in model_names]
    renamed = _renamed(module, stored, model_names) if unused else None
    if renamed is None:
        return Origins(
            {name: name for name in stored if name in model_names}, unused=list(filterfalse(expected, unused))
        )
    origins = Origins()
    unreadable: dict[str, tuple[Any, list[str]]] = {}
    for name, target, pattern, converter, source_name in renamed:
        if target not in model_names and name in model_names:  # the choice of Transformers' loader
            target, pattern = name, None
        if target not in model_names:
            origins.unused += [] if expected(target) else [name]
        elif pattern is None:
            _claim(origins, target, name)
        else:
            match = _number(pattern, source_name) if _stacks(converter) else None
            if match is None:
                unreadable.setdefault(target, (converter, []))[1].append(name)
                first, *others = converter.target_patterns
                origins.refused |= {target, *(target.replace(first, other) for other in others)}
            else:
                _claim_expert(origins, target, name, converter, pattern, match)
    for target, (converter, names) in unreadable.items():
        how = " and ".join(map(str, converter.operations))
        origins.problems.append(f"{target}: is made of {listed(names)} by {how}, which is not done here")
    return origins


def _expected(module: nn.Module) -> Callable[[str], bool]:
    """Return a predicate of stored names that the model declares to ignore, such as layers for other decodings."""
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None)
    patterns = list(patterns) if isinstance(patterns, (list, tuple, set, frozenset)) else []
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _claim(origins: Origins, target: str, name: str) -> None:
    origin = origins.of.setdefault(target, name)
    if origin != name:
        origin_name = origin if isinstance(origin, str) else _an_expert(origin)
        _twice(origins, target, f"{origin_name}, {name}: are both {target}")


def _claim_expert(origins: Origins, target: str, name: str, converter: Any, pattern: str, number: int) -> None:
    patterns = tuple(converter.source_patterns)
    dim = converter.operations[1].dim if len(patterns) > 1 else 0
    experts = origins.of.setdefault(target, Experts(patterns, dim))
    if isinstance(experts, str):
        _twice(origins, target, f"{experts}, {name}: are both {target}")
    elif experts.patterns != patterns:
        _twice(origins, target, f"{_an_expert(experts)}, {name}: are both an expert of {target}")
    else:
        other = experts.stored[patterns.index(pattern)].setdefault(number, name)
        if other != name:
            _twice(origins, target, f"{other}, {name}: are both expert {number} of {target}")


def _an_expert(experts: Experts) -> str:
    return next(name for stored in experts.stored for name in stored.values())


def _twice(origins: Origins, target: str, problem: str) -> None:
    if target not in origins.refused:  # report one of many duplicates
        origins.problems.append(problem)
        origins.refused.add(target)


# ------------------------------------------------------------------------------------------ Transformers


def _renamed(
    module: nn.Module, stored: Iterable[str], model_names: set[str]
) -> list[tuple[str, str, str | None, Any, str]] | None:
    """Rename stored names by Transformers' table, in the natural order that its renamings expect.

    Returns (stored name, name in the model, pattern and converter that matched, name that the converter saw) for each
    name; without a match the pattern is None. Returns None for other models, without importing Transformers, and for
    versions without a table.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        return None
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:
        return None
    table = get_model_conversion_mapping(module)
    renamings = [rule for rule in table if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in table if isinstance(rule, WeightConverter)]
    prefix = module.base_model_prefix or None
    names = dict.fromkeys(model_names, True)  # Transformers reads only the keys
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    rows = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, names)
        source_name = rename_source_key(name, renamings, [], None, None)[0] if pattern else ""
        rows.append((name, target, pattern, converter_of.get(pattern), source_name))
    return rows


def _stacks(converter: Any) -> bool:
    """Return whether `converter` stacks single experts along dim 0, and concatenates several patterns, no more."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    merge, *rest = converter.operations
    patterns, targets = converter.source_patterns, converter.target_patterns
    if type(merge) is not MergeModulelist or merge.dim != 0 or len(targets) != 1:
        return False
    if any(pattern.count("*") != 1 or "*." not in pattern for pattern in patterns):
        return False
    if len(patterns) == 1:
        return not rest
    concatenates = len(rest) == 1 and type(rest[0]) is Concatenate and rest[0].dim > 0
    return concatenates and getattr(rest[0], "num_shards_attribute", None) is None


def _number(pattern: str, name: str) -> int | None:
    """Return the expert's number, at the place of the ``*`` in `pattern`, or None without a match."""
    match = re.search(pattern.replace("*.", r"(?P<expert>\d+)\."), name)
    return None if match is None else int(match["expert"])
