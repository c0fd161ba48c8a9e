"""Executes a lowered program: process groups, sharded tables, row optimizers, the measured timeline."""
