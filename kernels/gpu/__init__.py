"""Triton kernels for NVIDIA GPUs of compute capability 8.0, 9.0 and 10.0; imported only where they are to run.

One kernel a file, always in the same order: formula, kernel, launcher. The eager twins are in ``compile_muon.kernels``:
``reference``, ``momentum`` and ``apply``. Shapes: [b, k, l] is b matrices of k rows and l columns, k ≤ l.
"""
