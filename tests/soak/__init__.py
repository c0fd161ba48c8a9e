"""Random loops, tables and faults, for as long as one likes: `make soak`."""
