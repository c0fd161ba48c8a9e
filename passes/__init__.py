"""Rewrites of the training graph: graph in, graph out, one file per pass."""
