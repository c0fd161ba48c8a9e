"""Turns a batch into a plan, and a plan into placed parameters and a launch order."""
