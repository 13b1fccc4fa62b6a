"""Where Triton's kernels run in tests: on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1), which needs none."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
