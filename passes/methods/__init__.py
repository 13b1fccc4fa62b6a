"""Methods of a step, a file each; a new one is a file and a line here."""

from __future__ import annotations

from .adamuon import ADAMUON
from .adamw import ADAMW
from .heavy_ball import HEAVY_BALL
from .lion import LION
from .method import After, ElementMethod, MatrixMethod, Method, Piece, Rate, State
from .muon import MUON
from .muonh import MUONH
from .normuon import NORMUON

__all__ = [
    "METHODS",
    "After",
    "ElementMethod",
    "MatrixMethod",
    "Method",
    "Piece",
    "Rate",
    "State",
    "matrix_method",
    "method_names",
]

METHODS: tuple[Method, ...] = (MUON, NORMUON, ADAMUON, MUONH, HEAVY_BALL, ADAMW, LION)


def method_names(kind: type[Method] = Method) -> list[str]:
    """Of all methods, or of those of one kind."""
    return [method.name for method in METHODS if isinstance(method, kind)]


def matrix_method(name: str) -> MatrixMethod:
    """The method for matrices of this name.

    Raises:
        KeyError: there is none.
    """
    return {method.name: method for method in METHODS if isinstance(method, MatrixMethod)}[name]
