"""One optimizer at work, and what features add to it."""

from compile_muon.engine.engine import Engine
from compile_muon.engine.extension import Extension

__all__ = ["Engine", "Extension"]
