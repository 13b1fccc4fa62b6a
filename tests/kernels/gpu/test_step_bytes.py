"""What memory a step moves of a Muon element, counted by the launches and operators that it makes."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import compile_muon
from compile_muon.passes import momentum

ROWS, COLS = 96, 160


def _of_matrix(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor) and x.numel() == ROWS * COLS]


class _Reads(TorchDispatchMode):
    """Bytes of matrices that operators are given, by operator, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = _of_matrix((args, kwargs))
        if given and not func.is_view:
            self.found[str(func).split(".")[1]] += sum(x.nbytes for x in given) // (ROWS * COLS)
        return result


@pytest.mark.parametrize("half", [True, False])
def test_a_muon_element_costs_36_bytes(device, monkeypatch, half):
    """The gradient once for its norm and its fingerprint, and the writes: 4 + 22. In backward the momentum is read and
    the update written, 6, and divided by a norm that is known, 4. What comes out of a product in half precision is cast
    by the same kernel, 6 as for AdamW; a product in float32 is read, 4."""
    from compile_muon.kernels.gpu import apply, fingerprint, launch
    from compile_muon.kernels.gpu import momentum as momentum_kernels

    launched: Counter[str] = Counter()
    run, encoded = launch.Launch.run, launch.encoded
    tensors: dict[int, Tensor] = {}  # by the number that stands for the address

    def noted(values: Any, count: int) -> Any:
        codes = encoded(values, count)
        tensors.update({code: x for code, x in zip(codes, values, strict=False) if isinstance(x, Tensor)})
        return codes

    for module in (apply, fingerprint, momentum_kernels):
        monkeypatch.setattr(module, "encoded", noted)

    def counted(self: launch.Launch) -> None:
        name = getattr(self.kernel, "fn", self.kernel).__name__
        arguments = [tensors.get(x, x) if isinstance(x, int) else x for x in tree_leaves(self.arguments)]
        own = [x for x in arguments if isinstance(x, Tensor) and x.nbytes >= 2 * ROWS * COLS]
        # One launch is of as many tensors as another: it is filled up with the first, of which nothing is read.
        launched[name] += sum({x.data_ptr(): x.nbytes for x in own}.values()) // (ROWS * COLS)
        run(self)

    monkeypatch.setattr(launch.Launch, "run", counted)
    monkeypatch.setattr(momentum, "kernel_on", lambda device: True)  # the interpreter's, too
    model = nn.Sequential(nn.Linear(COLS, ROWS, bias=False)).to(device)
    optimizer = compile_muon.MuonZero(model, update="backward", ns_dtype="bfloat16")
    compiled = torch.compile(model, backend="muon_zero", options={"codegen": "eager"})
    for step in range(3):
        launched.clear()
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            compiled(torch.randn(4, COLS, device=device)).float().square().mean().backward()
        beside = {name: count for name, count in launched.items() if "product" not in name and "symmetric" not in name}
        made = {"momentum_kernel": 2 + 4 + 4 + 2 if half else 4 + 4 + 2}
        assert beside == {**made, "mix_kernel": 0, "partial_norms_kernel": 0, "divide_kernel": 4}
        launched.clear()
        if step == 1:  # operators are seen, and kernels stay away
            with _Reads() as reads:
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
    assert optimizer.totals()["directions_used"] == 3
    # It reads weight, direction, momentum and gradient, and writes weight and momentum: 14 + 8.
    assert launched == {"sums_kernel": 4, "mix_kernel": 0, "apply_kernel": 14}
    scans = {name: count for name, count in reads.found.items() if not name.endswith("_")}
    assert scans == {"examine": 4}
