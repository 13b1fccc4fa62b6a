"""Attention over sequences that ranks share: heads exchanged, or keys sent round a ring."""
