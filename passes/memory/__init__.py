"""Chooses what a step saves for its backward, offloads or computes again, so that it keeps a budget."""
