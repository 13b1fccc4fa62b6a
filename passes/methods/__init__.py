"""Methods of a step, a file each; a new one is a file and a line here."""

from .adamuon import ADAMUON
from .adamw import ADAMW
from .dion2 import DION2
from .heavy_ball import HEAVY_BALL
from .lion import LION
from .method import STEP, After, ElementMethod, MatrixMethod, Method, Piece, Rate, State, WholeInputs, WholeOutputs
from .muon import MUON
from .muonbp import MUONBP
from .muonh import MUONH
from .muown import MUOWN
from .normuon import NORMUON
from .soap import SOAP

__all__ = [
    "METHODS",
    "After",
    "ElementMethod",
    "MatrixMethod",
    "Method",
    "Piece",
    "Rate",
    "State",
    "WholeInputs",
    "WholeOutputs",
    "matrix_method",
    "method_names",
    "method_of",
    "rates_of_methods",
    "state_labels",
]

METHODS: tuple[Method, ...] = (MUON, NORMUON, ADAMUON, MUONH, HEAVY_BALL, DION2, MUONBP, SOAP, MUOWN, ADAMW, LION)


def method_names(kind: type[Method] = Method) -> list[str]:
    """Return the names of all methods, or of those of one kind."""
    return [method.name for method in METHODS if isinstance(method, kind)]


def method_of(name: str) -> Method:
    """Return the method of this name, or raise KeyError."""
    return {method.name: method for method in METHODS}[name]


def rates_of_methods() -> dict[str, Rate]:
    """Return the rates that users may set, by name."""
    return {rate.name: rate for method in METHODS for rate in method.rates if rate is not STEP}


def state_labels() -> tuple[str, ...]:
    """Return the labels of all states that methods keep, each once."""
    return tuple(dict.fromkeys(state.label for method in METHODS for state in method.states))


def matrix_method(name: str) -> MatrixMethod:
    """Return the method for matrices of this name, or raise KeyError."""
    method = method_of(name)
    if not isinstance(method, MatrixMethod):
        raise KeyError(name)
    return method
