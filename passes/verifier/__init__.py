"""Proves of every rewritten graph, and of two windows of a schedule, what all passes must keep."""
