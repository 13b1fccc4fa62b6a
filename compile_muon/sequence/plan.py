"""Plan of sequence parallelism: the stacks of blocks whose positions are cut, and the hooks at their ends.

Every rank of a group has the whole batch. Ahead of its blocks (embeddings, merging of images, positions, masks) a model
computes all positions, so its code needs no offset of this rank. In front of the first block hidden states are cut;
attention exchanges positions for heads and sees the whole length, with the model's own mask; behind the last block
positions are joined, or head and loss stay cut.

Attention is found by Transformers' interface, or by calls of ``scaled_dot_product_attention`` in the blocks.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from compile_muon.agreement.compare import gather_objects, ranks_named
from compile_muon.config import SequenceParallelConfig
from compile_muon.config.checked import Mistakes
from compile_muon.errors import config_error, listed
from compile_muon.passes.sequence.place import Place
from compile_muon.passes.torch_private import group_named
from compile_muon.sequence.attention_interface import accepts_any, attends, exchange_in, has_causal_loss, loss_of
from compile_muon.sequence.batch import FIELD, Batch, Running, note_batch
from compile_muon.sequence.blocks import behind_tail, enter, intercepting, leave, takes_parts
from compile_muon.sequence.images import add_own_positions, collect, deal, deal_patches, grid_towers, vision_parts

_PLAN = "_sequence_plan"
_MIXING = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase)


@dataclass(frozen=True)
class Stack:
    """A stack: blocks that run one after the other."""

    path: str  # of the ``ModuleList``
    attentions: tuple[str, ...]  # paths of Transformers' attention modules; () where attention is a function
    passes_on: bool  # whether blocks hand keyword arguments on to attention, so that lengths need not divide
    tail: bool = False  # whether the modules behind the last block need all positions, see :mod:`.blocks`


@dataclass(eq=False)
class SequencePlan:
    """The parts of a model to cut, and after :meth:`apply` the state of this rank."""

    size: int  # ranks along ``sequence``
    ring: int  # groups of these ranks that keys and values go around
    stacks: tuple[Stack, ...]
    causal: str | None  # path of the module whose loss stays cut; None joins positions behind the last block
    images: tuple[str, str] | None = None  # paths of a vision tower, whose images are dealt out, and of its projector
    towers: tuple[str, ...] = ()  # paths of towers that take patches of several images
    place: Place | None = None  # of this rank; set by apply
    batch: Batch = field(default_factory=Batch)
    everyone: dist.ProcessGroup | None = None  # all ranks; set by apply
    unchecked: bool = False  # whether the first step still has to run ``check.check_first``

    @contextlib.contextmanager
    def wanting(self, wanted: str) -> Iterator[None]:
        """Set ``batch.wanted`` inside the ``with`` block, see :class:`~compile_muon.sequence.running.Batch`."""
        self.batch.wanted = wanted
        try:
            yield
        finally:
            self.batch.wanted = ""

    def differing_batches(self) -> str:
        """Return a clause about groups whose ranks have different batches, or ""; collective over all ranks."""
        if self.batch.digest is None or self.place is None or self.everyone is None:
            return ""
        ranks = dist.get_process_group_ranks(group_named(self.place.group))
        digests = gather_objects((tuple(ranks), int(self.batch.digest)), self.everyone)
        groups: dict[tuple[int, ...], set[int]] = {}
        for group, digest in digests:
            groups.setdefault(group, set()).add(digest)
        differing = [ranks_named(list(group)) for group, group_digests in groups.items() if len(group_digests) > 1]
        return f"{listed(differing)} share a sequence and were given different batches" if differing else ""

    def apply(self, model: nn.Module, place: Place, everyone: dist.ProcessGroup, *, compares: bool) -> None:
        """Hook the blocks, and replace attention and loss; no communication. `place`: of this rank in its group, in the
        order of the sequence. `everyone`: all ranks. `compares`: they exist and can compare batches."""
        self.place = ring_place = replace(place, ring=self.ring)
        self.everyone = everyone
        configs: dict[int, Any] = {}
        classes: dict[type, type] = {}  # equal blocks share a class, and so their compiled code
        stacks = [Running(ring_place, self.batch, tail=stack.tail) for stack in self.stacks]
        for stack, running in zip(self.stacks, stacks, strict=True):
            blocks: Any = model.get_submodule(stack.path)
            for number, block in enumerate(blocks):
                hook = enter(running, block, first=number == 0, passes_on=stack.passes_on)
                block.register_forward_pre_hook(hook, with_kwargs=True)
                if not stack.attentions:
                    block.__class__ = classes.setdefault(type(block), intercepting(type(block)))
                    block.__dict__["_sequence_running"] = running
            blocks[-1].register_forward_hook(leave(running, passes_on=stack.passes_on))
            owner = model.get_submodule(stack.path.rpartition(".")[0])
            if stack.attentions:
                owner.register_forward_hook(behind_tail(running))
            add_own_positions(owner, running)
            for path in stack.attentions:
                exchange_in(model.get_submodule(path), running, configs)
        if self.images is not None:
            tower, projector = map(model.get_submodule, self.images)
            image_running = Running(place, self.batch)
            tower.register_forward_pre_hook(deal(image_running), with_kwargs=True)
            projector.register_forward_hook(collect(image_running))
        for path in self.towers:
            deal_patches(model.get_submodule(path), Running(place, self.batch))
        first: Any = model if self.causal is None else model.get_submodule(self.causal)
        note = note_batch(self.batch, place, loss=self.causal is not None, compares=compares)
        first.register_forward_pre_hook(note, with_kwargs=True)
        if self.causal is not None:
            first.loss_function = loss_of(stacks[-1])
        model.__dict__[_PLAN] = self


def plan_of(model: nn.Module) -> SequencePlan | None:
    """Return the plan applied to `model` or to a module inside (of a compiled or wrapped model), or None."""
    return next((module.__dict__[_PLAN] for module in model.modules() if _PLAN in module.__dict__), None)


def plan_sequence(model: nn.Module, config: SequenceParallelConfig) -> SequencePlan:
    """Plan the cuts of `model`, which stays unchanged; raise a ConfigError about everything that cannot be cut."""
    mistakes = Mistakes()
    lists = {p: m for p, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    attentions = _attentions(lists)
    paths = config.blocks or tuple(path for path in attentions if not _sees_images(path))
    if config.blocks is None and len(paths) != 1:
        _check_model(model, mistakes)
        mistakes.raise_all()
        fitting = _fitting(lists, attentions)
        problem = f"finds other than one stack of blocks behind attention interfaces ({listed(list(paths)) or 'none'})"
        remedy = f"leave {FIELD} out: no other calls scaled_dot_product_attention and mixes positions by that alone"
        remedy = f'name the ModuleList, "blocks": ["{fitting[0]}"]' if fitting else remedy
        mistakes.add(config_error(FIELD, config.size, problem, remedy))
    if unknown := [path for path in paths if path not in lists]:
        problem = "is no ModuleList of the model"
        mistakes.add(config_error(f"{FIELD}.blocks", listed(unknown), problem, f"use some of {listed(list(lists))}"))
    mistakes.raise_all()
    _check_model(model, mistakes)
    stacks = []
    for path in paths:
        stack_attentions = attentions.get(path, ())
        _check_blocks(path, lists[path], stack_attentions, mistakes)
        receivers = (*lists[path], *(model.get_submodule(name) for name in stack_attentions))
        stacks.append(Stack(path, stack_attentions, bool(stack_attentions) and all(map(accepts_any, receivers))))
    ring = _ring(model, config, [path for stack in stacks for path in stack.attentions], mistakes)
    mistakes.raise_all()
    causal = None
    if config.joined is not True and stacks[-1].attentions:
        causal = next((path for path, module in model.named_modules() if has_causal_loss(module)), None)
    if config.joined is False and causal is None:
        problem = "is for the causal loss of Transformers, which the model does not have"
        raise config_error(f"{FIELD}.joined", False, problem, "leave it out")
    if causal is not None:
        inside = stacks[-1].path.removeprefix(f"{causal}." if causal else "")
        stacks[-1] = replace(stacks[-1], tail=not takes_parts(model.get_submodule(causal), inside))
    cuts_vision = any(map(_sees_images, paths))
    images, towers = (None, ()) if cuts_vision else (vision_parts(model), grid_towers(model))
    batch = Batch(sharded=config.inputs == "sharded")
    return SequencePlan(config.size, ring, tuple(stacks), causal, images, towers, batch=batch, unchecked=config.check)


def _fitting(lists: Mapping[str, nn.ModuleList], attentions: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return the paths of the outermost lists of blocks that ``blocks`` may name."""
    fitting: list[str] = []
    for path, blocks in lists.items():
        mistakes, block_attentions = Mistakes(), attentions.get(path, ())
        _check_blocks(path, blocks, block_attentions, mistakes)
        if not (mistakes.found or any(path.startswith(f"{other}.") for other in fitting)) and (
            block_attentions or all(map(_attends, blocks))
        ):
            fitting.append(path)
    return fitting


