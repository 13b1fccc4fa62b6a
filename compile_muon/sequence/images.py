"""Images of vision-language models: each rank of a group computes its share of whole images, tower and projector.

What is joined behind the projector the model merges into the text itself, for all positions, ahead of its blocks.
Images are alike and come one a row, or come as patches one behind the other, with a grid that says how many each has.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from compile_muon.errors import config_error
from compile_muon.passes.sequence.exchange_heads import join
from compile_muon.passes.sequence.place import Place
from compile_muon.sequence.running import FIELD, Running

__all__ = ["add_own_positions", "collect", "deal", "deal_patches", "grid_towers", "vision_parts"]

#: of models of Transformers: what turns images into features, and what is behind it, image by image
_PARTS = (("vision_tower", "multi_modal_projector"), ("vision_model", "connector"))
#: of pixels: images, channels, height, width
_IMAGES = 4


def vision_parts(model: nn.Module) -> tuple[str, str] | None:
    """Paths of a tower and a projector; None where there are none that take whole images."""
    for path, module in model.named_modules():
        children = dict(module.named_children())
        for tower, projector in _PARTS:
            if tower in children and projector in children:
                prefix = f"{path}." if path else ""
                return prefix + tower, prefix + projector
    return None


def deal(running: Running) -> Callable[..., Any]:
    """A hook ahead of the tower: this rank's images; ``running.whole`` counts all, 0 where each rank computes them.

    Each does without gradients, as one of them may be alone, and where something else belongs to the images.
    """

    def hook(tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, (Tensor, list, tuple))]
        pixels = args[0] if args else kwargs.get("pixel_values")
        running.whole = 0
        if len(given) > 1 or not running.deals or not isinstance(pixels, Tensor) or pixels.ndim != _IMAGES:
            return args, kwargs
        running.whole = pixels.shape[0]
        own = running.place.cut(pixels, 0)
        return ((own, *args[1:]), kwargs) if args else (args, {**kwargs, "pixel_values": own})

    return hook


def collect(running: Running) -> Callable[..., Any]:
    """A hook behind the projector: the features of all images.

    Raises:
        ConfigError: it returns something else than a row for each image.
    """
    place = running.place

    def hook(projector: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not running.whole:
            return output
        if not isinstance(output, Tensor) or output.shape[0] != place.local(running.whole):
            problem = f"returns other than a row for each of {place.local(running.whole)} images"
            raise config_error(FIELD, type(projector).__name__, problem, f"leave {FIELD} out")
        return join(output, place, running.whole, 0)

    return hook


def add_own_positions(stack: Any, running: Running) -> None:
    """Features of images that Transformers adds between blocks (``_deepstack_process``) go to this rank's positions."""
    plain = getattr(stack, "_deepstack_process", None)
    if plain is None:
        return

    def process(hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
        """As the model's: ``features`` are of those of all positions ``[B, S]`` where ``places`` is True."""
        if hidden.shape[1] == places.shape[1]:
            return plain(hidden, places, features)
        everywhere = hidden.new_zeros(*places.shape, hidden.shape[-1])
        where = places.to(hidden.device)[..., None].expand_as(everywhere)
        return hidden + running.place.cut(everywhere.masked_scatter(where, features.to(hidden)))

    stack._deepstack_process = process


# ------------------------------------------------------------------------------------------- patches with a grid


def grid_towers(model: nn.Module) -> tuple[str, ...]:
    """Paths of the outermost modules that take the patches of several images, and ``grid_thw`` of each (Qwen2-VL)."""
    found: list[str] = []
    for path, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        takes = code is not None and "grid_thw" in code.co_varnames[: code.co_argcount]
        if takes and not any(path.startswith(f"{other}.") for other in found):
            found.append(path)
    return tuple(found)


def deal_out(patches: Sequence[int], ranks: int) -> list[list[int]]:
    """Which images each rank computes: the largest first, each to the rank that has the fewest patches so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for image in sorted(range(len(patches)), key=lambda image: -patches[image]):
        rank = loads.index(min(loads))
        shares[rank].append(image)
        loads[rank] += patches[image]
    return [sorted(share) for share in shares]


def deal_patches(tower: nn.Module, running: Running) -> None:
    """Have ``tower`` compute this rank's images, and give the features of all.

    Without gradients, and where something else belongs to the images, each rank computes all.
    """
    names = list(inspect.signature(inspect.unwrap(type(tower).forward)).parameters)[1:]
    dealt: list[tuple[list[int], list[list[int]]]] = []  # of the call under way: patches of each image, and shares

    @torch.compiler.disable(reason="sequence_parallel: how many patches an image has is data")
    def ahead(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dealt.clear()
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {name for name, value in call.items() if isinstance(value, Tensor)}
        if tensors != {names[0], "grid_thw"} or not running.deals:
            return args, kwargs
        grid: Tensor = call["grid_thw"]
        patches = grid.prod(-1).tolist()
        shares = deal_out(patches, running.place.size)
        own = shares[running.place.index] or [0]  # something: its features are not read
        dealt.append((patches, shares))
        pieces = call[names[0]].split(patches)
        return (), {**call, names[0]: torch.cat([pieces[image] for image in own]), "grid_thw": grid[own]}

    @torch.compiler.disable(reason="sequence_parallel: how many patches an image has is data")
    def behind(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return tree_map_only(Tensor, partial(_all_images, running.place, *dealt.pop()), output) if dealt else output

    tower.register_forward_pre_hook(ahead, with_kwargs=True)
    tower.register_forward_hook(behind)


def _all_images(place: Place, patches: list[int], shares: list[list[int]], own: Tensor) -> Tensor:
    """Features of all images, of which ``own`` has a row for every so many patches of this rank's.

    Raises:
        ConfigError: it has not.
    """
    mine = sum(patches[image] for image in shares[place.index] or [0])
    if own.ndim == 0 or own.shape[0] == 0 or mine % own.shape[0]:
        problem = f"of what a vision tower returns for {mine} patches does not go by them"
        raise config_error(FIELD, list(own.shape), problem, f"leave {FIELD} out")
    rows = [number * own.shape[0] // mine for number in patches]
    lengths = [[rows[image] for image in share] for share in shares]
    most = max(map(sum, lengths))
    whole = join(F.pad(own, (0, 0) * (own.ndim - 1) + (0, most - own.shape[0])), place, most * place.size, 0)
    found: dict[int, Tensor] = {}
    for share, own_rows, part in zip(shares, lengths, whole.split(most), strict=True):
        found |= dict(zip(share, part[: sum(own_rows)].split(own_rows), strict=True) if share else ())
    return torch.cat([found[image] for image in range(len(patches))])
