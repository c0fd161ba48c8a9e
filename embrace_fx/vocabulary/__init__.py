"""Data that all rooms share: graphs, ops, plans, schedules. No policy, no input or output."""
