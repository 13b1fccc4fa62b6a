"""Which tensors of a folder make which of a model: itself, or for a stack of experts the single experts of a file.

Transformers keeps the experts of a mixture as one stack, and writes most of them one by one, under names of their own.
Its table of how to read such files, :func:`transformers.conversion_mapping.get_model_conversion_mapping`, is asked
here, for names alone. Its loader would then make the whole stack; here every stored tensor is a :class:`Block` of one,
and a rank reads what of a block is in its shard.
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
from compile_muon.files.tensors import Box, TensorFacts

__all__ = ["Block", "Experts", "Origins", "boxes", "origins_of"]


@dataclass(frozen=True)
class Block:
    """Where in a tensor of the model a stored one is.

    Args:
        stored: its name in the folder.
        start, shape: of the block.
        expert: whether it has no dim for the experts, which the block has.
    """

    stored: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    expert: bool = False


def boxes(blocks: Iterable[Block], region: Sequence[slice], local: Tensor) -> Iterator[Box]:
    """What to read of ``blocks`` into ``local``, which is ``region`` of the whole."""
    for block in blocks:
        first = [max(start, part.start) for start, part in zip(block.start, region, strict=True)]
        last = [
            min(start + size, part.stop) for start, size, part in zip(block.start, block.shape, region, strict=True)
        ]
        if any(stop <= start for start, stop in zip(first, last, strict=True)):
            continue
        here = tuple(slice(f - part.start, s - part.start) for f, s, part in zip(first, last, region, strict=True))
        offsets = tuple(f - start for f, start in zip(first, block.start, strict=True))
        target = local[here]
        yield Box(block.stored, offsets[1:], target[0]) if block.expert else Box(block.stored, offsets, target)


class Experts:
    """The single experts that make one stack.

    Args:
        patterns: the table's, in their order: gate and up, say.
        dim: of the stack, along which those lie one behind the other; ignored for one pattern.
    Attributes:
        stored: names in the folder by number, for each pattern.
    """

    def __init__(self, patterns: tuple[str, ...], dim: int) -> None:
        self.patterns, self.dim = patterns, dim
        self.stored: list[dict[int, str]] = [{} for _ in patterns]

    def blocks(
        self, shape: tuple[int, ...], facts: Mapping[str, TensorFacts]
    ) -> tuple[list[Block], list[str], list[str], list[str]]:
        """The blocks of a stack of this shape; names of experts that are missing; what does not fit; what is too much.

        All sources have the same share of ``dim``, as gate and up have.
        """
        count, expected = shape[0], list(shape[1:])
        shares = len(self.patterns)
        if shares > 1:
            expected[self.dim - 1] //= shares
        found, missing, wrong = [], [], []
        for place, stored in enumerate(self.stored):
            for expert in range(count):
                name = stored.get(expert)
                if name is None:
                    missing.append(self._name(place, expert))
                elif list(facts[name].shape) != expected:
                    wrong.append(f"{name}: has shape {list(facts[name].shape)}, an expert's in the model {expected}")
                else:
                    start = [expert] + [0] * len(expected)
                    if shares > 1:
                        start[self.dim] = place * expected[self.dim - 1]
                    found.append(Block(name, tuple(start), (1, *expected), expert=True))
        more = [name for stored in self.stored for expert, name in stored.items() if expert >= count]
        return found, missing, wrong, more

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a stack of this shape can have such experts."""
        return self.dim < len(shape) and (len(self.patterns) == 1 or shape[self.dim] % len(self.patterns) == 0)

    def _name(self, place: int, expert: int) -> str:
        """What an expert that is not there would be called, after one that is."""
        like = self.stored[place] or next(stored for stored in self.stored if stored)
        number, stored = next(iter(like.items()))
        words = stored.split(".")
        at = max((i for i, word in enumerate(words) if word == str(number)), default=None)
        tail = self.patterns[place].partition("*.")[2].replace("\\", "").rstrip("$").split(".")
        if at is None:
            return f"expert {expert} of {self.patterns[place]} beside {stored}"
        return ".".join([*words[:at], str(expert), *(words[at + 1 :] if self.stored[place] else tail)])


@dataclass
class Origins:
    """Where a model's tensors are in a folder.

    Args:
        of: a stored name, or experts, by name in the model.
        problems: what cannot be read, or is there twice.
        refused: names in the model that ``problems`` are about.
        unused: names in the folder that nothing in the model is made of.
    """

    of: dict[str, str | Experts] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    unused: list[str] = field(default_factory=list)


