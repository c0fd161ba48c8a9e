"""Exchanges that average the ranks' gradients of a replicated parameter, one file per strategy."""
