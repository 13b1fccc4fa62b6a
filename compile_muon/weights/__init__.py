"""Whole weights in and out of a sharded model, streamed: no rank holds more than its shards and one tensor.

``wire`` is how rows travel between rank 0 and the others, ``full`` has what a model holds by name and whole state
dicts; ``pretrained`` and ``materialize`` are the use. Files are those of :mod:`compile_muon.files`, stacks of experts
are read by :mod:`compile_muon.experts.load`. docs/how-to/weights.md is the same for users.
"""

from compile_muon.weights.adapters import merge_adapters
from compile_muon.weights.full import full_state_dict, load_full_state_dict
from compile_muon.weights.pretrained import load_pretrained, save_pretrained

__all__ = ["full_state_dict", "load_full_state_dict", "load_pretrained", "merge_adapters", "save_pretrained"]
