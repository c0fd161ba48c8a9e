"""Launches collectives in the schedule's order, and records them."""
