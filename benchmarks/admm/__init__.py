"""ADMM next to SGD-type optimizers, and its parallel forms next to each other."""
