"""Graph passes: markers in, collectives and kernels out.

The pipelines are values you can print: ``JOINT_PASSES`` run on the joint graph before it is partitioned,
``HALF_PASSES`` on each forward, backward, inference and step graph before code generation.
"""

if __name__ != "compile_muon.passes":
    # Found from a checkout's root. A second copy of the operators would unregister the first.
    raise ImportError(f"imported as {__name__!r}: this package is compile_muon.passes")

from .half.annotate import ANNOTATE
from .half.lower import LOWER
from .half.verify import VERIFY
from .joint.deduplicate import DEDUPLICATE
from .joint.insert_orthogonalize import INSERT_ORTHOGONALIZE
from .joint.recompute import RECOMPUTE
from .pipeline import GraphPass, Half, Lowering, PassContext, PassOptions, run_passes

__all__ = ["HALF_PASSES", "JOINT_PASSES", "GraphPass", "Half", "Lowering", "PassContext", "PassOptions", "run_passes"]

JOINT_PASSES: tuple[GraphPass, ...] = (DEDUPLICATE, RECOMPUTE, INSERT_ORTHOGONALIZE)
HALF_PASSES: tuple[GraphPass, ...] = (DEDUPLICATE, LOWER, VERIFY, ANNOTATE)
