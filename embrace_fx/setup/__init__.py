"""Sets a compiled model up: checks its options, and lets ranks agree on model, optimizers and options."""
