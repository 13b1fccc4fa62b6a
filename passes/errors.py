"""Errors that graph passes raise, and the base of every error of compile_muon."""

__all__ = ["MuonZeroError", "PassContractError", "RequestError", "VerificationError"]


class MuonZeroError(Exception):
    """Base of every error of compile_muon."""


class PassContractError(MuonZeroError, RuntimeError):
    """A pass ran out of order or left an ill-formed graph: a defect of the pipeline, not of the model."""


class RequestError(MuonZeroError, ValueError):
    """A backward graph was asked for something that its gradients do not allow."""


class VerificationError(MuonZeroError, RuntimeError):
    """A rewritten graph breaks a rule that every graph must keep; compiling it would hang or give wrong numbers."""
