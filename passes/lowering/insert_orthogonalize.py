"""The pass that adds Muon directions to a backward graph, for its SPECULATE gradients.

Each direction is an ``orthogonalize`` marker and an extra output; the gradient is returned as before. A fingerprint of
the gradient that it was made from lets ``step()`` detect a later change of ``.grad``.
"""

from torch import Tensor
from torch.fx import GraphModule

from ..edit import append_inputs, inline, insert_outputs
from ..errors import RequestError
from ..fingerprint import FINGERPRINT_OF_ROWS, ROW_SUMS
from ..markers import Orthogonalize, ReduceGrad
from ..pipeline import GraphKind, GraphPass, PassContext, tensor_value
from ..record import Alike
from .gradients import reduced_grads


def _insert(gm: GraphModule, ctx: PassContext) -> GraphModule:
    request = ctx.request
    if request is None:
        raise RequestError("a backward graph without a request; give PassContext(request=BackwardRequest(...))")
    request.check(reduced_grads(gm))
    if not request.speculated:
        return gm
    reductions = ReduceGrad.all(gm)
    examples = [(f"carried_{i}", tensor_value(reductions[i].node)) for i in request.carried_inputs]
    carried = dict(zip(request.carried_inputs, append_inputs(gm, examples), strict=True))
    # Ahead of the output and behind every reduction, so that no direction delays a gradient.
    output = gm.graph.output_node()
    gradients = [reductions[i].node for i in request.speculated]  # of ``.grad`` as this backward leaves it
    for place, i in enumerate(request.speculated):
        if i in carried:
            inputs = [carried[i], gradients[place]]
            (gradients[place],) = inline(gm, output, lambda carried, grad: [carried + grad], inputs)
    directions = []
    with gm.graph.inserting_before(output):
        for i, gradient in zip(request.speculated, gradients, strict=True):
            reduction = reductions[i]
            directions += Orthogonalize.insert(
                gm.graph, gradient, reduction.state, reduction.graph_scalars, reduction.spec
            )
    insert_outputs(gm, directions + inline(gm, output, _fingerprints, gradients, by_kind=True))
    return gm


def _fingerprints(*gradients: Tensor, alike: Alike) -> list[Tensor]:
    return [FINGERPRINT_OF_ROWS([alike(ROW_SUMS, ROW_SUMS, [gradient]) for gradient in gradients])]


INSERT_ORTHOGONALIZE = GraphPass(
    "insert_orthogonalize", _insert, requires=("deduplicate",), conflicts=("lower",), kinds=(GraphKind.BACKWARD,)
)
