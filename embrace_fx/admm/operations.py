"""Ids of the operations of an iteration, for recordings and pictures."""

from __future__ import annotations

from embrace_fx.vocabulary.operation_id import OperationId

# These operations are not split. Their part is "late", which the text of an operation id leaves out.
COMPUTE = FORWARD, STATES, WEIGHTS, DUALS, MEAN, FIGURES = (
    OperationId("forward", "forward pass", "late"),
    OperationId("backward", "states", "late"),
    *(OperationId("update", name, "late") for name in ("weights", "duals", "mean of weights", "figures")),
)

AGREE = OperationId("all_reduce", "AllReduce of weights", lane="dense")
TO_MASTER = OperationId("gradients", "weights to the master", "late", lane="dense")
TO_WORKER = OperationId("gradients", "weights from the master", "late", lane="dense")
