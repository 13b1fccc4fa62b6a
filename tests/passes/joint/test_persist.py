"""Weights that stay for the step's later micro-batches."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext, tracing
from torch.fx import Graph, GraphModule

from compile_muon.passes import keep_weights


def test_backward_leaves_weights_that_stay() -> None:
    graph = Graph()
    inputs = [graph.placeholder(name) for name in ("activation", "weight", "grad")]
    graph.output((graph.call_function(torch.mul, (inputs[1], inputs[2])),))
    backward = GraphModule(nn.Module(), graph)
    context = TracingContext(None)
    metadata: Any = SimpleNamespace(bw_donated_idxs=[0, 1])
    context.fw_metadata = metadata
    with tracing(context):
        keep_weights(backward, {"weight"})
    assert metadata.bw_donated_idxs == [0]
    # Inductor caches code by the names of inputs, not by what is donated.
    assert "activation, weight_persistent, grad" in backward.code
