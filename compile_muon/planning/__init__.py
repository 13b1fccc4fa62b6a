"""Simulate a training step before any rank runs it."""

from compile_muon.planning.capture import Captured, capture_step

__all__ = ["Captured", "capture_step"]
