"""Where Triton's kernels run in tests: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1), which needs none."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# --import-mode=importlib leaves sys.path alone; the files here share combinations.py.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def device() -> torch.device:
    pytest.importorskip("triton", reason="Triton is not installed")
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1")
    return torch.device("cuda")


@pytest.fixture(params=["pointers", "descriptors"])
def descriptors(request: pytest.FixtureRequest, device: torch.device) -> bool:
    """Both ways of loading; descriptors need compute capability 9.0, or the interpreter."""
    if request.param == "descriptors" and device.type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("tensor descriptors need compute capability 9.0")
    return request.param == "descriptors"


@pytest.fixture(autouse=True)
def _stores_begin_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store through a descriptor that begins before its tensor: the interpreter drops it, a GPU does not run it."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import InterpreterBuilder

    store = InterpreterBuilder.create_descriptor_store

    def checked(builder: Any, desc: Any, value: Any, indices: Any) -> Any:
        begin = [int(index.data.item()) for index in indices]
        assert min(begin) >= 0, f"a store through a descriptor begins at {begin}"
        return store(builder, desc, value, indices)

    monkeypatch.setattr(InterpreterBuilder, "create_descriptor_store", checked)
