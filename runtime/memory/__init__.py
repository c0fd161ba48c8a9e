"""Copies saved values from the device to the host or a file and back, and measures memory use."""
