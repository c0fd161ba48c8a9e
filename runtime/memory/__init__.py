"""Copies saved values out of memory and back, and reads how much memory is in use."""
