"""How momenta are kept: as they are, in bfloat16, or in 8 bits.

A step reads a momentum in the dtype of the master weight, moves it, and keeps it again; what it keeps then is what the
next direction is made of.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from compile_muon.errors import config_error
from compile_muon.passes.language.spec import ParamSpec, decode_dtype

__all__ = ["CODECS", "MOMENTUM", "SCALE", "Codec"]

BLOCK = 256
#: what a momentum is kept in, by name in the optimizer's state
MOMENTUM, SCALE = "momentum_buffer", "momentum_scale"


class Codec:
    """A momentum as it is.

    Args:
        device: of the momenta.

    Attributes:
        name: of ``momentum_dtype``.
        dtype: what elements are kept in; None for that of the master weight.
        block: how many elements of a row share a scale, which is float32; 0 without scales.
    """

    name: str | None = None
    dtype: torch.dtype | None = None
    block = 0

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def by_rows(self) -> bool:
        """Whether some rows may be kept without the others: chance and scales are of all of a momentum."""
        return self.dtype is None

    def check(self, name: str, spec: ParamSpec) -> None:
        """Raise what forbids to keep the momentum of this parameter so.

        Raises:
            ConfigError: naming it.
        """
        if self.dtype is not None and decode_dtype(spec.state_dtype).itemsize < 4:
            problem = f"rounds what is float32, and the master weight of {name} is not"
            raise config_error("momentum_dtype", self.name, problem, "leave it out, or set master_dtype to float32")
        if self.block and spec.cut_in_columns:
            problem = f"scales rows of {name}, of which ranks have parts"
            raise config_error("momentum_dtype", self.name, problem, 'use "bfloat16"')

    def decode(self, kept: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The momentum; may be the same memory."""
        return kept[MOMENTUM]

    def encode(self, momentum: Tensor, kept: Mapping[str, Tensor], name: str, step: int) -> None:
        """Keep it.

        Args:
            momentum: what :meth:`decode` gave, and a step has moved.
            name, step: of the parameter, and which step: on ranks that keep the same rows the same.
        """


class BFloat16(Codec):
    """Rounded up or down by chance, so that the mean is right: rounded to nearest, a moving average with a factor near
    1 stands still, since each addition is less than half of the last place."""

    name, dtype = "bfloat16", torch.bfloat16

    def decode(self, kept: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return kept[MOMENTUM].to(dtype)

    def encode(self, momentum: Tensor, kept: Mapping[str, Tensor], name: str, step: int) -> None:
        generator = torch.Generator(momentum.device).manual_seed(zlib.crc32(name.encode()) + step)
        chance = torch.empty(momentum.shape, dtype=torch.int32, device=momentum.device)
        chance.random_(1 << 16, generator=generator)
        bits = momentum.float().view(torch.int32) + chance  # what is cut off carries into what stays
        kept[MOMENTUM].copy_((bits & -(1 << 16)).view(torch.float32))


class EightBits(Codec):
    """Codes of torchao's and bitsandbytes' dynamic map, scaled by the largest of every 256 elements of a row.

    Source: Dettmers et al., arXiv 2110.02861. Their blocks run over the flat tensor; these end with a row, so that any
    rank can take up any rows.
    """

    name, dtype, block = "8bit", torch.uint8, BLOCK

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._table = dynamic_map().to(device)

    def decode(self, kept: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes, scale = kept[MOMENTUM], kept[SCALE]
        columns = _columns(codes, scale)
        values = self._table[codes.int()].to(dtype)
        blocks = _blocks(values, scale, columns) * scale.to(dtype).view(-1, scale.shape[-1], 1)
        return blocks.flatten(1)[:, :columns].reshape(codes.shape)

    def encode(self, momentum: Tensor, kept: Mapping[str, Tensor], name: str, step: int) -> None:
        codes, scale = kept[MOMENTUM], kept[SCALE]
        columns = _columns(codes, scale)
        blocks = _blocks(momentum.float(), scale, columns)
        largest = blocks.abs().amax(-1, keepdim=True)
        table = self._table
        blocks = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)
        nearest = torch.bucketize(blocks, (table[1:] + table[:-1]) / 2, out_int32=True)
        scale.copy_(largest.view(scale.shape))
        codes.copy_(nearest.flatten(1)[:, :columns].reshape(codes.shape))


#: what ``momentum_dtype`` names
CODECS: dict[str | None, type[Codec]] = {None: Codec, "bfloat16": BFloat16, "8bit": EightBits}


def dynamic_map() -> Tensor:
    """``[256]`` fp32, ascending to 1: seven decades to each side of 0, each with twice the codes of the one below."""
    bounds = [torch.linspace(0.1, 1, (1 << i) + 1, dtype=torch.float64, device="cpu") for i in range(7)]
    positive = torch.cat([10.0 ** (i - 6) * (b[1:] + b[:-1]) / 2 for i, b in enumerate(bounds)])
    return torch.cat([positive, -positive, torch.tensor([0.0, 1.0], device="cpu")]).sort().values.float()


def _columns(codes: Tensor, scale: Tensor) -> int:
    """Elements of a row."""
    return math.prod(codes.shape[scale.ndim - 1 :])


def _blocks(values: Tensor, scale: Tensor, columns: int) -> Tensor:
    """``[rows, blocks, 256]``, zeros behind the end of a row."""
    width = scale.shape[-1]
    rows = values.reshape(math.prod(scale.shape[:-1]), columns)
    return torch.nn.functional.pad(rows, (0, width * BLOCK - columns)).view(-1, width, BLOCK)