def origins_of(module: nn.Module, stored: Iterable[str], known: set[str]) -> Origins:
    """Find what in a folder makes which tensor of a model; nothing is read.

    Args:
        module: a Transformers model has a table; of others, and where the folder has the model's names only, a name
            stands for itself.
        stored: names in the folder.
        known: all names in the model.
    """
    stored = list(stored)
    expected = _expected(module)
    unused = [name for name in stored if name not in known]
    renamed = _renamed(module, stored, known) if unused else None
    if renamed is None:
        return Origins({name: name for name in stored if name in known}, unused=list(filterfalse(expected, unused)))
    found = Origins()
    unreadable: dict[str, tuple[Any, list[str]]] = {}
    for name, target, pattern, converter, seen in renamed:
        if target not in known and name in known:  # as Transformers decides
            target, pattern = name, None
        if target not in known:
            found.unused += [] if expected(target) else [name]
        elif pattern is None:
            _claim(found, target, name)
        else:
            match = _number(pattern, seen) if _stacks(converter) else None
            if match is None:
                unreadable.setdefault(target, (converter, []))[1].append(name)
                first, *others = converter.target_patterns
                found.refused |= {target, *(target.replace(first, other) for other in others)}
            else:
                _claim_expert(found, target, name, converter, pattern, match)
    for target, (converter, names) in unreadable.items():
        how = " and ".join(map(str, converter.operations))
        found.problems.append(f"{target}: is made of {listed(names)} by {how}, which is not done here")
    return found


def _expected(module: nn.Module) -> Callable[[str], bool]:
    """Whether a model of Transformers does not mind a name that it does not have: a layer for another decoding, say."""
    patterns = getattr(module, "_keys_to_ignore_on_load_unexpected", None)
    patterns = list(patterns) if isinstance(patterns, (list, tuple, set, frozenset)) else []
    return lambda name: any(re.search(pattern, name) for pattern in patterns)


def _claim(found: Origins, target: str, name: str) -> None:
    before = found.of.setdefault(target, name)
    if before != name:
        what = before if isinstance(before, str) else _an_expert(before)
        _twice(found, target, f"{what}, {name}: are both {target}")


def _claim_expert(found: Origins, target: str, name: str, converter: Any, pattern: str, number: int) -> None:
    patterns = tuple(converter.source_patterns)
    dim = converter.operations[1].dim if len(patterns) > 1 else 0
    experts = found.of.setdefault(target, Experts(patterns, dim))
    if isinstance(experts, str):
        _twice(found, target, f"{experts}, {name}: are both {target}")
    elif experts.patterns != patterns:
        _twice(found, target, f"{_an_expert(experts)}, {name}: are both an expert of {target}")
    else:
        other = experts.stored[patterns.index(pattern)].setdefault(number, name)
        if other != name:
            _twice(found, target, f"{other}, {name}: are both expert {number} of {target}")


def _an_expert(experts: Experts) -> str:
    return next(name for stored in experts.stored for name in stored.values())


def _twice(found: Origins, target: str, problem: str) -> None:
    if target not in found.refused:  # the first of many
        found.problems.append(problem)
        found.refused.add(target)


# ------------------------------------------------------------------------------------------ Transformers


def _renamed(
    module: nn.Module, stored: Iterable[str], known: set[str]
) -> list[tuple[str, str, str | None, Any, str]] | None:
    """By Transformers' table, in the order in which a group of renamings expects names.

    Returns:
        Of each stored name: itself, the model's, the pattern and converter that made it, and what that sees of it; the
        pattern is None where it was none. None for other models, and where Transformers has no table; it is not
        imported for the question.
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
    renamings = [each for each in table if isinstance(each, WeightRenaming)]
    converters = [each for each in table if isinstance(each, WeightConverter)]
    prefix = module.base_model_prefix or None
    names = dict.fromkeys(known, True)  # of which Transformers asks only whether they are there
    made_by = {pattern: each for each in converters for pattern in each.source_patterns}
    found = []
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, names)
        seen = rename_source_key(name, renamings, [], None, None)[0] if pattern else ""
        found.append((name, target, pattern, made_by.get(pattern), seen))
    return found


def _stacks(converter: Any) -> bool:
    """Whether it puts single experts into one stack, those of several patterns side by side."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    merge, *rest = converter.operations
    patterns, targets = converter.source_patterns, converter.target_patterns
    if type(merge) is not MergeModulelist or merge.dim != 0 or len(targets) != 1:
        return False
    if any(pattern.count("*") != 1 or "*." not in pattern for pattern in patterns):
        return False
    if len(patterns) == 1:
        return not rest
    joined = len(rest) == 1 and type(rest[0]) is Concatenate and rest[0].dim > 0
    return joined and getattr(rest[0], "num_shards_attribute", None) is None


def _number(pattern: str, name: str) -> int | None:
    """Of an expert, which stands where the table has a ``*``."""
    match = re.search(pattern.replace("*.", r"(?P<expert>\d+)\."), name)
    return None if match is None else int(match["expert"])
