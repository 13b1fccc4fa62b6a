"""Errors that graph passes raise."""

__all__ = ["PassContractError", "VerificationError"]


class PassContractError(RuntimeError):
    """A pass ran out of order or left an ill-formed graph: a defect of the pipeline, not of the model."""


class VerificationError(RuntimeError):
    """A rewritten graph breaks a rule that every graph must keep; compiling it would hang or give wrong numbers."""
