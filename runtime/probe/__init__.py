"""Links and processors, measured."""
