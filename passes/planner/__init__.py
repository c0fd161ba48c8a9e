"""Decides how each parameter is distributed (its strategy), and which gradients share a bucket. Rewrites no graph."""
