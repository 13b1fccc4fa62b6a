"""Options of one ``torch.compile(..., backend="muon_zero", options=...)`` call."""

from __future__ import annotations

from dataclasses import dataclass

from compile_muon.passes import PassOptions

__all__ = ["CODEGENS", "FrameOptions"]

CODEGENS = ("inductor", "eager")


@dataclass(frozen=True, kw_only=True)
class FrameOptions(PassOptions):
    """Those of the passes, and what compiles the graphs they leave.

    Args:
        codegen: ``"inductor"`` or ``"eager"`` (run the rewritten graphs without Inductor).
    """

    codegen: str = "inductor"
