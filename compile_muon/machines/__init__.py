"""Descriptions of machines for the cost model: files of some, and the measurement of others.

``load`` reads them; ``measure`` times products, kernels and collectives, ``fit`` makes a description of that, and
``calibrate`` is the command. docs/reference/machines.md is the same for users.
"""

from compile_muon.machines.load import known_machines, load_machine, machine_for

__all__ = ["known_machines", "load_machine", "machine_for"]
