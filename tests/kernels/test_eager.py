"""Kernels of ours are launched only where nothing records what happens to the tensors."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

from compile_muon.kernels.apply import may_launch, not_traced


def test_not_under_a_mode():
    """If this fails after an upgrade, `torch.utils._python_dispatch._get_current_dispatch_mode` changed."""
    with FlopCounterMode(display=False):
        assert not not_traced([torch.ones(2)])
    with FakeTensorMode():
        assert not not_traced([torch.ones(2)])
    assert not_traced([torch.ones(2)])


def test_not_while_traced():
    seen = []
    make_fx(lambda x: (seen.append(not_traced([x])), x + 1)[1])(torch.ones(2))
    compiled = torch.compile(lambda x: x + (1 if not_traced([x]) else -1), backend="eager", fullgraph=True)
    assert seen == [False]
    assert torch.equal(compiled(torch.ones(2)), torch.zeros(2))


def test_never_on_the_cpu():
    assert not may_launch([torch.ones(2)])
