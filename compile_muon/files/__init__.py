"""Tensors in files, for checkpoints and whole weights.

``tensors`` writes and reads the files; ``tensor_folder`` is Hugging Face's layout of a folder; ``disk`` is the file
system.
"""
