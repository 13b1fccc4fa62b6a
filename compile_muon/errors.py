"""The exceptions of compile_muon: what went wrong, where, and what to do about it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from compile_muon.passes.errors import MuonZeroError, PassContractError, VerificationError

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DamagedError",
    "LedgerError",
    "MuonZeroError",
    "NonFiniteError",
    "OffloadError",
    "PassContractError",
    "PeerError",
    "UnsupportedModelError",
    "VerificationError",
    "by_rank",
    "config_error",
    "join_errors",
    "listed",
    "raise_all",
    "ranks_named",
    "warn_user",
]

_LIBRARIES = tuple(str(Path(module).parent) for module in (__file__, torch.__file__))
_VALUE_WIDTH = 160  # a pasted config section must not bury the sentence that explains it


class CheckpointError(MuonZeroError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit; model and optimizer are as they were."""


class DamagedError(CheckpointError):
    """A checkpoint is not what was written."""


class LedgerError(MuonZeroError, RuntimeError):
    """A step whose gradients cannot be told: missing on some ranks, edited while they were sums, refused elsewhere."""


class NonFiniteError(MuonZeroError, ArithmeticError):
    """A step would write inf or NaN: under ``nonfinite="error"`` in one step, under ``"skip"`` in too many in a row."""


class OffloadError(MuonZeroError, RuntimeError):
    """Optimizer state cannot be read from its disk or written to it; weights and state are as they were."""


class PeerError(MuonZeroError, torch.distributed.DistError):
    """A collective did not end: a rank is gone, hangs, or runs something else; the message says where each rank is."""


class UnsupportedModelError(MuonZeroError, ValueError):
    """The model holds something compile_muon cannot shard or orthogonalize; nothing was changed."""


class ConfigError(MuonZeroError, ValueError):
    """Settings are wrong; nothing was changed. :func:`config_error` gives every message the same shape.

    Attributes:
        field: path of the setting as the user wrote it, e.g. ``optimizer.params.muon_lr``; empty if several are wrong.
        shown: the value as printed.
        problem: what is wrong with it.
        remedy: what to write instead.
    """

    field: str = ""
    shown: str = ""
    problem: str = ""
    remedy: str = ""
    _several: tuple[ConfigError, ...] = ()

    @property
    def errors(self) -> tuple[ConfigError, ...]:
        """One error for each wrong setting; the error itself where there is only one."""
        return self._several or (self,)

    def renamed(self, field: str) -> ConfigError:
        """The same complaint about ``field``, for a caller whose user knows the setting by another name."""
        return _compose(field, self.shown, self.problem, self.remedy)


def listed(names: Sequence[str]) -> str:
    """The first five names, and how many more there are.

    >>> listed(["a", "b"])
    'a, b'
    """
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def ranks_named(ranks: Sequence[int]) -> str:
    """At least one rank, in words.

    >>> ranks_named([1]), ranks_named([0, 2])
    ('rank 1', 'ranks 0, 2')
    """
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def by_rank(values: Sequence[object], numbers: Sequence[int] | None = None) -> str:
    """Which ranks have which value, the rarest first; these numbers of ranks, or from 0.

    >>> by_rank([2, 3, 2])
    '3 on rank 1, 2 on ranks 0, 2'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in zip(numbers or range(len(values)), values, strict=True):
        ranks.setdefault(str(value), []).append(rank)
    rarest = sorted(ranks.items(), key=lambda item: len(item[1]))
    return ", ".join(f"{value} on {ranks_named(who)}" for value, who in rarest)


def config_error(field: str, value: object, problem: str, remedy: str) -> ConfigError:
    """Build a :class:`ConfigError` reading ``{field} = {value!r}: {problem}; {remedy}``.

    >>> str(config_error("stage", 5, "is not a ZeRO stage", "use 0, 1, 2 or 3"))
    'stage = 5: is not a ZeRO stage; use 0, 1, 2 or 3'
    """
    shown = repr(value)
    if len(shown) > _VALUE_WIDTH:
        shown = shown[: _VALUE_WIDTH - 3] + "..."
    return _compose(field, shown, problem, remedy)


def join_errors(errors: Sequence[ConfigError]) -> ConfigError:
    """One error that lists ``errors`` (at least one) on a line each; a single one comes back as it is."""
    if len(errors) == 1:
        return errors[0]
    joined = ConfigError("\n  ".join((f"{len(errors)} settings are wrong:", *map(str, errors))))
    joined._several = tuple(errors)
    return joined


def raise_all(errors: Iterable[ConfigError]) -> None:
    """Raise ``errors`` as one; nothing where there are none."""
    if found := list(errors):
        raise join_errors(found) from None


def _compose(field: str, shown: str, problem: str, remedy: str) -> ConfigError:
    # Only strings are kept, so the error pickles across processes whatever the value was.
    error = ConfigError(f"{field} = {shown}: {problem}; {remedy}")
    error.field, error.shown, error.problem, error.remedy = field, shown, problem, remedy
    return error


def warn_user(message: str) -> None:
    """Warn at the line of the user's that led here, behind whatever of ours and torch's lies between."""
    frame: Any = sys._getframe(1)
    level = 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
