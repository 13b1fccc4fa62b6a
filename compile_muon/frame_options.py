"""Options of one ``torch.compile(..., backend="muon_zero", options=...)`` call."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compile_muon.passes import Half, PassContext

__all__ = ["FrameOptions"]


@dataclass(frozen=True)
class FrameOptions:
    """Options of one ``torch.compile`` call.

    Args:
        codegen: ``"inductor"`` or ``"eager"`` (run the rewritten graphs without Inductor).
        dump: folder for readable graphs, or None.
        nvtx: emit NVTX ranges around collectives and Newton-Schulz.
        bucket_bytes: size cap of fused collectives.
        reshard_after_forward: drop gathered weights after forward (stage 3), and gather again for backward.
    """

    codegen: str = "inductor"
    dump: Path | None = None
    nvtx: bool = False
    bucket_bytes: int = 25 * 2**20
    reshard_after_forward: bool = True

    def context(self, half: Half, frame: str, **kwargs: Any) -> PassContext:
        """A pass context with these options."""
        return PassContext(
            half=half,
            frame=frame,
            dump=self.dump,
            nvtx=self.nvtx,
            bucket_bytes=self.bucket_bytes,
            reshard_after_forward=self.reshard_after_forward,
            **kwargs,
        )
