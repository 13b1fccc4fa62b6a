"""Options of one ``torch.compile(..., backend="muon_zero", options=...)`` call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from compile_muon.config import accept
from compile_muon.config.checked import Checked, Mistakes, setting
from compile_muon.errors import shown, warn_user
from compile_muon.passes import PassOptions

_MB = 2**20
#: names without effect that are no errors
_FORMER = ("exchange_mb",)


@dataclass(frozen=True, kw_only=True)
class CompileOptions(Checked):
    """Options by the names that users write; defaults of pass options are those of :class:`PassOptions`.

    Attributes:
        codegen: "eager" runs the rewritten graphs without Inductor (debugging, fast tests).
        dump: folder that receives every graph before and after each pass.
        nvtx: ranges for profilers (docs/how-to/profiling.md), NVTX and torch.profiler.
        bucket_mb: size limit of fused collectives, in MiB, of which two may be in memory; below it the cost model
            chooses (docs/reference/machines.md#what-it-decides).
        cuda_graphs: record forward and backward as CUDA graphs and replay them, with ``checks`` "next_step" also
            ``step()`` (docs/reference/host-time.md#the-whole-step-as-a-cuda-graph). Costs a copy of the resident
            weights in each forward at stages 1 and 2.
        reshard_after_forward: at stage 3 drop gathered weights after forward and gather again for backward. False keeps
            them: one all-gather instead of two, for the memory of all weights. At stage 0 and on one rank with
            ``param_dtype``, False keeps the cast weights.
        memory: GiB that a step may use on a device, or "auto", a GPU's memory less what communicators and fragments
            take. Each frame then keeps as many gathered weights and activations as fit, and recomputes the others
            (docs/how-to/memory.md). null: ``reshard_after_forward`` and PyTorch's defaults decide.
    """

    codegen: str = setting("inductor", accept.choice, allowed=("inductor", "eager"))
    dump: Path | None = setting(PassOptions.dump, accept.folder, none=True)
    nvtx: bool = setting(PassOptions.nvtx, accept.ranges)
    bucket_mb: float = setting(PassOptions.bucket_bytes / _MB, accept.real, positive=True)
    cuda_graphs: bool = setting(False, accept.boolean)
    reshard_after_forward: bool = setting(PassOptions.reshard_after_forward, accept.boolean)
    memory: float | str | None = setting(None, accept.real, none=True, also="auto", positive=True)

    def options(self) -> dict[str, Any]:
        """Return what ``torch.compile(..., options=...)`` takes, without defaults.

        >>> CompileOptions(codegen="eager").options()
        {'codegen': 'eager'}
        """
        names = CompileOptions.__dataclass_fields__  # not the fields that CompileConfig adds
        return {name: value for name, value in self.changed().items() if name in names}


@dataclass(frozen=True, kw_only=True)
class FrameOptions(PassOptions):
    """The options of one frame: those of the passes, and :class:`CompileOptions`' fields about code generation."""

    codegen: str = CompileOptions.codegen
    cuda_graphs: bool = CompileOptions.cuda_graphs
    memory: float | str | None = CompileOptions.memory  # GiB, "auto", or None for no budget


def read_options(options: Mapping[str, Any] | None) -> FrameOptions:
    """Read the options of ``torch.compile(..., options=...)``; a ConfigError names every unknown option and bad value.

    >>> read_options({"bucket_mb": 0.5}).bucket_bytes
    524288
    """
    mistakes, known_options = Mistakes(), {}
    names = [f.name for f in fields(CompileOptions)]
    for name, value in (options or {}).items():
        if name in _FORMER:
            warn_user(f"no effect here: options[{name!r}]")
            continue
        with mistakes.collected():
            accept.known(f"options[{shown(name)}]", value, name, names, "an option of muon_zero")
            known_options[name] = value
    values = CompileOptions.canonical(known_options, mistakes, lambda name: f"options[{name!r}]")
    mistakes.raise_all()
    if "bucket_mb" in values:
        values["bucket_bytes"] = int(values.pop("bucket_mb") * _MB)
    return FrameOptions(**values)
