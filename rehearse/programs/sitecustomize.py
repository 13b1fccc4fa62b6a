"""On Python's path of unchanged programs that are rehearsed, this module makes up the numbers that they compare.

Modules are patched when they are imported.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from scripted import script  # noqa: E402


def _attention(module: Any) -> None:
    """Turn off cuDNN, which is NVIDIA's and finds no device."""
    import torch

    module.enable_cudnn_sdp(False)
    torch._C._set_cudnn_enabled(False)


def _checks(module: Any) -> None:
    script(module.StepChecks)


def _right(module: Any) -> None:
    """Make every product right, and every timing 1 ms."""
    import triton

    module.worst_block = lambda result, exact: 0.0
    module.asymmetry_of = lambda x: 0.0

    def timed(run: Callable[[], object], **settings: Any) -> float:
        run()
        return 1.0

    triton.testing.do_bench = timed


def _trusted(module: Any) -> None:
    """Make copies and averages right too."""

    def trusting(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda x: (make(x)[0], lambda result: None)

    makers = {"copy": module._copy, "muon_momentum": module._momentum, "momentum of a list": module._updates}
    for name, make in makers.items():
        module.YARDSTICKS[name] = module.Yardstick(trusting(make))


_CHANGED: dict[str, Callable[[ModuleType], None]] = {
    "torch.backends.cuda": _attention,
    "compile_muon.engine.step_checks": _checks,
    "orthogonalizers": _right,
    "yardsticks": _trusted,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in _CHANGED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None and spec.loader is not None
        run: Any = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _CHANGED[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Finder())
