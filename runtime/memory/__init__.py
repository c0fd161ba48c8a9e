"""Copies saved values out of memory and back, and measures memory use."""
