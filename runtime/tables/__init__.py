"""Holds a rank's part of each table, and lets optimizers update it."""

from embrace_fx.runtime.tables import part_rules  # noqa: F401  (parts answer by them)
