"""Muon: the orthogonalized momentum."""

from .method import DECAY, LR, MOMENTUM, MatrixMethod

__all__ = ["MUON"]

MUON = MatrixMethod("muon", "kellerjordan.github.io/posts/muon, torch.optim.Muon", (LR, MOMENTUM, *DECAY))
