"""Names of 0.1.0, which go with the next version."""
