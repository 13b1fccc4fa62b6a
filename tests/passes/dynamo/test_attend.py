"""What becomes of Dynamo's graph ahead of blocks whose positions are cut."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import symbolic_trace

from compile_muon.passes import GraphKind, PassContext, run_passes
from compile_muon.passes.dynamo.attend import LOOK_UP_OWN

TABLE = torch.randn(11, 4, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(10).view(2, 5)


def positions(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table).narrow(1, 2, 3) * 2


def read_twice(ids: Tensor, table: Tensor) -> Tensor:
    found = F.embedding(ids, table)
    return found.narrow(1, 2, 3) + found.sum()


def features(ids: Tensor, table: Tensor) -> Tensor:
    return F.embedding(ids, table).narrow(2, 0, 2)


def test_only_the_own_positions_are_looked_up() -> None:
    for function, own in ((positions, True), (read_twice, False), (features, False)):
        gm = run_passes(symbolic_trace(function), (LOOK_UP_OWN,), PassContext(GraphKind.DYNAMO))
        (lookup,) = gm.graph.find_nodes(op="call_function", target=F.embedding)
        assert (lookup.args[0].target == "narrow") == own, function.__name__
        assert torch.equal(gm(IDS, TABLE), function(IDS, TABLE))
