"""Tensors in files; checkpoints and weights are the use."""
