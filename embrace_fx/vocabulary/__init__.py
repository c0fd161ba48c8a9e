"""What all rooms share: graphs, ops, plans, schedules. No policy, no input or output."""
