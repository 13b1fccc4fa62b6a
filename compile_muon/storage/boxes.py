"""Tensors in files, by torch.distributed.checkpoint and its Hugging Face (safetensors) storage.

It plans who writes what (a tensor that all ranks hold is written once), keeps the place of each shard in the headers,
and reads whatever parts a rank needs, whatever parts were written. Its own metadata file, a pickle, does not exist in
this storage. One file per rank, written tensor by tensor from where they are, and flushed.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, SavePlanner
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from compile_muon.errors import CheckpointError
from compile_muon.passes.spec import encode_dtype

__all__ = ["Box", "TensorFacts", "read_boxes", "read_tensors", "write_tensors"]


class _Writer(HuggingFaceStorageWriter):
    """Notes which file this rank writes, and writes it from the tensors' own memory.

    torch's makes the whole file in memory first, twice, and holds the interpreter meanwhile (seen on 2.11 to 2.14).
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), save_distributed=True)
        self.written: set[str] = set()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        from safetensors import TensorSpec, serialize_file  # importing compile_muon stays lean

        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # read by nobody where no metadata file is written
        if not plan.items:
            return done
        tensors, offsets = {}, {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor) and tensor.is_cpu and tensor.is_contiguous()
            assert item.tensor_data is not None
            tensors[item.index.fqn] = tensor
            offsets[item.index.fqn] = {"saved_offsets": item.tensor_data.chunk.offsets}
        specs = {
            name: TensorSpec(dtype=encode_dtype(t.dtype), shape=t.shape, data_ptr=t.data_ptr(), data_len=t.nbytes)
            for name, t in tensors.items()
        }
        name = f"shard-{plan.storage_data['shard_index']:05}-model-00001-of-00001.safetensors"
        path = os.path.join(self.path, name)
        # As torch's reader expects it.
        serialize_file(specs, path, {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"})
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        self.written = {name}
        return done


@contextmanager
def _our_errors() -> Iterator[None]:
    """One line for each rank, instead of their tracebacks; a BaseException would pass by who catches errors."""
    # catch_warnings is not for threads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
    try:
        yield
    except CheckpointException as error:
        said = {rank: f"{type(cause).__name__}: {cause}" for rank, (cause, _) in sorted(error.failures.items())}
        alone = list(said) == [0]
        text = "; ".join(text if alone else f"rank {rank}: {text}" for rank, text in said.items())
        raise CheckpointError(text) from error


def write_tensors(folder: Path, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> list[Path]:
    """Write ``tensors`` (on the CPU; DTensors by their shards); collective over ``group``.

    Returns:
        The files that this rank wrote.
    Raises:
        CheckpointError: on every rank, naming those that failed.
    """
    writer = _Writer(folder)
    with _our_errors():
        dcp.save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
    return [folder / name for name in sorted(writer.written)]


def read_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read into ``tensors``, in place, what each of them holds of the tensor of its name; not collective.

    Raises:
        CheckpointError: a name is missing or has another shape.
    """
    if not tensors:
        return
    with _our_errors():
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)


@dataclass(frozen=True)
class TensorFacts:
    """Shape and dtype (torch's name without ``torch.``) of a whole tensor."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Box:
    """A part of a stored tensor to read.

    Args:
        stored: the tensor's name.
        offsets: of the part.
        target: of the part's shape and any dtype; is written in place.
    """

    stored: str
    offsets: tuple[int, ...]
    target: Tensor


class _BoxPlanner(DefaultLoadPlanner):
    """Reads boxes, where torch's own reads what a DTensor holds of the tensor of its name."""

    def __init__(self, boxes: Sequence[Box]) -> None:
        super().__init__()
        self._boxes = {(box.stored, torch.Size(box.offsets)): box.target for box in boxes}

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for (stored, offsets), target in self._boxes.items():
            facts = self.metadata.state_dict_metadata[stored]
            assert isinstance(facts, TensorStorageMetadata)
            if target.numel():
                box = ChunkStorageMetadata(offsets, target.shape)
                items += create_read_items_for_chunk_list(stored, facts, [box])
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._boxes[index.fqn, index.offset]


def read_boxes(boxes: Sequence[Box], reader: HuggingFaceStorageReader) -> None:
    """Read ``boxes``, each another part; not collective.

    Raises:
        CheckpointError: a file is damaged.
    """
    if not boxes:
        return
    with _our_errors():
        dcp.load({}, storage_reader=reader, planner=_BoxPlanner(boxes), no_dist=True)
