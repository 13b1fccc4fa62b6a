"""Measure a machine for the cost model.

``measure`` times the operations that the simulator models, ``fit`` turns the times into a machine description, and
``calibrate`` is the command. docs/reference/machines.md explains it to users.
"""
