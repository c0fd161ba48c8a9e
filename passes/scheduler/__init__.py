"""Decides the launch order of a window, and the order of a backward's compute; rewrites no graph."""
