"""Decides the order in which a step launches collectives, and the order of a backward's compute. Rewrites no graph."""
