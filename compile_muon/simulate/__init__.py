"""Simulate one training step of one rank from its lowered graphs: its time and its memory.

``fusion`` groups nodes into kernels, ``cost`` gives the time of a kernel, ``memory`` counts live bytes,
``offload_transfers`` moves buckets of offloaded state, ``engine`` runs kernels on one stream and collectives on others,
and ``together`` simulates several ranks that wait for each other. docs/reference/machines.md explains it to users.
"""

from compile_muon.simulate.engine import Event, Timeline, simulate, to_chrome_trace
from compile_muon.simulate.memory import LiveBytes
from compile_muon.simulate.played import SimulatedGraph
from compile_muon.simulate.together import simulate_together

__all__ = ["Event", "LiveBytes", "SimulatedGraph", "Timeline", "simulate", "simulate_together", "to_chrome_trace"]
