"""Attention over sequences that ranks share: an exchange of positions for heads, or a ring of keys and values."""
