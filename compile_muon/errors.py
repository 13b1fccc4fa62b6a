"""The exceptions of compile_muon: what went wrong, where, and what to do about it."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "LedgerError",
    "MuonZeroError",
    "NonFiniteError",
    "UnsupportedModelError",
    "config_error",
]

_VALUE_WIDTH = 160  # a pasted config section must not bury the sentence that explains it


class MuonZeroError(RuntimeError):
    """Base of the errors raised while training: the program was well-formed, this step is not."""


class LedgerError(MuonZeroError):
    """Forward and backward visits do not balance, e.g. a gradient arrived after its update."""


class NonFiniteError(MuonZeroError):
    """A gradient holds inf or NaN and the configuration says ``nonfinite="error"``."""


class UnsupportedModelError(MuonZeroError, ValueError):
    """The model holds something compile_muon cannot shard or orthogonalize; nothing was changed."""


class ConfigError(ValueError):
    """A setting is wrong. Raise it through :func:`config_error`, which gives every message the same shape.

    Attributes:
        field: path of the setting as the user wrote it, e.g. ``optimizer.params.muon_lr``.
        shown: the value as printed.
        problem: what is wrong with it.
        remedy: what to write instead.
    """

    field: str = ""
    shown: str = ""
    problem: str = ""
    remedy: str = ""

    def renamed(self, field: str) -> ConfigError:
        """The same complaint about ``field``, for a caller whose user knows the setting by another name."""
        return _compose(field, self.shown, self.problem, self.remedy)


def config_error(field: str, value: object, problem: str, remedy: str) -> ConfigError:
    """Build a :class:`ConfigError` reading ``{field} = {value!r}: {problem}; {remedy}``.

    >>> str(config_error("stage", 5, "is not a ZeRO stage", "use 0, 1, 2 or 3"))
    'stage = 5: is not a ZeRO stage; use 0, 1, 2 or 3'
    """
    shown = repr(value)
    if len(shown) > _VALUE_WIDTH:
        shown = shown[: _VALUE_WIDTH - 3] + "..."
    return _compose(field, shown, problem, remedy)


def _compose(field: str, shown: str, problem: str, remedy: str) -> ConfigError:
    # Only strings are kept, so the error pickles across processes whatever the value was.
    error = ConfigError(f"{field} = {shown}: {problem}; {remedy}")
    error.field, error.shown, error.problem, error.remedy = field, shown, problem, remedy
    return error
