"""Muon: the orthogonalized momentum."""

from .method import DECAY, LR, MOMENTUM, MatrixMethod

MUON = MatrixMethod("muon", "kellerjordan.github.io/posts/muon, torch.optim.Muon", (LR, MOMENTUM, *DECAY))
