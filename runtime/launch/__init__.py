"""Launches collectives in the order of the schedule, and records when they run."""
