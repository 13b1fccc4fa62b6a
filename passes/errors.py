"""Errors that graph passes raise, and the base of every error of compile_muon."""


class MuonZeroError(Exception):
    """Base of every error of compile_muon."""


class PassContractError(MuonZeroError, RuntimeError):
    """A pass ran out of order or left an ill-formed graph: a defect of the pipeline, not of the model."""


class RequestError(MuonZeroError, ValueError):
    """A graph was asked for something that its gradients, or its attention, do not allow."""


class VerificationError(MuonZeroError, RuntimeError):
    """A rewritten graph breaks a rule that every graph must keep; compiling it would hang or give wrong numbers."""
