"""Fault injection, one campaign a file, run by ``faults.py``.

docs/reference/reliability.md has the results, benchmarks/NOTES.md how they came about. ``processes`` starts and watches
ranks, ``outcome`` has the types of a campaign's report.
"""
