"""Graphs made into Python functions, and the kernels of recurrent layers."""
