"""Turns graphs into Python functions, and runs recurrent layers."""
