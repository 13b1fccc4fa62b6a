"""Experts of a Transformers mixture that ranks share: the plan, how tokens travel, and stacks out of files.

``plan`` and ``dispatch`` bring in Transformers, so only a model that shares its experts imports them.
"""
