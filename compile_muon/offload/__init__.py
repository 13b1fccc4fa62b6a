"""Optimizer state that is not resident: in host memory, in a file, or in fewer bits.

``layout`` decides which states are offloaded and how buckets group them, ``store`` keeps buckets in memory or a file,
``device_buffers`` holds a few of them on the device, ``codecs`` converts momenta to fewer bits, ``transaction`` rolls a
step back where a disk fails, and ``state`` provides states to graphs and steps.
"""

from compile_muon.offload.layout import keeps_momentum_alone, with_fetches
from compile_muon.offload.state import OffloadedStates

__all__ = ["OffloadedStates", "keeps_momentum_alone", "with_fetches"]
