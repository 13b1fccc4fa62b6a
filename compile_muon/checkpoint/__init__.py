"""Checkpoints: written as a whole or not at all, verified before anything is loaded, for any world and ZeRO stage.

``checkpointer`` is the use; ``folder`` is the commit protocol, ``manifest`` what makes a checkpoint whole, ``contents``
what is in one: tensors (:mod:`compile_muon.files`), and ``values`` as JSON. docs/how-to/checkpoints.md is the same for
users.
"""

from compile_muon.checkpoint.checkpointer import Checkpointer

__all__ = ["Checkpointer"]
