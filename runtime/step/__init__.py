"""Runs one call of a model and its backward as a compiled program, and hooks the optimizers that step its
parameters.
"""
