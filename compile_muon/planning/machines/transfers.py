"""How fast state comes from host memory and from a disk, and goes back: what offload is planned by."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from pathlib import Path

import torch

from compile_muon.offload.store import Bucket, FileStore, Slot
from compile_muon.passes.methods.adamw import ADAMW
from compile_muon.planning.machines.samples import TransferSample

__all__ = ["transfers"]

_BUCKETS = 8
_BUFFERS = 4


def transfers(
    seconds: Callable[[Callable[[], object]], float], device: str, sizes: tuple[int, ...], disk: Path | None, ranks: int
) -> Iterator[TransferSample]:
    """Both ways at once, as a step has them: what the next bucket needs comes while the last one goes.

    Args:
        seconds: of a function, as every rank runs it.
        sizes: bytes each way; all but the first are held out.
        disk: a folder on it; None to leave it out.
        ranks: that are at it.
    Raises:
        OffloadError: the disk has no room, or the folder is not there.
    """
    ways: dict[str, Callable[[int], Callable[[], object]]] = {}
    if device == "cuda":  # on CPUs both are what kernels do
        ways |= {"host": _host_link, "adamw": _host_adamw}
    if disk is not None:
        ways["disk"] = partial(_disk, folder=disk)
    for (number, nbytes), (way, copying) in itertools.product(enumerate(sizes), ways.items()):
        took = seconds(copying(nbytes))
        yield TransferSample(way=way, nbytes=nbytes, ranks=ranks, seconds=took, held_out=number > 0)


def _host_link(nbytes: int) -> Callable[[], object]:
    there = torch.empty(2, nbytes, dtype=torch.uint8, device="cuda")
    here = torch.empty(2, nbytes, dtype=torch.uint8, pin_memory=True)
    streams = torch.cuda.Stream(), torch.cuda.Stream()

    def run() -> None:
        current = torch.cuda.current_stream()
        for stream, target, source in zip(streams, (there[0], here[1]), (here[0], there[1]), strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
            current.wait_stream(stream)

    return run


def _host_adamw(nbytes: int) -> Callable[[], object]:
    """As ``adamw_on="cpu"`` has it: of 28 bytes of an element 16 are read, and 12 written."""
    numel = nbytes // 28
    params, grads, first, second = (torch.full((numel,), 1e-2) for _ in range(4))
    states: list[MutableMapping[str, torch.Tensor]] = [{"step": torch.ones(()), "exp_avg": first, "exp_avg_sq": second}]
    rates = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    assert ADAMW.on_host is not None
    return partial(ADAMW.on_host, [params], [grads], states, rates, None)


def _disk(nbytes: int, folder: Path) -> Callable[[], object]:
    """By the store that offload uses: around the page cache where the file system can."""
    shape = (nbytes // _BUCKETS,)
    buckets = [Bucket((Slot(f"bucket {number}", shape, torch.uint8),)) for number in range(_BUCKETS)]
    store = FileStore(folder, buckets, buffers=_BUFFERS)

    def run() -> None:
        for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
            store.open(bucket)
            if following is not None:
                store.start(following)
            store.close(bucket)
        store.finish()
        store.commit(buckets)

    return run
