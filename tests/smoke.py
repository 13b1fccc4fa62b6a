"""A first look at an installed wheel: `python tests/smoke.py` in an environment with nothing beside it.

It imports the package, runs `doctor`, trains a small model on one process, uncompiled and compiled, and saves and loads
it. No test framework, no compiler, no GPU, and no Triton are needed.
"""

# ruff: noqa: E402
import subprocess
import sys
import tempfile
import warnings
from importlib.metadata import version
from pathlib import Path

# Started by its path, Python looks here first, and the checkout's folder of tests has one of the package's name.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]

import torch
from torch import nn

import compile_muon


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.embed(x) + self.hidden(self.embed(x)).relu())
        return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


def trained(compiled: bool, folder: str) -> list[float]:
    """Losses, the last of them behind a save and a load."""
    torch.manual_seed(0)
    config = {"compile": {"codegen": "eager"} if compiled else False, "zero_optimization": {"stage": 3}}
    model, optimizer = compile_muon.initialize(Model(), config)
    checkpointer = compile_muon.Checkpointer(f"{folder}/{compiled}")
    losses = []
    for step in range(6):
        loss = model(torch.arange(22).view(2, 11) % 11)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 4:
            checkpointer.save(step, model, optimizer)
            assert checkpointer.load(model, optimizer) == {}
    assert losses[-1] < losses[0] and "hidden.weight" in str(optimizer.summary())
    return losses


def main() -> None:
    """Raises whatever is wrong."""
    warnings.simplefilter("ignore", compile_muon.MuonZeroWarning)
    package = Path(compile_muon.__file__).parent
    assert (package / "py.typed").is_file() and (package / "passes").is_dir() and (package / "kernels").is_dir(), (
        package
    )
    assert version("compile_muon") == compile_muon.__version__
    with tempfile.TemporaryDirectory() as folder:
        eager, compiled = (trained(how, folder) for how in (False, True))
        torch.testing.assert_close(torch.tensor(eager), torch.tensor(compiled), rtol=1e-5, atol=1e-5)
        said = subprocess.run(
            [sys.executable, "-m", "compile_muon", "doctor"], cwd=folder, capture_output=True, text=True
        )
    assert "compile_muon" in said.stdout and said.returncode in (0, 1), said.stderr  # 1: no compiler for Inductor
    try:
        compile_muon.MuonZero(Model(), ns_backend="triton", ns_dtype="bfloat16")
    except compile_muon.ConfigError as error:
        assert "use backend='auto'" in str(error) or "use ns_backend='auto'" in str(error), error
    else:
        raise AssertionError("Triton's kernels run on GPUs only, and nothing says so")
    print(f"compile_muon {compile_muon.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}: fine")


if __name__ == "__main__":
    main()
