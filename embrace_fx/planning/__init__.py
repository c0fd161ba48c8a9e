"""Turns a batch into a plan, a plan into placed parameters and a launch order, recordings into a timeline."""
