"""Carries from one step into the next what travels between them: ids, rows, row gradients, buckets."""
