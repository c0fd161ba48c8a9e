"""Memory while a step runs: how much of it there is."""
