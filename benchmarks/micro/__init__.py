"""One mechanism at a time, measured."""
