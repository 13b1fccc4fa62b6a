"""Faults put in on purpose, one campaign a file. ``faults.py`` runs them.

docs/reference/reliability.md tells what came of it, benchmarks/NOTES.md how.

``processes`` starts and watches ranks, ``outcome`` is what a campaign reports.
"""
