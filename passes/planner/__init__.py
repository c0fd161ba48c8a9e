"""Decides the strategy of every parameter and the buckets; rewrites no graph."""
