"""Checks the invariants of every rewritten graph, and of a schedule over two windows (a backward and the next forward
each).
"""
