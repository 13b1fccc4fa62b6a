"""Graph passes: markers in, collectives and kernels out.

The pipelines are values you can print: ``JOINT_PASSES`` run on the joint graph before it is partitioned,
``HALF_PASSES`` on each forward, backward, inference and step graph before code generation.
"""

if __name__ != "compile_muon.passes":
    # Found from a checkout's root. A second copy of the operators would unregister the first.
    raise ImportError(f"imported as {__name__!r}: this package is compile_muon.passes")

from .errors import MuonZeroError
from .half.annotate import ANNOTATE
from .half.gradients import reduced_grads
from .half.insert_orthogonalize import INSERT_ORTHOGONALIZE
from .half.lower import LOWER
from .half.refresh import AWAIT_REFRESH
from .half.room import ROOM, saved_by
from .half.schedule import SCHEDULE
from .half.verify import VERIFY
from .joint.deduplicate import DEDUPLICATE
from .joint.recompute import RECOMPUTE
from .pipeline import GraphPass, Half, PassContext, PassOptions, run_passes
from .request import BackwardRequest, Purpose, ReducedGrad

__all__ = [
    "HALF_PASSES",
    "JOINT_PASSES",
    "BackwardRequest",
    "GraphPass",
    "Half",
    "MuonZeroError",
    "PassContext",
    "PassOptions",
    "Purpose",
    "ReducedGrad",
    "reduced_grads",
    "run_passes",
    "saved_by",
]

JOINT_PASSES: tuple[GraphPass, ...] = (DEDUPLICATE, RECOMPUTE)
HALF_PASSES: tuple[GraphPass, ...] = (
    DEDUPLICATE,
    INSERT_ORTHOGONALIZE,
    LOWER,
    SCHEDULE,
    AWAIT_REFRESH,
    ROOM,
    VERIFY,
    ANNOTATE,
)
