"""Strategies to average the gradient of a replicated parameter over ranks, one file for each."""
