"""Exchanges that turn every rank's gradient of a replicated parameter into their mean, one file per strategy."""
