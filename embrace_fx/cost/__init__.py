"""Computes what exchanges, processors and links cost: bytes, messages, milliseconds. Nothing is measured here.

`links` has links and collectives, `devices` data sheets, `sparsity` the sparsity of gradients on all ranks, `exchanges`
each sparse exchange, `storage` tables beyond memory.
"""
