"""Turns the phases of a graph into Python functions, and runs recurrent layers."""
