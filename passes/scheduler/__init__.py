"""Decides the launch order of a window; rewrites nothing."""
