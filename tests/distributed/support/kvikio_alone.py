"""What of kvikio is called, by way of host memory: the calls of the disk are real, and shorter than asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from compile_muon.offload import direct, state

PAGE = 4096


class CuFile:
    """Opens by path and raises RuntimeError, as kvikio's does.

    Args:
        path, flags: of the file.
    """

    fails: str | None = None  # what the next call says

    def __init__(self, path: str, flags: str) -> None:
        assert flags == "r+"
        assert sys.modules["kvikio.defaults"].compat_mode == "off", "it would go by the host without a word"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(f"Unable to open file: {error.strerror}") from error

    def raw_read(self, memory: Tensor, *, file_offset: int) -> int:
        part = self._part(memory, file_offset)
        host = torch.empty_like(part, device="cpu")
        done = os.preadv(self._file, [host.numpy().data], file_offset)
        part[:done].copy_(host[:done])
        return done

    def raw_write(self, memory: Tensor, *, file_offset: int) -> int:
        return os.pwritev(self._file, [self._part(memory, file_offset).cpu().numpy().data], file_offset)

    def _part(self, memory: Tensor, place: int) -> Tensor:
        if CuFile.fails is not None:
            raise RuntimeError(CuFile.fails)
        assert not memory.data_ptr() % PAGE and not place % PAGE and not len(memory) % PAGE
        return memory[: max(PAGE, len(memory) // 2 // PAGE * PAGE)]

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


@contextmanager
def installed(*, gpu: bool = False, compatible: bool = False, driver: bool = True) -> Iterator[None]:
    """It can be imported.

    Args:
        gpu: there is one; else its calls do nothing.
        compatible: it goes by the host, and says so.
        driver: that of GPUDirect Storage is there.
    """
    modules = {name: ModuleType(name) for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver")}
    kvikio, defaults, driver_of = modules.values()
    defaults.compat_mode = "auto"
    defaults.set = partial(mock.patch.object, defaults)
    defaults.is_compat_mode_preferred = lambda: compatible
    driver_of.get = {"is_gds_available": driver}.__getitem__
    kvikio.CuFile, kvikio.CompatMode = CuFile, mock.Mock(OFF="off")
    kvikio.defaults, kvikio.cufile_driver = defaults, driver_of
    kvikio.__spec__ = mock.Mock()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules, modules))
        for name in () if gpu else ("set_device", "mem_get_info", "synchronize"):
            stack.enter_context(mock.patch.object(torch.cuda, name))
        yield


@contextmanager
def serving() -> Iterator[None]:
    """All offload to a disk goes by it, too."""

    def on_disk(*args: Any, pin: bool, **more: Any) -> direct.DirectStore:
        return direct.DirectStore(*args, **more)

    with installed(gpu=torch.cuda.is_available()), mock.patch.object(state, "on_disk", on_disk):
        yield
