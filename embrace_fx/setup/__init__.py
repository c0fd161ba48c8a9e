"""Holds what a compiled model is set up with: its options, what ranks agree on, the setting of the run."""
