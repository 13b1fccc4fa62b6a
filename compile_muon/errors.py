"""The exceptions of compile_muon. Each message says where, what is wrong, and what to do about it."""

from __future__ import annotations

import itertools
import os
import reprlib
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from compile_muon.passes.errors import MuonZeroError as MuonZeroError
from compile_muon.passes.errors import PassContractError as PassContractError
from compile_muon.passes.errors import VerificationError as VerificationError

#: Packages whose frames `warn_user` skips; ours is known by its module name, wherever its folders are.
_LIBRARIES = {"compile_muon", "torch", "transformers", "accelerate", "lightning", "pytorch_lightning", "torchtitan"}
_VALUE_WIDTH = 160  # a pasted config section must not bury the sentence that explains it
_FIELD_WIDTH = 200
_LINES = 40


class CheckpointError(MuonZeroError, RuntimeError):
    """A checkpoint cannot be written, is damaged, or does not fit; model and optimizer are as they were."""


class DamagedError(CheckpointError):
    """A checkpoint differs from the one that was written."""


class LedgerError(MuonZeroError, RuntimeError):
    """The gradients of a step are ambiguous: missing on some ranks, edited while they were sums, refused elsewhere."""


class NonFiniteError(MuonZeroError, ArithmeticError):
    """A step would write inf or NaN: under ``nonfinite="error"`` in one step, under ``"skip"`` in too many in a row."""


class OffloadError(MuonZeroError, RuntimeError):
    """Optimizer state cannot be read from its disk or written to it; weights and state are as they were."""


class PeerError(MuonZeroError, torch.distributed.DistError):
    """A collective did not end: a rank is gone, hangs, or runs something else; the message says where each rank is."""


class MuonZeroWarning(UserWarning):
    """A warning of compile_muon; given by rank 0, or by the rank that the message names."""


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
        """Return the same error about ``field``, for a caller whose user knows the setting by another name."""
        return _compose(field, self.shown, self.problem, self.remedy)


def listed(names: Sequence[str]) -> str:
    """Join the first five names, and the number of the others.

    >>> listed(["a", "b"])
    'a, b'
    """
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def config_error(field: str, value: object, problem: str, remedy: str) -> ConfigError:
    """Build a :class:`ConfigError` reading ``{field} = {value!r}: {problem}; {remedy}``.

    >>> str(config_error("stage", 5, "is not a ZeRO stage", "use 0, 1, 2 or 3"))
    'stage = 5: is not a ZeRO stage; use 0, 1, 2 or 3'
    """
    return _compose(field, shown(value), problem, remedy)


class _Short(reprlib.Repr):
    """A ``repr`` of values of any size and depth that stops where the result would be cut anyway."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 6
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = _VALUE_WIDTH // 2
        self.maxstring = self.maxlong = self.maxother = 4 * _VALUE_WIDTH

    def repr_dict(self, x: Mapping[Any, Any], level: int) -> str:
        """Keep the order of the keys; reprlib sorts them."""
        if level <= 0 and x:
            return "{...}"
        first = itertools.islice(x.items(), self.maxdict)
        pieces = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in first]
        return "{" + ", ".join(pieces) + ", ..." * (len(x) > self.maxdict) + "}"

    def repr_int(self, x: int, level: int) -> str:
        """Describe large integers by size; Python refuses to print thousands of digits."""
        return repr(x) if x.bit_length() < 16 * _VALUE_WIDTH else f"<an integer of {x.bit_length()} bits>"


_SHORT = _Short()


def shown(value: object) -> str:
    """Return ``repr(value)`` cut to 160 characters; the type's name where ``repr`` fails.

    >>> shown({"b": [1, 2], "a": None})
    "{'b': [1, 2], 'a': None}"
    """
    try:
        text = _SHORT.repr(value)
    except Exception:  # whatever the repr of a stranger's object raises
        text = f"<{type(value).__name__}>"
    return shortened(text, _VALUE_WIDTH)


def printable(text: str) -> str:
    """Escape control characters and characters without an encoding, as ``repr`` does.

    >>> printable("a\\x1b[31m, ü")
    'a\\\\x1b[31m, ü'
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def shortened(text: str, width: int) -> str:
    """Cut the text to ``width`` characters, the last three of them dots."""
    return text if len(text) <= width else text[: width - 3] + "..."


def join_errors(errors: Sequence[ConfigError]) -> ConfigError:
    """Join ``errors`` (at least one) into one, a line each for the first 40; a single error is returned as it is."""
    if len(errors) == 1:
        return errors[0]
    ending = [f"and {len(errors) - _LINES} more"] if len(errors) > _LINES else []
    joined = ConfigError("\n  ".join((f"{len(errors)} settings are wrong:", *map(str, errors[:_LINES]), *ending)))
    joined._several = tuple(errors)
    return joined


def raise_all(errors: Iterable[ConfigError]) -> None:
    """Raise ``errors`` as one, if there are any."""
    if all_errors := list(errors):
        raise join_errors(all_errors) from None


def _compose(field: str, shown: str, problem: str, remedy: str) -> ConfigError:
    # Only strings are kept, so the error pickles across processes whatever the value was.
    error = ConfigError(f"{printable(shortened(field, _FIELD_WIDTH))} = {shown}: {problem}; {remedy}")
    error.field, error.shown, error.problem, error.remedy = field, shown, problem, remedy
    return error


def warn_user(message: str, *, this_rank: bool = False) -> None:
    """Warn at the user's line that led here, above all frames of compile_muon and other libraries. ``this_rank``: the
    warning is about this rank, and its message names the rank; else rank 0 alone warns."""
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if ranks else int(os.environ.get("RANK", "0") or 0)
    if rank != 0 and not this_rank:
        return
    if this_rank and ranks and torch.distributed.get_world_size() > 1:
        message = f"rank {rank}: {message}"
    frame: Any = sys._getframe(1)
    level = 2
    while frame.f_back is not None and _package(frame) in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, MuonZeroWarning, stacklevel=level)


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
