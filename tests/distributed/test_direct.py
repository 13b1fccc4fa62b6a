"""GPUDirect Storage: the store's own protocol over what of kvikio is called, and when it is called."""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.kvikio_alone import CuFile, installed

from compile_muon.errors import OffloadError
from compile_muon.offload import direct
from compile_muon.offload.device_buffers import DeviceBuffers
from compile_muon.offload.store import Bucket, FileStore, Slot, Store

HOST, GPU = torch.device("cpu"), torch.device("cuda:0")


def buckets(number: int = 2, size: int = 5000) -> list[Bucket]:
    return [Bucket([Slot(f"momentum of {k}", (size,), torch.float32)]) for k in range(number)]


def written(store: Store, bucket: Bucket, value: float) -> None:
    store.open(bucket)[bucket.slots[0]].fill_(value)
    store.close(bucket)
    store.finish()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[tuple[direct.DirectStore, list[Bucket]]]:
    with installed():
        made = buckets()
        yield direct.DirectStore(tmp_path, made, buffers=1, device=HOST), made


@pytest.mark.parametrize("what", ["read", "write"])
def test_errors_of_cufile_say_where_and_what_to_do(
    disk: tuple[direct.DirectStore, list[Bucket]], tmp_path: Path, what: str
) -> None:
    store, (bucket, _) = disk
    if what == "write":
        store.open(bucket)
    with mock.patch.object(CuFile, "fails", "GPUDirect Storage not supported"):
        with pytest.raises(OffloadError, match=f"cannot {what} optimizer state") as error:
            store.open(bucket) if what == "read" else written(store, bucket, 1.0)
    for part in (str(tmp_path), "GPUDirect Storage not supported", "as they were", "offload to the cpu"):
        assert part in str(error.value)


def test_a_file_that_ends_early_is_an_error(disk: tuple[direct.DirectStore, list[Bucket]]) -> None:
    store, (bucket, _) = disk
    os.ftruncate(store._file, 0)
    with pytest.raises(OffloadError, match="the file ends early"):
        store.open(bucket)


def test_buffers_that_nobody_gave_back_are_waited_for(disk: tuple[direct.DirectStore, list[Bucket]]) -> None:
    store, (bucket, _) = disk
    store.open(bucket)
    store.discard()
    torch.cuda.synchronize.assert_called_once_with(HOST)  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["read", "write"])
def test_the_disk_waits_for_who_works_in_a_buffer(tmp_path: Path, what: str) -> None:
    """A read over it as much as a write from it."""
    one, other = made = buckets()
    store, happened = FileStore(tmp_path, made, buffers=1), list[str]()
    store.open(one)

    def noted(self: FileStore, memory: torch.Tensor, place: int) -> int:
        happened.append(what)
        return len(memory)

    with mock.patch.object(FileStore, f"_{what}", noted):
        if what == "write":
            store.close(one, lambda: happened.append("worked"))
        else:
            store.leave(one, lambda: happened.append("worked"))
            store.start(other)
            store.open(other)
        store.finish()
    assert happened == ["worked", what]


@pytest.mark.parametrize("where", [GPU, HOST])
def test_work_on_a_gpu_is_waited_for_and_nothing_is_copied(where: torch.device) -> None:
    made = buckets(1)
    store = mock.Mock(spec=FileStore, device=where)
    stream = mock.Mock()
    with mock.patch.object(torch.accelerator, "current_stream", return_value=stream):
        pool = DeviceBuffers([(store, made, where)], count=1, real=True)
        pool.leave(made[0])
        pool.close(made[0])
    ready = stream.record_event.return_value.synchronize if where is GPU else None
    assert store.mock_calls == [mock.call.leave(made[0], ready), mock.call.close(made[0], ready)]
    assert pool.open(made[0]) is store.open.return_value


# ---------------------------------------------------------------------------------------------------- when it serves


