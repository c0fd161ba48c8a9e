"""Data that all rooms share: graphs, ops, plans, schedules. It makes no decisions."""
