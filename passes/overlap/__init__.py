"""Overlaps communication with the next step by rewriting the phases (EmbRace, ICPP 2022, section 4).

    SubmitRows            submits and awaits a table's rows and gradients, and updates it before the next read
    SplitRows             splits rows into early and late, gradients into prior and delayed (vertical scheduling)
    ChunkBuckets          sends a bucket in chunks
    UpdateBeforeRead      updates a bucket where the next forward first reads it (horizontal scheduling)
    AwaitRowsLate         awaits rows where the forward first computes with them
    SubmitGradientsEarly  submits row gradients as soon as their inputs are computed

Contract
    Same values and otherwise the same nodes: parameters and rows are read after their last update. All passes rewrite
    the phases of a partitioned graph; the joint module does not change. Every submission and every await has its
    launch's id in `node.meta["launch"]`, and as text in its last argument.
"""
