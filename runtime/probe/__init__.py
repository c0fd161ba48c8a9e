"""Measures the speed of the links between ranks, and of the ranks' processors."""
