"""From a plan to a launch order, and from recordings to a timeline."""
