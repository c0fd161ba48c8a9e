"""Predicts the cost of exchanges, processors and links: bytes, messages, milliseconds. Measures nothing.

`links` has links and collectives, `devices` data sheets, `sparsity` the sparsity of gradients on all ranks, `exchanges`
each sparse exchange, `storage` tables larger than memory.
"""
