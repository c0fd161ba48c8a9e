"""Holds a rank's part of each table, and lets optimizers update it."""
