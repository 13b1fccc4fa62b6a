"""One training step of one rank, played from its lowered graphs: how long it takes, and what it holds.

``fusion`` says which nodes run as one kernel, ``cost`` how long a kernel takes, ``memory`` what is live,
``offload_transfers`` when offloaded state is there, and ``engine`` puts kernels on one stream and collectives on
others; ``together`` plays several ranks that wait for one another.
docs/reference/machines.md is the same for users.
"""

from compile_muon.planning.simulate.engine import Event, Played, Timeline, simulate, to_chrome_trace
from compile_muon.planning.simulate.memory import Held
from compile_muon.planning.simulate.together import simulate_together

__all__ = ["Event", "Held", "Played", "Timeline", "simulate", "simulate_together", "to_chrome_trace"]
