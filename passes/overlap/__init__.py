"""Overlaps communication with the next step, by nodes in the phases (EmbRace, ICPP 2022, section 4).

    SubmitRows         a table's rows and gradients are submitted and awaited, and updated before they are read again
    SplitRows         rows: early and late; gradients: prior and delayed, in pieces (vertical scheduling)
    ChunkBuckets      a bucket travels in chunks
    UpdateBeforeRead      a bucket is updated where the next forward first reads it (horizontal scheduling)
    AwaitRowsLate         rows are awaited where the forward first computes with them
    SubmitGradientsEarly  row gradients are submitted as soon as their inputs are computed

Contract
    Same nodes otherwise, same values: a parameter is read after its last update, a row after its last one. All work on
    the phases of a partitioned graph; the joint module stays as it was. Every submission and every await has the id of
    its launch in `node.meta["launch"]`, and as text in its last argument.
"""
