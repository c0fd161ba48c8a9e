"""Measures links and processors."""
