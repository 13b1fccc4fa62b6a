"""Graph passes: markers in, collectives and kernels out.

The pipelines are tuples in the order of their passes: ``DYNAMO_PASSES`` for Dynamo's graph of a frame, with the passes
of extensions behind the first; ``JOINT_PASSES`` for the joint graph before it is partitioned; ``LOWERING_PASSES`` for
each forward, backward, inference and step graph before code generation.
"""

if __name__ != "compile_muon.passes":
    # Imported from a checkout's root: a second copy would register the operators again, and PyTorch drop the first.
    raise ImportError(f"imported as {__name__!r}: this package is compile_muon.passes")

from .dynamo.local_inputs import TAKE_SHARDS
from .dynamo.regions import INLINE_REGIONS
from .errors import MuonZeroError
from .joint.deduplicate import DEDUPLICATE
from .joint.move import MOVE_OUT, move_activations
from .joint.persist import keep_weights, persistent_weights, take_weights
from .joint.recompute import RECOMPUTE
from .language.request import BackwardRequest, Purpose, ReducedGrad
from .lowering.annotate import ANNOTATE
from .lowering.gradients import reduced_grads
from .lowering.insert_orthogonalize import INSERT_ORTHOGONALIZE
from .lowering.lower import LOWER
from .lowering.refresh import AWAIT_REFRESH
from .lowering.room import ROOM, saved_by
from .lowering.schedule import SCHEDULE
from .lowering.verify import VERIFY
from .pipeline import GraphKind, GraphPass, PassContext, PassOptions, run_passes

__all__ = [
    "DYNAMO_PASSES",
    "LOWERING_PASSES",
    "JOINT_PASSES",
    "MOVE_OUT",
    "BackwardRequest",
    "GraphPass",
    "GraphKind",
    "MuonZeroError",
    "PassContext",
    "PassOptions",
    "Purpose",
    "ReducedGrad",
    "keep_weights",
    "move_activations",
    "persistent_weights",
    "reduced_grads",
    "run_passes",
    "saved_by",
    "take_weights",
]

DYNAMO_PASSES: tuple[GraphPass, ...] = (INLINE_REGIONS, TAKE_SHARDS)
JOINT_PASSES: tuple[GraphPass, ...] = (DEDUPLICATE, RECOMPUTE)
LOWERING_PASSES: tuple[GraphPass, ...] = (
    DEDUPLICATE,
    INSERT_ORTHOGONALIZE,
    LOWER,
    SCHEDULE,
    AWAIT_REFRESH,
    ROOM,
    VERIFY,
    ANNOTATE,
)
