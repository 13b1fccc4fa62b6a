"""Tensors in files, which checkpoints and whole weights use.

``safetensors`` writes them, and nothing else does; ``tensors`` reads what a rank wants of them, and saves what each
rank holds; ``tensor_folder`` is Hugging Face's layout of a folder of them; ``disk`` is what all need of a file system.
"""
