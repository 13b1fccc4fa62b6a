"""Codecs of momenta: stored as they are, in bfloat16, or in 8 bits.

A step decodes a momentum to the dtype of the master weight, moves it, and encodes it again; the next direction is made
of the encoded momentum.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from compile_muon.errors import config_error
from compile_muon.passes.language.spec import ParamSpec, decode_dtype

BLOCK = 256
#: names of the momentum's tensors in the optimizer's state: the elements or codes, and the scales of blocks
MOMENTUM, SCALE = "momentum_buffer", "momentum_scale"


class Codec:
    """The codec that stores a momentum as it is, and the base of the others; ``device``: of the momenta."""

    name: str | None = None  # value of `momentum_dtype`
    dtype: torch.dtype | None = None  # of stored elements; None: the master weight's
    block = 0  # elements of a row that share a scale, which is float32; 0 without scales

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @property
    def by_rows(self) -> bool:
        """Whether some rows can be encoded without the others; random bits and scales are of the whole momentum."""
        return self.dtype is None

    def check(self, name: str, spec: ParamSpec) -> None:
        """Raise ConfigError if the momentum of parameter ``name`` cannot be stored with this codec."""
        if self.dtype is not None and decode_dtype(spec.state_dtype).itemsize < 4:
            problem = f"rounds what is float32, and the master weight of {name} is not"
            raise config_error("momentum_dtype", self.name, problem, "leave it out, or set master_dtype to float32")
        if self.block and spec.cut_in_columns:
            problem = f"scales rows of {name}, of which ranks have parts"
            raise config_error("momentum_dtype", self.name, problem, 'use "bfloat16"')

    def decode(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Return the momentum in ``dtype``; it may be the stored tensor itself."""
        return tensors[MOMENTUM]

    def encode(self, momentum: Tensor, tensors: Mapping[str, Tensor], name: str, step: int) -> None:
        """Store ``momentum``, the result of :meth:`decode` after a step has moved it, in ``tensors``.
        ``name`` and ``step`` seed random bits, so ranks that hold the same rows store the same."""


class BFloat16(Codec):
    """Stochastic rounding to bfloat16, so that the mean is right. Rounded to nearest, a moving average with a factor
    near 1 stands still: each addition is less than half of the last place."""

    name, dtype = "bfloat16", torch.bfloat16

    def decode(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return tensors[MOMENTUM].to(dtype)

    def encode(self, momentum: Tensor, tensors: Mapping[str, Tensor], name: str, step: int) -> None:
        generator = torch.Generator(momentum.device).manual_seed(zlib.crc32(name.encode()) + step)
        chance = torch.empty(momentum.shape, dtype=torch.int32, device=momentum.device)
        chance.random_(1 << 16, generator=generator)
        bits = momentum.float().view(torch.int32) + chance  # a carry out of the low 16 bits rounds up
        tensors[MOMENTUM].copy_((bits & -(1 << 16)).view(torch.float32))


class EightBits(Codec):
    """Codes of the dynamic map of torchao and bitsandbytes, scaled by the largest of every 256 elements of a row.

    Source: Dettmers et al., arXiv 2110.02861. Their blocks run over the flat tensor; these end with a row, so that any
    rank can take up any rows.
    """

    name, dtype, block = "8bit", torch.uint8, BLOCK

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._table = dynamic_map().to(device)

    def decode(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        codes, scale = tensors[MOMENTUM], tensors[SCALE]
        columns = _columns(codes, scale)
        values = self._table[codes.int()].to(dtype)
        blocks = _blocks(values, scale, columns) * scale.to(dtype).view(-1, scale.shape[-1], 1)
        return blocks.flatten(1)[:, :columns].reshape(codes.shape)

    def encode(self, momentum: Tensor, tensors: Mapping[str, Tensor], name: str, step: int) -> None:
        codes, scale = tensors[MOMENTUM], tensors[SCALE]
        columns = _columns(codes, scale)
        blocks = _blocks(momentum.float(), scale, columns)
        largest = blocks.abs().amax(-1, keepdim=True)
        table = self._table
        blocks = blocks / largest.clamp(min=torch.finfo(torch.float32).tiny)  # a block of zeros
        nearest = torch.bucketize(blocks, (table[1:] + table[:-1]) / 2, out_int32=True)
        scale.copy_(largest.view(scale.shape))
        codes.copy_(nearest.flatten(1)[:, :columns].reshape(codes.shape))


#: codecs by value of ``momentum_dtype``
CODECS: dict[str | None, type[Codec]] = {None: Codec, "bfloat16": BFloat16, "8bit": EightBits}


def dynamic_map() -> Tensor:
    """Return the 256 fp32 codes, ascending to 1: seven decades on each side of 0, each with twice the lower one's."""
    bounds = [torch.linspace(0.1, 1, (1 << i) + 1, dtype=torch.float64, device="cpu") for i in range(7)]
    positive = torch.cat([10.0 ** (i - 6) * (b[1:] + b[:-1]) / 2 for i, b in enumerate(bounds)])
    return torch.cat([positive, -positive, torch.tensor([0.0, 1.0], device="cpu")]).sort().values.float()


def _columns(codes: Tensor, scale: Tensor) -> int:
    return math.prod(codes.shape[scale.ndim - 1 :])


def _blocks(values: Tensor, scale: Tensor, columns: int) -> Tensor:
    """Return the values as ``[rows, blocks, 256]``, with zeros behind the end of a row."""
    width = scale.shape[-1]
    rows = values.reshape(math.prod(scale.shape[:-1]), columns)
    return torch.nn.functional.pad(rows, (0, width * BLOCK - columns)).view(-1, width, BLOCK)
