"""One call of a model and its backward, as a program; whichever optimizer steps behind it."""
