"""What :mod:`compile_muon.passes.language.spec` was called in 0.1.0: the name goes with the next version."""

from compile_muon.kernels.renamed import moved

__getattr__ = moved(__name__, "compile_muon.passes.language.spec")
