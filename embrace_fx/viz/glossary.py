"""The words of a picture, explained on its page."""

from __future__ import annotations

from collections.abc import Mapping

GLOSSARY: Mapping[str, str] = {
    "window": "from the start of one backward to the start of the next: what is drawn twice, one after the other",
    "compute": "the rank's processor at work: backward, forward, the optimizer, and what the training loop does itself",
    "backward": "gradients computed, from the loss to the first layer",
    "forward": "the model computed, from the batch to the loss, rows looked up and put together included",
    "optimizer": "its own step, and updates of tables and buckets that are left to the next forward",
    "your code": "what the training loop does between the calls: losses, clipping, logging",
    "loader": "the next batch is read; without model.lookahead(loader), all from the optimizer's step to the next call",
    "ids": "ranks tell each other which rows the next batch reads",
    "embedding": "rows of sharded tables, and their gradients, on their way between ranks",
    "dense": "gradients of all other parameters, reduced in buckets",
    "delayed": "gradients of rows that the next batch does not read: they travel when nothing else does",
    "storage": "rows of tables beyond memory, read from where they rest, and written behind",
    "prior": "gradients of rows that the next batch reads: they travel first",
    "early rows": "rows of the next batch that this step does not change: they are fetched before it ends",
    "wait": "compute stands still for communication; it has the colour of what is waited for",
    "exposed": "the time of all waits of a class: communication that nothing hides",
    "busy": "the time that a class has something on the link, hidden or not",
    "overlap ratio": "the share of communication that compute hides: 1 is all of it",
    "between operations": "when nothing of the schedule runs: Python and autograd",
    "critical path": "the operations that the length of a step follows from: only what is on it makes a step shorter",
    "memory held": "what waits in memory for its reader: buckets, and rows that have arrived",
    "alone": "how long an operation takes on an idle processor or link",
    "DDP": "DistributedDataParallel, estimated: the same compute, and an AllReduce of every gradient, those of tables "
    "after the backward",
}
