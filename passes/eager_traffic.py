"""Traffic of markers that run eagerly, counted like that of graphs."""

from functools import lru_cache

import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from .collectives import Traffic, measure_traffic
from .exchange import transfers
from .language.spec import ParamSpec, decode_dtype
from .language.work import Category, Work, note_work
from .torch_private import unobserved


@lru_cache(maxsize=4096)
def traffic_of_gather(text: str) -> Traffic:
    """Traffic of an eager ``unshard``, by its encoded spec."""
    spec = ParamSpec.decode(text)
    resident = spec.layout.resident
    shape, dtype = (spec.layout.slice_shape, spec.compute_dtype) if resident else (spec.layout.local_shape, spec.dtype)
    if spec.layout.replicated_weight:
        return Traffic()
    return _traffic(spec, Category.GATHER, shape, dtype)


@lru_cache(maxsize=4096)
def traffic_of_reduction(text: str) -> Traffic:
    """Traffic of an eager ``reduce_grad``, by its encoded spec."""
    spec = ParamSpec.decode(text)
    return _traffic(spec, Category.REDUCE, spec.layout.shape, spec.dtype)


def _traffic(spec: ParamSpec, category: Category, shape: tuple[int, ...], dtype: str) -> Traffic:
    def run(x: torch.Tensor) -> torch.Tensor:
        if category is Category.REDUCE:
            return transfers.reduce_grad(x, spec)
        return transfers.unshard(x, x if spec.layout.resident else None, spec)

    with unobserved(), torch.no_grad(), FakeTensorMode():
        gm = make_fx(run)(torch.empty(shape, dtype=decode_dtype(dtype), device="cpu"))
    for node in gm.graph.nodes:
        note_work(node, Work(category, 0))
    return measure_traffic(gm, spec.layout.axes)
