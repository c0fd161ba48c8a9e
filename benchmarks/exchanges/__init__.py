"""Exchanges of sparse gradients, compared on ranks with limited links."""