def chosen(folder: Path, device: torch.device = GPU) -> tuple[FileStore, str]:
    """By a GPU whose memory is the host's; what was warned of."""
    made = direct.DirectStore

    def on_the_host(*args: Any, **more: Any) -> direct.DirectStore:
        return made(*args, **{**more, "device": HOST})

    with mock.patch.object(direct, "DirectStore", on_the_host), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        store = direct.on_disk(folder, buckets(), buffers=2, pin=False, device=device)
    return store, "\n".join(str(warning.message) for warning in found if "O_DIRECT" not in str(warning.message))


def test_it_serves_where_it_is_installed_and_numbers_come_back(tmp_path: Path) -> None:
    with installed():
        store, warned = chosen(tmp_path)
    assert type(store) is direct.DirectStore and not warned
    assert all((store.current(slot) == 0).all() for slot in store._places)


def test_nothing_is_said_where_nobody_asked_for_it(tmp_path: Path) -> None:
    with mock.patch.dict("sys.modules", {"kvikio": None}), mock.patch("importlib.util.find_spec", return_value=None):
        store, warned = chosen(tmp_path)
    assert type(store) is FileStore and not warned
    with installed():
        store, warned = chosen(tmp_path, HOST)
    assert type(store) is FileStore and not warned


def test_what_is_refused_is_said_once_and_the_host_serves(tmp_path: Path) -> None:
    def read_wrongly(self: CuFile, memory: torch.Tensor, *, file_offset: int) -> int:
        return len(memory.fill_(1))

    def written_nowhere(self: CuFile, memory: torch.Tensor, *, file_offset: int) -> int:
        return len(memory)

    cases = {
        "cannot be imported": ({}, mock.patch.dict("sys.modules", {"kvikio.defaults": None})),
        "compatibility mode": ({"compatible": True}, nullcontext()),
        "nvidia-fs is not loaded": ({"driver": False}, nullcontext()),
        "NVFS driver initialization error": (
            {}, mock.patch.object(CuFile, "__init__", side_effect=RuntimeError("NVFS driver initialization error")),
        ),
        r"cannot be used \(\[Errno 5\] DMA failed\)": ({}, mock.patch.object(CuFile, "fails", "DMA failed")),
        "the host does not read": ({}, mock.patch.object(CuFile, "raw_write", written_nowhere)),
        "the device does not read": ({}, mock.patch.object(CuFile, "raw_read", read_wrongly)),
    }  # fmt: skip
    for reason, (how, broken) in cases.items():
        with installed(**how), broken:
            store, warned = chosen(tmp_path)
        assert type(store) is FileStore
        assert re.search(reason, warned) and str(tmp_path) in warned and "host memory" in warned, warned


def test_a_folder_without_room_is_the_stores_own_error(tmp_path: Path) -> None:
    with installed(), pytest.raises(OffloadError, match="has no place for"):
        chosen(tmp_path / "absent")


def test_kvikio_itself_opens_a_file_without_a_name(tmp_path: Path) -> None:
    kvikio = pytest.importorskip("kvikio", reason="needs kvikio: pip install 'compile_muon[gds]'")
    importlib.import_module("kvikio.defaults")
    importlib.import_module("kvikio.cufile_driver")
    assert isinstance(kvikio.defaults.is_compat_mode_preferred(), bool)
    assert isinstance(kvikio.cufile_driver.get("is_gds_available"), bool)
    store = FileStore(tmp_path, buckets(), buffers=1)
    path = f"/proc/self/fd/{store._file}"
    opened = kvikio.CuFile(path, "r+")
    assert os.path.sameopenfile(opened.fileno(), store._file) and opened.open_flags() & os.O_RDWR
    if torch.cuda.is_available() and direct._refused(tmp_path, GPU) is None:
        return  # both ways, and compared
    with pytest.raises(RuntimeError, match="cuFile"):  # not a compatibility mode that nobody sees
        direct._opened(store._file)
    assert kvikio.defaults.get("compat_mode") != kvikio.CompatMode.OFF
    with pytest.raises((RuntimeError, ValueError)):  # which a request becomes an OffloadError by
        opened.raw_read(torch.zeros(4096, dtype=torch.uint8).numpy(), file_offset=0)
