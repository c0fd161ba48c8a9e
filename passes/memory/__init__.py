"""Chooses what a step saves for its backward, offloads or recomputes, so that it keeps a budget."""
