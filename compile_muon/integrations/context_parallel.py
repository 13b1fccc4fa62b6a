"""torchtitan's context parallelism: positions are exchanged for heads around its modules of inner attention.

The trainer cuts tokens, labels and positions for the ranks of its ``cp`` mesh. Except for attention, a decoder computes
position by position: around attention one all-to-all gives a rank all positions of some heads, and another one gives
them back (DeepSpeed-Ulysses, arXiv 2309.14509). Ranks have equal work in any order of positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention

from compile_muon.integrations.common import Refusal
from compile_muon.passes.sequence.exchange_heads import from_heads, to_heads
from compile_muon.passes.sequence.place import Place

_FIELD = "parallelism.context_parallel_degree"
_INNER = (FlexAttention, ScaledDotProductAttention)


def _attentions(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Return the (path, module) pairs of modules with an inner attention."""
    return ((path, module) for path, module in model.named_modules() if hasattr(module, "inner_attention"))


def refused_attention(model: Any, degree: int) -> Iterator[Refusal]:
    """Yield refusals of decoders that need all positions outside of attention, or all heads inside."""
    unfit = dict[str, str]()
    for path, block in model.layers.named_children():
        if next(_attentions(block), None) is None:
            unfit[f"layers.{path} ({type(block).__name__})"] = "none"
    for path, module in _attentions(model):
        heads = getattr(module, "n_heads", degree)
        yield heads % degree, _FIELD, degree, f"does not divide the {heads} heads of {path}", "use a divisor of them"
        if hasattr(module, "sinks") or not isinstance(module.inner_attention, _INNER):
            unfit[path] = type(module.inner_attention).__name__ + " with sinks" * hasattr(module, "sinks")
    for path, found in unfit.items():
        problem = f"needs FlexAttention or ScaledDotProductAttention, without sinks, in every block; {path} has {found}"
        yield True, _FIELD, degree, problem, "set it to 1"


def exchange_heads(model: Any, mesh: DeviceMesh) -> None:
    """Let every inner attention of a decoder exchange positions for heads over the 1-D `mesh`.

    Attention gets the whole ``BlockMask`` that the model made, in place of the trainer's cut one.
    """
    group = mesh.get_group()
    place = Place(group.size(), group.rank(), group.group_name)
    for _, module in _attentions(model):
        module.inner_attention.forward = _exchanging(module.inner_attention.forward, place)
    if not hasattr(model, "get_attention_masks"):
        return
    whole_masks: dict[str, Any] = {}
    get_masks = model.get_attention_masks

    def remember(*args: Any, **kwargs: Any) -> Any:
        whole_masks["attention_masks"] = get_masks(*args, **kwargs)
        return whole_masks["attention_masks"]

    def whole(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, **whole_masks} if kwargs.get("attention_masks") is not None else kwargs

    model.get_attention_masks = remember
    model.register_forward_pre_hook(whole, with_kwargs=True)


def _exchanging(inner: Any, place: Place) -> Any:
    """Return an attention over [B, s, H, D] that calls `inner` with [B, S, H / size, D]."""

    def forward(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        local = query.shape[1]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        by_heads = to_heads(query, key, value, place, local * place.size)
        kwargs["enable_gqa"] = by_heads[0].shape[1] != by_heads[1].shape[1]
        out: Tensor = inner(*(x.transpose(1, 2) for x in by_heads), **kwargs)
        return from_heads(out, place, local)

    return forward
