"""Measures the links between ranks and the ranks' processors."""
