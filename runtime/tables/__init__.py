"""Stores this rank's shard of each table, and applies the optimizer's updates to it."""

from embrace_fx.runtime.tables import shard_rules  # noqa: F401  (parts answer by them)
