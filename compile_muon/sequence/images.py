"""Images of vision-language models: each rank of a group runs tower and projector on its share of whole images.

Features are joined behind the projector, and the model itself merges them into the text, for all positions, ahead of
its blocks. Images have one shape and one row each, or are concatenated patches, with a grid of patches per image.
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
from compile_muon.sequence.batch import FIELD, Running

#: Transformers' names of a vision tower and of the projector behind it, which works image by image
_PARTS = (("vision_tower", "multi_modal_projector"), ("vision_model", "connector"))
#: dimensions of pixels: images, channels, height, width
_IMAGES = 4


def vision_parts(model: nn.Module) -> tuple[str, str] | None:
    """Return the paths of a vision tower that takes whole images and of its projector, or None."""
    for path, module in model.named_modules():
        children = dict(module.named_children())
        for tower, projector in _PARTS:
            if tower in children and projector in children:
                prefix = f"{path}." if path else ""
                return prefix + tower, prefix + projector
    return None


def deal(running: Running) -> Callable[..., Any]:
    """Return a pre-hook of the tower that keeps this rank's images, and sets ``running.whole`` to the count of all; to
    0, and all are computed here, without gradients, as a rank may be alone, and beside other tensors than pixels."""

    def hook(tower: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, (Tensor, list, tuple))]
        pixels = args[0] if args else kwargs.get("pixel_values")
        running.whole = 0
        if len(tensors) > 1 or not running.deals or not isinstance(pixels, Tensor) or pixels.ndim != _IMAGES:
            return args, kwargs
        running.whole = pixels.shape[0]
        own_images = running.place.cut(pixels, 0)
        return ((own_images, *args[1:]), kwargs) if args else (args, {**kwargs, "pixel_values": own_images})

    return hook


def collect(running: Running) -> Callable[..., Any]:
    """Return a hook of the projector that joins the features of all images. The hook raises a ConfigError if the
    projector does not return one row per image."""
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
    """Patch ``_deepstack_process``, by which Transformers adds image features between blocks, to cut positions."""
    plain = getattr(stack, "_deepstack_process", None)
    if plain is None:
        return

    def process(hidden: Tensor, places: Tensor, features: Tensor) -> Tensor:
        """Add `features` where `places` [B, S], a mask over all positions, is True."""
        if hidden.shape[1] == places.shape[1]:
            return plain(hidden, places, features)
        everywhere = hidden.new_zeros(*places.shape, hidden.shape[-1])
        where = places.to(hidden.device)[..., None].expand_as(everywhere)
        return hidden + running.place.cut(everywhere.masked_scatter(where, features.to(hidden)))

    stack._deepstack_process = process


# ------------------------------------------------------------------------------------------- patches with a grid


def grid_towers(model: nn.Module) -> tuple[str, ...]:
    """Return the paths of the outermost modules that take patches of several images and ``grid_thw`` (Qwen2-VL)."""
    towers: list[str] = []
    for path, module in model.named_modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        takes = code is not None and "grid_thw" in code.co_varnames[: code.co_argcount]
        if takes and not any(path.startswith(f"{other}.") for other in towers):
            towers.append(path)
    return tuple(towers)


def deal_out(patches: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the images of each rank: the largest first, each to the rank with the fewest patches so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for image in sorted(range(len(patches)), key=lambda image: -patches[image]):
        rank = loads.index(min(loads))
        shares[rank].append(image)
        loads[rank] += patches[image]
    return [sorted(share) for share in shares]


def deal_patches(tower: nn.Module, running: Running) -> None:
    """Hook `tower` to compute this rank's images and to return the features of all. Every rank computes all images
    without gradients, and if the call has more tensors than patches and grid."""
    names = list(inspect.signature(inspect.unwrap(type(tower).forward)).parameters)[1:]
    # of the call that runs: patches per image, and images per rank
    deals: list[tuple[list[int], list[list[int]]]] = []

    @torch.compiler.disable(reason="sequence_parallel: how many patches an image has is data")
    def ahead(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        deals.clear()
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        tensors = {name for name, value in call.items() if isinstance(value, Tensor)}
        if tensors != {names[0], "grid_thw"} or not running.deals:
            return args, kwargs
        grid: Tensor = call["grid_thw"]
        patches = grid.prod(-1).tolist()
        shares = deal_out(patches, running.place.size)
        own_images = shares[running.place.index] or [0]  # a tower needs an input: these features are dropped
        deals.append((patches, shares))
        pieces = call[names[0]].split(patches)
        return (), {**call, names[0]: torch.cat([pieces[image] for image in own_images]), "grid_thw": grid[own_images]}

    @torch.compiler.disable(reason="sequence_parallel: how many patches an image has is data")
    def behind(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return tree_map_only(Tensor, partial(_all_images, running.place, *deals.pop()), output) if deals else output

    tower.register_forward_pre_hook(ahead, with_kwargs=True)
    tower.register_forward_hook(behind)


def _all_images(place: Place, patches: list[int], shares: list[list[int]], shard: Tensor) -> Tensor:
    """Gather the features of all images, in order, from `shard`, which has a row for a fixed number of own patches.
    Ranks pad to the longest share, so that one gather joins them."""
    own_patches = sum(patches[image] for image in shares[place.index] or [0])
    if shard.ndim == 0 or shard.shape[0] == 0 or own_patches % shard.shape[0]:
        problem = f"of what a vision tower returns for {own_patches} patches does not go by them"
        raise config_error(FIELD, list(shard.shape), problem, f"leave {FIELD} out")
    rows = [number * shard.shape[0] // own_patches for number in patches]
    lengths = [[rows[image] for image in share] for share in shares]
    longest = max(map(sum, lengths))
    whole = join(
        F.pad(shard, (0, 0) * (shard.ndim - 1) + (0, longest - shard.shape[0])), place, longest * place.size, 0
    )
    features: dict[int, Tensor] = {}
    for share, own_rows, part in zip(shares, lengths, whole.split(longest), strict=True):
        features |= dict(zip(share, part[: sum(own_rows)].split(own_rows), strict=True) if share else ())
    return torch.cat([features[image] for image in range(len(patches))])
