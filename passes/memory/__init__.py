"""Chooses which values a step saves for its backward, offloads or recomputes, to keep a memory budget."""
