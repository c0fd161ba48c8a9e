"""What a rank of a training does in an iteration, by the ids that recordings and pictures share."""

from __future__ import annotations

from embrace_fx.vocabulary.operation_id import Kind, OperationId


def _computes(kind: Kind, name: str) -> OperationId:
    return OperationId(kind, name, "late")  # of an iteration as a whole, so that it is shown by its name alone


BACKWARD_SWEEP = _computes("backward", "backward sweep")
FORWARD_SWEEP = _computes("forward", "forward sweep")
MULTIPLIERS = _computes("update", "multipliers")
DUALS = _computes("update", "duals")
MEAN = _computes("update", "mean of weights")
FIGURES = _computes("update", "figures")
COMPUTE = (BACKWARD_SWEEP, FORWARD_SWEEP, MULTIPLIERS, DUALS, MEAN, FIGURES)

AGREE = OperationId("all_reduce", "AllReduce of weights", lane="dense")
TO_MASTER = OperationId("gradients", "weights to the master", "late", lane="dense")
TO_WORKER = OperationId("gradients", "weights from the master", "late", lane="dense")
