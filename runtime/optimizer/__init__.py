"""Optimizers that step tables too."""
