"""The tests of kernels in Triton's interpreter, in processes of their own: Triton decides when a kernel is defined."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy
import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

OLD_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
NEW_NUMPY = tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4)

#: one product, and normalization
SHORT = "(half_of_the_products and square and pointers) or (what_is_not_finite and nan)"
#: every kernel, without the tables of shapes and spectra
SOME = {
    "test_kernels.py": "x_times_its or half_of or normalization or apply or under_compile or momenta",
    "test_grouped.py": "shipped or launches_do_not or spoils_no or small_tensors or served or cubic or lower_squares",
}


@pytest.mark.skipif(OLD_TRITON and NEW_NUMPY, reason="the interpreter of Triton 3.6 needs numpy < 2.4")
@pytest.mark.parametrize(
    ("file", "chosen", "least"),
    [
        ("test_kernels.py", SHORT, 1),
        pytest.param("test_kernels.py", SOME["test_kernels.py"], 45, marks=pytest.mark.full),
        pytest.param("test_grouped.py", SOME["test_grouped.py"], 24, marks=pytest.mark.full),
        pytest.param("test_kernels.py", "", 85, marks=pytest.mark.campaign),
        pytest.param("test_grouped.py", "", 72, marks=pytest.mark.campaign),
    ],
)
def test_every_kernel_in_the_interpreter(file, chosen, least):
    here = Path(__file__).parent
    options = ["-q", "-rs", "-p", "no:cacheprovider", "-o", "cpu_limit=inf"]
    command = [sys.executable, "-m", "pytest", *options, "-k", chosen, str(here / file)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=here.parents[2], timeout=800)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert passed and int(passed[1]) > least, ran.stdout[-2000:]
