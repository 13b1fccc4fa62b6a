"""Images of vision-language models: each rank of a group computes its share of whole images, tower and projector.

What is joined behind the projector the model merges into the text itself, for all positions, ahead of its blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from compile_muon.errors import config_error
from compile_muon.passes.exchange.sequence import join
from compile_muon.sequence.running import FIELD, Running

__all__ = ["collect", "deal", "vision_parts"]

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
        if len(given) > 1 or running.batch.wanted == "whole" or not torch.is_grad_enabled():
            return args, kwargs
        if not isinstance(pixels, Tensor) or pixels.ndim != _IMAGES:
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
