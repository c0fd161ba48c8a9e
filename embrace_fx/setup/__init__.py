"""What a compiled model is set up with: the options, what ranks agree on, the run's setting."""
