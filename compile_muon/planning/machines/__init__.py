"""The measurement of machines for the cost model.

``measure`` times what the simulator reads, ``fit`` makes a description of that, and ``calibrate`` is the command.
docs/reference/machines.md is the same for users.
"""
