"""Tensors in files, and the ranks that write and read them together; checkpoints and weights are the use."""
