"""Optimizer state that is not beside its parameter: in host memory, in a file, or in fewer bits.

``choice`` says which, ``store`` keeps buckets of it, ``arena`` has a few of them on the device, ``codecs`` says in how
many bits, and ``home`` lends it to graphs and steps.
"""

from compile_muon.offload.choice import home_of, with_fetches
from compile_muon.offload.home import Home, keeps_momentum_alone

__all__ = ["Home", "home_of", "keeps_momentum_alone", "with_fetches"]
