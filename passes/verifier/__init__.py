"""Verifies the invariants of every rewritten graph, and of two windows of a schedule."""
