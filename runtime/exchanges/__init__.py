"""Exchanges: the strategies that turn every rank's gradient of a replicated parameter into their mean."""
