"""Errors that graph passes raise, and the base of every error of compile_muon."""

__all__ = ["DescriptionError", "MuonZeroError", "PassContractError", "RequestError", "VerificationError"]


class MuonZeroError(Exception):
    """Base of every error of compile_muon."""


class DescriptionError(MuonZeroError, ValueError):
    """One field of a machine description is wrong; see ``compile_muon.errors.config_error`` for the arguments."""

    def __init__(self, field: str, value: object, problem: str, remedy: str) -> None:
        super().__init__(f"{field} = {value!r}: {problem}; {remedy}")
        self.field, self.value, self.problem, self.remedy = field, value, problem, remedy


class PassContractError(MuonZeroError, RuntimeError):
    """A pass ran out of order or left an ill-formed graph: a defect of the pipeline, not of the model."""


class RequestError(MuonZeroError, ValueError):
    """A backward graph was asked for something that its gradients do not allow."""


class VerificationError(MuonZeroError, RuntimeError):
    """A rewritten graph breaks a rule that every graph must keep; compiling it would hang or give wrong numbers."""
