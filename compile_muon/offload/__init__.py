"""Optimizer state that is not resident: in host memory, in a file, or in fewer bits.

``layout`` says which, and which of it is provided together, ``store`` keeps it, ``device_buffers`` has a few buckets of
it on the device, ``codecs`` says in how many bits, ``transaction`` goes back where a disk fails, and ``state`` provides
it to graphs and steps.
"""

from compile_muon.offload.layout import keeps_momentum_alone, with_fetches
from compile_muon.offload.state import OffloadedStates

__all__ = ["OffloadedStates", "keeps_momentum_alone", "with_fetches"]
