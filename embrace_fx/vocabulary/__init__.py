"""Data types that all packages share: graphs, ops, plans, schedules. Makes no decisions."""
