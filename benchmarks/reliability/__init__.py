"""Faults put in on purpose, one campaign a file. ``faults.py`` runs them, docs/reliability.md tells what came of it.

``processes`` starts and watches ranks, ``outcome`` is what a campaign reports.
"""
