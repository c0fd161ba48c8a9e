"""Sets a compiled model up: checks its options, lets ranks agree on them, and finds their process group."""
