"""Keeps what travels from one step to the next: ids, rows, row gradients, and buckets of dense gradients."""
