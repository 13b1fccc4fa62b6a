"""Tensors in files, for checkpoints and whole weights.

``safetensors`` makes all files of tensors; ``tensors`` reads a rank's parts, and shares what to write among ranks;
``tensor_folder`` is Hugging Face's layout of a folder; ``disk`` is the file system.
"""
