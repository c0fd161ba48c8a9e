"""What a rank of a training does in an iteration, by the ids that recordings and pictures share."""

from __future__ import annotations

from embrace_fx.vocabulary.operation_id import Kind, OperationId


def _computes(kind: Kind, name: str) -> OperationId:
    return OperationId(kind, name, "late")  # of a batch or an iteration, so that it is shown by its name alone


FORWARD = _computes("forward", "forward pass")
STATES = _computes("backward", "states")
WEIGHTS = _computes("update", "weights")
DUALS = _computes("update", "duals")
MEAN = _computes("update", "mean of weights")
FIGURES = _computes("update", "figures")
COMPUTE = (FORWARD, STATES, WEIGHTS, DUALS, MEAN, FIGURES)

AGREE = OperationId("all_reduce", "AllReduce of weights", lane="dense")
TO_MASTER = OperationId("gradients", "weights to the master", "late", lane="dense")
TO_WORKER = OperationId("gradients", "weights from the master", "late", lane="dense")