def _attends(block: nn.Module) -> bool:
    """Return whether a method of `block`, or a function it calls, names ``scaled_dot_product_attention``."""
    queue = [function for module in block.modules() for function in _functions(type(module))]
    for function in queue:
        names = set(function.__code__.co_names)
        if "scaled_dot_product_attention" in names:
            return True
        if function.__qualname__ != function.__name__:  # a method; calls by functions are not followed
            called = (function.__globals__.get(name) for name in names)
            queue += [inspect.unwrap(value) for value in called if inspect.isfunction(value)]
    return False


def _functions(cls: type) -> list[Any]:
    """Return the methods of `cls` without those of ``torch.nn`` classes."""
    members = (
        attribute
        for base in cls.__mro__
        if not base.__module__.startswith("torch.nn")
        for attribute in vars(base).values()
    )
    return [
        function
        for attribute in members
        if inspect.isfunction(function := inspect.unwrap(attribute) if callable(attribute) else None)
    ]


def _attentions(lists: Mapping[str, nn.ModuleList]) -> dict[str, tuple[str, ...]]:
    """Return outermost ``ModuleList`` -> the paths of Transformers' attention modules inside."""
    by_list: dict[str, tuple[str, ...]] = {}
    for path, module in lists.items():
        inside = tuple(f"{path}.{name}" for name, each in module.named_modules() if attends(each))
        if inside and not any(path.startswith(f"{other}.") for other in by_list):
            by_list[path] = inside
    return by_list


