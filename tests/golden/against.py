"""Runs of this tree beside those of another commit, on this machine: the bits of weights, states and losses."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
WORLDS = (1, 2)

#: cell -> its tensors, or its error; and seconds of CPU
Results = dict[str, tuple[dict[str, Tensor] | str, float]]


def compare(commit: str, pattern: str) -> int:
    """Print the differences; return 1 where there are any, 2 where no cell fits the pattern."""
    with checkout(commit) as other:
        here, there = ({world: ranks(tree, world, pattern) for world in WORLDS} for tree in (ROOT, other))
    different, cells, total = 0, 0, [0.0, 0.0]
    for world in WORLDS:
        for name in here[world][0]:
            pairs = list(zip(here[world], there[world], strict=True))
            said = [
                f"rank {i}, {each}" for i, (a, b) in enumerate(pairs) for each in differences(a[name][0], b[name][0])
            ]
            seconds = [sum(results[side][name][1] for results in pairs) for side in (0, 1)]
            result = f"{len(said)} differences" if said else "same bits"
            took = f"{seconds[0]:.1f} s of CPU here, {seconds[1]:.1f} s there"
            print(f"{world} rank{'s' if world > 1 else ''}, {name}: {result}; {took}")
            print(*(f"    {each}" for each in said), sep="\n", end="\n" if said else "")
            different, cells = different + bool(said), cells + 1
            total = [total[side] + seconds[side] for side in (0, 1)]
    took = f"{total[0]:.0f} s of CPU here, {total[1]:.0f} s there"
    print(f"{cells} cells, of which {different} differ from {commit}; {took}")
    return 2 if not cells else int(different > 0)


def differences(here: dict[str, Tensor] | str, there: dict[str, Tensor] | str) -> list[str]:
    """Differences by tensor; none where all bits are the same."""
    if isinstance(here, str) or isinstance(there, str):
        both = ((here, "here"), (there, "there"))
        return [f"fails {where}: {result}" for result, where in both if isinstance(result, str)]
    said = []
    for name in dict.fromkeys([*here, *there]):
        if name not in here or name not in there:
            said.append(f"{name}: only {'here' if name in here else 'there'}")
            continue
        a, b = here[name], there[name]
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            said.append(f"{name}: {a.dtype} {list(a.shape)}, there {b.dtype} {list(b.shape)}")
        elif a.contiguous().view(-1).view(torch.uint8).ne(b.contiguous().view(-1).view(torch.uint8)).any():
            said.append(f"{name}: at most {float((a.double() - b.double()).abs().max()):.1e} apart")
    return said


def ranks(tree: Path, world: int, pattern: str) -> list[Results]:
    """Results of the ranks of a world; a RuntimeError where a rank ended without any."""
    script = Path(__file__).with_name("runs.py")
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder, f"{rank}.pt") for rank in range(world)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        places = [(str(out), pattern, str(rank), str(world), f"{folder}/store") for rank, out in enumerate(outs)]
        commands = [[sys.executable, str(script), str(tree), *place] for place in places]
        processes = [subprocess.Popen(command, cwd=folder, env=environment) for command in commands]
        codes = [process.wait(1200) for process in processes]
        if any(codes):
            raise RuntimeError(f"ranks of {tree} ended with {codes}")
        return [torch.load(out) for out in outs]


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """The tree of a commit, in a folder of its own for as long as this lasts."""

    def git(*words: str) -> Any:
        return subprocess.run(["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True)

    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        git("worktree", "add", "--detach", str(tree), commit)
        try:
            yield tree
        finally:
            git("worktree", "remove", "--force", str(tree))
