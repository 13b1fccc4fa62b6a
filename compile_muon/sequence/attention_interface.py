"""Transformers: attention behind its interface, and the causal loss, where positions are cut.

Attention modules get a shallow copy of their config that names our function, which exchanges positions for heads around
the function that the config named before. The model keeps its config, and makes masks for all positions from it.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from compile_muon.errors import config_error
from compile_muon.passes.sequence.exchange_heads import from_heads, heads_of, mean_over, over_ring, to_heads
from compile_muon.passes.sequence.place import Place
from compile_muon.sequence.batch import FIELD, Running
from compile_muon.sequence.blocks import LENGTH, POSITIONS

_NAME = "compile_muon_sequence"
#: entry of an attention module's ``__dict__``: the :class:`Running` of its stack, and its own function's name
_RECORD = "_sequence_attention"


def attends(module: nn.Module) -> bool:
    """Return whether the forward of `module` looks up its attention in Transformers' interface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def accepts_any(module: nn.Module) -> bool:
    """Return whether the forward of `module` has ``**kwargs``."""
    parameters = inspect.signature(inspect.unwrap(type(module).forward)).parameters.values()
    return any(each.kind is each.VAR_KEYWORD for each in parameters)


def has_causal_loss(module: nn.Module) -> bool:
    """Return whether the loss of `module` is Transformers' causal loss, which :func:`loss_of` replaces."""
    if "transformers" not in sys.modules or not hasattr(type(module), "loss_function"):
        return False
    # For a model without a loss of its own (no head) ``loss_function`` is the causal one too, with a warning.
    if getattr(module, "loss_type", None) is None and module.get_output_embeddings() is None:  # type: ignore[operator]
        return False
    from transformers.loss.loss_utils import ForCausalLMLoss

    return module.loss_function is ForCausalLMLoss


# ------------------------------------------------------------------------------------------- attention


class _OwnHeads:
    """An attention module as the interface's functions see it, with sinks and group count of this rank's heads."""

    def __init__(self, module: Any, groups: int, place: Place) -> None:
        self._module = module
        self._place = place
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self._place.own(value, 0) if name == "sinks" else value


def _forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    running, name = module.__dict__[_RECORD]
    place, local = running.place, query.shape[2]
    inner = _function(module, name)
    if running.alone:
        return inner(module, query, key, value, attention_mask, *args, **kwargs)
    padded_from = kwargs.pop(LENGTH, None)
    whole = local * place.size if padded_from is None else padded_from
    if POSITIONS in kwargs:
        kwargs["position_ids"] = kwargs.pop(POSITIONS)
    q, k, v = to_heads(query, key, value, place, whole)
    if isinstance(attention_mask, Tensor):
        attention_mask = heads_of(attention_mask, place)
    for name in ("s_aux", "sinks"):  # one number per head
        if isinstance(kwargs.get(name), Tensor):
            kwargs[name] = place.own(kwargs[name], 0)
    if place.ring > 1:
        causal = kwargs.get("is_causal")
        causal = attention_mask is None and (getattr(module, "is_causal", True) if causal is None else causal)
        out = over_ring(
            q, k, v, attention_mask, place, whole, dropout_p=kwargs.get("dropout", 0.0), causal=causal,
            scale=kwargs.get("scaling"),
        )  # fmt: skip
        return from_heads(out.transpose(1, 2), place, local), None
    if isinstance(kwargs.get("position_bias"), Tensor):
        kwargs["position_bias"] = heads_of(kwargs["position_bias"], place)
    own_heads = _OwnHeads(module, q.shape[1] // k.shape[1], place)
    out, _ = inner(own_heads, q, k, v, attention_mask, *args, **kwargs)
    return from_heads(out, place, local), None


def _function(module: Any, name: str) -> Any:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if name == "eager":
        return sys.modules[type(module).__module__].__dict__["eager_attention_forward"]
    return ALL_ATTENTION_FUNCTIONS[name]


def exchange_in(module: Any, running: Running, configs: dict[int, Any]) -> None:
    """Let an attention module exchange positions for heads. `configs`: ``id`` of a config -> its copy that names our
    function; modules with one config share its copy."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if _NAME not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(_NAME, _forward)
    config = module.config
    if id(config) not in configs:
        configs[id(config)] = copy.copy(config)
        configs[id(config)]._attn_implementation_internal = _NAME
    module.config = configs[id(config)]
    module.__dict__[_RECORD] = running, config._attn_implementation


# ------------------------------------------------------------------------------------------- loss


def loss_of(running: Running) -> Callable[..., Tensor]:
    """Return Transformers' ``ForCausalLMLoss`` for this rank's positions: whole labels are shifted, then cut. The mean
    is over the valid tokens of all ranks of the group, or over ``num_items_in_batch``."""
    place = running.place

    def causal_loss(
        logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: Any = None, ignore_index: int = -100,
        shift_labels: Tensor | None = None, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        if running.alone or running.batch.joins:
            from transformers.loss.loss_utils import ForCausalLMLoss

            return ForCausalLMLoss(
                logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels=shift_labels, **kwargs
            )
        all_labels = labels if shift_labels is None else shift_labels
        are_cut = running.batch.sharded and all_labels.shape[1] == logits.shape[1]  # the caller cut them
        if shift_labels is None:
            if are_cut:
                remedy = "shift all labels, then cut them, and hand shift_labels on"
                raise config_error("labels", list(labels.shape), "are a part, which cannot be shifted", remedy)
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        if not are_cut:
            # `cut` pads with 0, and the loss must skip padding.
            shift_labels = place.cut(shift_labels - ignore_index) + ignore_index
        if logits.shape[:2] != shift_labels.shape:
            problem = f"are not of the {list(shift_labels.shape)} rows and positions of this rank's labels"
            raise config_error("logits", list(logits.shape), problem, f"set {FIELD}.joined")
        targets = shift_labels.reshape(-1).to(logits.device)
        rows = logits.float().view(-1, vocab_size)
        total = F.cross_entropy(rows, targets, ignore_index=ignore_index, reduction="sum")
        if num_items_in_batch is None:
            return mean_over(total, (targets != ignore_index).sum(), place)
        # num_items_in_batch counts the whole group's tokens; `mean_over` sums the ranks' counts.
        return mean_over(total, torch.as_tensor(num_items_in_batch, device=total.device) / place.size, place)

    return causal_loss