def _sees_images(path: str) -> bool:
    return "vision" in path or "visual" in path


def _check_model(model: nn.Module, mistakes: Mistakes) -> None:
    config = getattr(model, "config", None)
    remedy = f"leave {FIELD} out"
    if getattr(config, "is_encoder_decoder", False):
        mistakes.add(config_error(FIELD, type(model).__name__, "is an encoder and a decoder, of two lengths", remedy))
    text = getattr(config, "text_config", config)
    if getattr(text, "output_router_logits", False):
        problem = "makes a loss of each rank's own tokens, where that of all is meant"
        mistakes.add(config_error("config.output_router_logits", True, problem, f"set it to False, or {remedy}"))


def _check_blocks(path: str, blocks: nn.ModuleList, attentions: tuple[str, ...], mistakes: Mistakes) -> None:
    remedy = f"leave {FIELD} out"
    for number, block in enumerate(blocks):
        where = f"{path}.{number}"
        mixing = next((f"{where}.{name}" for name, m in block.named_modules() if isinstance(m, _MIXING)), None)
        if mixing is not None:
            kind = type(block.get_submodule(mixing.removeprefix(f"{where}."))).__name__
            mistakes.add(config_error(mixing, kind, "mixes positions otherwise than by attention", remedy))
        elif not attentions and type(block).__module__.startswith("transformers.") and not _attends(block):
            problem = "attends neither behind Transformers' interface nor by scaled_dot_product_attention"
            mistakes.add(config_error(where, type(block).__name__, problem, remedy))
        elif attentions and not any(each.startswith(f"{where}.") for each in attentions):
            problem = "mixes positions otherwise than by attention behind Transformers' interface"
            mistakes.add(config_error(where, type(block).__name__, problem, remedy))


def _ring(model: nn.Module, config: SequenceParallelConfig, attentions: Sequence[str], mistakes: Mistakes) -> int:
    """Return the number of groups that keys and values go around; each group exchanges positions for heads."""
    configs = {path: getattr(model.get_submodule(path), "config", None) for path in attentions}
    heads = {
        path: n
        for path, module_config in configs.items()
        if isinstance(n := getattr(module_config, "num_attention_heads", None), int)
    }
    uneven = next((path for path, number in heads.items() if number % config.size), None)
    if config.attention == "heads":
        if uneven is not None:
            number = heads[uneven]
            fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            remedy = f'use one of {fitting}, or "attention": "both", where keys and values go around'
            problem = f"does not divide the {number} heads of {uneven}"
            mistakes.add(config_error(f"{FIELD}.size", config.size, problem, remedy))
        return 1
    field = f"{FIELD}.attention"
    if config.attention == "both" and not heads:
        remedy = 'use "heads" or "ring"'
        mistakes.add(config_error(field, "both", "divides heads, and blocks of your own do not say how many", remedy))
    for path, module_config in configs.items():
        kind = getattr(module_config, "_attn_implementation", None)
        if kind != "sdpa":
            problem = f"takes plain softmax attention in parts, and that of {path} is {kind!r}"
            remedy = 'load the model with attn_implementation="sdpa", or use "heads"'
            mistakes.add(config_error(field, config.attention, problem, remedy))
            break
    return config.size // (math.gcd(config.size, *heads.values()) if config.attention == "both" else 1)
