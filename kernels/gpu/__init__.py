"""Triton kernels for NVIDIA GPUs of compute capability 8.0, 9.0 and 10.0; imported only where they are to run.

One kernel a file, always in the same order: formula, kernel, launcher. The eager twins are in ``compile_muon.kernels``:
``reference``, ``momentum`` and ``apply``. Shapes in names: B matrices of K rows and L columns, K ≤ L; or of R rows and
C columns, where either may be more.
"""
